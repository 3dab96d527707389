"""The traffic of a run's parameters: which gradients and weights of ZeRO-1 travel together.

In:   the uncut units of the whole model, by index in the layout, with the rows of their parameters; this rank's place.
Out:  the rows of `hf_helix.planning.traffic`: buckets, and flat weights.
Must hold: rows are the same on all ranks of a pipeline. Flat weights are in the order of their first reads.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import nn

from hf_helix.operators.units.unit import Unit
from hf_helix.operators.zero.zero1 import Zero1FlatParameter, zero1_flat_parameters
from hf_helix.planning.parameters import Parameter, Place
from hf_helix.planning.traffic import Bucket, FlatWeights
from hf_helix.runtime.gradients.buckets import bound_buckets
from hf_helix.runtime.rank_units import RankUnits

T = TypeVar("T")


def planned_buckets(rank_units: RankUnits, place: Place) -> list[Bucket]:
    """Returns the buckets of all pipeline ranks that a plan orders."""
    layout, model = rank_units.layout, rank_units.all_units
    ranks = ({unit: model[unit] for unit in layout.units_of(rank) if unit in model} for rank in range(layout.num_ranks))
    buckets = (bucket.row for units in ranks for bucket in bound_buckets(rank_units.rows, units, place))
    return [bucket for bucket in buckets if bucket.is_planned]


def flat_weights(rank_units: RankUnits, place: Place) -> list[FlatWeights]:
    """Returns the ZeRO-1 weights of all pipeline ranks."""
    readers = readers_of(sorted(rank_units.all_units.items()))
    return [
        FlatWeights(tuple(units), flat.name, _bytes(flat, rank_units.rows, place)) for flat, units in readers.items()
    ]


def readers_of(units: Iterable[tuple[T, Unit]]) -> dict[Zero1FlatParameter, list[T]]:
    """Returns the reading units of every ZeRO-1 flat parameter, by the given names, in the given (forward) order."""
    readers: dict[Zero1FlatParameter, list[T]] = {}
    for name, unit in units:
        for flat in zero1_flat_parameters(unit.flat_parameters.values()):
            readers.setdefault(flat, []).append(name)
    return readers


def _bytes(flat: Zero1FlatParameter, rows: Mapping[nn.Parameter, Parameter], place: Place) -> int:
    """The bytes of the buffer on the rank with the largest, without padding."""
    itemsize = flat.cast_to.itemsize if flat.cast_to is not None else None
    members = (rows[parameter] for parameter in flat.placements)
    return sum(row.most_elements(place) * (itemsize or row.itemsize) for row in members)
