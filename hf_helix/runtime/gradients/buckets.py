"""Buckets: gradients that ranks reduce together.

In:   the units of one rank of the pipeline with the rows of their parameters, and the mesh.
Out:  `BoundBucket`s, in the order in which a single micro-batch would complete them.
Must hold: every trained parameter with gradients on other ranks is in one bucket. Buckets depend only on the model and
on the sizes of the mesh: not on the plan, so reductions give the same bits under every plan, and not on this rank's
slices, so every rank of a pipeline knows the buckets of the others.

`hf_helix.planning.traffic` fills the buckets. A flat parameter is a bucket of its own, whose reduce-scatter leaves
each rank its shard.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.units.rows import Rows, by_completion
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.parameters import Parameter, Place
from hf_helix.planning.traffic import Bucket, BucketMember, gradient_buckets
from hf_helix.planning.window.layout import Layout


@dataclass(frozen=True)
class BoundBucket:
    """A bucket bound to the parameters of this rank.

    Attributes:
        row: the bucket.
        rows: its parameters, with their rows.
        flat: the flat parameter; None if every rank keeps the full parameters.
    """

    row: Bucket
    rows: Rows
    flat: FlatParameter | None = None


def bound_buckets(rows: Mapping[nn.Parameter, Parameter], units: Mapping[int, Unit], place: Place) -> list[BoundBucket]:
    """Returns the buckets of a rank of the pipeline.

    Args:
        rows: of parameters, those of the units among them.
        units: of the rank, by index in the layout.
        place: of this rank.
    """
    flats = {p: flat for unit in units.values() for flat in unit.flat_parameters.values() for p in flat.placements}
    completed = by_completion(rows, units).items()
    reduced = [(parameter, row, member) for parameter, row in completed if (member := BucketMember.of(row, place))]
    return [
        BoundBucket(bucket, {parameter: row for parameter, row, _ in members}, flats.get(members[0][0]))
        for bucket in gradient_buckets([member for _, _, member in reduced])
        for members in [[reduced[number] for number in bucket.members]]
    ]


def planned_buckets(
    rows: Mapping[nn.Parameter, Parameter], units: Mapping[int, Unit], layout: Layout, place: Place
) -> list[Bucket]:
    """Returns the buckets of all pipeline ranks that a plan orders.

    Args:
        rows: of the model's parameters, in the order of its units.
        units: of the whole model, uncut, by index in the layout.
        layout: of all pipeline ranks.
        place: of this rank.
    """
    by_rank = [
        {unit: units[unit] for unit in layout.units_of(rank) if unit in units} for rank in range(layout.num_ranks)
    ]
    buckets = [bucket.row for own in by_rank for bucket in bound_buckets(rows, own, place)]
    return [bucket for bucket in buckets if bucket.is_planned]
