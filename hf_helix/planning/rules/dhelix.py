"""The paper's search (DHelix, arXiv 2411.15871, section 4.2): segments of the two strands, paired between barriers.

In:   the forward and the backward graph of a block, and a profile.
Out:  the fastest order of the space below, by the cost function (`simulate` and the profile's slowdowns).
Must hold: a pure function, the same on all ranks; no order of the space is faster; never slower than `sequential`.

The space of the paper's equation 2:

- Sequences: a weight gradient may be issued anywhere from its canonical place on; all other operators, the chain, keep
  their order. The issued weight gradients are part of the state of the dynamic programme. At most `PENDING` wait at a
  barrier; fewer in long blocks, so that there are at most `MAX_STATES` states.
- Segments: at most `SEGMENT` operators of each strand's chain, the weight gradients that they make ready (the paper's
  "self-overlap" with the collective after the I), and at most `MOVED` others.
- Pairs: a segment of each strand, or of a single strand, then a barrier, at which computation waits for communication.
  Two segments with a local collective each are never paired.
- Within a pair, every interleaving of the computations. A collective is issued as soon as its strand has come to it,
  the forward's first.
- `sequential`, also for a single strand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, combinations, islice
from operator import itemgetter

from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part
from hf_helix.planning.plan.block_plan import BARRIER, Order, entries, sequential
from hf_helix.planning.timing.operator_clock import simulate
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.window import COMPUTE, NONE, STREAMS, WindowArrays

# The space of a block, see above: the paper's segments, and more weight gradients than change anything. The figures are
# of two Llama layers with random times.

SEGMENT = 3  # with 2 the window is up to 2.9 % longer; with 4 as long
MOVED = 2  # with 0 up to 1.8 % longer; 1 to 3 are equal
PENDING = 4  # with 0 up to 1.8 % longer; 1 to 6 are equal

MAX_STATES = 2500  # bounds the time of a search in long blocks, such as recurrent layers

LOCAL = STREAMS.index(Kind.INTRA_NODE)
NEAR = 1e-9  # two times that differ by a smaller part are equal

Bits = int
"""A set of movable operators."""

State = tuple[int, int, Bits]
"""Issued operators of the forward chain and of the backward chain (counts), and of the movable ones (a set)."""

Segments = tuple[int, int, int, int, Bits]
"""Operators between two barriers: chain[i:i + a] forward, chain[j:j + b] backward, as (i, a, j, b, movable)."""


def dhelix(forward: Graph | None, backward: Graph | None, profile: Profile) -> Order:
    """The best pairing of segments (paper, section 4.2, equation 2)."""
    baseline = sequential(forward, backward, profile)
    if forward is None or backward is None:
        return baseline
    block = _Block(forward, backward, profile)
    groups = _Search(block).run()
    strands = [[i for i, entry in enumerate(block.entries) if entry[0] == letter] for letter in "FB"]
    alone, paired = (sum(block.seconds_of(group) for group in segments) for segments in (strands, groups))
    if alone <= paired * (1 + NEAR):
        return baseline
    return _with_barriers(block, groups)


def _with_barriers(block: _Block, groups: Sequence[Sequence[int]]) -> Order:
    """The groups in turn, a barrier after each with communication."""
    order: list[str] = []
    for group in groups:
        order += [block.entries[i] for i in group]
        if any(block.streams[i] != COMPUTE for i in group):
            order.append(BARRIER)
    return tuple(order if order[-1:] == [BARRIER] else [*order, BARRIER])


class _Block:
    """The operators of a block as numbers, each strand in canonical order.

    Attributes:
        chains: of each strand, the operators that stay in canonical order.
        movable: the others; bit m of a set stands for `movable[m]`.
        places: of each movable operator, its strand and the length of the chain before it.
        follows: of each operator, its movable predecessors.
        waits: of each operator, the communication whose results it reads.
    """

    def __init__(self, forward: Graph, backward: Graph, profile: Profile) -> None:
        operators = entries(forward, backward)
        names = [(forward.name if entry[0] == "F" else backward.name, entry) for entry in operators]
        self.entries = list(operators)
        self.streams = [STREAMS.index(op.kind) for op in operators.values()]
        self.seconds = [profile.times[name] for name in names]
        self._names = names
        self._slowdown = cache(profile.contention) if profile.contention else None
        self.chains: tuple[list[int], list[int]] = ([], [])
        self.movable: list[int] = []
        self.places: list[tuple[int, int]] = []
        for i, (entry, op) in enumerate(operators.items()):
            strand = "FB".index(entry[0])
            if op.part is Part.W and not op.kind.communicates:
                self.movable.append(i)
                self.places.append((strand, len(self.chains[strand])))
            else:
                self.chains[strand].append(i)
        self._link(operators)

    def _link(self, operators: dict[str, Operator]) -> None:
        number = {entry: i for i, entry in enumerate(operators)}
        writers = {(entry[0], value): number[entry] for entry, op in operators.items() for value in op.writes}
        bits = {i: 1 << m for m, i in enumerate(self.movable)}
        self.follows: list[Bits] = []
        self.waits: list[tuple[int, ...]] = []
        for entry, op in operators.items():
            needs = {writers[entry[0], value] for value in op.depends_on if (entry[0], value) in writers}
            self.waits.append(tuple(i for i in sorted(needs) if self.streams[i] != COMPUTE))
            needs |= {number[f"{entry[0]}.{name}"] for name in op.ordered_after}
            self.follows.append(sum(bits.get(i, 0) for i in needs))

    def ready(self, i: int, j: int) -> Bits:
        """The movable operators whose canonical place has been reached."""
        return sum(1 << m for m, (strand, place) in enumerate(self.places) if place <= (i, j)[strand])

    def valid(self, state: State) -> bool:
        """Whether the state includes the predecessors of its operators."""
        i, j, movable = state
        issued = (*self.chains[0][:i], *self.chains[1][:j], *self.members(movable))
        return all(not self.follows[n] & ~movable for n in issued)

    def members(self, movable: Bits) -> list[int]:
        """The operators of a set."""
        return [i for m, i in enumerate(self.movable) if movable >> m & 1]

    def seconds_of(self, group: Sequence[int]) -> float:
        """Predicted seconds from one barrier to the next, for operators that are issued in this order."""
        if self._slowdown is None:
            return self.bound(group)
        place = {i: number for number, i in enumerate(group)}
        arrays = WindowArrays(
            [self.streams[i] for i in group],
            [self.seconds[i] for i in group],
            [[place[need] for need in self.waits[i] if need in place] for i in group],
            list(range(len(group))),
            [self._names[i] for i in group],
            [0] * len(group),
            [0] * len(group),
            [NONE] * len(group),
        )
        return simulate(arrays, self._slowdown).seconds

    def bound(self, group: Sequence[int]) -> float:
        """Seconds without contention: those of `simulate`, but for the last digits, which decide between equal
        orders."""
        free, ends = [0.0] * len(STREAMS), dict[int, float]()
        for i in group:
            self.issue(i, free, ends)
        return max(free)

    def issue(self, i: int, free: list[float], ends: dict[int, float]) -> None:
        """Updates the earliest end of an operator, in `ends`, and when each stream is free."""
        stream = self.streams[i]
        start = max(free[COMPUTE], free[stream])  # communication also waits for all computation before it
        for need in self.waits[i]:
            start = max(start, ends.get(need, 0.0))  # 0: it ran before the last barrier
        ends[i] = free[stream] = start + self.seconds[i]

    def floor_of_chains(self, i: int, a: int, j: int, b: int) -> tuple[float, float]:
        """The load of computation of two segments without movable operators, and a bound by the other streams and by
        each strand alone."""
        strands = self.chains[0][i : i + a], self.chains[1][j : j + b]
        loads = [0.0] * len(STREAMS)
        for n in (*strands[0], *strands[1]):
            loads[self.streams[n]] += self.seconds[n]
        return loads[COMPUTE], max(*loads, *map(self.bound, strands))


def _interleave(block: _Block, segments: Segments, limit: float) -> tuple[float, tuple[int, ...]]:
    """Returns time and order of the best interleaving of two segments, by a depth-first search; `limit` and no order if
    none takes less."""
    i, a, j, b, movable = segments
    strands = block.chains[0][i : i + a], block.chains[1][j : j + b]
    operators = [*strands[0], *strands[1], *block.members(movable)]
    best: tuple[float, tuple[int, ...]] = (limit, ())
    ends: dict[int, float] = {}  # those left from other ways are written anew before they are read

    def choices(issued: tuple[int, int], waiting: Bits) -> Iterator[tuple[int, tuple[int, int], Bits]]:
        """The next operators: a collective whose turn has come, or else any computation."""
        found = []
        for strand, (segment, count) in enumerate(zip(strands, issued, strict=True)):
            if count < len(segment) and not block.follows[segment[count]] & waiting:
                n = segment[count]
                choice = n, (issued[0] + (strand == 0), issued[1] + (strand == 1)), waiting
                if block.streams[n] != COMPUTE:
                    yield choice
                    return
                found.append(choice)
        yield from found
        for m, (strand, place) in enumerate(block.places):
            if waiting >> m & 1 and place <= (i, j)[strand] + issued[strand]:
                n = block.movable[m]
                if not block.follows[n] & waiting:
                    yield n, issued, waiting & ~(1 << m)

    def extend(
        issued: tuple[int, int], waiting: Bits, free: list[float], order: tuple[int, ...], compute: float
    ) -> None:
        """Extends an order, with `compute` seconds of computation left."""
        nonlocal best
        if len(order) == len(operators):
            seconds = block.seconds_of(order)
            if seconds < best[0] * (1 - NEAR):
                best = seconds, order
            return
        for n, next_issued, next_waiting in choices(issued, waiting):
            then = free.copy()
            block.issue(n, then, ends)
            left = compute - (block.seconds[n] if block.streams[n] == COMPUTE else 0.0)
            if max(then[COMPUTE] + left, *then) < best[0] * (1 - NEAR):
                extend(next_issued, next_waiting, then, (*order, n), left)

    compute = sum(block.seconds[n] for n in (*strands[0], *strands[1]) if block.streams[n] == COMPUTE)
    extend((0, 0), movable, [0.0] * len(STREAMS), (), compute + sum(block.seconds[n] for n in block.members(movable)))
    return best


class _Search:
    """Equation 2 over all states: the fastest path to each."""

    def __init__(self, block: _Block) -> None:
        self.block = block
        self.lengths = len(block.chains[0]), len(block.chains[1])
        self.ready = {(i, j): block.ready(i, j) for i in range(self.lengths[0] + 1) for j in range(self.lengths[1] + 1)}
        self.local = [[0, *accumulate(block.streams[n] == LOCAL for n in chain)] for chain in block.chains]
        self.reached: dict[State, tuple[float, State, tuple[int, ...]]] = {(0, 0, 0): (0.0, (0, 0, 0), ())}
        self.known: dict[Segments, tuple[float, tuple[int, ...]]] = {}
        self.floor_of_chains = cache(block.floor_of_chains)
        self.seconds_of_movable = cache(lambda movable: sum(block.seconds[n] for n in block.members(movable)))

    def floor(self, segments: Segments) -> float:
        """A lower bound of all interleavings: each stream's load, and each strand alone."""
        compute, rest = self.floor_of_chains(*segments[:4])
        return max(compute + self.seconds_of_movable(segments[4]), rest)

    def best(self, segments: Segments, limit: float) -> tuple[float, tuple[int, ...]]:
        """P(i, j) of the paper: time and order of the best interleaving if it takes less than `limit`; else a bound of
        at least `limit`."""
        known = self.known.get(segments)
        if known is None or (not known[1] and known[0] < limit):
            known = self.known[segments] = _interleave(self.block, segments, limit)
        return known

    def run(self) -> list[tuple[int, ...]]:
        """Returns the operators between the barriers of the best order, group by group."""
        for state in self._states():
            self._reach(state)
        groups: list[tuple[int, ...]] = []
        state = (*self.lengths, self.ready[self.lengths])
        while any(state):
            _, state, order = self.reached[state]
            groups.append(order)
        return groups[::-1]

    def _states(self) -> list[State]:
        for pending in range(PENDING, 0, -1):
            states = list(islice(self._states_with(pending), MAX_STATES + 1))
            if len(states) <= MAX_STATES:
                return states
        return list(self._states_with(0))

    def _states_with(self, pending: int) -> Iterator[State]:
        """Every state after the first, each after its predecessors."""
        for (i, j), ready in self.ready.items():
            for issued in sorted(ready & ~waiting for waiting in _subsets(ready, pending)):
                if (i or j or issued) and self.block.valid((i, j, issued)):
                    yield i, j, issued

    def _reach(self, state: State) -> None:
        best: tuple[float, State, tuple[int, ...]] = (math.inf, state, ())
        # Single operators first: with a way known, the dearer segments need not be looked into.
        for _, floor, before, segments in sorted(self._ways(state), key=itemgetter(0, 1)):
            if floor < best[0] * (1 - NEAR):
                start = self.reached[before][0]
                seconds, order = self.best(segments, best[0] - start)
                if order and start + seconds < best[0]:
                    best = start + seconds, before, order
        if best[2]:
            self.reached[state] = best

    def _ways(self, state: State) -> Iterator[tuple[bool, float, State, Segments]]:
        """Paths to a state: whether of more than one operator, a lower bound, the state before, the segments
        between."""
        i, j, issued = state
        for a in range(min(SEGMENT, i) + 1):
            local = self.local[0][i] > self.local[0][i - a]
            for b in range(min(SEGMENT, j) + 1):
                if local and self.local[1][j] > self.local[1][j - b]:
                    continue
                ready = self.ready[i - a, j - b]
                new = issued & ~ready  # the segment's own
                for moved in _subsets(issued & ready, MOVED):
                    before = (i - a, j - b, issued & ready & ~moved)
                    if before in self.reached and before != state:
                        segments = (i - a, a, j - b, b, new | moved)
                        floor = self.reached[before][0] + self.floor(segments)
                        yield a + b + (new | moved).bit_count() > 1, floor, before, segments


@cache
def _subsets(whole: Bits, max_size: int) -> list[Bits]:
    """Returns the subsets of at most `max_size` elements, the smallest first."""
    elements = [1 << m for m in range(whole.bit_length()) if whole >> m & 1]
    return [sum(chosen) for count in range(max_size + 1) for chosen in combinations(elements, count)]
