"""The operators of a rank and the cuts of its parameters, as text.

In:   a model and its units on a rank.
Out:  for every kind of unit the operators of its forward pass in order, and its parameters.
Must hold: training runs these operators; the backward pass is derived from them, and a plan orders both.
"""

from collections.abc import Sequence
from typing import Any

from hf_helix.operators.param_shard import Placement
from hf_helix.operators.unit import Unit


def text_of_units(model: Any, units: Sequence[Unit]) -> str:
    """Returns the operators of every kind of unit, and the cuts of its parameters."""
    kinds: dict[str, list[Unit]] = {}
    for unit in units:
        kinds.setdefault(unit.graphs.forward.name, []).append(unit)
    return "\n\n".join(_text_of_kind(model, same) for same in kinds.values())


def _text_of_kind(model: Any, same: Sequence[Unit]) -> str:
    unit = same[0]
    rows = [
        (op.name, type(unit.operators[op.name]).__name__, ", ".join(op.reads)) for op in unit.graphs.forward.operators
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    cuts = [(names[id(parameter)], _cut(parameter, placed)) for parameter, placed in unit.placements.items()]
    labels = ", ".join(other.label for other in same)
    return "\n".join([f"{labels}: operators", *_table(rows), f"{labels}: parameters", *_table(cuts)])


def _cut(parameter: Any, placed: Placement) -> str:
    shape = "x".join(map(str, parameter.shape))
    if placed.dim is None:
        return f"{shape}, on every rank" + (", gradients summed over the ranks" if placed.sums_gradient else "")
    blocks = f", in blocks of {', '.join(map(str, placed.blocks))}" if placed.is_fused else ""
    return f"{shape}, dimension {placed.dim} cut over {placed.mesh_axis}{blocks}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
