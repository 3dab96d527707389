"""Rules that order a block without a profile.

In:   the forward and the backward graph of a block (None: that strand is absent).
Out:  an order of their operators.
Must hold: every rule is a pure function, the same on all ranks.

`sequential` is Megatron-style: one strand after the other, with W beside the collective that follows its I.
`round_robin` is the paper's Wavelet+: operators of the two strands in turn. `greedy` is driven by dependencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, zip_longest

from hf_helix.planning.graph import Graph, Operator, Part
from hf_helix.planning.plan import BARRIER, Order, Rule, entries


def sequential(forward: Graph | None, backward: Graph | None) -> Order:
    """The forward strand, a barrier, then the backward strand, a barrier; each strand in canonical order."""
    strands = (entries(forward, None), entries(None, backward))
    return tuple(entry for strand in strands if strand for entry in (*strand, BARRIER))


def round_robin(forward: Graph | None, backward: Graph | None) -> Order:
    """One operator of each strand in turn; what is left of the longer strand follows."""
    turns = zip_longest(entries(forward, None), entries(None, backward))
    return tuple(entry for entry in chain.from_iterable(turns) if entry is not None)


def greedy(forward: Graph | None, backward: Graph | None) -> Order:
    """List scheduling on the dependency graph of both strands, with W as filler.

    Communication is issued as soon as its input exists. The next compute operator is, among those that need not
    wait, the one with the longest path of dependents; W only where everything else would wait.
    """
    return _ListScheduler(entries(forward, backward)).run()


RULES: dict[str, Rule] = {"sequential": sequential, "round_robin": round_robin, "greedy": greedy}


class _ListScheduler:
    """Simulates one compute stream and one stream per kind of communication, in units of `Operator.effort`."""

    def __init__(self, operators: Mapping[str, Operator]) -> None:
        self.left = dict(operators)
        writers = {(entry[0], value): entry for entry, op in operators.items() for value in op.writes}
        self.needs = {
            entry: [writers[entry[0], v] for v in op.depends_on if (entry[0], v) in writers]
            for entry, op in operators.items()
        }
        self.rank = self._path_lengths()
        self.finish: dict[str, float] = {}
        self.free = {op.kind: 0.0 for op in operators.values()}
        self.now = 0.0  # end of the last compute operator
        self.order: list[str] = []

    def run(self) -> Order:
        while self.left:
            self._issue_communication()
            if not self.left:
                break
            entry = min(self._ready(), key=self._preference)
            operator = self.left.pop(entry)
            self.now = max(self.now, self._inputs_at(entry)) + operator.effort
            self.finish[entry] = self.now
            self.order.append(entry)
        return tuple(self.order)

    def _issue_communication(self) -> None:
        while found := self._ready(communication=True):
            entry = max(found, key=lambda entry: self.rank[entry])
            operator = self.left.pop(entry)
            start = max(self.now, self.free[operator.kind], self._inputs_at(entry))
            self.finish[entry] = self.free[operator.kind] = start + operator.effort
            self.order.append(entry)

    def _ready(self, communication: bool = False) -> list[str]:
        return [
            entry
            for entry, op in self.left.items()
            if op.kind.communicates == communication and all(need in self.finish for need in self.needs[entry])
        ]

    def _inputs_at(self, entry: str) -> float:
        return max((self.finish[need] for need in self.needs[entry]), default=0.0)

    def _preference(self, entry: str) -> tuple[float, bool, float, str]:
        """Smaller is better: no wait, then no W, then the longest path; a W rather than a wait."""
        is_filler = self.left[entry].part is Part.W
        wait = max(0.0, self._inputs_at(entry) - self.now)
        return (wait, is_filler, -self.rank[entry], entry)

    def _path_lengths(self) -> dict[str, float]:
        """For each operator, the effort of the longest chain that starts with it (W ends a chain)."""
        lengths: dict[str, float] = {}
        dependents: dict[str, list[str]] = {entry: [] for entry in self.left}
        for entry, needs in self.needs.items():
            for need in needs:
                dependents[need].append(entry)
        for entry in reversed(list(self.left)):
            tail = max((lengths[dependent] for dependent in dependents[entry]), default=0.0)
            lengths[entry] = self.left[entry].effort + tail
        return lengths
