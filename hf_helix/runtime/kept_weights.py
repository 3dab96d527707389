"""Weights that every rank keeps whole, and that each steps a part of: what a layout knows of them.

In:   units whose parameters are in flats that are kept whole (`hf_helix.operators.zero.zero1`).
Out:  the gathers of a layout, and which units read which flat.
Must hold: gathers are in the order in which a micro-batch first reads them, the same on all ranks of a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from hf_helix.operators.unit import Unit
from hf_helix.operators.zero.zero1 import KeptFlat, kept_flats
from hf_helix.planning.layout import Layout, WeightGather
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.gradients.buckets import max_elements

T = TypeVar("T")


def layout_with_gathers(layout: Layout, model: Mapping[int, Unit], mesh: Mesh) -> Layout:
    """Returns a layout with the gathers of weights of all ranks of the pipeline.

    Args:
        layout: what the ranks hold.
        model: the units of the whole model, before any parameter is cut.
        mesh: which ranks share what.
    """
    readers = readers_of(sorted(model.items()))
    return replace(
        layout, gathers=[WeightGather(tuple(units), flat.name, _bytes(flat, mesh)) for flat, units in readers.items()]
    )


def readers_of(units: Iterable[tuple[T, Unit]]) -> dict[KeptFlat, list[T]]:
    """Returns, for every flat that is kept whole, the units that read it, in the order in which they are given.

    Args:
        units: each with what it goes by in the result, in forward order.
    """
    readers: dict[KeptFlat, list[T]] = {}
    for name, unit in units:
        for flat in kept_flats(unit.flats.values()):
            readers.setdefault(flat, []).append(name)
    return readers


def _bytes(flat: KeptFlat, mesh: Mesh) -> int:
    """The bytes of the piece on the rank that holds most of it, without padding."""
    return sum(
        max_elements(parameter, placement, mesh) * (flat.cast_to or parameter.dtype).itemsize
        for parameter, placement in flat.placements.items()
    )
