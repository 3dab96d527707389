"""Profiles: times of operators, single and concurrent, measured or estimated.

In:   measurements or estimates.
Out:  seconds of every operator, and how much operators slow each other down.
Must hold: a profile holds its graphs, so plans and pictures can be made from only the file; it covers every operator,
and its times are possible. A pair without a measurement has the mean slowdown of its kinds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.operator_clock import Slowdown
from hf_helix.planning.traffic import GRADIENTS
from hf_helix.planning.window.layout import (
    Layout,
    Name,
    is_traffic,
    named_operators,
    named_traffic,
)

EMULATED_LINK = "emulated_link"
REDUCTIONS_OVER = "gradient_sums"
"""Keys of `Profile.about`: the speed of the emulated link, and the kind of communication whose links gradient
reductions and weight gathers use."""


@dataclass(frozen=True)
class Pair:
    """Two operators started together, once each.

    Attributes:
        together: seconds until both are done (P_ij of the paper's equation 1).
        first, second: seconds of each, concurrent with the other.
    """

    together: float
    first: float
    second: float

    @staticmethod
    def of(first: float, second: float, slowdown: float, slowdown_of_second: float) -> Pair:
        """The pair that follows from two slowdowns.

        Args:
            first, second: seconds of each by itself.
            slowdown: how many times longer the first takes while the second runs.
            slowdown_of_second: how many times longer the second takes while the first runs.
        """
        a, b = first * slowdown, second * slowdown_of_second
        if a <= b:
            b = a + second - a / slowdown_of_second
        else:
            a = b + first - b / slowdown
        return Pair(max(a, b), a, b)


@dataclass(frozen=True)
class OperatorMemory:
    """The memory of one call of an operator."""

    delta: int = 0  # change of live bytes, including releases by its readers
    peak: int = 0  # largest increase of live bytes while the operator runs
    weights: int = 0  # the part of `delta` in gathered weights or copies of gathered weights


@dataclass(frozen=True)
class Profile:
    """The times of the operators of a layout.

    Attributes:
        about: hardware, versions, model, mesh and shapes, as text.
        layout: the units of a rank, with their graphs.
        times: seconds of each operator by itself.
        spread: of each, the distance between the quartiles in parts of the median.
        pairs: operators measured concurrently.
        like: an operator -> an equal one (a collective of the same size) that `pairs` names.
        bytes: sent by a rank in each operator that communicates.
        memory: of each operator, in the order of one strand; empty if not measured.
    """

    about: Mapping[str, str]
    layout: Layout
    times: Mapping[Name, float]
    spread: Mapping[Name, float] = field(default_factory=dict)
    pairs: Mapping[tuple[Name, Name], Pair] = field(default_factory=dict)
    like: Mapping[Name, Name] = field(default_factory=dict)
    bytes: Mapping[Name, int] = field(default_factory=dict)
    memory: Mapping[Name, OperatorMemory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_times(self.layout, self.times, self.pairs)
        for name in [*self.like, *self.like.values(), *self.memory]:
            if name not in self.times:
                raise ValueError(f"the profile names {join_name(name)!r}, which is not an operator of these graphs")

    @cached_property
    def _kinds(self) -> dict[Name, Kind]:
        return {name: op.kind for name, op in (*named_operators(self.layout), *named_traffic(self.layout))}

    @cached_property
    def _slowdowns(self) -> tuple[dict[tuple[Name, Name], float], dict[tuple[Kind, Kind], float]]:
        """The slowdown of every measured pair, and the mean for every pair of kinds."""
        measured: dict[tuple[Name, Name], float] = {}
        by_kind: dict[tuple[Kind, Kind], list[tuple[float, float]]] = {}
        for (a, b), pair in self.pairs.items():
            for name, other, seconds, rest in ((a, b, pair.first, pair.second), (b, a, pair.second, pair.first)):
                factor = measured[name, other] = slowdown_of(self.times[name], seconds, rest)
                by_kind.setdefault((self.kind(name), self.kind(other)), []).append((factor, self.times[name]))
        means = {
            kinds: sum(factor * weight for factor, weight in rows) / sum(weight for _, weight in rows)
            for kinds, rows in by_kind.items()
        }
        return measured, means

    def kind(self, name: Name) -> Kind:
        """The kind of an operator."""
        return self._kinds.get(name, Kind.GRADIENTS)

    @property
    def contention(self) -> Slowdown | None:
        """`slowdown`, for `simulate`; None if no pair was measured."""
        return self.slowdown if self.pairs else None

    def slowdown(self, name: Name, other: Name) -> float:
        """How many times longer the first takes while the second runs."""
        key = (self.like.get(name, name), self.like.get(other, other))
        measured, by_kind = self._slowdowns
        if key in measured:
            return measured[key]
        kinds = self.kind(name), self.kind(other)
        if kinds in by_kind or Kind.GRADIENTS not in kinds:
            return by_kind.get(kinds, 1.0)
        return by_kind.get((self._measured_as(name), self._measured_as(other)), 1.0)

    def _measured_as(self, name: Name) -> Kind:
        """The kind whose pairs stand for an operator: gradient reductions and weight gathers slow down as collectives
        between hosts do, or inside a host if there are no others."""
        kind = self.kind(name)
        if kind is not Kind.GRADIENTS:
            return kind
        return Kind.INTER_NODE if Kind.INTER_NODE in self._kinds.values() else Kind.INTRA_NODE

    def overlap_efficiency(self, name: Name, other: Name) -> float:
        """OEF, the paper's equation 1: 1 if the shorter is hidden, 0 without a gain, negative for a loss."""
        pair = self.pairs[name, other]
        alone = self.times[name], self.times[other]
        return (sum(alone) - pair.together) / min(alone)


def rough_profile(layout: Layout) -> Profile:
    """A profile without a measurement: the relative cost of every operator, in milliseconds."""
    operators = (*named_operators(layout), *named_traffic(layout))
    return Profile({"measured": "no"}, layout, {name: op.relative_cost * 1e-3 for name, op in operators})


def slowdown_of(alone: float, concurrent: float, other: float) -> float:
    """Returns how many times longer an operator takes while another runs, from 1 to 10.

    Args:
        alone: seconds of an operator by itself.
        concurrent: seconds when both start together.
        other: seconds of the other.
    """
    shared = min(concurrent, other)
    done_meanwhile = alone - (concurrent - shared)  # in seconds of the operator by itself
    return min(max(shared / done_meanwhile, 1.0), 10.0) if done_meanwhile > 0.1 * shared else 10.0


def check_times(layout: Layout, times: Mapping[Name, float], pairs: Mapping[tuple[Name, Name], Pair]) -> None:
    """Raises ValueError, naming the operator, if times are missing, unknown or impossible."""
    known = {name for name, _ in named_operators(layout)}
    for name in sorted((known | {name for name, _ in named_traffic(layout)}) - times.keys()):
        what = f"operator {join_name(name)!r}"
        if is_traffic(name):
            is_sum = name[0] == GRADIENTS
            what = "sums of gradients" if is_sum else "gathers of weights"
            what = f"the {what} ({len(layout.reductions if is_sum else layout.gathers)} here)"
        raise ValueError(f"the profile does not cover {what}")
    for name in [*times, *(name for pair in pairs for name in pair)]:
        if name not in known and not is_traffic(name):  # a part of the layout may lack these
            raise ValueError(f"the profile names {join_name(name)!r}, which is not an operator of these graphs")
    for name, seconds in times.items():
        _check_time(join_name(name), seconds)
    for (a, b), pair in pairs.items():
        for seconds in (pair.together, pair.first, pair.second):
            _check_time(f"{join_name(a)} beside {join_name(b)}", seconds)


def _check_time(what: str, seconds: float) -> None:
    if not (isinstance(seconds, float) and math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"impossible time of {what}: {seconds * 1e3!r} ms; times must be positive numbers")


def join_name(name: Name) -> str:
    """Returns the text form of an operator's name: unit, slash, entry."""
    return "/".join(name)
