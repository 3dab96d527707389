"""Gathers of weights as operators of a window: those that every rank keeps whole and steps a part of.

In:   a window in the order of issue, whose layout has `gathers`.
Out:  the order with the gathers in it, as numbers and as instructions.
Must hold: a gather is issued once, before anything of its units. The first computation of a unit waits for it.

Gathers of a rank run one after the other on the stream of the sums of gradients, which has nothing else to do while the
first micro-batch goes forward. They are there from the start of the window on, and what is read first goes first. So
there is nothing to choose about them, and no plan orders them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_helix.planning.cost import COMPUTE, STREAMS, Times, Work
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.instructions import Instruction
from hf_helix.planning.layout import Layout
from hf_helix.planning.profile import named_gathers
from hf_helix.planning.window import ABSENT, Window

STREAM = STREAMS.index(Kind.GRADIENTS)


def with_gathers(program: Sequence[Instruction], layout: Layout, rank: int) -> list[Instruction]:
    """Returns the instructions of a rank with the gathers in front of them.

    Args:
        program: without them.
        layout: what the ranks hold.
        rank: whose program it is.
    """
    operators = [op for _, op in named_gathers(layout)]
    first = min((each.microbatch for each in program if each.operator is not None), default=0)
    gathers = [
        Instruction(first, layout.gathers[number].units[0], operators[number], gather=number)
        for number in layout.gathers_of(rank)
    ]
    return [*gathers, *program]


def add_gathers(work: Work, window: Window, times: Times) -> Work:
    """Returns the numbers of a window with all gathers of its layout behind them; they are in no order yet.

    Args:
        work: of the window, with nothing but barriers and sums of gradients behind it.
        window: what the ranks run.
        times: seconds of every operator.

    Raises:
        KeyError: `times` lacks a gather.
    """
    layout, pattern = window.layout, window.pattern
    names = [name for name, _ in named_gathers(layout)]
    if not names:
        return work
    needs = list(work.needs)
    for number, gather in enumerate(layout.gathers, len(work)):
        for unit in gather.units:
            computing = (call for call in pattern.spans[unit, True] if pattern.work.streams[call] == COMPUTE)
            first = next(computing, ABSENT)
            for places in window.at if first != ABSENT else ():
                if places[first] != ABSENT:
                    needs[places[first]] = [*needs[places[first]], number]
    ranks = (layout.rank_of(gather.units[0]) for gather in layout.gathers)
    return replace(work, needs=needs).followed_by(STREAM, names, times, [[] for _ in names], ranks)


def order_with_gathers(layout: Layout, order: Sequence[int], first: int) -> list[int]:
    """Returns an order of issue with the gathers in front.

    Args:
        layout: what the ranks hold.
        order: without them.
        first: the place of the first gather among the numbers, see `add_gathers`.
    """
    return [*range(first, first + len(layout.gathers)), *order]
