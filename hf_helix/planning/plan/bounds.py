"""Lower bounds of windows: seconds that no order of issue can beat.

In:   a profile and a schedule, or a window as arrays.
Out:  seconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from hf_helix.config import parse_link
from hf_helix.planning.graph.operator import Graph, Kind, Part
from hf_helix.planning.schedule.actions import Schedule, num_microbatches_of, without_microbatches
from hf_helix.planning.timing.profile import EMULATED_LINK, REDUCTIONS_OVER, Profile
from hf_helix.planning.window.layout import Layout, Name
from hf_helix.planning.window.window import STREAMS, Window, WindowArrays


def busiest_link(loads: Iterable[tuple[str, float]]) -> float:
    """Lower bound of communication, from names of links and seconds over each: transfers on one link serialize, links
    are independent."""
    totals: dict[str, float] = {}
    for link, seconds in loads:
        totals[link] = totals.get(link, 0.0) + seconds
    return max(totals.values(), default=0.0)


def lower_bound(profile: Profile, schedule: Schedule) -> float:
    """Seconds that no order of a window can beat: `bound` for every micro-batch, or the busiest link of a rank, weight
    gathers and gradient reductions included."""
    layout, count = profile.layout, num_microbatches_of(schedule)
    arrays = Window(without_microbatches(schedule, 1), layout).arrays(profile.times)
    links = [busiest_link(_link_loads(profile, arrays, rank, count)) for rank in range(layout.num_ranks)]
    return max(count * bound(arrays, layout), *links)


def _link_loads(profile: Profile, arrays: WindowArrays, rank: int, count: int) -> Iterator[tuple[str, float]]:
    """Yields the communication of a window of `count` micro-batches, for `busiest_link`: each stream has a link of its
    own, gradient reductions use the link of the stream that the profile names, and an emulated link is shared by all.
    Transfers of the pipeline are left out.
    """
    moving = {kind: load for kind, load in arrays.loads_of(rank).items() if kind not in (Kind.COMPUTE, Kind.PIPELINE)}
    yield from ((kind.value, count * load) for kind, load in moving.items())
    emulated, own = profile.about.get(EMULATED_LINK), Kind.GRADIENTS.value
    layout = profile.layout
    names = list[Name]()
    for traffic in layout.traffic_of(rank):
        between_ranks = [name for name, op in traffic.named_operators if not op.kind.copies]
        names += between_ranks * (count if traffic.every_microbatch else 1)
    yield own if emulated else profile.about.get(REDUCTIONS_OVER, own), sum(profile.times[name] for name in names)
    if emulated:
        streams = {STREAMS.index(kind) for kind in moving if not kind.copies}
        mine = (
            place for place in range(len(arrays)) if arrays.ranks[place] == rank and arrays.streams[place] in streams
        )
        sent = count * sum(profile.bytes.get(arrays.names[arrays.entries[place]], 0) for place in mine)
        sent += sum(profile.bytes.get(name, 0) for name in names)
        yield "all", parse_link(emulated).seconds(sent)


def bound(arrays: WindowArrays, layout: Layout) -> float:
    """Seconds that no order of a window can beat: the load of the busiest stream, and the critical path of each strand
    through a rank's layers without weight gradients; half of the sum of both paths if two micro-batches of one
    direction are concurrent (warm-up and cool-down on several ranks, evaluation).
    """
    limits = [max(arrays.loads().values())]
    for rank in range(layout.num_ranks):
        forward, backward = (_critical_path(arrays, layout, letter, rank) for letter in "FB")
        single = layout.num_ranks == 1 and forward and backward
        limits.append(max(forward, backward) if single else (forward + backward) / 2)
    return max(limits)


def _critical_path(arrays: WindowArrays, layout: Layout, strand: str, rank: int) -> float:
    """Seconds of the critical paths through all repeating units of a strand of a rank."""
    names = [arrays.names[entry] for entry in arrays.entries]
    seconds = dict(zip(names, arrays.seconds, strict=True))
    passes = Counter(name for place, name in enumerate(names) if arrays.ranks[place] == rank)
    total = 0.0
    for unit, pair in layout.graphs.items():
        graph = pair.forward if strand == "F" else pair.backward
        count = passes[unit, f"{strand}.{graph.operators[0].name}"]
        if graph.repeats and count:
            of_unit = {op.name: seconds[unit, f"{strand}.{op.name}"] for op in graph.operators}
            total += count * critical_path(graph, of_unit)
    return total


def pass_seconds(graph: Graph, seconds: Mapping[str, float]) -> float:
    """Seconds of a pass of a unit by itself in canonical order, until its computation and its collectives have ended;
    prefetched operators, and transfers that no barrier waits for, are left out. Plans of one strand take no less.

    Args:
        graph: of the pass.
        seconds: of each operator.
    """
    free, ended = dict.fromkeys(Kind, 0.0), dict[str, float]()
    for op in graph.operators:
        if not op.ahead and (op.kind is Kind.COMPUTE or op.kind.is_awaited):
            needed = (ended[value] for value in op.depends_on if value in ended)
            end = max(free[op.kind], free[Kind.COMPUTE], *needed) + seconds[op.name]
            free[op.kind] = end
            if op.kind is not Kind.COMPUTE:
                ended.update(dict.fromkeys(op.writes, end))
    return max(free.values())


def critical_path(graph: Graph, seconds: Mapping[str, float]) -> float:
    """Seconds of the longest chain from the inputs of a unit to its outputs."""
    reached = dict.fromkeys(graph.inputs, 0.0)
    ended: dict[str, float] = {}
    for op in graph.operators:
        begins = [reached[value] for value in op.depends_on if value in reached]
        begins += [ended[name] for name in op.ordered_after if name in ended]
        if begins and op.part is not Part.W:
            ended[op.name] = max(begins) + seconds[op.name]
            reached.update(dict.fromkeys(op.writes, ended[op.name]))
    return max((reached[value] for value in graph.outputs if value in reached), default=0.0)
