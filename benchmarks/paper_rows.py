"""The paper's dense rows on paper: how near every rule comes to the bound, by the cost function.

In:   the shapes of the twelve dense A40 rows (figures 11 and 12) and of the two A800 Llama-66B rows (figure 13), and
      the rates of the modelled bounds: GEMM, attention, NCCL in a node, network card.
Out:  a profile per row; per rule the milliseconds of one layer in the steady state, beside the bound and the paper's
      gain.
Must hold: no device and no torch is needed; C, L and X of a row are the reference's table: multi-head attention (MHA,
as the authors coded it; with GQA the table does not come out), causal attention, backward twice the forward. That table
has no time for norms, additions and activations; here each takes a microsecond, or with `--memory` its bytes at the
bandwidth of the memory.

One layer and one sequence. A steady state is the forward of one micro-batch beside the backward of another through N
layers; what a layer takes is the difference between two N, so that the ends do not count.

    python benchmarks/paper_rows.py --contention 1.0 1.2
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from hf_helix import config
from hf_helix.planning.cost import simulate, work_of
from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part
from hf_helix.planning.graph.pair import GraphPair
from hf_helix.planning.instructions import window_instructions
from hf_helix.planning.layout import Layout
from hf_helix.planning.pipeline.actions import Action, Schedule, Slot
from hf_helix.planning.plans.plan import Plan
from hf_helix.planning.plans.registry import make_plan
from hf_helix.planning.plans.search import bound
from hf_helix.planning.profile import Name, Pair, Profile, named_operators
from hf_helix.planning.program import build_programs

RULES = tuple(rule for rule in config.RULES if rule != "intra_batch")
LAYERS = (8, 24)
TINY = 1e-6
BYTES = 2  # of a number
KINDS = (Kind.COMPUTE, Kind.INTRA_NODE, Kind.INTER_NODE)


@dataclass(frozen=True)
class Machine:
    """Rates per GPU: FLOPs a second of GEMMs and of attention; bytes a second in a node, on the network, of memory."""

    gemm: float
    attention: float
    node: float
    network: float
    memory: float


# The network: 100 Gb/s, or 4 x 200 Gb/s, for 8 GPUs, at 90 % (1.406 and 11.25 GB/s; the reference prints 1.4 and 11.3).
A40 = Machine(0.65 * 149.7e12, 0.42 * 149.7e12, 18e9, 0.9 * 12.5e9 / 8, 696e9)
A800 = Machine(0.77 * 312e12, 0.55 * 312e12, 160e9, 0.9 * 100e9 / 8, 2039e9)


@dataclass(frozen=True)
class Row:
    """One configuration of the paper: its shape, the reference's C, L and X in ms, and the gain over Megatron."""

    name: str
    machine: Machine
    hidden: int
    inner: int
    gated: bool
    sequence: int
    tp: int
    cp: int
    printed: tuple[float, float, float]
    gain: float

    @property
    def tokens(self) -> int:
        """Of a sequence, on the ranks that share a part of it."""
        return self.sequence // self.cp

    @property
    def ring(self) -> Kind:
        """Where the ring of context parallelism runs: between nodes, unless TP and CP fit in one."""
        return Kind.INTRA_NODE if self.tp * self.cp <= 8 else Kind.INTER_NODE


