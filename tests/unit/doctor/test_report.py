"""The table of layouts: the verdict is about every row, and what would help is said where little fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulated import case_of, cluster_with, counted, on_meta

from hf_helix.doctor.fsdp import FSDP
from hf_helix.doctor.layouts import Dropped, Ranking
from hf_helix.doctor.report import help_lines, ranking_lines
from hf_helix.doctor.step import Step, simulate_step
from hf_helix.doctor.window import Fidelity
from hf_helix.planning.graph.operator import Kind

CLUSTER = cluster_with(devices_per_node=2)


@pytest.fixture(scope="module")
def step() -> Step:
    amounts = counted(on_meta(num_hidden_layers=2), bf16=True)
    return simulate_step(amounts, case_of(2, 2, 32, dp=2, plan="sequential"), CLUSTER, Fidelity.REDUCED)


def slower(step: Step, factor: float) -> Step:
    return replace(step, window=factor * step.window, sums=factor * step.sums, optimizer=factor * step.optimizer)


def table(step: Step, stock: float) -> list[str]:
    """The lines where the stock row takes so many times as long as the best layout."""
    return [*ranking_lines(Ranking([step], [], FSDP(slower(step, stock), False)), CLUSTER, 5)]


def helps(step: Step, fitting: int = 1, dropped: int = 0, adapters: bool = False, several: bool = False) -> list[str]:
    ranking = Ranking([step] * fitting, [Dropped(step.case, "needs more")] * dropped)
    return [*help_lines(ranking, adapters, several)]


def share(lines: list[str], name: str) -> str:
    line = next(line for line in lines if line.startswith(name))
    return next(word for word in line.split() if word.endswith("%"))


@pytest.mark.parametrize(
    ("stock", "verdict"),
    [
        (2.0, "Plain data parallelism is the fastest of these: no layer has to be cut."),
        (0.97, "FSDP (ZeRO-3), stock, is the fastest of these, 3.1% ahead of dp 2; they are as good as each other"),
        (0.5, "FSDP (ZeRO-3), stock, is the fastest of these, 100.0% ahead of dp 2: train with that."),
    ],
)
def test_the_verdict_is_about_every_row(step: Step, stock: float, verdict: str) -> None:
    lines = table(step, stock)
    assert lines[0].startswith(verdict)
    assert share(lines, "FSDP (ZeRO-3), stock  ") == f"{min(1.0, 1 / stock):.0%}"
    assert share(lines, "dp 2") == f"{min(1.0, stock):.0%}"


def test_the_columns_are_explained(step: Step) -> None:
    text = "\n".join(table(step, 2.0))
    for word in ("micro-batches", "bubble", "exposed", "sums", "memory", "one strand"):
        assert f"{word}: " in text


def test_what_helps_is_said_where_little_fits(step: Step) -> None:
    assert helps(step, dropped=9) == [
        "Little fits: 1 of 10 layouts. What helps: adapters (--lora_r 16), states on the host "
        "(--offload optimizer), more devices (--gpus), shorter sequences (--sequence_length)."
    ]
    assert helps(step, fitting=4, dropped=9) == []
    assert helps(step) == [], "all fit"


def test_what_helps_is_said_where_links_hold_it_up(step: Step) -> None:
    kind = next(iter(step.loads))
    held = replace(step, exposed={kind: 0.5 * step.seconds})
    assert helps(held, adapters=True, several=True) == [
        "The links hold it up: 50% of the best step is exposed. What helps: a faster network (--network 100gbit)."
    ]
    assert helps(held, adapters=True)[0].endswith("What helps: a machine with faster links.")


def test_what_helps_is_said_where_the_host_holds_it_up(step: Step) -> None:
    held = replace(step, window=4 * step.loads[Kind.COMPUTE], replayed=False)
    assert helps(held) == [
        "The host holds it up: the device waits 75% of the window for it. What helps: cuda_graphs, of experts with "
        "--expert_capacity_factor."
    ]
    assert helps(replace(held, replayed=True)) == []
