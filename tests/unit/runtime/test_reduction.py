"""Sums of gradients: a bucket at a time; no stream waits for more than it needs; what is left is summed at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.units import unit_of
from torch import nn

from hf_helix.operators.communication.transport import Axis, GroupTransport
from hf_helix.operators.param_shard import COPIED, COPIED_ON_SHARDS, CUT_ROWS, Placement
from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.distributed.pipe import Pipe
from hf_helix.runtime.gradients import buckets
from hf_helix.runtime.gradients.reduce import GradientReducer
from hf_helix.runtime.streams import CpuStreams, Event


class Issued(Event):
    def __init__(self, kind: Kind, after: Sequence[Event]) -> None:
        self.kind, self.after = kind, list(after)


class Recorder(CpuStreams):
    """Runs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[Issued] = []
        self.waited: list[Event] = []

    def issue(self, kind: Kind, work: Any, after: Sequence[Event], label: str, lane: str = "") -> Event:
        self.issued.append(Issued(kind, after))
        return self.issued[-1]

    def wait(self, event: Any) -> None:
        self.waited.append(event)


def mesh_of(tp: bool, dp: bool) -> Mesh:
    axis = Axis.single()
    if tp:
        axis.transport = object.__new__(GroupTransport)
        axis.transport.group, axis.transport.size, axis.transport.rank = object(), 2, 0  # type: ignore[assignment]
    sizes = {"dp": 1 + dp, "pp": 1, "cp": 1, "tp": 1 + tp, "ep": 1}
    group: Any = object() if dp else None
    return Mesh(sizes, torch.device("cpu"), None, axis, Axis.single(), axis, Pipe([0]), group, group, group, None)


def parameter(frozen: bool = False) -> nn.Parameter:
    """100 bytes, with a gradient unless it is frozen."""
    result = nn.Parameter(torch.zeros(25), requires_grad=not frozen)
    result.grad = None if frozen else torch.zeros(25)
    return result


def kinds(streams: Recorder) -> list[str]:
    return [event.kind.value for event in streams.issued]


def reduction_of(
    placements: Sequence[dict[nn.Parameter, Placement]], streams: Recorder, tp: bool, dp: bool
) -> GradientReducer:
    units, mesh = {k: unit_of(result) for k, result in enumerate(placements)}, mesh_of(tp, dp)
    return GradientReducer(buckets.gradient_buckets(units, mesh), mesh, streams)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 200)  # two parameters
    return Recorder()


def test_a_bucket_is_summed_when_it_is_asked_for_and_at_the_end_otherwise(streams: Recorder) -> None:
    reduction = reduction_of([{parameter(): CUT_ROWS} for _ in range(6)], streams, tp=False, dp=True)
    reduction.reduce_bucket(1)
    assert kinds(streams) == ["gradients"]
    assert streams.waited == []
    reduction.finish()
    assert kinds(streams) == ["gradients"] * 3
    assert streams.waited == streams.issued


def test_averages_wait_for_their_own_sums_and_sums_for_nothing(streams: Recorder) -> None:
    """The stream of the sums carries the collectives of the layers, too, and must not wait for other batches."""
    placements = [{parameter(): COPIED_ON_SHARDS, parameter(): CUT_ROWS} for _ in range(2)]
    reduction_of(placements, streams, tp=True, dp=True).finish()
    assert kinds(streams) == ["intra_node", "gradients"] * 2
    assert [event.after for event in streams.issued] == [[], streams.issued[:1], [], streams.issued[2:3]]


@pytest.mark.parametrize(
    ("tp", "dp", "expected"), [(False, False, []), (True, False, ["intra_node"]), (False, True, ["gradients"])]
)
def test_only_axes_of_several_ranks_communicate(tp: bool, dp: bool, expected: list[str], streams: Recorder) -> None:
    reduction_of([{parameter(): COPIED_ON_SHARDS, parameter(): COPIED}], streams, tp, dp).finish()
    assert kinds(streams) == expected


def test_what_is_not_trained_is_in_no_bucket(streams: Recorder) -> None:
    reduction_of([{parameter(): COPIED}, {parameter(frozen=True): COPIED}], streams, tp=False, dp=True).finish()
    assert kinds(streams) == ["gradients"]
