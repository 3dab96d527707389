"""ZeRO-1 flat buffers (`shard_optimizer`): full weights on every replica, each updating a shard.

In:   the counted units, one of each name, and the type of matrix products.
Out:  `KeptWeights`, in the order of first reads by a micro-batch.
Must hold: buffers are made by the same function as in training.
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
    """Weights in one flat buffer.

    Attributes:
        units: names of the units that read the buffer.
        name: unique within these units.
        element_bytes: bytes of an element in the gathered type.
        is_experts: whether the weights are of experts, with fewer replicas.
        is_cast: whether trained and gathered types differ.
    """

    units: tuple[str, ...]
    name: str
    elements: int
    element_bytes: int
    is_experts: bool
    is_cast: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the buffer, without padding."""
        return self.elements * self.element_bytes


def with_kept_flats(units: Sequence[Unit], autocast_dtype: torch.dtype | None) -> list[Unit]:
    """Returns the units with the flat buffers of `shard_optimizer`, unsharded; `autocast_dtype` is the type of matrix
    products."""
    # Buffers do not depend on the number of replicas.
    several = simulated_mesh({}, spread={COPIES: 2, EXPERT_COPIES: 2}).mesh
    return apply_zero1(units, several.shard_axes, autocast_dtype)


def kept_weights(units: Iterable[Unit]) -> list[KeptWeights]:
    """Returns the flat buffers of units whose parameters are this rank's TP and expert shards."""
    return [_kept(flat, names) for flat, names in readers_of((unit.name, unit) for unit in units).items()]


def flat_names(units: Iterable[Unit]) -> Mapping[nn.Parameter, str]:
    """Returns the names of flat buffers by parameter, for parameters in a buffer."""
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