_8B, _25B, _39B = (4096, 14336, True), (8192, 28672, True), (16384, 53248, True)
_GPT7, _GPT18, _GPT30 = (4096, 16384, False), (6144, 24576, False), (12288, 49152, False)
ROWS = (
    Row("Llama-8B TP4", A40, *_8B, 8192, 4, 1, (37, 22, 0), 1.306),
    Row("Llama-25B TP8", A40, *_25B, 8192, 8, 1, (68, 52, 0), 1.405),
    Row("Llama-39B TP8", A40, *_39B, 8192, 8, 1, (246, 104, 0), 1.267),
    Row("GPT-6.7B TP4", A40, *_GPT7, 8192, 4, 1, (32, 22, 0), 1.256),
    Row("GPT-18B TP8", A40, *_GPT18, 8192, 8, 1, (34, 39, 0), 1.402),
    Row("GPT-30B TP8", A40, *_GPT30, 8192, 8, 1, (124, 78, 0), 1.360),
    Row("Llama-8B CP2", A40, *_8B, 16384, 4, 2, (44, 30, 0), 1.304),
    Row("Llama-25B CP2", A40, *_25B, 16384, 8, 2, (75, 52, 95), 1.302),
    Row("Llama-39B CP2", A40, *_39B, 16384, 8, 2, (259, 104, 191), 1.387),
    Row("GPT-6.7B CP2", A40, *_GPT7, 16384, 4, 2, (39, 30, 0), 1.311),
    Row("GPT-18B CP2", A40, *_GPT18, 16384, 8, 2, (38, 39, 72), 1.218),
    Row("GPT-30B CP2", A40, *_GPT30, 16384, 8, 2, (134, 78, 143), 1.227),
    Row("A800 66B CP2", A800, *_25B, 16384, 8, 2, (30, 6, 12), 1.074),
    Row("A800 66B CP4", A800, *_25B, 32768, 8, 4, (35, 6, 30), 1.241),
)


# --- Graphs ---


def layer_graphs(row: Row) -> GraphPair:
    """A decoder layer as the authors count its operators: 14 forward; backward every W apart. With CP, a ring."""
    pair = GraphPair.of(_plain_layer())
    if row.cp == 1:
        return pair
    return GraphPair(
        _replaced(pair.forward, list(_ring_forward(row.cp, row.ring))),
        _replaced(pair.backward, list(_ring_backward(row.cp, row.ring))),
    )


def _plain_layer() -> Graph:
    def op(name: str, reads: str, writes: str, kind: Kind = Kind.COMPUTE, split: bool = False) -> Operator:
        return Operator(
            name=name, kind=kind, reads=tuple(reads.split()), writes=tuple(writes.split()), splits_dgrad_wgrad=split
        )

    operators = (
        op("attn.norm", "x", "a"),
        op("attn.gather", "a", "a.all", Kind.INTRA_NODE),
        op("attn.qkv", "a.all", "q kv", split=True),
        op("attn.core", "q kv", "context"),
        op("attn.out", "context", "b.partial", split=True),
        op("attn.scatter", "b.partial", "b", Kind.INTRA_NODE),
        op("attn.add", "b x", "y"),
        op("mlp.norm", "y", "c"),
        op("mlp.gather", "c", "c.all", Kind.INTRA_NODE),
        op("mlp.first", "c.all", "d", split=True),
        op("mlp.act", "d", "e"),
        op("mlp.second", "e", "f.partial", split=True),
        op("mlp.scatter", "f.partial", "f", Kind.INTRA_NODE),
        op("mlp.add", "f y", "z"),
    )
    return Graph("layer", operators, ("x",), ("z",), repeats=True)


def _replaced(graph: Graph, ring: Sequence[Operator]) -> Graph:
    place = [op.name for op in graph.operators].index("attn.core")
    return dataclasses.replace(graph, operators=(*graph.operators[:place], *ring, *graph.operators[place + 1 :]))


def _ring_forward(cp: int, kind: Kind) -> Iterator[Operator]:
    """K and V of the neighbour arrive beside the block before; blocks add up in order. `cp` - 1 hops."""
    for i in range(cp):
        keys = f"kv{i}" if i else "kv"
        if i + 1 < cp:
            yield Operator(name=f"attn.hop{i + 1}", kind=kind, reads=(keys,), writes=(f"kv{i + 1}",))
        before = (f"part{i - 1}",) if i else ()
        after = f"part{i}" if i + 1 < cp else "context"
        yield Operator(name=f"attn.block{i}", kind=Kind.COMPUTE, reads=("q", keys, *before), writes=(after,))


