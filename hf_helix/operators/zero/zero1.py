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

from hf_helix.operators.base import Work
from hf_helix.operators.unit import Unit
from hf_helix.operators.zero.flat_parameter import Flat
from hf_helix.operators.zero.grouping import SpreadOver, make_flats


@dataclass(eq=False)
class KeptFlat(Flat):
    """Parameters in one piece that every rank keeps, and of which each steps a stretch.

    Attributes:
        piece: the parameters in one piece [length], as operators read them.
    """

    piece: Tensor = field(init=False, repr=False)
    _gathered_at: int | None = field(init=False, default=None, repr=False)  # the version of the stretch

    @property
    def is_current(self) -> bool:
        """Whether the piece is as the ranks' stretches are. Steps of optimizers are said by `outdate`; others who write
        to shards, such as schedule-free optimizers between training and evaluation, are found by the version that torch
        counts."""
        return self._gathered_at == self.shard._version

    def _make_shard(self, owned: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.piece = torch.zeros(owned * self.axis.size, dtype=self.cast_to or dtype, device=device)
        return self._own_place(self.piece) if self.cast_to is None else super()._make_shard(owned, dtype, device)

    def cast(self, parameter: nn.Parameter) -> Tensor | None:
        return self._view_in(self.piece, parameter)

    def begin_window(self) -> None:
        super().begin_window()
        if self.cast_to is None:
            self.lend(self.piece)

    def outdate(self) -> None:
        self._gathered_at = None

    def refresh(self) -> Work:
        """Returns the work that gathers the piece from the stretches of all ranks, where it lies. Collective."""

        def work() -> None:
            self._fill(self.piece)
            self._gathered_at = self.shard._version  # behind: the stretch may lie in the piece

        return work

    def gather(self) -> Tensor:
        if self.cast_to is not None:
            return super().gather()
        self.refresh()()
        return self.piece

    def keep(self, whole: Tensor) -> None:
        super().keep(whole)
        self.outdate()


def keep_units(units: Sequence[Unit], spread_over: SpreadOver, autocast_dtype: torch.dtype | None) -> list[Unit]:
    """Returns the units with their trained parameters in flats that every rank keeps whole; graphs stay as they are.

    Args:
        units: of the whole model, in forward order.
        spread_over: see `SpreadOver`.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.
    """
    flats = make_flats(units, spread_over, autocast_dtype, KeptFlat, frozen=False)
    return [
        replace(unit, flats={flat.name: flat for flat in found}) if found else unit
        for unit, found in zip(units, flats, strict=True)
    ]


def kept_flats(flats: Iterable[Flat]) -> Iterator[KeptFlat]:
    """Yields those that every rank keeps whole."""
    return (flat for flat in flats if isinstance(flat, KeptFlat))
