"""Profiles: measured times of operators, alone and beside each other.

In:   what the profiler measured, or a file.
Out:  seconds of every operator, and how much operators slow each other down.
Must hold: a profile holds the graphs it is for, so plans and pictures can be made from the file alone; it covers every
operator, and its times are possible. Pairs that were not measured get the mean of their kinds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_helix.planning.graph.graph_json import graph_data, graph_from
from hf_helix.planning.graph.operator import GraphPair, Kind, Operator, first_difference
from hf_helix.planning.instructions import Layout
from hf_helix.planning.json_text import format_json, round_ms

FORMAT = "hf_helix.profile/1"

Name = tuple[str, str]
"""An operator: the name of its unit and its entry in a plan, such as ("layer", "B.mlp.down.W")."""


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
        """Of two operators that take so long alone, and slow each other down so much while both run."""
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
        object.__setattr__(self, "_kinds", {name: op.kind for name, op in named_operators(self.layout)})
        check_times(self.layout, self.times, self.pairs)
        for name in [*self.like, *self.like.values()]:
            if name not in self.times:
                raise ValueError(f"the profile names {_join(name)!r}, which is not an operator of these graphs")
        measured: dict[tuple[Name, Name], float] = {}
        by_kind: dict[tuple[Kind, Kind], list[tuple[float, float]]] = {}
        for (a, b), pair in self.pairs.items():
            for name, other, seconds, rest in ((a, b, pair.first, pair.second), (b, a, pair.second, pair.first)):
                factor = measured[name, other] = slowdown_of(self.times[name], seconds, rest)
                by_kind.setdefault((self.kind(name), self.kind(other)), []).append((factor, self.times[name]))
        object.__setattr__(self, "_measured", measured)
        object.__setattr__(self, "_by_kind", {kinds: _weighted_mean(found) for kinds, found in by_kind.items()})

    def kind(self, name: Name) -> Kind:
        """Of an operator."""
        return self._kinds[name]  # type: ignore[attr-defined]

    def slowdown(self, name: Name, other: Name) -> float:
        """How many times longer the first takes while the second runs beside it."""
        key = (self.like.get(name, name), self.like.get(other, other))
        found = self._measured.get(key)  # type: ignore[attr-defined]
        if found is None:
            found = self._by_kind.get((self.kind(name), self.kind(other)), 1.0)  # type: ignore[attr-defined]
        return found

    def overlap_efficiency(self, name: Name, other: Name) -> float:
        """OEF, the paper's equation 1: 1 where the shorter is hidden, 0 where nothing is gained, below 0 a loss."""
        pair = self.pairs[name, other]
        alone = self.times[name], self.times[other]
        return (sum(alone) - pair.together) / min(alone)

    def without(self, names: Collection[str]) -> Profile:
        """The same times for graphs with less freedom, see `GraphPair.without`."""
        graphs = {unit: pair.without(names) for unit, pair in self.layout.graphs.items()}
        return replace(self, layout=replace(self.layout, graphs=graphs)) if names else self

    def to_json(self) -> str:
        """The text form that is kept in files."""
        operators: dict[str, dict[str, Any]] = {}
        for name, seconds in self.times.items():
            figures: dict[str, Any] = {"ms": round_ms(seconds), "spread": round(self.spread.get(name, 0.0), 3)}
            if name in self.like:
                figures["like"] = _join(self.like[name])
            if name in self.bytes:
                figures["bytes"] = self.bytes[name]
            if name in self.bare:
                figures["bare_ms"] = round_ms(self.bare[name])
            operators.setdefault(name[0], {})[name[1]] = figures
        data = {
            "format": FORMAT,
            "about": dict(self.about),
            "operators": operators,
            "pairs": [
                {
                    "first": _join(a),
                    "second": _join(b),
                    "together_ms": round_ms(pair.together),
                    "first_ms": round_ms(pair.first),
                    "second_ms": round_ms(pair.second),
                    "oef": round(self.overlap_efficiency(a, b), 3),
                }
                for (a, b), pair in self.pairs.items()
            ],
            "layout": {
                "units": list(self.layout.units),
                "chunks": {str(stage): list(units) for stage, units in self.layout.chunks.items()},
                "shared": [[list(each) for each in row] for row in self.layout.shared],
                "ranks": list(self.layout.ranks),
            },
            "graphs": {name: graph_data(pair.forward) for name, pair in self.layout.graphs.items()},
        }
        return format_json(data) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the profile to a file that `HelixConfig(profile=path)` and `hf-helix` take."""
        Path(path).write_text(self.to_json())


def rough_profile(layout: Layout) -> Profile:
    """Without a measurement: relative times by the declared effort of every operator, in milliseconds."""
    return Profile({"measured": "no"}, layout, {name: op.effort * 1e-3 for name, op in named_operators(layout)})


def named_operators(layout: Layout) -> Iterator[tuple[Name, Operator]]:
    """Every operator of the units, once."""
    for unit, pair in layout.graphs.items():
        for letter, graph in (("F", pair.forward), ("B", pair.backward)):
            for op in graph.operators:
                yield (unit, f"{letter}.{op.name}"), op


def check_times(layout: Layout, times: Mapping[Name, float], pairs: Mapping[tuple[Name, Name], Pair]) -> None:
    """Raise ValueError, naming the operator, where times are missing, unknown or impossible."""
    known = {name for name, _ in named_operators(layout)}
    for name in sorted(known - times.keys()):
        raise ValueError(f"the profile does not cover operator {_join(name)!r}")
    for name in [*times, *(name for pair in pairs for name in pair)]:
        if name not in known:
            raise ValueError(f"the profile names {_join(name)!r}, which is not an operator of these graphs")
    for name, seconds in times.items():
        _check_time(_join(name), seconds)
    for (a, b), pair in pairs.items():
        for seconds in (pair.together, pair.first, pair.second):
            _check_time(f"{_join(a)} beside {_join(b)}", seconds)


def load_profile(
    path: str | Path,
    *,
    about: Mapping[str, str] | None = None,
    layout: Layout | None = None,
    without: Collection[str] = (),
) -> Profile:
    """Read a profile file.

    Args:
        about: what it must be for: every entry given here must be equal.
        layout: what it is used for, whose graphs it must hold; None for its own.
        without: see `Profile.without`.

    Raises:
        ValueError: damaged, impossible, incomplete or for something else; says what, and how to make it anew.
    """
    try:
        return _load(path, about or {}, layout, without)
    except ValueError as error:
        raise ValueError(
            f"profile file {path} {error}; measure anew with "
            f"`hf-helix profile --model FOLDER --tp_size N --output {path}`, or leave `profile` out"
        ) from error


def _load(path: str | Path, about: Mapping[str, str], layout: Layout | None, without: Collection[str]) -> Profile:
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"is damaged: {error}") from error
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise ValueError(f"has format {version!r}, this version reads {FORMAT!r}")
    try:
        profile = _profile_from(data).without(without)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"is damaged: {f'it lacks {error}' if isinstance(error, KeyError) else error}") from error
    for key, value in about.items():
        if profile.about.get(key) != value:
            raise ValueError(f"is for {key} {profile.about.get(key)!r}, this run has {value!r}")
    return profile if layout is None else _for_layout(profile, layout)


def _for_layout(profile: Profile, layout: Layout) -> Profile:
    """The profile with another rank's layout of the same graphs."""
    known, wanted = ("\n".join(_described(found)) for found in (profile.layout, layout))
    if known != wanted:
        raise ValueError(f"is for other operators: {first_difference(known, wanted)}")
    return replace(profile, layout=layout)


