"""Tiling: a collective and the linear beside it, cut into tiles along the sequence.

In:   a forward graph and a number of tiles; or a profile of whole operators.
Out:  the graph in which each all-gather in front of a linear, and each reduce-scatter behind one, is a row of tiles
      between those of the linear, so that even a single strand computes while it communicates (the paper's
      intra-batch baseline, after MegaScale); the profile of the tiled graphs.
Must hold: values that other operators read keep their names, so the rest of the graph is as before; tiles of one linear
declare their order, so its weight's gradient adds up in one order under every plan. Nothing here is measured: the
times of tiles are parts of the whole's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hf_helix.planning.graph.operator import Graph, Kind, Operator
from hf_helix.planning.graph.pair import GraphPair
from hf_helix.planning.layout import Layout
from hf_helix.planning.profile import Name, Pair, Profile, named_operators


@dataclass(frozen=True)
class Site:
    """Two operators that are cut together: a gather and the linear that reads it, or a linear and its scatter."""

    first: Operator
    second: Operator

    @property
    def gathers(self) -> bool:
        """Whether the communication comes first."""
        return self.second.split

    @property
    def cut(self) -> str:
        """Name of the operator that cuts what goes in."""
        return f"{self.first.name}.cut"

    @property
    def join(self) -> str:
        """Name of the operator that puts together what comes out."""
        return f"{self.second.name}.join"


def tile_graph(graph: Graph, tiles: int) -> Graph:
    """The forward graph with every collective that a linear reads or writes alone cut into tiles.

    Args:
        tiles: how many; with 1 the graph stays as it is.

    Raises:
        ValueError: fewer than one tile.
    """
    if tiles < 1:
        raise ValueError(f"tiles={tiles}: a collective is cut into at least one tile; 1 leaves it whole")
    if tiles == 1:
        return graph
    effort = _light(graph, tiles)
    replaced: dict[str, list[Operator]] = {}
    repeated = {value for op in graph.operators if op.again for value in op.writes}
    for site in sites(graph):
        pieces = _pieces(site, tiles, effort, again=site.first.reads[0] in repeated)
        replaced[site.first.name], replaced[site.second.name] = pieces
    operators = tuple(piece for op in graph.operators for piece in replaced.get(op.name, [op]))
    return replace(graph, operators=operators)


def sites(graph: Graph) -> list[Site]:
    """Where a graph can be tiled. A linear between a gather and a scatter goes with the gather."""
    readers: dict[str, list[Operator]] = {}
    for op in graph.operators:
        for value in op.reads:
            readers.setdefault(value, []).append(op)
    taken = {name for op in graph.operators if op.after for name in (op.name, *op.after)}  # tiles already
    found = []
    for gathers in (True, False):
        for first in graph.operators:
            if len(first.writes) != 1 or first.writes[0] in graph.outputs:
                continue
            reading = readers.get(first.writes[0], [])
            if len(reading) != 1 or {first.name, reading[0].name} & taken:
                continue
            site = Site(first, reading[0])
            if site.gathers is gathers and _fits(site):
                found.append(site)
                taken |= {first.name, reading[0].name}
    return found


def tile_profile(profile: Profile, tiles: int) -> Profile:
    """The profile of the tiled graphs, derived from the whole operators' times.

    A tile takes its part of the whole; cut and join take what the cheapest local operator of their graph takes forward,
    since they copy a value once in either direction. Operators slow each other down as the whole ones do.
    """
    if tiles == 1:
        return profile
    old = profile.layout
    graphs = {name: GraphPair.of(tile_graph(pair.forward, tiles)) for name, pair in old.graphs.items()}
    layout = Layout(old.units, old.chunks, graphs, ranks=old.ranks)
    sources = {name: _source(name, op, profile, tiles) for name, op in named_operators(layout)}
    times = {name: profile.times[source] / parts for name, (source, parts) in sources.items()}
    spread = {name: profile.spread.get(source, 0.0) for name, (source, _) in sources.items()}
    first = {name: name if name in times else _tile_entry(name, op, 0) for name, op in named_operators(old)}
    like = {name: first[profile.like.get(source, source)] for name, (source, _) in sources.items()}
    like = {name: other for name, other in like.items() if other != name}
    pairs = {}
    for a, b in profile.pairs:
        beside = profile.slowdown(a, b), profile.slowdown(b, a)
        pairs[first[a], first[b]] = Pair.of(times[first[a]], times[first[b]], *beside)
    return Profile({**profile.about, "tiled": "derived, not measured"}, layout, times, spread, pairs, like)


def _fits(site: Site) -> bool:
    linear, collective = (site.second, site.first) if site.gathers else (site.first, site.second)
    kind = collective.kind
    moves = kind in (Kind.LOCAL, Kind.CROSS) and collective.backward_kind in (None, kind)
    moves = moves and not collective.split
    return moves and linear.split and all(len(op.reads) == 1 for op in (linear, collective))


def _pieces(site: Site, tiles: int, effort: float, again: bool) -> tuple[list[Operator], list[Operator]]:
    """What stands in the place of the first and of the second operator, in canonical order.

    Args:
        again: whether backward runs again what comes before.
    """
    first, second = site.first, site.second
    parts = tuple(f"{site.cut}.{tile}" for tile in range(tiles))
    cut = Operator(name=site.cut, kind=Kind.COMPUTE, reads=first.reads, writes=parts, again=again, effort=effort)
    firsts = _tiles(first, parts)
    seconds = _tiles(second, [op.writes[0] for op in firsts])
    results = tuple(value for op in seconds for value in op.writes)
    join = Operator(
        name=site.join, kind=Kind.COMPUTE, reads=results, writes=second.writes, again=second.again, effort=effort
    )
    if site.gathers:  # every tile is on its way before the first is computed with
        return [cut, *firsts], [*seconds, join]
    return [cut, *(op for pair in zip(firsts, seconds, strict=True) for op in pair)], [join]


def _tiles(op: Operator, values: Sequence[str]) -> list[Operator]:
    """The operator once for each part of its input, in a row."""
    names = tuple(f"{op.name}.{tile}" for tile in range(len(values)))
    return [
        replace(
            op,
            name=names[tile],
            of="",
            reads=(value,),
            writes=tuple(f"{written}.{tile}" for written in op.writes),
            after=names[:tile],
            effort=op.effort / len(values),
        )
        for tile, value in enumerate(values)
    ]


def _local_operators(graph: Graph) -> Iterator[Operator]:
    return (op for op in graph.operators if op.kind is Kind.COMPUTE and not op.split)


def _light(graph: Graph, tiles: int) -> float:
    """The effort of a cut or join: half the lightest local operator's, since backward counts double."""
    least = min((op.effort for op in graph.operators), default=1.0) / tiles
    return min((op.effort for op in _local_operators(graph)), default=least) / 2


def _tile_entry(name: Name, op: Operator, tile: int) -> Name:
    """What a tile of an operator is called: X.W becomes X.0.W."""
    unit, entry = name
    return unit, f"{entry[0]}.{op.of}.{tile}{op.name.removeprefix(op.of)}"


def _source(name: Name, op: Operator, profile: Profile, tiles: int) -> tuple[Name, int]:
    """The operator that the time of a tiled graph's operator is taken from, and into how many parts."""
    if name in profile.times:
        return name, 1
    unit, entry = name
    base, _, last = op.of.rpartition(".")
    if last.isdecimal():
        return (unit, f"{entry[0]}.{base}{op.name.removeprefix(op.of)}"), tiles
    whole = profile.layout.graphs[unit].forward
    local = list(_local_operators(whole))
    cheapest = min(((unit, f"F.{other.name}") for other in local or whole.operators), key=profile.times.__getitem__)
    return cheapest, 1 if local else tiles
