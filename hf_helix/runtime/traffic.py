"""The traffic of a run's parameters: which gradients and weights of ZeRO-1 travel together.

In:   the uncut units of the whole model, by index in the layout, and the mesh.
Out:  the rows of `hf_helix.planning.parameters`: buckets, and flat weights.
Must hold: rows are the same on all ranks of a pipeline. Flat weights are in the order of their first reads.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from hf_helix.operators.units.unit import Unit
from hf_helix.operators.zero.zero1 import Zero1FlatParameter, zero1_flat_parameters
from hf_helix.planning.parameters import Bucket, FlatWeights
from hf_helix.planning.window.layout import Layout
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.gradients.buckets import bound_buckets, max_elements

T = TypeVar("T")


def planned_buckets(layout: Layout, model: Mapping[int, Unit], mesh: Mesh) -> list[Bucket]:
    """Returns the buckets of all pipeline ranks that a plan orders, from the uncut units of the whole model."""
    ranks = ({unit: model[unit] for unit in layout.units_of(rank) if unit in model} for rank in range(layout.num_ranks))
    return [made.row for units in ranks for made in bound_buckets(units, mesh) if made.row.is_planned]


def flat_weights(model: Mapping[int, Unit], mesh: Mesh) -> list[FlatWeights]:
    """Returns the ZeRO-1 weights of all pipeline ranks, from the uncut units of the whole model."""
    readers = readers_of(sorted(model.items()))
    return [FlatWeights(tuple(units), flat.name, _bytes(flat, mesh)) for flat, units in readers.items()]


def readers_of(units: Iterable[tuple[T, Unit]]) -> dict[Zero1FlatParameter, list[T]]:
    """Returns the reading units of every ZeRO-1 flat parameter, by the given names, in the given (forward) order."""
    readers: dict[Zero1FlatParameter, list[T]] = {}
    for name, unit in units:
        for flat in zero1_flat_parameters(unit.flat_parameters.values()):
            readers.setdefault(flat, []).append(name)
    return readers


def _bytes(flat: Zero1FlatParameter, mesh: Mesh) -> int:
    """The bytes of the buffer on the rank with the largest, without padding."""
    return sum(
        max_elements(parameter, placement, mesh) * (flat.cast_to or parameter.dtype).itemsize
        for parameter, placement in flat.placements.items()
    )
