"""Search: a better order of a repeating block than list scheduling finds.

In:   the forward and the backward graph of a block, with times in `Operator.effort`.
Out:  an order without barriers whose steady state is short; whatever pays may run one block late.
Must hold: by `steady_period` the result is never slower than what `greedy` makes of the same times; it is the same on
every rank (a fixed seed). Blocks that do not repeat are left to `greedy`.

Annealing over circular orders: an operator is taken out and put back anywhere between what it reads and what reads
it, in its own block or the next. The cost of an order is the time that one more block adds to many.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from hf_helix.planning.graph import Graph, Kind, Part
from hf_helix.planning.greedy import block_needs, greedy
from hf_helix.planning.plan import BARRIER, LATE, Order, entries, is_late, on_time

STEPS = 8000
COPIES = 6


def search(forward: Graph | None, backward: Graph | None) -> Order:
    """The best order found for a block."""
    start = greedy(forward, backward)
    if forward is None or backward is None or not (forward.repeats and backward.repeats):
        return start
    return _Annealer(_Block(forward, backward), start, lower_bound(forward, backward)).run()


def steady_period(order: Order, forward: Graph, backward: Graph) -> float:
    """The time that one more block of this order adds to many of them in a row.

    One compute stream and one stream per kind of communication, each in order; a transfer starts behind everything
    computed before it, a computation behind the transfers that it reads.
    """
    return _period([entry for entry in order if entry != BARRIER], _Block(forward, backward))


def lower_bound(forward: Graph, backward: Graph) -> float:
    """No order of a repeating block adds less: the busiest stream, and each strand's way from block to block."""
    block = _Block(forward, backward)
    load: dict[Kind, float] = {}
    for op in block.operators.values():
        load[op.kind] = load.get(op.kind, 0.0) + op.effort
    return max(*load.values(), block.way("F"), block.way("B"))


class _Block:
    """A block's operators, with what each waits for in its own block and in the one before."""

    def __init__(self, forward: Graph, backward: Graph) -> None:
        self.operators = entries(forward, backward)
        needs = block_needs(self.operators, forward, backward, copies=2)
        self.here = {entry: [need for copy, need in needs[1, entry] if copy == 1] for entry in self.operators}
        self.before = {entry: [need for copy, need in needs[1, entry] if copy == 0] for entry in self.operators}
        self.readers: dict[str, list[str]] = {entry: [] for entry in self.operators}
        self.next_readers: dict[str, list[str]] = {entry: [] for entry in self.operators}
        for entry in self.operators:
            for need in self.here[entry]:
                self.readers[need].append(entry)
            for need in self.before[entry]:
                self.next_readers[need].append(entry)

    def way(self, strand: str) -> float:
        """The longest chain of a strand from what enters a block to what leaves it."""
        reached: dict[str, float] = {}
        longest = 0.0
        for entry, op in self.operators.items():
            if entry[0] == strand and op.part is not Part.W:
                ways = [reached[need] for need in self.here[entry] if need in reached]
                if ways or self.before[entry]:
                    reached[entry] = op.effort + max(ways, default=0.0)
                    longest = max(longest, reached[entry] if self.next_readers[entry] else 0.0)
        return longest


def _period(order: Sequence[str], block: _Block) -> float:
    steps = [(on_time(entry), is_late(entry), block.operators[on_time(entry)]) for entry in order]
    finish: dict[tuple[int, str], float] = {}
    free: dict[Kind, float] = {}
    computed, ends = 0.0, []
    for copy in range(COPIES):
        for entry, late, op in steps:
            mine = copy - late
            if mine < 0:
                continue
            ready = computed
            for need in block.here[entry]:
                ready = max(ready, finish[mine, need])
            for need in block.before[entry]:
                ready = max(ready, finish.get((mine - 1, need), 0.0))
            if op.kind is Kind.COMPUTE:
                computed = finish[mine, entry] = ready + op.effort
            else:
                finish[mine, entry] = free[op.kind] = max(ready, free.get(op.kind, 0.0)) + op.effort
        ends.append(max(computed, *free.values()) if free else computed)
    half = COPIES // 2
    return (ends[-1] - ends[half - 1]) / (COPIES - half)


class _Annealer:
    """Orders as circles: an operator's place is its index, plus the length of the circle where it runs late."""

    def __init__(self, block: _Block, start: Order, goal: float) -> None:
        self.block = block
        self.goal = goal
        self.random = random.Random(0)
        self.best = self.order = list(start)
        self.best_cost = self.cost = _period(start, block)

    def run(self) -> Order:
        """The best order seen."""
        warmth = 0.02 * self.cost
        for step in range(STEPS):
            if self.best_cost <= self.goal * (1 + 1e-6):
                break
            candidate = self._neighbour()
            if candidate is None:
                continue
            cost = _period(candidate, self.block)
            heat = warmth * (1 - step / STEPS) + 1e-12
            if cost <= self.cost or self.random.random() < math.exp((self.cost - cost) / heat):
                self.order, self.cost = candidate, cost
                if cost < self.best_cost * (1 - 1e-9):
                    self.best, self.best_cost = candidate, cost
        return tuple(self.best)

    def _neighbour(self) -> list[str] | None:
        """The order with one operator elsewhere."""
        order = self.order
        chosen = self.random.randrange(len(order))
        entry = on_time(order[chosen])
        rest = order[:chosen] + order[chosen + 1 :]
        length = len(rest)
        place = {on_time(e): i + (length if is_late(e) else 0) for i, e in enumerate(rest)}
        block = self.block
        lowest = max(
            [place[need] + 1 for need in block.here[entry]]
            + [place[need] + 1 - length for need in block.before[entry] if need != entry],
            default=0,
        )
        highest = min(
            [place[reader] for reader in block.readers[entry]]
            + [place[reader] + length for reader in block.next_readers[entry] if reader != entry],
            default=2 * length,
        )
        lowest, highest = max(lowest, 0), min(highest, 2 * length)
        if lowest > highest:
            return None
        target = self.random.randint(lowest, highest)
        late = target > length or (target == length and self.random.random() < 0.5)
        index = target - length if late else target
        moved = [*rest[:index], entry + LATE if late else entry, *rest[index:]]
        return moved
