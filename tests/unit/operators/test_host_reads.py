"""What the host knows of an expert layer's counts is read once and serves every operator of the layer.

How often the host waits in a whole window is counted in `test_cuda_streams`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_helix.operators.base import Call
from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.operators.moe.dispatch import AllToAll, ExchangeCounts
from hf_helix.operators.moe.row_counts import RowCounts
from hf_helix.planning.graph.operator import Part


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all tensors that become lists."""
    result: list[tuple[int, ...]] = []
    tolist = Tensor.tolist

    def noted(value: Tensor) -> Any:
        result.append(tuple(value.shape))
        return tolist(value)

    monkeypatch.setattr(Tensor, "tolist", noted)
    return result


def test_the_numbers_serve_both_ways_and_backward(read: list[tuple[int, ...]]) -> None:
    """What this rank gives and gets, by rank; recompute announces again and reads nothing."""
    axis, row_counts = Axis(SilentTransport(2, 0)), RowCounts()
    announce = ExchangeCounts(axis, row_counts)
    there, back = (AllToAll(axis, back, row_counts) for back in (False, True))
    shared: dict[object, Any] = {}
    counts = torch.tensor([1, 0, 2, 3])
    rows = torch.randn(6, 4)
    call = Call({}, 0, True, shared=shared)
    (arriving,) = announce.method_of(Part.F)(call, counts)
    (gone,) = there.method_of(Part.F)(Call({}, 0, True, shared=shared), rows, counts, arriving)
    assert len(gone) == 6
    announce.method_of(Part.R)(call, counts)
    for exchange in (there, back):
        (outputs, _) = exchange.prepare(Call({}, 0, True, shared=shared), Part.B, rows, counts, arriving)
        assert outputs[0].shape == (6, 4)
    assert read == [(2, 2, 2)]
    assert row_counts.by_expert(call, torch.empty(6, 4), torch.tensor([3, 3])) == [3, 3]
    assert len(read) == 1
