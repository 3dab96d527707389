"""Profiles: measured times of operators, alone and beside each other.

In:   what the profiler measured, or a file.
Out:  seconds of every operator, and how much operators slow each other down.
Must hold: a profile holds the graphs it is for, so plans and pictures can be made from the file alone; it covers every
operator, and its times are possible. Pairs that were not measured get the mean of their kinds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.clock import Slowdown
from hf_helix.planning.window.layout import (
    Layout,
    Name,
    is_per_step,
    named_gathers,
    named_operators,
    named_per_step,
    named_reductions,
    names_per_step,
)

EMULATED_LINK = "emulated_link"
REDUCTIONS_OVER = "gradient_sums"
"""What `Profile.about` calls the speed of the emulated link, as text, and the kind of communication whose links sums of
gradients and gathers of weights go over."""


@dataclass(frozen=True)
class Pair:
    """Two operators started together, one of each, whatever was repeated to measure it.

    Attributes:
        together: seconds until both are done (P_ij of the paper's equation 1).
        first: seconds of the first, beside the second.
        second: seconds of the second, beside the first.
    """

    together: float
    first: float
    second: float

    @staticmethod
    def of(first: float, second: float, slowdown: float, slowdown_of_second: float) -> Pair:
        """Returns what follows from two operators' slowdowns: started together, until the longer one has ended.

        Args:
            first: seconds of the first alone.
            second: seconds of the second alone.
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
class Profile:
    """What was measured.

    Attributes:
        about: what it was measured on and for, as text: hardware, versions, model, mesh, shapes.
        layout: what a rank holds, with its graphs.
        times: seconds of each operator alone.
        spread: of each, the distance between the quartiles in parts of the median.
        pairs: what was measured beside each other.
        like: operators that do the same as another (a collective of the same size) -> that other, which `pairs` names.
        bytes: of each operator that communicates, what a rank sends in it.
        bare: seconds of each of them without the emulated link that `times` were measured on; empty without one.
    """

    about: Mapping[str, str]
    layout: Layout
    times: Mapping[Name, float]
    spread: Mapping[Name, float] = field(default_factory=dict)
    pairs: Mapping[tuple[Name, Name], Pair] = field(default_factory=dict)
    like: Mapping[Name, Name] = field(default_factory=dict)
    bytes: Mapping[Name, int] = field(default_factory=dict)
    bare: Mapping[Name, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_times(self.layout, self.times, self.pairs)
        for name in [*self.like, *self.like.values()]:
            if name not in self.times:
                raise ValueError(f"the profile names {join_name(name)!r}, which is not an operator of these graphs")

    @cached_property
    def _kinds(self) -> dict[Name, Kind]:
        return {name: op.kind for name, op in named_operators(self.layout)}

    @cached_property
    def _slowdowns(self) -> tuple[dict[tuple[Name, Name], float], dict[tuple[Kind, Kind], float]]:
        """Returns the slowdown of every measured pair, and their mean for every pair of kinds."""
        measured: dict[tuple[Name, Name], float] = {}
        by_kind: dict[tuple[Kind, Kind], list[tuple[float, float]]] = {}
        for (a, b), pair in self.pairs.items():
            for name, other, seconds, rest in ((a, b, pair.first, pair.second), (b, a, pair.second, pair.first)):
                factor = measured[name, other] = slowdown_of(self.times[name], seconds, rest)
                by_kind.setdefault((self.kind(name), self.kind(other)), []).append((factor, self.times[name]))
        return measured, {kinds: _weighted_mean(slowdowns) for kinds, slowdowns in by_kind.items()}

    def kind(self, name: Name) -> Kind:
        """Returns the kind of an operator."""
        return Kind.GRADIENTS if is_per_step(name) else self._kinds[name]

    @property
    def contention(self) -> Slowdown | None:
        """`slowdown`, for `simulate`; None if no pair was measured."""
        return self.slowdown if self.pairs else None

    def slowdown(self, name: Name, other: Name) -> float:
        """How many times longer the first takes while the second runs beside it."""
        key = (self.like.get(name, name), self.like.get(other, other))
        measured, by_kind = self._slowdowns
        if key in measured:
            return measured[key]
        kinds = self.kind(name), self.kind(other)
        if kinds in by_kind or Kind.GRADIENTS not in kinds:
            return by_kind.get(kinds, 1.0)
        return by_kind.get((self._measured_as(name), self._measured_as(other)), 1.0)

    def _measured_as(self, name: Name) -> Kind:
        """The kind whose pairs stand for an operator: sums of gradients and gathers of weights cost what
        collectives between hosts cost, or those inside a host where there are no others."""
        kind = self.kind(name)
        if kind is not Kind.GRADIENTS:
            return kind
        return Kind.INTER_NODE if Kind.INTER_NODE in self._kinds.values() else Kind.INTRA_NODE

    def overlap_efficiency(self, name: Name, other: Name) -> float:
        """OEF, the paper's equation 1: 1 where the shorter is hidden, 0 where nothing is gained, below 0 a loss."""
        pair = self.pairs[name, other]
        alone = self.times[name], self.times[other]
        return (sum(alone) - pair.together) / min(alone)


def rough_profile(layout: Layout) -> Profile:
    """Without a measurement: relative times by the declared effort of every operator, in milliseconds."""
    operators = (*named_operators(layout), *named_per_step(layout))
    return Profile({"measured": "no"}, layout, {name: op.relative_cost * 1e-3 for name, op in operators})


def seconds_per_step(profile: Profile, rank: int) -> float:
    """Seconds of all gathers of weights and sums of gradients of a pipeline rank."""
    return sum(profile.times[name] for name in names_per_step(profile.layout, rank))


def slowdown_of(alone: float, beside: float, other: float) -> float:
    """Returns how many times longer an operator takes while another runs, from 1 to 10.

    Args:
        alone: the seconds that it takes alone.
        beside: the seconds that it takes when the other starts with it.
        other: the seconds for which the other runs.
    """
    shared = min(beside, other)
    done_meanwhile = alone - (beside - shared)  # of its own work, in seconds alone
    return min(max(shared / done_meanwhile, 1.0), 10.0) if done_meanwhile > 0.1 * shared else 10.0


def _weighted_mean(weighted: list[tuple[float, float]]) -> float:
    return sum(value * weight for value, weight in weighted) / sum(weight for _, weight in weighted)


def check_times(layout: Layout, times: Mapping[Name, float], pairs: Mapping[tuple[Name, Name], Pair]) -> None:
    """Raises ValueError, naming the operator, where times are missing, unknown or impossible.

    Args:
        layout: its operators are those that need a time.
        times: seconds of every operator.
        pairs: of operators that were timed beside each other.
    """
    sums = {name for name, _ in named_reductions(layout)}
    gathers = {name for name, _ in named_gathers(layout)}
    known = {name for name, _ in named_operators(layout)}
    for name in sorted((known | sums | gathers) - times.keys()):
        what = f"operator {join_name(name)!r}"
        if is_per_step(name):
            what = f"the {'sums of gradients' if name in sums else 'gathers of weights'} ({len(sums or gathers)} here)"
        raise ValueError(f"the profile does not cover {what}")
    for name in [*times, *(name for pair in pairs for name in pair)]:
        if name not in known and not is_per_step(name):  # a part of the layout may have none of these
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
