"""How many rows of a micro-batch go to each rank and expert, on the host.

In:   counts on the device.
Out:  Python numbers, the same for every operator of a layer that allocates by them, forward and backward.
Must hold: the host waits once for a layer and a micro-batch, only for the copy of its counts: later kernels go on.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.base import OperatorContext


class HostCopy:
    """Numbers on their way from the device to the host."""

    def __init__(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._buffer = torch.empty(shape, dtype=torch.long, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None
        self._numbers: Any = None

    def queue(self, *parts: Tensor) -> None:
        """Queues the copy of all parts on the current stream."""
        for buffer, part in zip(self._buffer, parts, strict=True):
            buffer.copy_(part, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    @property
    def numbers(self) -> Any:
        """The numbers as nested lists. The first time, the host waits for the copy."""
        if self._numbers is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._numbers = self._buffer.tolist()
        return self._numbers


class EvenRowCounts:
    """Numbers of rows where nothing is computed, on the meta device: an equal number for every expert, the remainder
    for the first experts; `imbalance` is the factor of rows for this rank's experts."""

    imbalance = 1.0

    def __init__(self, num_rows: int, ranks: int, experts: int) -> None:
        each, over = divmod(num_rows, ranks * experts)
        counts = [each + (place < over) for place in range(ranks * experts)]
        given = [counts[rank * experts : (rank + 1) * experts] for rank in range(ranks)]
        self.numbers = [given, [[math.ceil(count * self.imbalance) for count in given[0]]] * ranks]


@contextmanager
def assuming(imbalance: float) -> Iterator[None]:
    """Returns a context in which experts on the meta device get `imbalance` times an even share of rows, see
    `EvenRowCounts`."""
    before, EvenRowCounts.imbalance = EvenRowCounts.imbalance, imbalance
    try:
        yield
    finally:
        EvenRowCounts.imbalance = before


class RowCounts:
    """The counts of a layer, by micro-batch: rows given to every rank and expert, and got [ranks, experts of each]."""

    def expect(self, ctx: OperatorContext, counts: Tensor, num_ways: int = 2) -> HostCopy | None:
        """Returns the destination for the counts of a micro-batch; None where the host knows them.

        Args:
            ctx: of the micro-batch.
            counts: of one direction [ranks, experts of each].
            num_ways: 2 for given and got rows; 1 where these are the same.
        """
        if self in ctx.shared or counts.is_meta:
            return None
        ctx.shared[self] = copy = HostCopy((num_ways, *counts.shape), counts.device)
        return copy

    def by_rank(self, ctx: OperatorContext, rows: Tensor, given: Tensor, got: Tensor) -> tuple[list[int], list[int]]:
        """Returns how many rows go to every rank, and how many come from it.

        Args:
            ctx: of the micro-batch.
            rows: the rows to send, at the first call.
            given, got: [ranks, experts of each]; read where no copy was expected.
        """
        given_rows, got_rows = self._numbers(ctx, len(rows), given, got)
        return [sum(row) for row in given_rows], [sum(row) for row in got_rows]

    def by_expert(self, ctx: OperatorContext, rows: Tensor, sizes: Tensor) -> list[int]:
        """Returns how many rows each expert of this rank has.

        Args:
            ctx: of the micro-batch.
            rows: of all experts.
            sizes: the result on the device [experts]; read where no copy was expected.
        """
        return [sum(column) for column in zip(*self._numbers(ctx, len(rows), sizes.unsqueeze(0))[-1], strict=True)]

    def _numbers(self, ctx: OperatorContext, num_rows: int, *ways: Tensor) -> Any:
        if ways[0].is_meta:
            return ctx.shared.setdefault(self, EvenRowCounts(num_rows, *ways[0].shape)).numbers
        copy = self.expect(ctx, ways[0], len(ways))
        if copy is not None:
            copy.queue(*ways)
        return ctx.shared[self].numbers
