"""The table of layouts: the verdict is about every row, and what would help is said where little fits."""

from dataclasses import replace

import pytest
from support.simulated import case_of, cluster_with, counted, on_meta

from hf_helix.doctor.exactness import range_of
from hf_helix.doctor.layouts import Dropped, Ranking
from hf_helix.doctor.memory import Memory
from hf_helix.doctor.report import (
    alone_line,
    answer_lines,
    checkpoint_line,
    help_lines,
    ranking_lines,
    roomier_text,
    training_line,
)
from hf_helix.doctor.rivals import FSDP, HSDP, RivalStep
from hf_helix.doctor.step import Step, simulate_step
from hf_helix.doctor.window import Fidelity
from hf_helix.planning.graph.operator import Kind

CLUSTER = cluster_with(devices_per_node=2)


@pytest.fixture(scope="module")
def step() -> Step:
    amounts = counted(on_meta(num_hidden_layers=2), bf16=True)
    return simulate_step(amounts, case_of(2, 2, 32, dp=2, plan="sequential"), CLUSTER, Fidelity.WHOLE)


def slower(step: Step, factor: float) -> Step:
    return replace(step, window=factor * step.window, sums=factor * step.sums, optimizer=factor * step.optimizer)


def table(step: Step, stock: float) -> list[str]:
    """The lines where the stock row takes so many times as long as the best layout."""
    return [*ranking_lines(Ranking([step], [], [RivalStep(FSDP, slower(step, stock))]), CLUSTER, 5)]


def helps(step: Step, fitting: int = 1, dropped: int = 0) -> list[str]:
    ranking = Ranking([step] * fitting, [Dropped(step.case, "needs more")] * dropped)
    return [*help_lines(ranking, lambda: ["--gpus 2x2"])]


def share(lines: list[str], name: str) -> str:
    line = next(line for line in lines if line.startswith(name))
    return next(word for word in line.split() if word.endswith("%"))


@pytest.mark.parametrize(
    ("stock", "verdict"),
    [
        (2.0, "Plain data parallelism is the fastest of these: no layer has to be cut."),
        (0.97, "FSDP (stock) is the fastest of these, 3.1% ahead of dp 2; less than 5% apart is too close to tell"),
        (0.5, "FSDP (stock) is the fastest of these, 100.0% ahead of dp 2: train with that."),
    ],
)
def test_the_verdict_is_about_every_row(step: Step, stock: float, verdict: str) -> None:
    lines = table(step, stock)
    assert lines[0].startswith(verdict)
    assert share(lines, "FSDP (stock)  ") == f"{min(1.0, 1 / stock):.0%}"
    assert share(lines, "dp 2") == f"{min(1.0, stock):.0%}"
    for word in ("micro-batches", "bubble", "exposed", "sums", "memory", "one strand"):
        assert f"{word}: " in "\n".join(lines), "the columns are explained"


def test_of_layouts_too_close_to_tell_the_one_with_room_is_proposed(step: Step) -> None:
    memory = CLUSTER.device.memory

    def with_memory(factor: float, share: float) -> Step:
        return replace(slower(step, factor), memory=Memory(share * memory, 0, 0, 0, 0, 0))

    full, near, far = with_memory(1.0, 0.97), with_memory(1.04, 0.94), with_memory(1.1, 0.5)
    assert Ranking([full, near, far], []).proposed(CLUSTER) is near
    assert Ranking([full, far], []).proposed(CLUSTER) is full
    assert Ranking([with_memory(0.99, 0.9), full, near], []).proposed(CLUSTER).memory.total == 0.9 * memory
    assert "3.0% of the memory free" in roomier_text(full, CLUSTER)
    tokens = step.tokens_per_second * 86400 * 2
    said = training_line(step, int(tokens), CLUSTER)
    low, high = range_of(step.case)
    assert " take 2.0 days, 96 device hours, as predicted," in said
    assert f"and {2 * low:.1f} to {2 * high:.1f} days, {96 * low:.0f} to {96 * high:.0f} device hours" in said


def test_a_step_is_compared_with_one_device_and_other_answers(step: Step) -> None:
    line = alone_line(step, slower(step, 1.8), CLUSTER)
    assert f"2 are 1.80x one {CLUSTER.device.name}, 90% of 2x" in line
    assert "does not hold the training" in alone_line(step, None, CLUSTER)
    assert "12.0 MB    4.0 MB of trained weights in fp32, 8.0 MB of optimizer" in checkpoint_line(10**6, step.case)
    one = cluster_with(devices_per_node=1)
    answers = [(one, 64, slower(step, 1.8)), (CLUSTER, 64, step), (CLUSTER, 128, "no layout fits")]
    _, *rows = answer_lines(answers)
    assert [share([row], row[:1]) for row in rows[:2]] == ["100%", "90%"]
    assert rows[2].endswith("no layout fits")


def test_the_gain_is_over_the_best_rival_that_fits(step: Step) -> None:
    cut = replace(step, case=step.case.changed(tp_size=2))
    large = replace(step, memory=replace(step.memory, weights=2 * CLUSTER.device.memory))
    rivals = [RivalStep(FSDP, slower(step, 1.5)), RivalStep(HSDP, slower(large, 0.5))]
    lines = [*ranking_lines(Ranking([cut], [], rivals), CLUSTER, 5)]
    assert lines[0] == "tp 2 x dp 2 is 1.50x as fast as the best rival, FSDP (stock)."
    assert any(line.startswith("HSDP, sums in fp32: needs ") for line in lines)
    assert "Data parallelism of hf_helix alone does not work: no such layout." in lines


@pytest.mark.parametrize("top", [1, 5])
def test_layouts_that_are_too_close_to_tell_are_named(step: Step, top: int) -> None:
    others = [
        replace(slower(step, factor), case=step.case.changed(tp_size=tp))
        for tp, factor in ((2, 1.02), (4, 1.04), (8, 1.5))
    ]
    lines = [*ranking_lines(Ranking([step, *others], []), CLUSTER, top)]
    near = "tp 2 x dp 2" if top == 1 else "tp 2 x dp 2, tp 4 x dp 2"
    assert (
        f"The second layout is 2.0% slower than the first; within 5% of the first, too close to tell: {near}." in lines
    )


def test_what_helps_is_said_where_little_fits_or_links_or_the_host_hold_it_up(step: Step) -> None:
    assert helps(step, dropped=9) == ["Little fits: 1 of 10 layouts.", "What helps, predicted: --gpus 2x2."]
    assert helps(step, fitting=4, dropped=9) == []
    assert helps(step, fitting=3, dropped=1) == [], "most fit"
    assert helps(step) == [], "all fit"
    held = replace(step, exposed={next(iter(step.loads)): 0.5 * step.seconds})
    assert helps(held) == [
        "The links hold it up: 50% of the best step is exposed.",
        "What helps, predicted: --gpus 2x2.",
    ]
    held = replace(step, window=4 * step.loads[Kind.COMPUTE], replayed=False)
    assert helps(held) == [
        "The host holds it up: the device waits 75% of the window for it. What helps: cuda_graphs, of experts with "
        "--expert_capacity_factor."
    ]
    assert helps(replace(held, replayed=True)) == []
