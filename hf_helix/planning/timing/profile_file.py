"""Profiles and graphs as JSON files.

In:   a `Profile`, or the path of a file.
Out:  readable JSON, or the `Profile`.
Must hold: a file that is damaged, of another version or for other operators is an error with the reason. The keys of an
operator are the fields of `Operator`; a field with its default value is left out, so a new field with a default needs
no other format.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, astuple, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Kind, Operator
from hf_helix.planning.text import first_difference, format_json, round_ms
from hf_helix.planning.timing.profile import OperatorMemory, Pair, Profile, join_name
from hf_helix.planning.traffic import Bucket, FlatWeights
from hf_helix.planning.window.layout import Layout, Name, with_traffic

FORMAT = "hf_helix.profile/1"


def load_profile(
    path: str | Path,
    *,
    about: Mapping[str, str] | None = None,
    layout: Layout | None = None,
) -> Profile:
    """Reads a profile file.

    Args:
        about: entries of `Profile.about` that must be equal.
        layout: the layout of the run, whose graphs the file must hold; None for the file's own layout.

    Raises:
        ValueError: damaged, impossible, incomplete or for another run; the error names the command that measures anew.
    """
    try:
        return _load(path, about or {}, layout)
    except ValueError as error:
        raise ValueError(
            f"profile file {path} {error}; measure anew with "
            f"`hf-helix profile --model FOLDER --tp_size N --output {path}`, or leave `profile` out"
        ) from error


def _load(path: str | Path, about: Mapping[str, str], layout: Layout | None) -> Profile:
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
        profile = _profile_from(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"is damaged: {f'it lacks {error}' if isinstance(error, KeyError) else error}") from error
    for key, value in about.items():
        if profile.about.get(key) != value:
            raise ValueError(f"is for {key} {profile.about.get(key)!r}, this run has {value!r}")
    return profile if layout is None else _for_layout(profile, layout)


def _for_layout(profile: Profile, layout: Layout) -> Profile:
    """The profile with another rank's layout of the same graphs."""
    known, wanted = ("\n".join(_described(each)) for each in (profile.layout, layout))
    if known != wanted:
        raise ValueError(f"is for other operators: {first_difference(known, wanted)}")
    return replace(profile, layout=layout)


def _described(layout: Layout) -> list[str]:
    return [graph.describe() for _, pair in sorted(layout.graphs.items()) for graph in (pair.forward, pair.backward)]


def _profile_from(data: Mapping[str, Any]) -> Profile:
    graphs = {name: GraphPair.of(graph_from(name, graph)) for name, graph in data["graphs"].items()}
    units = data["layout"]["units"]
    chunks = {int(stage): list(unit_names) for stage, unit_names in data["layout"]["chunks"].items()}
    if set(units) != graphs.keys() or any(unit not in range(len(units)) for chunk in chunks.values() for unit in chunk):
        raise ValueError("its layout names units that it does not hold")
    shared = [[(int(unit), str(name)) for unit, name in row] for row in data["layout"].get("shared", ())]
    buckets = [_bucket_from(row) for row in data["layout"].get("sums", ())]
    weights = [
        FlatWeights(tuple(map(int, row["units"])), str(row["name"]), int(row["bytes"]))
        for row in data["layout"].get("gathers", ())
    ]
    ranks = [int(rank) for rank in data["layout"].get("ranks", ())]
    if ranks and len(ranks) != len(chunks):
        raise ValueError(f"its layout has {len(chunks)} stages on {len(ranks)} ranks")
    times, spread, like, moved = {}, {}, {}, {}
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
    pairs = {}
    for row in data["pairs"]:
        seconds = (float(row[key]) / 1e3 for key in ("together_ms", "first_ms", "second_ms"))
        pairs[_split(row["first"]), _split(row["second"])] = Pair(*seconds)
    memory = {_split(name): OperatorMemory(*map(int, row)) for name, row in data.get("memory", {}).items()}
    about = {str(key): str(value) for key, value in data["about"].items()}
    layout = Layout(units, chunks, graphs, shared, ranks)
    layout = with_traffic(layout, buckets, weights, bool(data["layout"].get("on_host")), often=True)
    return Profile(about, layout, times, spread, pairs, like, moved, memory)


def _bucket_from(row: Mapping[str, Any]) -> Bucket:
    adders = tuple((int(unit), str(name)) for unit, name in row["adders"])
    return Bucket((), adders, int(row["bytes"]), can_reduce_often=bool(row.get("every_microbatch", False)))


def _split(text: str) -> Name:
    unit, _, entry = text.partition("/")
    return unit, entry


