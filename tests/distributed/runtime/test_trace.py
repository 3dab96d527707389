"""The recorded order of a real step shows the interleaving; it does not depend on how fast anything ran."""

import functools
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_jobs import events_of_window

from hf_helix.planning.schedule.named import build_schedule


@pytest.fixture(scope="module")
def events(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What rank 0's issuing thread did, by plan."""
    folder = str(tmp_path_factory.mktemp("trace"))

    @functools.cache
    def get(plan: str) -> list[tuple[str, str]]:
        job = {"folder": folder, "helix": {"tp_size": 2, "plan": plan}, "num_microbatches": 3}
        return cluster_of(2).run(events_of_window, **job)[0]

    return get


def in_flight(events: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """(computation, communication) for every computation that ran between a collective's issue and its wait."""
    pairs, flying = [], []
    for verb, label in events:
        if verb == "issue":
            flying.append(label)
        elif verb == "wait" and label in flying:
            flying.remove(label)
        elif verb == "run":
            pairs += [(label, other) for other in flying]
    return pairs


def strand(label: str) -> str:
    """'F2' of 'F2.layers.0.attn.qkv': direction and micro-batch."""
    return label.split(".")[0]


@pytest.mark.parametrize("plan", ["greedy", "round_robin"])
def test_forward_runs_while_a_collective_of_the_other_strand_is_in_flight(plan: str, events: Any) -> None:
    pairs = [(strand(computed), strand(moved)) for computed, moved in in_flight(events(plan))]
    for backward in (0, 1):
        assert (f"F{backward + 1}", f"B{backward}") in pairs
        assert (f"B{backward}", f"F{backward + 1}") in pairs


def test_sequential_keeps_the_strands_apart(events: Any) -> None:
    pairs = in_flight(events("sequential"))
    assert all(strand(computed) == strand(moved) for computed, moved in pairs)
    # W beside the collective that follows its I is all that one strand overlaps.
    assert pairs
    assert all(computed.endswith(".W") for computed, _ in pairs)


@pytest.mark.parametrize("schedule", ["folded_1f1b", "dualpipe_v", "1f1b"])
def test_layers_of_a_pipeline_run_in_the_slots_of_its_schedule(schedule: str, cluster_of: Any, tmp_path: Path) -> None:
    """Of stages of a layer each: what starts, in order; the two actions of a slot in any."""
    layers, count = (2 if schedule == "1f1b" else 4), 5
    helix = {"pp_size": 2, "schedule": schedule, "layers_per_stage": [1] * layers}
    job = {"helix": helix, "num_microbatches": count, "model": {"num_hidden_layers": layers}}
    ranks = cluster_of(2).run(events_of_window, folder=str(tmp_path), **job)
    for events, slots in zip(ranks, build_schedule(schedule, 2, count), strict=True):
        started = [".".join(label.split(".")[:3]) for verb, label in events if verb == "run" and ".layers." in label]
        started = list(dict.fromkeys(started))
        for slot in slots:
            parts = {"F": "F", "B": "B", "I": "B"}  # weight gradients by themselves start nothing
            actions = [each for each in slot.actions if each.computation_type in parts]
            wanted = {f"{parts[each.computation_type]}{each.microbatch}.layers.{each.stage}" for each in actions}
            assert {started.pop(0) for _ in wanted} == wanted
        assert not started
