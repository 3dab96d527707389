"""List scheduling: an order driven by dependencies.

In:   the forward and the backward graph of a block (None: that strand is absent), with times in `Operator.effort`.
Out:  an order of their operators.
Must hold: a pure function, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_helix.planning.graph import Graph, Operator, Part
from hf_helix.planning.plan import LATE, Order, entries


def greedy(forward: Graph | None, backward: Graph | None) -> Order:
    """List scheduling on the dependency graph of both strands, with W as filler.

    Communication is issued as soon as its input exists. The next compute operator is, among those that need not
    wait, the one with the longest path of dependents; W only where everything else would wait. Where blocks of the
    kind follow each other, what one leaves open fills the gaps of the next.
    """
    if forward is not None and backward is not None and forward.repeats and backward.repeats:
        steady = _steady_state(_ListScheduler(forward, backward, copies=8).run())
        if steady is not None:
            return steady
    return tuple(entry for _, entry in _ListScheduler(forward, backward, copies=1).run())


Place = tuple[int, str]
"""A copy of the block, and an entry of it."""


def _steady_state(places: list[Place]) -> Order | None:
    """The order of one copy from the middle, with what it left to the next as late entries; None if it does not
    repeat from copy to copy."""
    middle = max(copy for copy, _ in places) // 2
    start, end = (next(i for i, (copy, _) in enumerate(places) if copy == number) for number in (middle, middle + 1))
    period = places[start:end]
    on_time = {entry for copy, entry in period if copy == middle}
    late = {entry for copy, entry in period if copy == middle - 1}
    every = {entry for _, entry in places}
    if len(period) != len(every) or on_time & late or on_time | late != every:
        return None
    return tuple(entry if copy == middle else entry + LATE for copy, entry in period)


class _ListScheduler:
    """Simulates one compute stream and one stream per kind of communication, in units of `Operator.effort`.

    Schedules several copies of the block in a row; of a copy nothing starts before the last but one is done.
    """

    def __init__(self, forward: Graph | None, backward: Graph | None, copies: int) -> None:
        operators = entries(forward, backward)
        self.left: dict[Place, Operator] = {(c, entry): op for c in range(copies) for entry, op in operators.items()}
        self.needs = block_needs(operators, forward, backward, copies)
        self.rank = self._path_lengths()
        self.finish: dict[Place, float] = {}
        self.open = [len(operators)] * copies  # operators left, by copy
        self.free = {op.kind: 0.0 for op in operators.values()}
        self.now = 0.0  # end of the last compute operator
        self.order: list[Place] = []

    def run(self) -> list[Place]:
        """Every entry of every copy in the order of issue."""
        while self.left:
            while found := self._ready(communication=True):
                self._issue(max(found, key=self.rank.__getitem__))
            if self.left:
                self._issue(min(self._ready(), key=self._preference))
        return self.order

    def _issue(self, place: Place) -> None:
        operator = self.left.pop(place)
        start = max(self.now, self._inputs_at(place), self.free[operator.kind])
        self.finish[place] = self.free[operator.kind] = start + operator.effort
        if not operator.kind.communicates:
            self.now = self.finish[place]
        self.open[place[0]] -= 1
        self.order.append(place)

    def _ready(self, communication: bool = False) -> list[Place]:
        limit = next((copy for copy, count in enumerate(self.open) if count), 0) + 2
        return [
            place
            for place, op in self.left.items()
            if place[0] < limit
            and op.kind.communicates == communication
            and all(need in self.finish for need in self.needs[place])
        ]

    def _inputs_at(self, place: Place) -> float:
        return max((self.finish[need] for need in self.needs[place]), default=0.0)

    def _preference(self, place: Place) -> tuple[float, bool, float, Place]:
        """Smaller is better: no wait, then no W, then the longest path; a W rather than a wait."""
        is_filler = self.left[place].part is Part.W
        wait = max(0.0, self._inputs_at(place) - self.now)
        return (wait, is_filler, -self.rank[place], place)

    def _path_lengths(self) -> dict[Place, float]:
        """For each operator, the effort of the longest chain that starts with it (W ends a chain)."""
        lengths: dict[Place, float] = {}
        dependents: dict[Place, list[Place]] = {place: [] for place in self.left}
        for place, needs in self.needs.items():
            for need in needs:
                dependents[need].append(place)
        for place in reversed(list(self.left)):
            tail = max((lengths[dependent] for dependent in dependents[place]), default=0.0)
            lengths[place] = self.left[place].effort + tail
        return lengths


def block_needs(
    operators: Mapping[str, Operator], forward: Graph | None, backward: Graph | None, copies: int
) -> dict[Place, list[Place]]:
    """What each operator waits for: in its own copy, and through the inputs of the block in the copy before."""
    writers = {(entry[0], value): entry for entry, op in operators.items() for value in op.writes}
    entering = {
        (letter, value): writers[letter, leaving]
        for letter, graph in (("F", forward), ("B", backward))
        if graph is not None
        for value, leaving in zip(graph.inputs, graph.outputs, strict=False)
        if (letter, leaving) in writers
    }
    needs: dict[Place, list[Place]] = {}
    for copy in range(copies):
        for entry, op in operators.items():
            found = [(entry[0], value) for value in op.depends_on]
            needs[copy, entry] = [(copy, writers[value]) for value in found if value in writers]
            if copy > 0:
                needs[copy, entry] += [(copy - 1, entering[value]) for value in found if value in entering]
    return needs
