"""Buckets: which gradients are summed over ranks in one piece.

In:   the units of one rank of the pipeline with their parameters and placements, and the mesh.
Out:  `Bucket`s, in the order in which a micro-batch by itself would complete them.
Must hold: every trained parameter whose gradient another rank adds to is in one bucket. What is in a bucket depends on
the model and on the sizes of the mesh alone: not on the plan, so sums have the same bits under every plan, and not on
what this rank holds of a parameter, so all ranks of a pipeline know the buckets of each other.

Parameters that are spread over ranks in one flat are one bucket, whose sum leaves each rank its part. Other buckets are
as large as pays, but for the last ones: what is left of a window behind its last computation is the sum
that this computation completes. So from where less than `TAIL` buckets are left, each takes one in `TAIL` of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from hf_helix.operators.unit import Placement, Unit
from hf_helix.operators.weights.flat import Flat
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.layout import GradientSum, Layout
from hf_helix.runtime.distributed.mesh import Mesh

BUCKET_BYTES = 25 * 2**20
SMALLEST_BYTES = 2**20
"""Below it a collective takes its latency, and another bucket gains nothing."""

TAIL = 4

Adder = tuple[int, str]
"""An operator of backward: the index of its unit, and its name there."""


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed in one piece.

    Attributes:
        placements: the parameters, with how they are cut.
        adders: the operators that add to their gradients.
        bytes: of the gradients, on the rank that holds most of them.
        spans_batches: whether ranks that see other tokens (dp, cp) add to them; if not, they are parts that tensor
            parallelism sums, few and small.
        flat: what the parameters are spread in; None where every rank keeps all of them.
    """

    placements: Mapping[nn.Parameter, Placement]
    adders: tuple[Adder, ...]
    bytes: int
    spans_batches: bool
    flat: Flat | None = None

    @property
    def is_planned(self) -> bool:
        """Whether its sum is one of the layout's."""
        return self.spans_batches and bool(self.adders)


def gradient_buckets(units: Mapping[int, Unit], mesh: Mesh) -> list[Bucket]:
    """Returns the buckets of a rank of the pipeline.

    Args:
        units: what it holds, by index in the layout.
        mesh: which ranks share what.
    """
    adders = _all_adders(units)
    found = dict(each for each in _by_completion(units, adders) if _is_summed(*each, mesh))
    sizes = {parameter: _most_bytes(parameter, placement, mesh) for parameter, placement in found.items()}
    flats = {p: flat for unit in units.values() for flat in unit.flats.values() for p in flat.placements}
    groups = _groups_by_size({p: size for p, size in sizes.items() if p not in flats})
    groups += [[p for p in found if flats.get(p) is flat] for flat in dict.fromkeys(flats.values())]
    last = {parameter: place for place, parameter in enumerate(found)}
    return [
        Bucket(
            {parameter: found[parameter] for parameter in group},
            tuple(dict.fromkeys(adder for parameter in group for adder in adders[parameter])),
            sum(sizes[parameter] for parameter in group),
            any(mesh.copies_of(found[parameter]) is not None for parameter in group),
            flats.get(group[0]),
        )
        for group in sorted(filter(None, groups), key=lambda group: max(last[parameter] for parameter in group))
    ]


def _groups_by_size(sizes: Mapping[nn.Parameter, int]) -> list[list[nn.Parameter]]:
    """Cuts parameters in the order in which their gradients are complete into groups; bytes by parameter."""
    left = sum(size for size in sizes.values() if size <= BUCKET_BYTES)
    groups: list[list[nn.Parameter]] = []
    filled, limit = 0, 0
    for parameter, size in sizes.items():
        if not groups or filled + size > limit:
            groups.append([])
            filled, limit = 0, min(BUCKET_BYTES, max(SMALLEST_BYTES, left // TAIL))
        groups[-1].append(parameter)
        filled += size
        left -= size if size <= BUCKET_BYTES else 0
    return groups


def layout_with_sums(layout: Layout, model: Mapping[int, Unit], mesh: Mesh) -> Layout:
    """Returns a layout with the sums of all ranks of the pipeline.

    Args:
        layout: what the ranks hold.
        model: the units of the whole model, before any parameter is cut.
        mesh: which ranks share what.
    """
    sums = []
    for rank in range(layout.num_ranks):
        units = {unit: model[unit] for unit in layout.units_of(rank) if unit in model}
        sums += [GradientSum(made.adders, made.bytes) for made in gradient_buckets(units, mesh) if made.is_planned]
    return replace(layout, sums=sums)


def adders_of(units: Mapping[int, Unit]) -> dict[Tensor, list[Adder]]:
    """Returns the operators that add to the gradient of each parameter, in the order in which a micro-batch runs them.

    Args:
        units: by index in the layout.
    """
    found: dict[Tensor, list[Adder]] = {}
    for index in sorted(units, reverse=True):
        for op in units[index].graphs.backward.operators:
            if op.part not in (Part.I, Part.R) and not (op.splits_dgrad_wgrad and op.wgrad_fraction == 0):
                for parameter in units[index].operators[op.forward_name].parameters:
                    found.setdefault(parameter, []).append((index, op.name))
    return found


def _all_adders(units: Mapping[int, Unit]) -> dict[Tensor, list[Adder]]:
    """Returns `adders_of`; of a parameter that no operator names, every computation of its unit."""
    found = adders_of(units)
    for index in sorted(units, reverse=True):
        computing = [op.name for op in units[index].graphs.backward.operators if not op.kind.communicates]
        for parameter in units[index].placements:
            found.setdefault(parameter, [(index, name) for name in computing])
    return found


def _by_completion(
    units: Mapping[int, Unit], adders: Mapping[Tensor, list[Adder]]
) -> list[tuple[nn.Parameter, Placement]]:
    """The trained parameters in the order in which a micro-batch by itself would complete their gradients."""
    order: dict[Adder, int] = {}
    found: dict[nn.Parameter, tuple[int, Placement]] = {}
    for index in sorted(units, reverse=True):
        for op in units[index].graphs.backward.operators:
            order[index, op.name] = len(order)
        for parameter, placement in units[index].placements.items():
            last = max((order[adder] for adder in adders[parameter] if adder in order), default=len(order))
            found[parameter] = last, placement
    complete = sorted(found, key=lambda parameter: found[parameter][0])
    return [(parameter, found[parameter][1]) for parameter in complete if parameter.requires_grad]


def _is_summed(parameter: nn.Parameter, placement: Placement, mesh: Mesh) -> bool:
    """Whether other ranks add to the gradient, or it is divided by the number of batches."""
    shards = placement.sums_gradient and mesh.tp.group is not None
    return shards or mesh.copies_of(placement) is not None or mesh.dp_size > 1


def _most_bytes(parameter: nn.Parameter, placement: Placement, mesh: Mesh) -> int:
    """The bytes of a parameter on the first rank of its axis, which no rank exceeds; the same once it is cut."""
    shape = list(parameter.shape)
    if placement.dim is not None and placement.length:
        shape = list(placement.shape(placement.whole_shape(shape), mesh.axis_of(placement).size, 0))
    count = 1
    for length in shape:
        count *= length
    return count * parameter.element_size()
