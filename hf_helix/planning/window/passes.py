"""Prefetch: operators that are issued ahead, such as gathers of weights, move forward in a plan's order of issue.

In:   a window, and the order in which a plan issues it.
Out:  the order with each of these `Operator.ahead` units before its own, or where the plan has it if that is earlier.
Must hold: everything else keeps its order, and what is issued ahead reads nothing, so the order stays valid. It follows
from the plan's order alone, so all ranks with copies of a weight gather it in the same turn.

Units count as a rank comes to compute in them, whichever micro-batch passes through them, and in which direction. So of
two strands each has the weights of its next unit brought while the other one computes, too; and those of the first
units of a micro-batch come behind the last units of another, where a strand would otherwise begin by waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.timing.profile import named_gathers, named_sums
from hf_helix.planning.window.instructions import BARRIER_INSTRUCTION, Instruction
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.window import ABSENT, COMPUTE, STREAMS, Times, Window, Work

UnitPass = tuple[int, int, bool]
"""A micro-batch going through a unit, forward or not."""


def prefetched(window: Window, order: Sequence[int]) -> Sequence[int]:
    """Returns an order of issue with what is issued ahead as many units ahead as it says.

    Args:
        window: what the ranks run.
        order: places in the window, of one rank or of several; others stand for barriers.
    """
    ahead = window.pattern.ahead
    if not ahead:
        return order
    turns = _Turns(window, order)
    moved: dict[int, list[int]] = {}  # by position, what is issued in front of it
    for position, place in enumerate(order):
        earlier = turns.issued_at(place)
        if earlier is not None and earlier <= position:  # in its turn also where it does not move
            moved.setdefault(earlier, []).append(place)
    gone = {place for places in moved.values() for place in places}
    made: list[int] = []
    for position, place in enumerate(order):
        made += sorted(moved.get(position, ()), key=turns.of.__getitem__)
        if place not in gone:
            made.append(place)
    return made


class _Turns:
    """When a rank comes to what in an order of issue.

    Args:
        window, order: as of `prefetched`.

    Attributes:
        of: of each place of what is issued ahead, the turn of the unit that it is for.
    """

    def __init__(self, window: Window, order: Sequence[int]) -> None:
        self.of: dict[int, int] = {}
        self._window = window
        self._begins: list[list[int]] = [[] for _ in range(window.layout.num_ranks)]  # the position of each turn
        brings: dict[int, list[int]] = {}
        for call, readers in window.pattern.ahead.items():
            for reader in readers:
                brings.setdefault(reader, []).append(call)
        passes: dict[UnitPass, int] = {}
        for position, place in enumerate(order):
            for call in brings.get(window.calls[place], ()) if 0 <= place < len(window) else ():
                self._note(position, window.microbatches[place], call, passes)

    def _note(self, position: int, microbatch: int, call: int, passes: dict[UnitPass, int]) -> None:
        """Notes that what a call brings for a micro-batch is read at a position."""
        place = self._window.at[microbatch][call]
        if place == ABSENT or place in self.of:
            return
        op, unit = self._window.pattern.calls[call].operator, self._window.pattern.calls[call].unit
        assert op is not None
        begins = self._begins[self._window.layout.rank_of(unit)]
        unit_pass = microbatch, unit, op.part is Part.F
        if unit_pass not in passes:
            passes[unit_pass] = len(begins)
            begins.append(position)
        self.of[place] = passes[unit_pass]

    def issued_at(self, place: int) -> int | None:
        """The position in front of which something is issued at the latest; None of what is not issued ahead."""
        if place not in self.of:
            return None
        made = self._window.pattern.calls[self._window.calls[place]]
        assert made.operator is not None
        turn = self.of[place] - made.operator.ahead
        return self._begins[self._window.layout.rank_of(made.unit)][turn] if turn >= 0 else 0


BUCKET_BYTES = 25 * 2**20
SMALLEST_BYTES = 2**20
"""Below it a collective takes its latency, and another bucket gains nothing."""

TAIL = 4

STREAM = STREAMS.index(Kind.GRADIENTS)

Item = TypeVar("Item")


def fill_buckets(sizes: Sequence[int], largest: int) -> list[int]:
    """Returns the bucket of each gradient, numbered from 0.

    Args:
        sizes: bytes of the gradients, in the order in which a micro-batch by itself completes them.
        largest: bytes of a bucket at most, unless it holds one gradient alone.
    """
    left = sum(size for size in sizes if size <= largest)
    buckets: list[int] = []
    number, filled, limit = -1, 0, 0
    for size in sizes:
        if not buckets or filled + size > limit:
            number, filled, limit = number + 1, 0, min(largest, max(SMALLEST_BYTES, left // TAIL))
        buckets.append(number)
        filled += size
        left -= size if size <= largest else 0
    return buckets


def sums_behind(window: Window, order: Sequence[int]) -> dict[int, list[int]]:
    """Returns which sums are issued behind which positions of an order of issue.

    Args:
        window: what the ranks run.
        order: places in the window, of one rank or of several; others stand for barriers.
    """
    layout = window.layout
    left = _sums_of_calls(window)
    sums: dict[int, list[int]] = {}
    issued: set[int] = set()
    for position in range(len(order) - 1, -1, -1) if layout.sums else ():
        place = order[position]
        if 0 <= place < len(window):
            last = [number for number in left.get(window.calls[place], ()) if number not in issued]
            if last:
                sums[position] = last
                issued.update(last)
                if len(issued) == len(layout.sums):
                    break
    return sums


def _sums_of_calls(window: Window) -> dict[int, list[int]]:
    """The sums that each call of the pattern adds to, worked out once."""
    layout, pattern = window.layout, window.pattern
    known = layout.derived.get("sums_of_calls")
    if isinstance(known, dict):
        return known
    units = {unit for made in layout.sums for unit, _ in made.adders}
    places = {
        (unit, op.name): place
        for unit in units
        for place in pattern.spans[unit, False]
        if (op := pattern.calls[place].operator) is not None
    }
    sums: dict[int, list[int]] = {}
    for number, made in enumerate(layout.sums):
        for adder in made.adders:
            sums.setdefault(places[adder], []).append(number)
    layout.derived["sums_of_calls"] = sums
    return sums


def insert(order: Sequence[Item], behind: Mapping[int, Sequence[Item]]) -> Iterator[Item]:
    """Yields an order with further items behind some of its positions."""
    for position, item in enumerate(order):
        yield item
        yield from behind.get(position, ())


def with_sums(program: Sequence[Instruction], behind: Mapping[int, Sequence[int]], layout: Layout) -> list[Instruction]:
    """Returns the instructions of a rank with the sums in it.

    Args:
        program: without them.
        behind: see `sums_behind`.
        layout: what the ranks hold.
    """
    if not behind:
        return list(program)
    operators = [op for _, op in named_sums(layout)]
    made = {
        position: [
            Instruction(program[position].microbatch, program[position].unit, operators[number], gradient_sum=number)
            for number in numbers
        ]
        for position, numbers in behind.items()
    }
    return list(insert(program, made))


def add_sums(work: Work, window: Window, times: Times) -> Work:
    """Returns the numbers of a window with all sums of its layout behind them; they are in no order yet.

    Args:
        work: of the window, with nothing but barriers behind it.
        window: what the ranks run.
        times: seconds of every operator.

    Raises:
        KeyError: `times` lacks a sum.
    """
    layout = window.layout
    names = [name for name, _ in named_sums(layout)]
    if not names:
        return work
    last = {call: place for place, call in enumerate(window.calls)}
    needs: list[list[int]] = [[] for _ in names]
    for call, numbers in _sums_of_calls(window).items():
        for number in numbers:
            needs[number] += [last[call]] if call in last else []
    ranks = (layout.rank_of(each.adders[0][0]) for each in layout.sums)
    return work.followed_by(STREAM, names, times, needs, ranks)


def order_with_sums(window: Window, order: Sequence[int], first: int) -> list[int]:
    """Returns an order of issue with the sums in it.

    Args:
        window: what the ranks run.
        order: without them.
        first: the place of the first sum among the numbers, see `add_sums`.
    """
    behind = sums_behind(window, order)
    return list(insert(order, {at: [first + number for number in numbers] for at, numbers in behind.items()}))


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


PIPELINE = STREAMS.index(Kind.PIPELINE)


@dataclass(frozen=True)
class Issued:
    """A window in the order of issue.

    Attributes:
        window: what the ranks run.
        orders: rank by rank, the places of the instructions in the window; ~u stands for a barrier beside unit u. Where
            gradients are summed, and where what is issued ahead is issued, follows from them.
        ends: of each instruction, when it ends by the clock that the plan ordered it with; None where the order does
            not depend on times.
    """

    window: Window
    orders: Sequence[Sequence[int]]
    ends: Sequence[float] | None = None

    def program(self, rank: int) -> list[Instruction]:
        """The instructions of a rank, with its gathers of weights in front and its sums of gradients."""
        window, order = self.window, prefetched(self.window, self.orders[rank])
        made = [
            window.instruction(place) if place >= 0 else replace(BARRIER_INSTRUCTION, unit=~place) for place in order
        ]
        summed = with_sums(made, sums_behind(window, order), window.layout)
        return with_gathers(summed, window.layout, rank) if order else summed

    def work(self, times: Times) -> tuple[Work, list[int]]:
        """The window as numbers, with barriers, sums of gradients and gathers of weights behind its
        instructions, and the order of issue.

        Raises:
            KeyError: `times` lacks an operator.
        """
        work, order = self.window.work(times), []
        ahead = self.window.pattern.ahead
        for rank, places in enumerate(self.orders):
            moving: list[int] = []
            for place in prefetched(self.window, places):
                if place >= 0:
                    if work.streams[place] not in (COMPUTE, PIPELINE) and self.window.calls[place] not in ahead:
                        moving.append(place)
                    order.append(place)
                else:
                    order.append(len(work))
                    _add_barrier(work, rank, moving)
                    moving = []
        summed, order = add_sums(work, self.window, times), order_with_sums(self.window, order, len(work))
        gathered = add_gathers(summed, self.window, times)
        return gathered, order_with_gathers(self.window.layout, order, len(summed))


def _add_barrier(work: Work, rank: int, moving: list[int]) -> None:
    """Adds a barrier at which a rank waits for these instructions."""
    work.streams.append(COMPUTE)
    work.seconds.append(0.0)
    work.needs.append(moving)
    work.entries.append(ABSENT)
    work.ranks.append(rank)
    work.lanes.append(0)
    work.size_sources.append(ABSENT)