def _described(layout: Layout) -> list[str]:
    return [graph.describe() for _, pair in sorted(layout.graphs.items()) for graph in (pair.forward, pair.backward)]


def _profile_from(data: Mapping[str, Any]) -> Profile:
    graphs = {name: GraphPair.of(graph_from(name, graph)) for name, graph in data["graphs"].items()}
    units = data["layout"]["units"]
    chunks = {int(stage): list(found) for stage, found in data["layout"]["chunks"].items()}
    if set(units) != graphs.keys() or any(unit not in range(len(units)) for chunk in chunks.values() for unit in chunk):
        raise ValueError("its layout names units that it does not hold")
    shared = [[(int(unit), str(name)) for unit, name in row] for row in data["layout"].get("shared", ())]
    ranks = [int(rank) for rank in data["layout"].get("ranks", ())]
    if ranks and len(ranks) != len(chunks):
        raise ValueError(f"its layout has {len(chunks)} stages on {len(ranks)} ranks")
    times, spread, like, moved, bare = {}, {}, {}, {}, {}
    for unit, operators in data["operators"].items():
        for entry, figures in operators.items():
            if "ms" not in figures:
                raise ValueError(f"operator {unit}/{entry} lacks 'ms'")
            times[unit, entry] = float(figures["ms"]) / 1e3
            spread[unit, entry] = float(figures.get("spread", 0.0))
            if "like" in figures:
                like[unit, entry] = _split(figures["like"])
            if "bytes" in figures:
                moved[unit, entry] = int(figures["bytes"])
            if "bare_ms" in figures:
                bare[unit, entry] = float(figures["bare_ms"]) / 1e3
    pairs = {}
    for row in data["pairs"]:
        seconds = (float(row[key]) / 1e3 for key in ("together_ms", "first_ms", "second_ms"))
        pairs[_split(row["first"]), _split(row["second"])] = Pair(*seconds)
    about = {str(key): str(value) for key, value in data["about"].items()}
    return Profile(about, Layout(units, chunks, graphs, shared, ranks), times, spread, pairs, like, moved, bare)


def slowdown_of(alone: float, beside: float, other: float) -> float:
    """From the seconds that an operator takes alone, and beside another that runs for `other` seconds."""
    shared = min(beside, other)
    done_meanwhile = alone - (beside - shared)  # of its own work, in seconds alone
    return min(max(shared / done_meanwhile, 1.0), 10.0) if done_meanwhile > 0.1 * shared else 10.0


def _weighted_mean(found: list[tuple[float, float]]) -> float:
    return sum(value * weight for value, weight in found) / sum(weight for _, weight in found)


def _check_time(what: str, seconds: float) -> None:
    if not (isinstance(seconds, float) and math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"impossible time of {what}: {seconds * 1e3!r} ms; times must be positive numbers")


def _join(name: Name) -> str:
    return "/".join(name)


def _split(text: str) -> Name:
    unit, _, entry = text.partition("/")
    return unit, entry