def _ring_backward(cp: int, kind: Kind) -> Iterator[Operator]:
    """K and V go round again (`cp` - 1 hops, from when the layer's backward starts); their gradients follow, every rank
    adding its own, until they are where they belong (`cp` hops)."""
    for i in range(cp):
        if i + 1 < cp:
            source = f"keys{i}" if i else "d.z"
            yield _backward(f"attn.hop{i + 1}", kind, (source,), (f"keys{i + 1}",))
        reads = ("d.context", f"keys{i}", f"d.q{i - 1}") if i else ("d.context",)
        yield _backward(f"attn.block{i}", Kind.COMPUTE, reads, (f"d.q{i}" if i + 1 < cp else "d.q", f"own{i}"))
        if i:
            yield _backward(f"attn.sum{i}", Kind.COMPUTE, (f"own{i}", f"came{i}"), (f"sum{i}",), of=f"attn.hop{i}")
        ready, arrives = (f"sum{i}" if i else "own0"), (f"came{i + 1}" if i + 1 < cp else "d.kv")
        yield _backward(f"attn.send{i}", kind, (ready,), (arrives,), of=f"attn.block{i}")


def _backward(name: str, kind: Kind, reads: tuple[str, ...], writes: tuple[str, ...], of: str = "") -> Operator:
    return Operator(
        name=name,
        kind=kind,
        reads=reads,
        writes=writes,
        part=Part.B,
        forward_name=of,
        accumulates=(None,) * len(writes),
    )


# --- Profiles ---


def row_profile(row: Row, layers: int = 3, contention: float = 1.0, memory: bool = False) -> Profile:
    """One rank with two chunks of `layers` layers.

    Args:
        contention: how many times longer computation and communication take beside each other; local beside cross
            communication is not slowed.
        memory: whether norms, additions and activations take their bytes at the bandwidth of the memory.
    """
    layout = Layout(
        ["layer"] * 2 * layers, {0: range(layers), 1: range(layers, 2 * layers)}, {"layer": layer_graphs(row)}
    )
    forward = _forward_seconds(row)
    small = _memory_seconds(row) if memory else {}
    times: dict[Name, float] = {}
    for (unit, entry), op in named_operators(layout):
        if entry in small or op.forward_name in forward:
            twice = op.part is Part.B and op.kind is Kind.COMPUTE and not op.name.startswith("attn.sum")
            times[unit, entry] = small.get(entry) or forward[op.forward_name] * (1 + twice)
        else:
            times[unit, entry] = TINY
        if op.name.startswith("attn.send"):
            times[unit, entry] = _hop_seconds(row)
        if op.name.startswith("attn.sum"):
            times[unit, entry] = small.get(entry, TINY)
    return Profile({"row": row.name}, layout, times, pairs=_slow_pairs(layout, times, contention))


def _forward_seconds(row: Row) -> dict[str, float]:
    """Of everything but the small operators."""
    machine, tokens, hidden = row.machine, row.tokens, row.hidden

    def gemm(columns: int) -> float:
        return 2 * tokens * hidden * columns / row.tp / machine.gemm

    collective = (row.tp - 1) / row.tp * tokens * hidden * BYTES / machine.node
    core = 2 * row.sequence * tokens * hidden / row.tp / machine.attention  # half of 4: causal
    seconds = {
        "attn.qkv": gemm(3 * hidden),
        "attn.core": core,
        "attn.out": gemm(hidden),
        "mlp.first": gemm((1 + row.gated) * row.inner),
        "mlp.second": gemm(row.inner),
    }
    seconds |= {f"{block}.{name}": collective for block in ("attn", "mlp") for name in ("gather", "scatter")}
    seconds |= {f"attn.block{i}": core / row.cp for i in range(row.cp)}
    seconds |= {f"attn.hop{i}": _hop_seconds(row) for i in range(1, row.cp)}
    return seconds


def _hop_seconds(row: Row) -> float:
    rate = row.machine.node if row.ring is Kind.INTRA_NODE else row.machine.network
    return 2 * row.tokens * row.hidden / row.tp * BYTES / rate


