"""The recorded order of a real step shows the interleaving; it does not depend on how fast anything ran."""

import functools
from typing import Any

import pytest
from support.pipeline_jobs import events_of_window


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
