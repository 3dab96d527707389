"""Buckets: gradients that ranks reduce together.

In:   the units of one rank of the pipeline with their parameters and placements, and the mesh.
Out:  `Bucket`s, in the order in which a single micro-batch would complete them.
Must hold: every trained parameter with gradients on other ranks is in one bucket. Buckets depend only on the model and
on the sizes of the mesh: not on the plan, so reductions give the same bits under every plan, and not on this rank's
slices, so every rank of a pipeline knows the buckets of the others.

`hf_helix.planning.window.passes` gives the size of buckets. A flat parameter is a bucket of its own, whose
reduce-scatter leaves each rank its shard.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from torch import Tensor, nn

from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.parameters.param_shard import Placement
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.window.layout import GradientReduction, Layout
from hf_helix.planning.window.passes import BUCKET_BYTES, fill_buckets
from hf_helix.runtime.distributed.mesh import Mesh

Adder = tuple[int, str]
"""An operator of backward: the index of its unit, and its name in that unit."""


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
class Bucket:
    """Parameters whose gradients ranks reduce together.

    Attributes:
        placements: the parameters, with their cuts.
        adders: the operators that add to their gradients.
        bytes: of the gradients, on the rank with most of them.
        spans_batches: whether ranks with other tokens (dp, cp) add to them, or the host takes them. If not, only tensor
            parallelism reduces them: few and small gradients.
        flat: the flat parameter; None if every rank keeps the full parameters.
    """

    placements: Mapping[nn.Parameter, Placement]
    adders: tuple[Adder, ...]
    bytes: int
    spans_batches: bool
    flat: FlatParameter | None = None

    @property
    def is_planned(self) -> bool:
        """Whether the layout contains this reduction."""
        return self.spans_batches and bool(self.adders)

    @property
    def is_sharded_within_unit(self) -> bool:
        """True if the gradients are sharded and a single unit adds to them. A tied table's full gradient lives through
        the whole backward pass anyway, since units add to it at the begin and at the end."""
        is_sharded = self.flat is not None and self.flat.reduce_axis.size > 1
        return is_sharded and len({unit for unit, _ in self.adders}) == 1


def gradient_buckets(units: Mapping[int, Unit], mesh: Mesh) -> list[Bucket]:
    """Returns the buckets of a rank of the pipeline, from its units by index in the layout."""
    flats = {p: flat for unit in units.values() for flat in unit.flat_parameters.values() for p in flat.placements}
    reduced = [
        made
        for made in by_completion(units)
        if made.parameter in flats or _is_reduced(made.parameter, made.placement, mesh)
    ]
    sizes = {
        made.parameter: made.parameter.element_size() * max_elements(made.parameter, made.placement, mesh)
        for made in reduced
    }
    full = [parameter for parameter in sizes if parameter not in flats]
    numbers = dict(zip(full, fill_buckets([sizes[parameter] for parameter in full], BUCKET_BYTES), strict=True))
    groups: dict[int | FlatParameter, list[TrainedParameter]] = {}
    for made in reduced:
        bucket = flats.get(made.parameter, numbers.get(made.parameter, 0))
        groups[bucket] = [
            *groups.pop(bucket, ()),
            made,
        ]  # moved to the end: a bucket is complete with its last gradient
    return [
        Bucket(
            {made.parameter: made.placement for made in group},
            tuple(dict.fromkeys(adder for made in group for adder in made.adders)),
            sum(sizes[made.parameter] for made in group),
            flat is not None or any(mesh.replica_group_of(made.placement) is not None for made in group),
            flat,
        )
        for group, flat in ((group, flats.get(group[0].parameter)) for group in groups.values())
    ]


def layout_with_reductions(layout: Layout, model: Mapping[int, Unit], mesh: Mesh, often: bool = False) -> Layout:
    """Returns a layout with the gradient reductions of all pipeline ranks, from the uncut units of the whole model;
    `often` reduces shards in every micro-batch."""
    sums = []
    for rank in range(layout.num_ranks):
        units = {unit: model[unit] for unit in layout.units_of(rank) if unit in model}
        sums += [
            GradientReduction(made.adders, made.bytes, often and made.is_sharded_within_unit)
            for made in gradient_buckets(units, mesh)
            if made.is_planned
        ]
    return replace(layout, reductions=sums)


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