def profile_json(profile: Profile) -> str:
    """The text form of profile files."""
    operators: dict[str, dict[str, Any]] = {}
    for name, seconds in profile.times.items():
        figures: dict[str, Any] = {"ms": round_ms(seconds), "spread": round(profile.spread.get(name, 0.0), 3)}
        if name in profile.like:
            figures["like"] = join_name(profile.like[name])
        if name in profile.bytes:
            figures["bytes"] = profile.bytes[name]
        operators.setdefault(name[0], {})[name[1]] = figures
    reductions, moved = profile.layout.reductions, profile.layout.gathers
    sums = [
        {"bytes": each.bytes, "adders": [list(adder) for adder in each.adders]}
        | ({"every_microbatch": True} if each.every_microbatch else {})
        for each in reductions
    ]
    gathers = [
        {"bytes": each.bytes, "name": each.operators[-1].forward_name, "units": list(each.readers)} for each in moved
    ]
    memory = {join_name(name): list(astuple(each)) for name, each in profile.memory.items()}
    data = {
        "format": FORMAT,
        "about": dict(profile.about),
        "operators": operators,
        "pairs": [
            {
                "first": join_name(a),
                "second": join_name(b),
                "together_ms": round_ms(pair.together),
                "first_ms": round_ms(pair.first),
                "second_ms": round_ms(pair.second),
                "oef": round(profile.overlap_efficiency(a, b), 3),
            }
            for (a, b), pair in profile.pairs.items()
        ],
        "layout": {
            "units": list(profile.layout.units),
            "chunks": {str(stage): list(units) for stage, units in profile.layout.chunks.items()},
            "shared": [[list(each) for each in row] for row in profile.layout.shared],
            "ranks": list(profile.layout.ranks),
            **({"sums": sums} if sums else {}),
            **({"gathers": gathers} if gathers else {}),
            **({"on_host": True} if profile.layout.is_on_host else {}),
        },
        **({"memory": memory} if memory else {}),
        "graphs": {name: graph_data(pair.forward) for name, pair in profile.layout.graphs.items()},
    }
    return format_json(data) + "\n"


def save_profile(profile: Profile, path: str | Path) -> None:
    """Writes a profile to a file that `HelixConfig(profile=path)` and `hf-helix` take."""
    Path(path).write_text(profile_json(profile))


FORMS: dict[Any, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    str: (str, str),
    bool: (bool, bool),
    int: (int, int),
    float: (float, float),
    tuple[str, ...]: (" ".join, lambda text: tuple(text.split())),
    Kind: (lambda kind: kind.value, Kind),
    Kind | None: (lambda kind: kind and kind.value, lambda text: Kind(text) if text else None),
}
"""By the type of a field: the writer and the reader of its value."""
TYPES = get_type_hints(Operator)


LISTS = ("inputs", "outputs", "shown", "plain_inputs")
"""The lists of values of a graph; files leave out empty ones."""


def graph_data(graph: Graph) -> dict[str, Any]:
    """The data of a graph for a file."""
    return {
        **{name: " ".join(getattr(graph, name)) for name in LISTS if getattr(graph, name)},
        "repeats": graph.repeats,
        "operators": [_operator_data(operator) for operator in graph.operators],
    }


def graph_from(name: str, data: Mapping[str, Any]) -> Graph:
    """Returns the graph of a name.

    Raises:
        KeyError, TypeError, ValueError: the data lacks something or is of another sort.
    """
    operators = tuple(_operator_from(operator) for operator in data["operators"])
    if not isinstance(data["repeats"], bool):
        raise ValueError(f"graph {name!r}: repeats must be true or false, got {data['repeats']!r}")
    lists = {key: tuple(data.get(key, "").split()) for key in LISTS}
    return Graph(name, operators, repeats=data["repeats"], **lists)


def _operator_data(operator: Operator) -> dict[str, Any]:
    plain = Operator(name=operator.name, kind=operator.kind, reads=operator.reads, writes=operator.writes)
    written = {}
    for field in fields(Operator):
        value = getattr(operator, field.name)
        if field.default is MISSING or value != getattr(plain, field.name):
            write, _ = FORMS[TYPES[field.name]]
            written[field.name] = write(value)
    return written


def _operator_from(data: Mapping[str, Any]) -> Operator:
    known = {field.name: FORMS[TYPES[field.name]][1] for field in fields(Operator) if field.name in data}
    if unknown := data.keys() - known.keys():
        raise ValueError(f"operator {data.get('name')!r} has {', '.join(sorted(unknown))}, which this version lacks")
    return Operator(**{name: read(data[name]) for name, read in known.items()})
