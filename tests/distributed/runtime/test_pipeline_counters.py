"""What ran, counted: slots, bubbles and live activations of real windows, against the paper's formulas."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.marks import slow
from support.pipeline_jobs import Step, runner_of, steps_of, trainer_of, window_of
from support.schedules import live_activations, start_times, text

from hf_helix.measure.overlap import trace_window
from hf_helix.planning.schedule.actions import PARTS, Action, Schedule, Slot
from hf_helix.planning.schedule.named import build_schedule

LAYERS = 2  # of each virtual stage: with one, a slot's two actions would run in turn


def traced(
    folder: str, helix: dict[str, Any], model: dict[str, Any], cases: Sequence[tuple[str, str, int]]
) -> list[list[Step]]:
    """What this rank computes in a window of each (plan, schedule, number of micro-batches)."""
    trainer = trainer_of(folder, helix, model)
    result = []
    for rule, schedule, count in cases:
        runner = runner_of(trainer, rule, schedule)
        trace = trace_window(runner, window_of(trainer, count, rows=1, lengths=(5,)))
        result.append(steps_of(runner, trace.events))
    trainer.helix.runner.executor.streams.close()
    return result


RULES = {
    "folded_1f1b": ("sequential", "round_robin", "greedy"),
    "dualpipe_v": ("sequential", "greedy"),
    "1f1b": ("sequential",),
}


def ran(cluster_of: Any, folder: Path, size: int, schedule: str, count: int) -> dict[str, list[list[Step]]]:
    """By plan, what every rank of a pipeline of so many computes in a window."""
    stages = size if schedule == "1f1b" else 2 * size
    helix = {"pp_size": size, "schedule": schedule, "layers_per_stage": [LAYERS] * stages}
    cases = [(rule, schedule, count) for rule in RULES[schedule]]
    job = {"helix": helix, "model": {"num_hidden_layers": stages * LAYERS}, "cases": cases}
    ranks = cluster_of(size).run(traced, folder=str(folder), **job)
    return {rule: [rank[place] for rank in ranks] for place, rule in enumerate(RULES[schedule])}


def slots_of(steps: Sequence[Step]) -> list[Slot]:
    """What ran side by side: parts whose operators mingle are of one slot."""
    spans: dict[tuple[int, str, int], tuple[int, int]] = {}
    for place, (part, microbatch, stage, _, _) in enumerate(steps):
        spans[stage, part, microbatch] = spans.get((stage, part, microbatch), (place, place))[0], place
    groups: list[dict[tuple[int, str, int], int]] = []
    end = -1
    for key, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        groups = groups if first <= end else [*groups, {}]
        groups[-1][key] = first
        end = max(end, last)
    return [_slot(group) for group in groups]


def _slot(group: dict[tuple[int, str, int], int]) -> Slot:
    whole = {parts: direction for direction, parts in PARTS.items()}
    actions: dict[bool, list[tuple[int, str, int]]] = {True: [], False: []}
    for key in sorted(group):
        actions[key[1] == "F"].append(key)
    made = []
    for keys in actions.values():
        assert len({(stage, microbatch) for stage, _, microbatch in keys}) <= 1, f"not one slot: {group}"
        parts = "".join(part for _, part, _ in keys)
        made.append(Action(keys[0][0], whole[parts], keys[0][2]) if keys else None)
    return Slot(*made)


def live_chunks(steps: Sequence[Step]) -> int:
    """How many (virtual stage, micro-batch) are between the start of F and the end of backward, at most."""
    ends = {(stage, microbatch): place for place, (_, microbatch, stage, _, _) in enumerate(steps)}
    live: set[tuple[int, int]] = set()
    most = 0
    for place, (_, microbatch, stage, _, _) in enumerate(steps):
        live.add((stage, microbatch))
        most = max(most, len(live))
        if ends[stage, microbatch] == place:
            live.remove((stage, microbatch))
    return most


def live_layers(steps: Sequence[Step]) -> float:
    """How many layers' activations are alive at most: an operator keeps its own from F to its last backward part."""
    layers = [step for step in steps if step[3].startswith("layers.")]
    share = 1 / len({step[4] for step in layers if step[0] == "F"})
    last = {_kept_by(step): place for place, step in enumerate(layers)}
    alive = most = 0.0
    for place, step in enumerate(layers):
        alive += share if step[0] == "F" else 0.0
        most = max(most, alive)
        alive -= share if last[_kept_by(step)] == place else 0.0
    return most


def _kept_by(step: Step) -> tuple[int, str, str]:
    part, microbatch, _, unit, operator = step
    return microbatch, unit, operator if part == "F" else operator.removesuffix(".I").removesuffix(".W")


SIZES = [(2, 1), (2, 2), (2, 3), (2, 7), slow(4, 5)]
"""Ranks of a pipeline, and micro-batches."""


@pytest.mark.parametrize(("size", "count"), SIZES)
def test_slots_of_w(size: int, count: int, cluster_of: Any, tmp_path: Path) -> None:
    by_rule = ran(cluster_of, tmp_path, size, "folded_1f1b", count)
    for rule in ("sequential", "round_robin"):
        observed: Schedule = [slots_of(steps) for steps in by_rule[rule]]
        assert text(observed) == text(build_schedule("folded_1f1b", size, count))
        fused = 2 * max(0, count - size)
        for steps, slots in zip(by_rule[rule], observed, strict=True):
            assert sum(slot.fused for slot in slots) == fused
            assert len(slots) == 4 * count - fused
            assert live_chunks(steps) == (2 * size + 1 if count >= 2 * size else live_activations(slots))
            assert live_layers(steps) <= 2 * size * LAYERS + 1 + 1e-6  # p stage-shares plus one layer
            assert live_layers(steps) > 2 * size * LAYERS or count < 2 * size
        if count >= size:
            length = 1 + max(start_times(observed, 2 * size, count).values())
            assert length == 4 * size + 2 * count - 2
            assert {length - len(slots) for slots in observed} == {2 * (size - 1)}
    flow_keeps_one_layer_more(by_rule)
    assert max(live_layers(steps) for steps in by_rule["greedy"]) <= 2 * size * LAYERS + 2 + 1e-6


@pytest.mark.parametrize(("size", "count"), SIZES)
def test_slots_of_the_other_schedules(size: int, count: int, cluster_of: Any, tmp_path: Path) -> None:
    for schedule in ("1f1b", "dualpipe_v"):
        by_rule = ran(cluster_of, tmp_path, size, schedule, count)
        ranks, wanted = by_rule["sequential"], build_schedule(schedule, size, count)
        assert text([slots_of(steps) for steps in ranks]) == text(wanted)
        assert [live_chunks(steps) for steps in ranks] == [live_activations(slots) for slots in wanted]
        if schedule == "1f1b":
            assert [live_chunks(steps) for steps in ranks] == [min(count, size - rank) for rank in range(size)]
        else:
            flow_keeps_one_layer_more(by_rule)


def flow_keeps_one_layer_more(by_rule: dict[str, list[list[Step]]]) -> None:
    """A flow has no slots, but the schedule's memory: with turns by layer at most one more, and one for the flow."""
    for rank, (steps, in_turns) in enumerate(zip(by_rule["greedy"], by_rule["sequential"], strict=True)):
        assert {step[:4] for step in steps} == {step[:4] for step in in_turns}
        assert len(steps) == len(in_turns)
        assert live_layers(steps) <= live_layers(in_turns) + 1 + 1e-6, f"rank {rank}"
