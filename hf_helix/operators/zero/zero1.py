"""Flats that every rank keeps whole, and steps a stretch of (ZeRO-1).

In:   the trained parameters of a unit that have one type, the same ranks with copies, and readers of one kind.
Out:  a piece that never moves, which is gathered once in a window; this rank's stretch, which an optimizer steps.
Must hold: between windows parameters are stand-ins, as those of every flat: what other ranks have stepped is not here
yet.

A piece in the type of the parameters has this rank's stretch in it, and the parameters are views of it while a window
runs. A piece in the type of matrix products has the cast of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from hf_helix.operators.base import TransferFn
from hf_helix.operators.unit import Unit
from hf_helix.operators.zero.flat_parameter import FlatParameter
from hf_helix.operators.zero.grouping import ShardAxes, make_flat_parameters


@dataclass(eq=False)
class Zero1FlatParameter(FlatParameter):
    """Parameters in one piece that every rank keeps, and of which each steps a stretch.

    Attributes:
        piece: the parameters in one piece [length], as operators read them.
    """

    buffer: Tensor = field(init=False, repr=False)
    _gathered_at: int | None = field(init=False, default=None, repr=False)  # the version of the stretch

    @property
    def is_current(self) -> bool:
        """Whether the piece is as the ranks' stretches are. Steps of optimizers are said by `mark_stale`; others who write
        to shards, such as schedule-free optimizers between training and evaluation, are found by the version that torch
        counts."""
        return self._gathered_at == self.shard._version

    def _make_shard(self, owned: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.buffer = torch.zeros(owned * self.axis.size, dtype=self.cast_to or dtype, device=device)
        return self._own_place(self.buffer) if self.cast_to is None else super()._make_shard(owned, dtype, device)

    def cast(self, parameter: nn.Parameter) -> Tensor | None:
        return self._view_in(self.buffer, parameter)

    def begin_window(self) -> None:
        super().begin_window()
        if self.cast_to is None:
            self.unshard(self.buffer)

    def mark_stale(self) -> None:
        self._gathered_at = None

    def refresh(self) -> TransferFn:
        """Returns the work that gathers the piece from the stretches of all ranks, where it lies. Collective."""

        def work() -> None:
            self._fill(self.buffer)
            self._gathered_at = self.shard._version  # behind: the stretch may lie in the piece

        return work

    def gather(self) -> Tensor:
        if self.cast_to is not None:
            return super().gather()
        self.refresh()()
        return self.buffer

    def load_full(self, whole: Tensor) -> None:
        super().load_full(whole)
        self.mark_stale()


def apply_zero1(units: Sequence[Unit], shard_axes: ShardAxes, autocast_dtype: torch.dtype | None) -> list[Unit]:
    """Returns the units with their trained parameters in flats that every rank keeps whole; graphs stay as they are.

    Args:
        units: of the whole model, in forward order.
        shard_axes: see `ShardAxes`.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.
    """
    flats = make_flat_parameters(units, shard_axes, autocast_dtype, Zero1FlatParameter, frozen=False)
    return [
        replace(unit, flat_parameters={flat.name: flat for flat in found}) if found else unit
        for unit, found in zip(units, flats, strict=True)
    ]


def zero1_flat_parameters(flats: Iterable[FlatParameter]) -> Iterator[Zero1FlatParameter]:
    """Yields those that every rank keeps whole."""
    return (flat for flat in flats if isinstance(flat, Zero1FlatParameter))