def _memory_seconds(row: Row) -> dict[str, float]:
    """Of the small operators, by what they read and write: the streams of numbers that pass the memory."""
    stream = row.tokens / row.tp * row.hidden * BYTES / row.machine.memory
    inner = row.tokens / row.tp * row.inner * BYTES / row.machine.memory
    seconds = {}
    for block in ("attn", "mlp"):
        seconds |= {f"F.{block}.norm": 2 * stream, f"B.{block}.norm": 4 * stream}  # the sum of gradients with it
        seconds |= {f"F.{block}.add": 3 * stream, f"B.{block}.add": 2 * stream}
    seconds |= {"F.mlp.act": (2 + row.gated) * inner, "B.mlp.act": (3 + 2 * row.gated) * inner}
    return seconds | {f"B.attn.sum{i}": 6 * stream for i in range(1, row.cp)}


def _slow_pairs(layout: Layout, times: Mapping[Name, float], contention: float) -> dict[tuple[Name, Name], Pair]:
    """One measurement for computation beside each kind of communication; the profile takes it for all of the kind."""
    if contention == 1.0:
        return {}
    compute = ("layer", "F.mlp.first")
    others = {op.kind: name for name, op in named_operators(layout) if op.kind.communicates}
    pairs = {}
    for other in others.values():
        a, b = times[compute], times[other]
        shared, rest = contention * min(a, b), abs(a - b)
        first, second = (shared, shared + rest) if a <= b else (shared + rest, shared)
        pairs[compute, other] = Pair(shared + rest, first, second)
    return pairs


def totals(profile: Profile) -> dict[Kind, float]:
    """C, L and X: seconds of one layer, forward and backward."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for name, op in named_operators(profile.layout):
        seconds[op.kind] += profile.times[name]
    return seconds


# --- Steady state ---


@dataclass(frozen=True)
class Result:
    """Milliseconds of a layer in the steady state.

    Attributes:
        bound: no plan takes less: the busiest stream and each strand's way through a layer, nothing being slowed.
        slowed: the same, where whatever overlaps is slowed (see `slowed_load`).
        rules: of each rule.
        planning: seconds of a processor that making each rule's plan took.
    """

    row: Row
    loads: tuple[float, ...]
    bound: float
    slowed: float
    rules: Mapping[str, float]
    planning: Mapping[str, float]


def judge(row: Row, contention: float = 1.0, memory: bool = False, rules: Sequence[str] = RULES) -> Result:
    """Plan a row with every rule, and measure the plans on paper."""
    profile = row_profile(row, 3, contention, memory)
    steps, planning = {}, {}
    for rule in rules:
        start = time.process_time()
        chain, schedule = fused(profile, 40)
        plan = make_plan(rule, chain, model="layer", mesh={}, schedule=schedule)
        planning[rule] = time.process_time() - start
        steps[rule] = 1e3 * steady_seconds(plan, profile)
    loads = totals(profile)
    least = 1e3 * lower_bound(profile)
    slowed = 1e3 * slowed_load([loads[kind] for kind in KINDS], contention)
    return Result(row, tuple(1e3 * loads[kind] for kind in KINDS), least, max(least, slowed), steps, planning)


def fused(profile: Profile, layers: int) -> tuple[Profile, Schedule]:
    """The forward of a micro-batch beside the backward of another, through `layers` layers of one chunk."""
    layout = Layout(["layer"] * layers, {0: range(layers)}, profile.layout.graphs)
    return dataclasses.replace(profile, layout=layout), [[Slot(Action(0, "F", 1), Action(0, "B", 0))]]


def steady_seconds(plan: Plan, profile: Profile, layers: tuple[int, int] = LAYERS) -> float:
    """Of one layer, far from the ends."""
    short, long = (_fused_seconds(plan, *fused(profile, count)) for count in layers)
    return (long - short) / (layers[1] - layers[0])


def _fused_seconds(plan: Plan, profile: Profile, schedule: Schedule) -> float:
    (program,) = build_programs(schedule, profile.layout, plan)
    work = work_of(program, profile.layout, profile.times)
    return simulate(work, profile.slowdown if profile.pairs else None).seconds


def lower_bound(profile: Profile) -> float:
    """Seconds of one layer that no plan beats."""
    profile, schedule = fused(profile, LAYERS[0])
    work = work_of(window_instructions(schedule, profile.layout), profile.layout, profile.times)
    return bound(work, profile.layout) / LAYERS[0]


def slowed_load(loads: Sequence[float], contention: float) -> float:
    """Seconds that the loads take at least where overlap slows them.

    At every moment some set of the three streams is busy, each at a known rate: 1 / contention for every stream that
    it is slowed by. Whatever the plan, the time spent in each set satisfies one equation per stream (rate times time
    is its load), so the least total under these equations, a linear program, is a bound. Its optimum uses at most
    three sets.
    """
    compute, *others = range(len(loads))
    columns = []
    for size in (1, 2, 3):
        for busy in itertools.combinations(range(len(loads)), size):
            beside = sum(stream in busy for stream in others)
            rates = [0.0] * len(loads)
            for stream in busy:
                rates[stream] = contention ** -(beside if stream == compute else compute in busy)
            columns.append(rates)
    best = sum(loads)
    for chosen in itertools.combinations(columns, 3):
        spent = _solve(chosen, loads)
        if spent is not None and min(spent) >= -1e-12:
            best = min(best, sum(spent))
    return best


def _solve(columns: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """Cramer's rule for three equations."""
    (a, b, c), whole = columns, _determinant(*columns)
    if abs(whole) < 1e-12:
        return None
    return [_determinant(right, b, c) / whole, _determinant(a, right, c) / whole, _determinant(a, b, right) / whole]


