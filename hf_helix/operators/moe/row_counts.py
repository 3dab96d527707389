"""How many rows of a micro-batch go to which rank and expert, as the host knows it.

In:   counts on the device.
Out:  Python numbers, the same for every operator of a layer that allocates by them, forward and backward.
Must hold: the host waits once for a layer and a micro-batch, for the copy of its counts alone: what was computed behind
them goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.base import Call


class Reading:
    """Numbers on their way from the device to the host.

    Args:
        shape: of the numbers.
        device: that they come from.
    """

    def __init__(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._room = torch.empty(shape, dtype=torch.long, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None
        self._numbers: Any = None

    def copy(self, *parts: Tensor) -> None:
        """Queues the copy of all parts on the current stream."""
        for room, part in zip(self._room, parts, strict=True):
            room.copy_(part, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    @property
    def numbers(self) -> Any:
        """As nested lists. The first time, the host waits for the copy."""
        if self._numbers is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._numbers = self._room.tolist()
        return self._numbers


class Assumed:
    """Numbers of rows where nothing is computed, on the meta device: every expert gets as many, the first ones what is
    left over.

    Attributes:
        imbalance: how many times as many the experts of this rank get.
    """

    imbalance = 1.0

    def __init__(self, num_rows: int, ranks: int, experts: int) -> None:
        each, over = divmod(num_rows, ranks * experts)
        counts = [each + (place < over) for place in range(ranks * experts)]
        given = [counts[rank * experts : (rank + 1) * experts] for rank in range(ranks)]
        self.numbers = [given, [[math.ceil(count * self.imbalance) for count in given[0]]] * ranks]


@contextmanager
def assuming(imbalance: float) -> Iterator[None]:
    """Within it, what is declared on the meta device gets so many times as many rows as an even share.

    Args:
        imbalance: see `Assumed`.
    """
    before, Assumed.imbalance = Assumed.imbalance, imbalance
    try:
        yield
    finally:
        Assumed.imbalance = before


class RowCounts:
    """The counts of a layer, by micro-batch: rows given to every rank and expert, and got [ranks, experts of each]."""

    def expect(self, call: Call, counts: Tensor, num_ways: int = 2) -> Reading | None:
        """Where to copy the counts of a micro-batch; None where the host knows them.

        Args:
            counts: of one way [ranks, experts of each].
            num_ways: what was given and what was got; 1 where they are the same.
        """
        if self in call.shared or counts.is_meta:
            return None
        call.shared[self] = reading = Reading((num_ways, *counts.shape), counts.device)
        return reading

    def by_rank(self, call: Call, rows: Tensor, given: Tensor, got: Tensor) -> tuple[list[int], list[int]]:
        """How many rows go to every rank, and how many come from it.

        Args:
            rows: those that go, the first time.
            given, got: [ranks, experts of each]; read where nobody expected them.
        """
        given_rows, got_rows = self._numbers(call, len(rows), given, got)
        return [sum(row) for row in given_rows], [sum(row) for row in got_rows]

    def by_expert(self, call: Call, rows: Tensor, sizes: Tensor) -> list[int]:
        """How many rows each expert of this rank has.

        Args:
            rows: of all of them.
            sizes: the same on the device [experts]; read where nobody expected them.
        """
        return [sum(column) for column in zip(*self._numbers(call, len(rows), sizes.unsqueeze(0))[-1], strict=True)]

    def _numbers(self, call: Call, num_rows: int, *ways: Tensor) -> Any:
        if ways[0].is_meta:
            return call.shared.setdefault(self, Assumed(num_rows, *ways[0].shape)).numbers
        reading = self.expect(call, ways[0], len(ways))
        if reading is not None:
            reading.copy(*ways)
        return call.shared[self].numbers
