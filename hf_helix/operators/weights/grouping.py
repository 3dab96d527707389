"""Which parameters lie in one flat.

In:   the units of a whole model, and which ranks hold copies of what.
Out:  flats, not spread yet, for each unit.
Must hold: parameters of a flat are read by the same units, have one type and the same ranks with copies, and are all
trained, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from hf_helix.operators.communication.transport import Copies
from hf_helix.operators.unit import EXPERTS, Placement, Unit
from hf_helix.operators.weights.flat import Flat

SpreadOver = Callable[[Placement], Copies | None]
"""Returns the ranks that a parameter which is placed like this is spread over; None where every rank keeps it."""

NameOf = Callable[[nn.Parameter, Placement, bool], str | None]
"""Returns the name of the flat that a parameter is in, from its placement and from whether several units read it; None
where it is in no flat. Parameters of a unit that have one name are in one flat."""

MakeFlat = Callable[[str, Mapping[nn.Parameter, Placement], Copies], Flat]
"""Makes a flat of a name and parameters, over ranks with copies of them."""


def name_of(parameter: nn.Parameter, placement: Placement, shared: bool) -> str:
    """Returns the name of the value that holds a parameter once it is gathered.

    Args:
        parameter: itself.
        placement: how it is cut.
        shared: whether several units read it.
    """
    traits = {
        "shared": shared,
        "experts": placement.over == EXPERTS,
        "frozen": not parameter.requires_grad,
        "bf16": parameter.dtype is torch.bfloat16,
    }
    return ".".join(["weights", *(trait for trait, holds in traits.items() if holds)])


def make_flats(units: Sequence[Unit], spread_over: SpreadOver, name: NameOf, make: MakeFlat) -> list[list[Flat]]:
    """Returns the flats of every unit. A parameter that several units read is in a flat of its own kind, which each of
    these units has.

    Args:
        units: of the whole model, in forward order.
        spread_over: see `SpreadOver`.
        name: see `NameOf`.
        make: see `MakeFlat`.
    """
    users: dict[nn.Parameter, list[int]] = {}
    placements: dict[nn.Parameter, Placement] = {}
    for place, unit in enumerate(units):
        for parameter, placement in unit.placements.items():
            users.setdefault(parameter, []).append(place)
            placements[parameter] = placement
    members: dict[tuple[tuple[int, ...], str], dict[nn.Parameter, Placement]] = {}
    for parameter, places in users.items():
        placement = placements[parameter]
        called = name(parameter, placement, len(places) > 1)
        if called is not None and spread_over(placement) is not None:
            members.setdefault((tuple(places), called), {})[parameter] = placement
    found: list[list[Flat]] = [[] for _ in units]
    for (using, called), alike in members.items():
        over = spread_over(next(iter(alike.values())))
        assert over is not None
        flat = make(called, alike, over)
        for place in using:
            found[place].append(flat)
    return found
