"""The paper's intra-batch baseline (after MegaScale): one micro-batch at a time, collectives cut into tiles.

In:   the graphs of a model's units, their profile, and a number of tiles.
Out:  the tiled graphs, their profile, and a step with them. Each all-gather before a linear, and each reduce-scatter
      after a linear, is cut into tiles, issued in turn with the tiles of the linear. So even the single strand of the
      plan `sequential` overlaps computation and communication.
Must hold: values with other readers keep their names, so the rest of the graph is unchanged. The tiles of a linear add
to the gradient of its weight in one order. Times are derived, not measured: a tile takes its part of the operator's
time.

`benchmarks.paper.tiled_units` runs tiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hf_helix.doctor.amounts.records import Amounts
from hf_helix.doctor.step import Step
from hf_helix.doctor.window import WindowClock
from hf_helix.planning.graph.backward import (
    GraphPair,
    advance,
    backward_graph,
    backward_parts,
    place_recomputation,
    place_weights,
)
from hf_helix.planning.graph.operator import Graph, Kind, Operator
from hf_helix.planning.parameters import Parameter
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.profile import Pair, Profile
from hf_helix.planning.window.layout import Layout, Name, is_traffic, named_operators


@dataclass(frozen=True)
class Site:
    """Two operators cut together: a gather and the linear after it, or a linear and its scatter."""

    first: Operator
    second: Operator

    @property
    def operators(self) -> tuple[Operator, Operator]:
        """Both, in forward order."""
        return self.first, self.second

    @property
    def gathers(self) -> bool:
        """Whether the communication comes first."""
        return self.second.splits_dgrad_wgrad

    @property
    def cut(self) -> str:
        """The name of the operator that cuts the input."""
        return f"{self.first.name}.cut"

    @property
    def join(self) -> str:
        """The name of the operator that joins the outputs."""
        return f"{self.second.name}.join"


def tile_graph(graph: Graph, tiles: int) -> Graph:
    """Returns the forward graph with every collective of a single linear cut into tiles."""
    cut = sites(graph) if tiles > 1 else []
    if not cut:
        return graph
    repeated = {value for op in graph.operators if op.recomputed for value in op.writes}
    replaced: dict[str, list[Operator]] = {}
    for site in cut:
        pieces = _pieces(site, tiles, recomputed=site.first.reads[0] in repeated)
        replaced[site.first.name], replaced[site.second.name] = pieces
    operators = tuple(piece for op in graph.operators for piece in replaced.get(op.name, [op]))
    return replace(graph, operators=operators)


def tile_pairs(pairs: Mapping[str, GraphPair], tiles: int) -> Mapping[str, GraphPair]:
    """The graphs of all units with their collectives cut into tiles."""
    return {name: tile_pair(pair, tiles) for name, pair in pairs.items()}


def tile_layout(layout: Layout, tiles: int) -> Layout:
    """The layout with tiled graphs. Every tile of a linear adds to the gradient of its weight; `shared` is left out."""
    graphs = tile_pairs(layout.graphs, tiles)

    def adders(unit: int, name: str) -> list[tuple[int, str]]:
        return [(unit, each) for each in _adders(graphs[layout.units[unit]], name, tiles)]

    traffic = [
        replace(moved, adders=tuple(each for adder in moved.adders for each in adders(*adder)))
        for moved in layout.traffic
    ]
    return replace(layout, graphs=graphs, shared=(), traffic=traffic)


def _adders(pair: GraphPair, name: str, tiles: int) -> list[str]:
    """The operators of a tiled graph that add to a gradient in the place of an operator."""
    known = {op.name for op in pair.backward.operators}
    return [name] if name in known else [f"{name.removesuffix('.W')}.{tile}.W" for tile in range(tiles)]


def tile_pair(pair: GraphPair, tiles: int) -> GraphPair:
    """Returns the tiled forward graph and its backward: communication of tiles as early as possible, and the W's of a
    row of tiles after all I's of the row with communication after them, to overlap it."""
    forward = tile_graph(pair.forward, tiles)
    if forward is pair.forward:
        return pair
    rows = [[f"{op.name}.{tile}" for tile in range(tiles)] for site in sites(pair.forward) for op in site.operators]
    # Backward takes a row from its last tile to its first.
    later = {name: tuple(row[tile + 1 :]) for row in rows for tile, name in enumerate(row)}
    parts = backward_parts(forward)
    chain = [
        op if op.splits_dgrad_wgrad else replace(op, ordered_after=(*later.get(op.name, ()), *op.ordered_after))
        for op in parts.chain
    ]
    weights = {
        name: replace(weight, ordered_after=tuple(f"{tile}.W" for tile in later.get(weight.forward_name, ())))
        for name, weight in parts.weights.items()
    }
    early = {op.name for op in chain if op.kind.communicates and (op.name in later or op.recomputed)}

    def row_goes_on(op: Operator, following: Operator | None, waiting: Sequence[Operator]) -> bool:
        """Whether the W's wait until after the communication of all tiles of their row."""
        further = weights.get(following.name) if following else None
        return (
            op.kind.communicates
            and further is not None
            and any(weight.name in further.ordered_after for weight in waiting)
        )

    operators = place_weights(advance(chain, early), weights, row_goes_on)
    return GraphPair(forward, backward_graph(forward, place_recomputation(operators, parts.recomputation)))


def sites(graph: Graph) -> list[Site]:
    """Returns the tileable sites of a graph. A linear between a gather and a scatter is tiled with the gather."""
    readers: dict[str, list[Operator]] = {}
    for op in graph.operators:
        for value in op.reads:
            readers.setdefault(value, []).append(op)
    taken: set[str] = set()
    result = []
    for gathers in (True, False):
        for first in graph.operators:
            if len(first.writes) != 1 or first.writes[0] in graph.outputs:
                continue
            reading = readers.get(first.writes[0], [])
            if len(reading) != 1 or {first.name, reading[0].name} & taken:
                continue
            site = Site(first, reading[0])
            if site.gathers is gathers and _fits(site):
                result.append(site)
                taken |= {first.name, reading[0].name}
    return result


