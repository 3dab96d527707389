"""Flats that every rank keeps whole, and steps a stretch of (ZeRO-1).

In:   the trained parameters of a unit that have one type, the same ranks with copies, and readers of one kind.
Out:  a piece that never moves, which is gathered once in a window; this rank's stretch, which an optimizer steps.
Must hold: between windows parameters are stand-ins, as those of every flat: what other ranks have stepped is not here
yet. The type of a piece changes no bit of what is computed.

A piece in the type of the parameters has this rank's stretch in it, and the parameters are views of it while a window
runs. Under autocast, parameters that matrix products alone read have pieces in the type of the products: then a stretch
is what the piece is cast from (the fp32 master of bfloat16 weights), the parameters stay stand-ins, and products take
their weights from the piece (`CastWeights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from hf_helix.operators.base import Work
from hf_helix.operators.communication.transport import Copies
from hf_helix.operators.unit import Placement, Unit
from hf_helix.operators.weights.flat import Flat
from hf_helix.operators.weights.grouping import SpreadOver, make_flats, name_of


@dataclass(eq=False)
class KeptFlat(Flat):
    """Parameters in one piece that every rank keeps, and of which each steps a stretch.

    Attributes:
        cast_to: the type of the piece where it is not that of the parameters.
        piece: the parameters in one piece [length].
        is_current: whether the piece is as the ranks' stretches are, or is being gathered from them.
    """

    cast_to: torch.dtype | None = None
    piece: Tensor = field(init=False, repr=False)
    is_current: bool = field(init=False, default=False)

    def _make_shard(self, owned: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.piece = torch.zeros(owned * self.axis.size, dtype=self.cast_to or dtype, device=device)
        return self._own_place if self.cast_to is None else super()._make_shard(owned, dtype, device)

    @property
    def _own_place(self) -> Tensor:
        """The place of this rank's stretch in the piece."""
        return self.piece.chunk(self.axis.size)[self.axis.rank]

    @property
    def casts(self) -> dict[nn.Parameter, Tensor]:
        """The parameters in the type of matrix products, where the piece has them in it."""
        return {} if self.cast_to is None else self.views(self.piece)

    def begin_window(self) -> None:
        if self.cast_to is None:
            self.lend(self.piece)

    def outdate(self) -> None:
        self.is_current = False

    def refresh(self) -> Work:
        """Returns the work that gathers the piece from the stretches of all ranks, where it lies. Collective."""
        own, self.is_current = self._own_place, True

        def work() -> None:
            if self.cast_to is not None:
                own.copy_(self.shard)
            self.axis.transport.all_gather(self.piece, own)

        return work

    def prepare_gather(self) -> tuple[Tensor, Work]:
        return super().prepare_gather() if self.cast_to is not None else (self.piece, self.refresh())

    def keep(self, whole: Tensor) -> None:
        super().keep(whole)
        self.outdate()


def keep_units(units: Sequence[Unit], spread_over: SpreadOver, products: torch.dtype | None) -> list[Unit]:
    """Returns the units with their trained parameters in flats that every rank keeps whole; graphs stay as they are.

    Args:
        units: of the whole model, in forward order.
        spread_over: see `SpreadOver`.
        products: the type of matrix products under autocast; None for no autocast.
    """
    cast = set(_read_by_products_alone(units)) if products is not None else set()

    def name(parameter: nn.Parameter, placement: Placement, shared: bool) -> str | None:
        if not parameter.requires_grad:
            return None
        is_cast = parameter in cast and parameter.dtype is not products
        return name_of(parameter, placement, shared) + (".products" if is_cast else "")

    def make(name: str, placements: Mapping[nn.Parameter, Placement], over: Copies) -> Flat:
        # Matrices first, so that those that are multiplied at once lie side by side.
        ordered = dict(sorted(placements.items(), key=lambda each: -each[0].dim()))
        return KeptFlat(name, ordered, over.weights, over.sums, products if name.endswith(".products") else None)

    flats = make_flats(units, spread_over, name, make)
    return [
        replace(unit, flats={flat.name: flat for flat in found}) if found else unit
        for unit, found in zip(units, flats, strict=True)
    ]


def kept_flats(flats: Iterable[Flat]) -> Iterator[KeptFlat]:
    """Yields those that every rank keeps whole."""
    return (flat for flat in flats if isinstance(flat, KeptFlat))


def _read_by_products_alone(units: Sequence[Unit]) -> Iterator[Tensor]:
    operators = [operator for unit in units for operator in unit.operators.values()]
    cast = {parameter for operator in operators for parameter in operator.cast_parameters}
    others = {p for operator in operators for p in operator.parameters if p not in set(operator.cast_parameters)}
    return (parameter for parameter in cast if parameter not in others)
