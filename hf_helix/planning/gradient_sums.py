"""Sums of gradients as operators of a window: what is summed in one piece, and where it is issued.

In:   sizes of gradients; a window in the order of issue, whose layout has `sums`.
Out:  buckets; the order with the sums in it, as numbers and as instructions.
Must hold: a sum is issued right behind the last operator that adds to its gradients. What is in a sum does not depend
on the plan, so the bits of gradients do not either.

The sums of a rank run one after the other, each once its gradients are complete. Whatever is complete first goes first:
no order of jobs that are there at different times ends earlier on one machine, as long as it never idles while one
waits. So there is nothing to choose about the sums. A plan chooses when their gradients are complete, by its order of
the last backward, see `hf_helix.planning.plans.holding`.

Buckets are as large as pays, but for the last ones: what is left of a window behind its last computation is the sum
that this computation completes. So from where less than `TAIL` buckets are left, each takes one in `TAIL` of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from hf_helix.planning.cost import STREAMS, Times, Work
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.instructions import Instruction
from hf_helix.planning.layout import Layout
from hf_helix.planning.profile import named_sums
from hf_helix.planning.window import Window

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
