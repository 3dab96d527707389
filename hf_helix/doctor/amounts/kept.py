"""Weights that ranks with copies keep whole and each step a part of (`shard_optimizer`): which lie in one piece.

In:   the units that were counted, one of each name, and the type of matrix products.
Out:  `KeptWeights`, in the order in which a micro-batch first reads them.
Must hold: pieces are made by the function that training makes them with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_helix.doctor.amounts.mesh import simulated_mesh
from hf_helix.operators.param_shard import EXPERTS
from hf_helix.operators.unit import Unit
from hf_helix.operators.zero.zero1 import Zero1FlatParameter, apply_zero1
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES
from hf_helix.runtime.zero import readers_of


@dataclass(frozen=True)
class KeptWeights:
    """Weights in one piece.

    Attributes:
        units: names of those that read them.
        name: what tells them from other weights of these units.
        elements: how many a rank holds.
        element_bytes: of one of them, in the type in which they are gathered.
        is_experts: whether they are of experts, which fewer ranks have copies of.
        is_cast: whether they are trained in another type than they are gathered in.
    """

    units: tuple[str, ...]
    name: str
    elements: int
    element_bytes: int
    is_experts: bool
    is_cast: bool = False

    @property
    def bytes(self) -> int:
        """Returns the bytes of the piece, without padding."""
        return self.elements * self.element_bytes


def with_kept_flats(units: Sequence[Unit], autocast_dtype: torch.dtype | None) -> list[Unit]:
    """Returns the units with the pieces that `shard_optimizer` would keep, as flats that are not spread.

    Args:
        autocast_dtype: the type of matrix products under autocast; None for no autocast.
    """
    several = simulated_mesh(
        {}, spread={COPIES: 2, EXPERT_COPIES: 2}
    ).mesh  # whatever their number, pieces are the same
    return apply_zero1(units, several.shard_axes, autocast_dtype)


def kept_weights(units: Iterable[Unit]) -> list[KeptWeights]:
    """Returns the pieces of units, whose parameters are this rank's part of them."""
    return [_kept(flat, names) for flat, names in readers_of((unit.name, unit) for unit in units).items()]


def flat_names(units: Iterable[Unit]) -> Mapping[nn.Parameter, str]:
    """Returns the name of the flat of every parameter that is in one."""
    return {
        parameter: flat.name
        for unit in units
        for flat in unit.flat_parameters.values()
        for parameter in flat.placements
    }


def _kept(flat: Zero1FlatParameter, units: Sequence[str]) -> KeptWeights:
    parameter, placement = next(iter(flat.placements.items()))
    elements = sum(each.numel() for each in flat.placements)
    dtype = flat.cast_to or parameter.dtype
    is_experts, is_cast = placement.over == EXPERTS, dtype != parameter.dtype
    return KeptWeights(tuple(units), flat.name, elements, dtype.itemsize, is_experts, is_cast)
