"""The parameters of units as rows, and their gradients in the order of completion.

In:   units by index in the layout, whose parameters are full, or cut already; names and pipeline ranks.
Out:  a `Parameter` for every parameter, see `hf_helix.planning.parameters`.
Must hold: rows do not depend on this rank's slices. A row belongs to one pipeline rank; the stand-ins for slices of the
vocabulary on other ranks have rows of their own.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from hf_helix.operators.units.unit import Unit
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.parameters import Adder, Flat, Parameter
from hf_helix.planning.traffic import completion

Rows = dict[nn.Parameter, Parameter]


def parameter_rows(
    units: Mapping[int, Unit],
    rank_of: Callable[[int], int] = lambda _: 0,
    names: Mapping[nn.Parameter, str] | None = None,
) -> Rows:
    """Returns the row of every parameter of units, in the order of the units.

    Args:
        units: by index in the layout, in forward order.
        rank_of: from a unit to its pipeline rank.
        names: of the parameters in the model; None if nobody asks.

    Raises:
        ValueError: units of two ranks share a parameter.
    """
    adders, flats = _all_adders(units), _flats(units)
    holders: dict[nn.Parameter, list[int]] = {}
    for index, unit in units.items():
        for parameter in unit.placements:
            holders.setdefault(parameter, []).append(index)
    above = {parameter for unit in units.values() for parameter in unit.above}
    by_data = [each for unit in units.values() for each in unit.operators.values() if each.by_data]
    conditional = {parameter for operator in by_data for parameter in operator.parameters}
    rows: Rows = {}
    for index, unit in units.items():
        for parameter, cut in unit.placements.items():
            if parameter in rows:
                if rows[parameter].owner != rank_of(index):
                    raise _shared(next(each for each in units.values() if parameter in each.placements))
                continue
            flat, number = flats.get(parameter, (None, 0))
            rows[parameter] = Parameter(
                name=(names or {}).get(parameter, ""),
                shape=cut.full_shape(parameter.shape),
                itemsize=parameter.element_size(),
                trained=parameter.requires_grad,
                cut=cut,
                owner=rank_of(index),
                units=tuple(holders[parameter]),
                adders=tuple(adders[parameter]),
                is_above=parameter in above,
                is_read=parameter not in unit.unread,
                is_conditional=parameter in conditional,
                flat=flat,
                number=number,
            )
    return rows


def _flats(units: Mapping[int, Unit]) -> dict[nn.Parameter, tuple[Flat, int]]:
    """Returns the flat parameter of every parameter in one, and the parameter's number among the members."""
    flats: dict[nn.Parameter, tuple[Flat, int]] = {}
    for index, unit in units.items():
        for each in unit.flat_parameters.values():
            members = tuple((cut.full_shape(parameter.shape), cut) for parameter, cut in each.placements.items())
            dtype = each.cast_to or next(iter(each.placements)).dtype
            row = Flat(index, each.name, members, dtype.itemsize, each.keeps_buffer)
            for number, parameter in enumerate(each.placements):
                flats.setdefault(parameter, (row, number))
    return flats


def _shared(unit: Unit) -> ValueError:
    return ValueError(
        f"{unit.label} shares a weight with a unit on another pipeline rank (tied embeddings), and every weight "
        "lives on one; use a schedule on the fold, such as schedule='auto', or tie_word_embeddings=False"
    )


def with_adders(rows: Mapping[nn.Parameter, Parameter], units: Mapping[int, Unit]) -> Rows:
    """Returns rows for units with other operators on the same parameters."""
    adders = _all_adders(units)
    return {parameter: replace(row, adders=tuple(adders[parameter])) for parameter, row in rows.items()}


def shared_gradients(rows: Iterable[Parameter]) -> list[list[Adder]]:
    """Returns the backward operators of gradients shared by several units, see `Layout.shared`."""
    return [list(row.adders) for row in rows if len({unit for unit, _ in row.adders}) > 1]


def _all_adders(units: Mapping[int, Unit]) -> dict[Tensor, list[Adder]]:
    """Returns the operators that add to the gradient of each parameter, in the order of a micro-batch. If no operator
    names a parameter, every computation of its unit adds to it, unless no code reads it."""
    adders: dict[Tensor, list[Adder]] = {}
    for index in sorted(units, reverse=True):
        for op in units[index].graphs.backward.operators:
            if op.part not in (Part.I, Part.R) and not (op.splits_dgrad_wgrad and op.wgrad_fraction == 0):
                for parameter in units[index].operators[op.forward_name].parameters:
                    adders.setdefault(parameter, []).append((index, op.name))
    for index in sorted(units, reverse=True):
        computing = [op.name for op in units[index].graphs.backward.operators if not op.kind.communicates]
        for parameter in units[index].placements:
            is_unread = parameter in units[index].unread
            adders.setdefault(parameter, [] if is_unread else [(index, name) for name in computing])
    return adders


def by_completion(rows: Mapping[nn.Parameter, Parameter], units: Mapping[int, Unit]) -> Rows:
    """Returns the rows of trained parameters in the order in which a single micro-batch would complete their gradients.

    Args:
        rows: of parameters, in the order of their units.
        units: with the parameters, by index in the layout.
    """
    trained = [(parameter, row) for parameter, row in rows.items() if parameter.requires_grad]
    backward = {index: unit.graphs.backward for index, unit in units.items()}
    return dict(trained[number] for number in completion([row for _, row in trained], backward))
