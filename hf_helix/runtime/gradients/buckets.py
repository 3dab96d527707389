"""Buckets: gradients that ranks reduce together.

In:   the units of one rank of the pipeline with their parameters and placements, and the mesh.
Out:  `BoundBucket`s, in the order in which a single micro-batch would complete them.
Must hold: every trained parameter with gradients on other ranks is in one bucket. Buckets depend only on the model and
on the sizes of the mesh: not on the plan, so reductions give the same bits under every plan, and not on this rank's
slices, so every rank of a pipeline knows the buckets of the others.

`hf_helix.planning.parameters` fills the buckets. A flat parameter is a bucket of its own, whose reduce-scatter leaves
each rank its shard.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor, nn

from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.parameters.param_shard import Placement
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.parameters import Adder, Bucket, Parameter, gradient_buckets
from hf_helix.runtime.distributed.mesh import Mesh


class TrainedParameter(NamedTuple):
    """A trained parameter.

    Attributes:
        parameter: the parameter.
        placement: its cut.
        adders: the operators that add to its gradient.
    """

    parameter: nn.Parameter
    placement: Placement
    adders: tuple[Adder, ...]


@dataclass(frozen=True)
class BoundBucket:
    """A bucket bound to the parameters of this rank.

    Attributes:
        row: the bucket.
        placements: its parameters, with their cuts.
        flat: the flat parameter; None if every rank keeps the full parameters.
    """

    row: Bucket
    placements: Mapping[nn.Parameter, Placement]
    flat: FlatParameter | None = None


def bound_buckets(units: Mapping[int, Unit], mesh: Mesh) -> list[BoundBucket]:
    """Returns the buckets of a rank of the pipeline, from its units by index in the layout."""
    flats = {p: flat for unit in units.values() for flat in unit.flat_parameters.values() for p in flat.placements}
    reduced = [
        made
        for made in by_completion(units)
        if made.parameter in flats or _is_reduced(made.parameter, made.placement, mesh)
    ]
    rows = [_row(made, flats.get(made.parameter), mesh) for made in reduced]
    return [
        BoundBucket(bucket, {made.parameter: made.placement for made in members}, flats.get(members[0].parameter))
        for bucket in gradient_buckets(rows)
        for members in [[reduced[number] for number in bucket.members]]
    ]


def _row(made: TrainedParameter, flat: FlatParameter | None, mesh: Mesh) -> Parameter:
    size = made.parameter.element_size() * max_elements(made.parameter, made.placement, mesh)
    if flat is not None:
        return Parameter(size, made.adders, flat=str(id(flat)), is_sharded=flat.reduce_axis.size > 1)
    return Parameter(size, made.adders, mesh.replica_group_of(made.placement) is not None)


def adders_of(units: Mapping[int, Unit]) -> dict[Tensor, list[Adder]]:
    """Returns the operators that add to the gradient of each parameter, in the order of a micro-batch; units by index
    in the layout."""
    adders: dict[Tensor, list[Adder]] = {}
    for index in sorted(units, reverse=True):
        for op in units[index].graphs.backward.operators:
            if op.part not in (Part.I, Part.R) and not (op.splits_dgrad_wgrad and op.wgrad_fraction == 0):
                for parameter in units[index].operators[op.forward_name].parameters:
                    adders.setdefault(parameter, []).append((index, op.name))
    return adders


def _all_adders(units: Mapping[int, Unit]) -> dict[Tensor, list[Adder]]:
    """Returns `adders_of`; for a parameter that no operator names, every computation of its unit, unless no code reads
    it."""
    adders = adders_of(units)
    for index in sorted(units, reverse=True):
        computing = [op.name for op in units[index].graphs.backward.operators if not op.kind.communicates]
        for parameter in units[index].placements:
            is_unread = parameter in units[index].unread
            adders.setdefault(parameter, [] if is_unread else [(index, name) for name in computing])
    return adders


def by_completion(units: Mapping[int, Unit]) -> Iterator[TrainedParameter]:
    """Yields the trained parameters in the order in which a single micro-batch would complete their gradients; units by
    index in the layout."""
    adders = _all_adders(units)
    order: dict[Adder, int] = {}
    places: dict[nn.Parameter, tuple[int, Placement]] = {}
    for index in sorted(units, reverse=True):
        for op in units[index].graphs.backward.operators:
            order[index, op.name] = len(order)
        for parameter, placement in units[index].placements.items():
            last = max((order[adder] for adder in adders[parameter] if adder in order), default=len(order))
            places[parameter] = last, placement
    for parameter in sorted(places, key=lambda parameter: places[parameter][0]):
        if parameter.requires_grad:
            yield TrainedParameter(parameter, places[parameter][1], tuple(adders[parameter]))


def _is_reduced(parameter: nn.Parameter, placement: Placement, mesh: Mesh) -> bool:
    """Whether other ranks add to the gradient, or the number of batches divides it."""
    over_tp = placement.sums_gradient and mesh.tp.group is not None
    return over_tp or mesh.replica_group_of(placement) is not None or mesh.dp_size > 1


def max_elements(parameter: nn.Parameter, placement: Placement, mesh: Mesh) -> int:
    """Returns the elements of a parameter on the first rank of its axis, which has the most."""
    shape = list(parameter.shape)
    if placement.dim is not None and placement.length:
        shape = list(placement.shape(placement.full_shape(shape), mesh.axis_of(placement).size, 0))
    return prod(shape)
