"""Compared losses: ranks that share a batch compare the losses of a window, and the gradients that these have given.

In:   the losses of a window of calls, and the gradients that they hand back to the cut decoder, on every rank.
Out:  nothing, or the same error on every rank that shares the batch, before the optimizer steps.
Must hold: a single small message for each window, of one size in every window. Losses are compared over all ranks that
share a batch; gradients over the ranks of a pipeline stage, since the stages have different parts of them; gradients
through logits in slices are sums over tp already, so that only the loss tells a difference there. Differences of
rounding are none: code of the caller may add in another order on every rank.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.runtime.distributed.agreement import gather_numbers
from hf_helix.runtime.distributed.mesh import Mesh

_SMALL = 1e-2
"""Losses and gradients below count as so large: what is left of a sum that cancels is rounding."""


class ComparedLosses:
    """The losses of a window and their gradients, as a few sums."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.forget()

    def forget(self) -> None:
        """Begins another window."""
        self._losses: list[tuple[Tensor, Tensor]] = []
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._tolerances = [0.0, 0.0]  # of a loss, and of a gradient: the relative difference that counts as rounding

    def add_loss(self, loss: Tensor) -> None:
        """Adds the loss of a micro-batch, a scalar."""
        if self._mesh.batch_group is not None:
            value = loss.detach().float().mean()
            self._losses.append((value, value.abs()))
            self._tolerances[0] = max(self._tolerances[0], _rounding(loss))

    def add_gradient(self, gradient: Tensor) -> None:
        """Adds a gradient [..., features] of a value of the decoder."""
        if self._mesh.batch_group is not None:
            rows = gradient.detach().reshape(-1, gradient.shape[-1])
            self._gradients.append((_product(rows), torch.linalg.vector_norm(rows, dtype=torch.float32)))
            self._tolerances[1] = max(self._tolerances[1], _rounding(gradient))

    def check(self) -> None:
        """Compares the window, and begins another. Collective over the ranks that share a batch.

        Raises:
            ValueError: on every rank of the batch, names two ranks.
        """
        group, device, tolerances = self._mesh.batch_group, self._mesh.device, self._tolerances
        sums = [_total(pairs, device) for pairs in (self._losses, self._gradients)]
        self.forget()
        if group is None:
            return
        stage = torch.tensor([self._mesh.pipe.rank], dtype=torch.float64, device=device)
        rows: list[Any] = gather_numbers(torch.cat((stage, *sums)), group)
        ranks = dist.get_process_group_ranks(group)
        for place, (stage_of, *row) in enumerate(rows):
            mate = next(each for each, (other, *_) in enumerate(rows) if other == stage_of)
            if _differ(row[:2], rows[0][1:3], tolerances[0]):
                values = f"{rows[0][1]:.6g} and {row[0]:.6g}, added up over a step"
                raise _difference("loss", ranks[0], ranks[place], values)
            if _differ(row[2:], rows[mate][3:], tolerances[1]):
                values = f"of norms {rows[mate][4]:.6g} and {row[3]:.6g}, added up over a step"
                raise _difference("gradient of the loss", ranks[mate], ranks[place], values)


def _total(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """The sum of pairs of numbers [2]."""
    none = torch.zeros(1, 2, dtype=torch.float64, device=device)
    return torch.cat([none, *(torch.stack(pair).double()[None].to(device) for pair in pairs)]).sum(0)


def _product(rows: Tensor) -> Tensor:
    """The product of a gradient with random numbers, equal on every rank."""
    by_row, by_column = (_random(size, rows.device) for size in rows.shape)
    return (rows @ by_column.to(rows.dtype)).float() @ by_row


@functools.lru_cache(8)
def _random(count: int, device: torch.device) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(device)


def _rounding(value: Tensor) -> float:
    return math.sqrt(torch.finfo(value.dtype).eps)


def _differ(sums: Sequence[float], others: Sequence[float], tolerance: float) -> bool:
    """Whether two sums differ, given with the sums of sizes. Values that are not finite are refused elsewhere."""
    (one, size), (other, other_size) = sums, others
    if not math.isfinite(one - other):
        return math.isfinite(one) != math.isfinite(other)
    return abs(one - other) > tolerance * max(size, other_size, _SMALL)


def _difference(what: str, rank: int, other: int, values: str) -> ValueError:
    return ValueError(
        f"the {what} differs between ranks {rank} and {other}, which share every batch: {values}; draw random numbers "
        "from the global generators of torch, numpy or Python, which these ranks share, or seed generators of your own "
        "alike, such as with args.seed in place of args.process_index"
    )