def tile_profile(profile: Profile, tiles: int) -> Profile:
    """Returns the profile of the tiled graphs, derived from the times of the untiled operators.

    A tile takes its part of the time; cut and join take as long as the cheapest local operator of their graph in
    forward, since a value is copied once in either direction. Slowdowns equal the slowdowns of untiled operators.
    """
    if tiles == 1:
        return profile
    old = profile.layout
    layout = tile_layout(old, tiles)
    sources = {name: source_of(name, op, profile, tiles) for name, op in named_operators(layout)}
    times = {name: profile.times[source] / parts for name, (source, parts) in sources.items()}
    of_window = [name for name in profile.times if is_traffic(name)]  # also reductions outside a part of the window
    times |= {name: profile.times[name] for name in of_window}
    spread = {name: profile.spread.get(source, 0.0) for name, (source, _) in sources.items()}
    first = {name: name if name in times else _first_tile(name, op) for name, op in named_operators(old)}
    first |= {name: name for name in of_window}
    like = {name: first[profile.like.get(source, source)] for name, (source, _) in sources.items()}
    like = {name: other for name, other in like.items() if other != name}
    pairs = {}
    for a, b in profile.pairs:
        if not {first[a], first[b]} <= times.keys():
            continue  # a sum of gradients that the backward of a cut takes over
        beside = profile.slowdown(a, b), profile.slowdown(b, a)
        pairs[first[a], first[b]] = Pair.of(times[first[a]], times[first[b]], *beside)
    return Profile({**profile.about, "tiled": "derived, not measured"}, layout, times, spread, pairs, like)


def step_in_tiles(
    step: Step, profile: Profile, amounts: Amounts, cluster: Cluster, tiles: int, reduces: bool = True
) -> Step:
    """Returns a step whose window runs tiled graphs, in the memory of the untiled step.

    Args:
        step: under the plan `sequential`.
        profile: the times of the tiled graphs, see `tile_profile`.
        amounts: of whole operators.
        cluster: what the step runs on.
        tiles: how many.
        reduces: whether gradients are reduced and weights gathered in the window.
    """
    pairs = tile_pairs(amounts.layout.graphs, tiles)

    names = amounts.layout.units

    def tiled(row: Parameter) -> Parameter:
        each = ((unit, tile) for unit, op in row.adders for tile in _adders(pairs[names[unit]], op, tiles))
        return replace(row, adders=tuple(each))

    of_tiles = replace(
        amounts,
        layout=replace(amounts.layout, graphs=pairs),
        parameters=[tiled(row) for row in amounts.parameters],
    )
    clock = WindowClock(profile, of_tiles, step.case, cluster, step.fidelity, reduces=reduces)
    made = clock.time()
    return replace(
        step,
        window=step.casts + max(made.seconds, step.issuing),
        sums=made.reductions,
        exposed={kind: seconds for kind, seconds in made.exposed.items() if step.loads[kind]},
        bubble=made.bubble / made.seconds,
        waits=made.waits,
        planned=None,
    )


def _fits(site: Site) -> bool:
    linear, collective = (site.second, site.first) if site.gathers else (site.first, site.second)
    kind = collective.kind
    moves = kind in (Kind.INTRA_NODE, Kind.INTER_NODE) and collective.backward_kind in (None, kind)
    moves = moves and not collective.splits_dgrad_wgrad
    return moves and linear.splits_dgrad_wgrad and all(len(op.reads) == 1 for op in (linear, collective))


def _pieces(site: Site, tiles: int, recomputed: bool) -> tuple[list[Operator], list[Operator]]:
    """The tiles of the first and of the second operator, in canonical order; `recomputed`: whether backward recomputes
    the operators before."""
    first, second = site.first, site.second
    parts = tuple(f"{site.cut}.{tile}" for tile in range(tiles))
    cut = Operator(name=site.cut, kind=Kind.COMPUTE, reads=first.reads, writes=parts, recomputed=recomputed)
    firsts = _tiles(first, parts)
    seconds = _tiles(second, [op.writes[0] for op in firsts])
    results = tuple(value for op in seconds for value in op.writes)
    join = Operator(
        name=site.join,
        kind=Kind.COMPUTE,
        reads=results,
        writes=second.writes,
        recomputed=second.recomputed,
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
            forward_name="",
            reads=(value,),
            writes=tuple(f"{written}.{tile}" for written in op.writes),
        )
        for tile, value in enumerate(values)
    ]


def _first_tile(name: Name, op: Operator) -> Name:
    """The name of the first tile of an operator: X.W becomes X.0.W."""
    unit, entry = name
    return unit, f"{entry[0]}.{op.forward_name}.0{op.name.removeprefix(op.forward_name)}"


def source_of(name: Name, op: Operator, profile: Profile, tiles: int) -> tuple[Name, int]:
    """Returns the whole operator of a tiled graph's operator, and its number of parts."""
    if name in profile.times:
        return name, 1
    unit, entry = name
    base, _, last = op.forward_name.rpartition(".")
    if last.isdecimal():
        return (unit, f"{entry[0]}.{base}{op.name.removeprefix(op.forward_name)}"), tiles
    whole = profile.layout.graphs[unit].forward.operators
    local = [op for op in whole if op.kind is Kind.COMPUTE and not op.splits_dgrad_wgrad]
    cheapest = min(((unit, f"F.{other.name}") for other in local or whole), key=profile.times.__getitem__)
    return cheapest, 1 if local else tiles