def _determinant(a: Sequence[float], b: Sequence[float], c: Sequence[float]) -> float:
    cross = (b[1] * c[2] - b[2] * c[1], b[2] * c[0] - b[0] * c[2], b[0] * c[1] - b[1] * c[0])
    return a[0] * cross[0] + a[1] * cross[1] + a[2] * cross[2]


# --- Output ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contention", type=float, nargs="+", default=[1.0, 1.2])
    parser.add_argument("--memory", action="store_true", help="norms, additions and activations take time")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    for contention in args.contention:
        with ProcessPoolExecutor(args.workers) as pool:
            job = partial(judge, contention=contention, memory=args.memory, rules=args.rules)
            print(f"\nContention {contention:g}\n" + table(list(pool.map(job, ROWS))))


def table(results: Sequence[Result]) -> str:
    """One line per row: C/L/X here and in the reference, the bounds, and of every rule ms, share of the bound, gain."""
    rules = list(results[0].rules)
    first = rules[0]
    head = f"{'row':14}{'C/L/X ms':>18}{'(reference)':>14}{'bound':>8}{'slowed':>8}"
    lines = [head + "".join(f"{rule:>22}" for rule in rules) + f"{'paper':>7}"]
    for result in results:
        loads, printed = (
            "/".join(f"{ms:.{d}f}" for ms in part) for part, d in ((result.loads, 1), (result.row.printed, 0))
        )
        cells = [f"{ms:9.2f}{result.slowed / ms:6.1%}{result.rules[first] / ms:6.2f}x" for ms in result.rules.values()]
        start = f"{result.row.name:14}{loads:>18}{printed:>14}{result.bound:8.2f}{result.slowed:8.2f}"
        lines.append(start + "".join(f"{cell:>22}" for cell in cells) + f"{result.row.gain:6.2f}x")
    mean = partial(_mean, results)
    cells = [
        f"{mean(lambda r, n=rule: r.slowed / r.rules[n]):15.1%}"
        f"{mean(lambda r, n=rule: r.rules[first] / r.rules[n]):6.2f}x"
        for rule in rules
    ]
    lines.append(f"{'mean':62}" + "".join(f"{cell:>22}" for cell in cells) + f"{mean(lambda r: r.row.gain):6.2f}x")
    slowest = max(max(result.planning.values()) for result in results)
    return "\n".join(
        [*lines, f"shares are of the slowed bound; gains over {first}; planning took {slowest:.1f} s at most"]
    )


def _mean(results: Sequence[Result], value: Callable[[Result], float]) -> float:
    return sum(value(result) for result in results) / len(results)


if __name__ == "__main__":
    main()
