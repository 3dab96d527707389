"""Graphs, layouts and profiles by hand, without a model, and strategies for random ones."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from hypothesis import strategies as st

from hf_helix.config import RECOMPUTE
from hf_helix.planning.graph.backward import GraphPair, transfer_graphs
from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part
from hf_helix.planning.plan.block_plan import round_robin, sequential
from hf_helix.planning.plan.list_scheduler import Priorities, PriorityPlan
from hf_helix.planning.plan.plan import graphs_digest
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.rules.dhelix import dhelix
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.schedule.named import build_schedule
from hf_helix.planning.timing.operator_clock import Timeline
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.timing.recompute import recomputed
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Layout, Name, named_operators, place_names


def compute(name: str, reads: str = "", writes: str = "", **options: object) -> Operator:
    return Operator(
        name=name, kind=Kind.COMPUTE, reads=tuple(reads.split()), writes=tuple((writes or name).split()), **options
    )


def linear(name: str, reads: str, writes: str = "", **options: object) -> Operator:
    return compute(name, reads, writes, splits_dgrad_wgrad=True, **options)


def autograd(name: str, reads: str, writes: str = "", **options: object) -> Operator:
    """What runs under autograd, and what selective recompute runs again."""
    return compute(name, reads, writes, has_saved_state=True, recompute_when_selective=True, **options)


def collective(name: str, reads: str, *, kind: Kind = Kind.INTRA_NODE, **options: object) -> Operator:
    return Operator(name=name, kind=kind, reads=(reads,), writes=(name,), **options)


def pair(name: str, *operators: Operator, inputs: str = "x", outputs: str = "", repeats: bool = False) -> GraphPair:
    """A unit of these operators; by default what the last one writes leaves it."""
    leaving = tuple(outputs.split()) or operators[-1].writes
    return GraphPair.of(Graph(name, operators, tuple(inputs.split()), leaving, repeats))


def llama_layer() -> Graph:
    """A Llama layer under tensor and sequence parallelism: the 14 operators of paper section 4.2."""
    operators = (
        autograd("attn.norm", "x"),
        collective("attn.gather", "attn.norm", recompute_when_selective=True),
        linear("attn.qkv", "attn.gather", "attn.qkv.q attn.qkv.k attn.qkv.v"),
        autograd("attention", "attn.qkv.q attn.qkv.k attn.qkv.v"),
        linear("attn.out", "attention"),
        collective("attn.scatter", "attn.out"),
        compute("attn.add", "x attn.scatter"),
        autograd("mlp.norm", "attn.add"),
        collective("mlp.gather", "mlp.norm", recompute_when_selective=True),
        linear("mlp.up", "mlp.gather", "mlp.up.gate mlp.up.up"),
        autograd("mlp.act", "mlp.up.gate mlp.up.up"),
        linear("mlp.down", "mlp.act"),
        collective("mlp.scatter", "mlp.down"),
        compute("mlp.add", "attn.add mlp.scatter"),
    )
    return Graph("layer", operators, ("x",), ("mlp.add",), repeats=True)


def llama_layer_on_one_rank() -> Graph:
    """The same layer without its four collectives: 10 operators."""
    whole = llama_layer()
    moved = {op.name: op.reads[0] for op in whole.operators if op.kind.communicates}
    kept = [op for op in whole.operators if op.name not in moved]
    operators = [replace(op, reads=tuple(moved.get(value, value) for value in op.reads)) for op in kept]
    return replace(whole, operators=tuple(operators))


EMBEDDING = pair("embedding", compute("lookup"), collective("scatter", "lookup"), inputs="")
HEAD = pair(
    "head",
    compute("norm", "x"),
    collective("gather", "norm"),
    linear("head", "gather"),
    compute("loss.statistics", "head"),
    collective("loss.gather", "loss.statistics", backward_kind=Kind.COMPUTE),
    compute("loss", "loss.gather"),
)
LLAMA = {"embedding": EMBEDDING, "layer": GraphPair.of(llama_layer()), "head": HEAD}

SMALL_LAYER = pair(
    "layer",
    autograd("norm", "x"),
    collective("gather", "norm", recompute_when_selective=True, relative_cost=4),
    linear("up", "gather", relative_cost=4),
    linear("down", "up", relative_cost=4),
    collective("scatter", "down", kind=Kind.INTER_NODE, relative_cost=4),
    compute("add", "x scatter"),
    repeats=True,
)
SMALL = {
    "embedding": EMBEDDING,
    "layer": SMALL_LAYER,
    "head": pair("head", linear("logits", "x"), compute("loss", "logits")),
}


def layout_of(graphs: Mapping[str, GraphPair], num_layers: int) -> Layout:
    """What the rank of a pipeline of one holds: everything, in two chunks."""
    units = ["embedding", *["layer"] * num_layers, "head"]
    first = 1 + (num_layers + 1) // 2
    return Layout(units, {0: list(range(first)), 1: list(range(first, len(units)))}, graphs)


def layers_only(layer: GraphPair, num_layers: int) -> Layout:
    """Nothing but layers, in two chunks: the second has none where there is one."""
    first = (num_layers + 1) // 2
    chunks = {0: list(range(first)), 1: list(range(first, num_layers))}
    return Layout(["layer"] * num_layers, chunks, {"layer": layer})


def schedule_of(num_microbatches: int) -> Schedule:
    """The W schedule on one rank."""
    return build_schedule("folded_1f1b", 1, num_microbatches)


def pipeline_of(graphs: Mapping[str, GraphPair], counts: Sequence[int], ranks: Sequence[int]) -> Layout:
    """What the ranks of a pipeline hold: so many layers on each virtual stage, and the ways between the ranks."""
    ranges = [range(first, last) for first, last in pairwise(accumulate(counts, initial=0))]
    units, chunks = place_names(["embedding", *["layer"] * sum(counts), "head"], ranks, ranges)
    return Layout(units, chunks, {**graphs, **transfer_graphs()}, ranks=ranks)


def loss_gradient(layout: Layout) -> tuple[int, str]:
    """The key of what backward starts from."""
    return len(layout.units) - 1, f"d.{layout.graphs[layout.units[-1]].forward.outputs[0]}"


def efforts(layout: Layout) -> dict[Name, float]:
    """Every operator takes its effort in ms."""
    return {name: op.relative_cost / 1e3 for name, op in named_operators(layout)}


def random_times(layout: Layout, seed: int) -> dict[Name, float]:
    """Whole milliseconds, anything from 1 to 12."""
    draw = random.Random(seed)
    return {name: draw.randint(1, 12) / 1e3 for name, _ in named_operators(layout)}


def random_priority(layout: Layout, seed: int) -> dict[Name, float]:
    draw = random.Random(seed)
    return {name: draw.uniform(-12e-3, 12e-3) for name, _ in named_operators(layout)}


def profile_of(layout: Layout, times: Mapping[Name, float] | None = None, **options: object) -> Profile:
    return Profile({"model": "Llama"}, layout, times or efforts(layout), **options)


def priority_plan(priorities: Priorities, layout: Layout) -> PriorityPlan:
    return PriorityPlan("by hand", "Llama", {"tp_size": 2}, graphs_digest(layout.graphs), priorities)


def timeline_of(priorities: Priorities, profile: Profile, schedule: Schedule) -> Timeline:
    """The predicted timeline of a window that list scheduling orders."""
    return predict(priority_plan(priorities, profile.layout), profile, schedule, timeline=True).timeline


def list_scheduled(schedule: Schedule, layout: Layout, priorities: Priorities) -> list[list[Instruction]]:
    """The instructions of every rank in the order in which list scheduling issues them."""
    ordered = priority_plan(priorities, layout).issue(schedule, layout)
    return [ordered.program(rank) for rank in range(len(schedule))]


ORDER_BLOCK = {"sequential": sequential, "round_robin": round_robin, "dhelix": dhelix}


def operators_of(program: Iterable[Instruction]) -> list[Instruction]:
    """The program without its barriers."""
    return [instruction for instruction in program if instruction.operator is not None]


PassOperator = tuple[int, int, bool, str]
"""Micro-batch, unit, whether forward, operator."""


def by_operator(program: Iterable[Instruction]) -> dict[PassOperator, Instruction]:
    """Every instruction by what it runs; nothing runs twice."""
    result: dict[PassOperator, Instruction] = {}
    for i in program:
        key = i.microbatch, i.unit, i.operator.part is Part.F, i.operator.name
        assert key not in result, key
        result[key] = i
    return result


def check_whole_and_in_order(program: Sequence[Instruction], made: Sequence[Instruction]) -> None:
    """Every instruction of a window once, values before their readers, gradients in micro-batch order, `after` kept.

    Independent of `validate_program`, and of what flows and works note as needs.
    """
    assert len(program) == len(made)
    assert by_operator(program) == by_operator(made)
    written_somewhere = {(i.microbatch, key) for i in made for key in i.writes}
    written: set[tuple[int, tuple[int, str]]] = set()
    latest: dict[tuple[int, str, bool], int] = {}
    done: set[tuple[int, int, str, bool]] = set()
    for i in program:
        op, k = i.operator, i.microbatch
        forward = op.part is Part.F
        for key in i.needs:
            assert (k, key) in written or (k, key) not in written_somewhere, f"{op.name} reads {key} too early"
        if not forward:
            assert latest.get((i.unit, op.name, forward), -1) < k, f"gradients of {op.name} in another order"
            latest[i.unit, op.name, forward] = k
        for name in op.ordered_after:
            assert (k, i.unit, name, forward) in done, f"{op.name} comes before {name}"
        done.add((k, i.unit, op.name, forward))
        written.update((k, key) for key in i.writes)


def most_layers_alive(program: Iterable[Instruction], layout: Layout) -> float:
    """What forward keeps of a layer in equal shares, one for each computation, which its whole backward or its weight
    gradient gives back; and as much for the gradient that a weight gradient waits with."""
    shares = kept_by_forward(layout.graphs["layer"])
    alive = most = 0
    for instruction in program:
        if layout.units[instruction.unit] == "layer" and instruction.operator.forward_name in shares:
            alive += {Part.F: 1, Part.I: 1, Part.W: -2}.get(instruction.operator.part, -1)
            most = max(most, alive) if instruction.operator.part is Part.F else most  # only forward is held up
    assert alive == 0
    return most / max(1, len(shares))


def kept_by_forward(layer: GraphPair) -> list[str]:
    """The computations of a layer that do not run again, nor does what their weight gradients read."""
    backward = {op.name: op for op in layer.backward.operators}
    writers = {value: op for op in layer.backward.operators for value in op.writes if op.part is Part.R}

    def computed(values: Iterable[str]) -> bool:
        result = [writers[value] for value in values if value in writers]
        return any(op.kind is Kind.COMPUTE or computed(op.reads) for op in result[:1])

    return [
        op.name
        for op in layer.forward.operators
        if op.kind is Kind.COMPUTE
        and f"{op.name}.again" not in backward
        and not (op.splits_dgrad_wgrad and computed(backward[f"{op.name}.W"].reads))
    ]


# Random ones


@st.composite
def graphs(draw: st.DrawFn, *, max_operators: int = 12, sources: bool = True) -> Graph:
    """Any graph whose collectives' inputs have no later reader.

    Args:
        sources: whether there are operators that read nothing.
    """
    inputs = tuple(f"x{i}" for i in range(draw(st.integers(1, 3))))
    open_values, unread, operators = list(inputs), set(inputs), []
    for number in range(draw(st.integers(1, max_operators))):
        kind = draw(st.sampled_from((Kind.COMPUTE, Kind.INTRA_NODE, Kind.INTER_NODE))) if open_values else Kind.COMPUTE
        backward_kind, split, count = None, False, 1
        if kind.communicates:
            reads = [draw(st.sampled_from(open_values))]
            backward_kind = draw(st.sampled_from([None, Kind.COMPUTE]))
            if backward_kind is None:
                open_values.remove(reads[0])
        else:
            fewest = 0 if sources or not open_values else 1
            result = st.lists(st.sampled_from(open_values), unique=True, min_size=fewest, max_size=3)
            reads = draw(result) if open_values else []
            split, count = draw(st.booleans()), draw(st.integers(1, 2))
        writes = tuple(f"v{number}.{i}" for i in range(count))
        operators.append(
            Operator(
                name=f"op{number}",
                kind=kind,
                reads=tuple(reads),
                writes=writes,
                splits_dgrad_wgrad=split,
                backward_kind=backward_kind,
                has_saved_state=not kind.communicates and not split and draw(st.booleans()),
                recompute_when_selective=draw(st.booleans()),
                relative_cost=draw(st.sampled_from([0.5, 1.0, 4.0])),
            )
        )
        open_values.extend(writes)
        unread.difference_update(reads)
        unread.update(writes)
    return Graph("random", tuple(operators), inputs, tuple(sorted(unread)))


@st.composite
def layers(draw: st.DrawFn, max_operators: int = 8) -> GraphPair:
    """A random layer with one way in and one way out, which every operator is on; recomputed or not."""
    inner = draw(graphs(max_operators=max_operators, sources=False))
    enter = compute("enter", "x", " ".join(inner.inputs))
    leave = compute("leave", " ".join(inner.outputs), "y")
    layer = Graph("layer", (enter, *inner.operators, leave), ("x",), ("y",), repeats=True)
    return GraphPair.of(recomputed(layer, draw(st.sampled_from(RECOMPUTE))))
