"""Passes over a window: operators outside a plan's order are inserted into its order of issue.

In:   a window and a plan's order of issue: places of one rank or of several, barriers as negative numbers.
Out:  the order with prefetched operators moved forward, gradient reductions and weight gathers; an `OrderedWindow`.
Must hold: all other operators keep their order, so the order stays valid. A pass depends on the order only, so all
replicas issue their collectives in the same order.

The passes run one after the other:

    prefetch            an operator of `Operator.ahead` = n moves n units before its own, or keeps an earlier place
                        of the plan. Units count in the order of the rank's computation, whatever the micro-batch and
                        the direction: each of two strands gets the weights of its next unit during the unit of the
                        other.
    reduce_gradients    a reduction follows the last operator that adds to its bucket, in the window or in every
                        micro-batch. The reductions of a rank run one after the other; first complete, first issued is
                        optimal. A plan only chooses when buckets are complete, see `defer_weight_gradients` of
                        `planning.plan.search`. A copy to the host follows the last.
    gather_weights      the gathers of a rank come first; the stream is shared with the reductions, and idle then.
                        Copies from the host precede them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_helix.planning.graph.operator import Part
from hf_helix.planning.window.instructions import Instruction, UnitPass
from hf_helix.planning.window.window import COMPUTE, NONE, Times, Window, WindowArrays

MAX_COPIES = 2
"""How many buckets may have a copy in flight when the next copy is made, if streams hold memory or every micro-batch is
reduced: the buffers of flat parameters, and upcasts of gradients in half precision. Computation waits for others."""

Order = Sequence[int]


def run_passes(window: Window, order: Order) -> Order:
    """The order of issue after all passes."""
    return gather_weights(window, reduce_gradients(window, prefetch(window, order)))


@dataclass(frozen=True)
class OrderedWindow:
    """A window in the order of issue of a plan."""

    window: Window  # the instructions of all ranks
    orders: Sequence[Order]  # the places of each rank in the plan's order, before the passes
    # when the instruction at each place ends by the clock of the plan; None if the order does not depend on times
    ends: Sequence[float] | None = None

    def program(self, rank: int) -> list[Instruction]:
        """The instructions of a rank in the order of issue."""
        return self.window.instructions(run_passes(self.window, self.orders[rank]))

    def arrays(self, times: Times) -> tuple[WindowArrays, list[int]]:
        """The window as numbers, barriers included, and the order of issue, rank by rank.

        Raises:
            KeyError: `times` lacks an operator.
        """
        window, count, indices = self.window, len(self.window), self.window.indices
        awaited, reduces_often = window.pattern.is_awaited, window.layout.reduces_often
        arrays, order = window.arrays(times, traffic=True), list[int]()
        for rank, places in enumerate(self.orders):
            moving: list[int] = []
            often, waits = list[int](), list[int]()
            for place in run_passes(window, places):
                if place >= 0:
                    if place < count and awaited[indices[place]]:
                        moving.append(place)
                    if reduces_often and window.is_reduced_often(place):
                        often.append(place)
                        waits = often[-1 - MAX_COPIES : -MAX_COPIES]
                    elif waits and arrays.streams[place] == COMPUTE:
                        arrays.needs[place] += waits
                        waits = []
                    order.append(place)
                else:
                    order.append(arrays.append_barrier(moving, rank))
                    moving = []
        return arrays, order


# -- prefetch --------------------------------------------------------------------------------------------------------


def prefetch(window: Window, order: Order) -> Order:
    """Moves prefetched operators forward by their number of units."""
    pattern = window.pattern
    if not pattern.prefetch_readers:
        return order
    first, begins = _turns(window, order)
    at = {place: position for position, place in enumerate(order) if place >= 0}
    moved: dict[int, list[int]] = {}  # by position, the operators to issue before the position
    for position, place in enumerate(order):
        if place not in first:
            continue
        index, of_batch = window.indices[place], window.at[window.microbatches[place]]
        turn = first[place] - pattern.operators[index].ahead
        read = [
            at[of_batch[need]] for need in pattern.needs[index] if of_batch[need] in at and of_batch[need] not in first
        ]
        earlier = max([begins[pattern.ranks[index]][turn] if turn >= 0 else 0, *(each + 1 for each in read)])
        if earlier <= position:  # also without a move, to be sorted among the moved ones
            moved.setdefault(earlier, []).append(place)
    gone = {place for places in moved.values() for place in places}
    made: list[int] = []
    for position, place in enumerate(order):
        made += sorted(moved.get(position, ()), key=first.__getitem__)
        if place not in gone:
            made.append(place)
    return made


def _turns(window: Window, order: Order) -> tuple[dict[int, int], list[list[int]]]:
    """The turns of the ranks, which are units in the order of a rank's computation: the turn in which each prefetched
    place is first read, and the position at which each turn of a rank begins."""
    pattern = window.pattern
    brings: dict[int, list[int]] = {}
    for index, readers in pattern.prefetch_readers.items():
        for reader in readers:
            brings.setdefault(reader, []).append(index)
    first: dict[int, int] = {}
    begins: list[list[int]] = [[] for _ in range(window.layout.num_ranks)]
    passes: dict[UnitPass, int] = {}
    for position, reader in enumerate(order):
        for index in brings.get(window.indices[reader], ()) if reader >= 0 else ():
            microbatch = window.microbatches[reader]
            place, mine = window.at[microbatch][index], begins[pattern.ranks[index]]
            if place == NONE or place in first:
                continue
            unit_pass = microbatch, pattern.instructions[index].unit, pattern.operators[index].part is Part.F
            if unit_pass not in passes:
                passes[unit_pass] = len(mine)
                mine.append(position)
            first[place] = passes[unit_pass]
    return first, begins


# -- gradient reductions -----------------------------------------------------------------------------------------------


def reduce_gradients(window: Window, order: Order) -> Order:
    """Inserts each gradient reduction after the last adder to its gradients."""
    completes, added = window.pattern.completes, dict[int, list[int]]()
    left = {place for place, each in enumerate(window.traffic, len(window)) if each.traffic.adders}
    for position in range(len(order) - 1, -1, -1) if left else ():
        place = order[position]
        for traffic in completes.get(window.indices[place], ()) if place >= 0 else ():
            moves = window.places_of(traffic, window.microbatches[place])
            if moves[0] in left:
                added.setdefault(position, []).extend(moves)
                left.difference_update(moves)
        if not left:
            break
    if not added:
        return order
    return [each for position, place in enumerate(order) for each in (place, *added.get(position, ()))]


# -- weight gathers --------------------------------------------------------------------------------------------------


def gather_weights(window: Window, order: Order) -> Order:
    """Issues the weight gathers of the ranks of an order before everything else."""
    layout = window.layout
    if not layout.gathers:
        return order
    ranks = {
        window.pattern.ranks[index] for index in {window.indices[place] for place in order if 0 <= place < len(window)}
    }
    own = [each for each in layout.gathers if layout.rank_of(each.unit) in ranks]
    return [*(place for each in own for place in window.places_of(each, 0)), *order]
