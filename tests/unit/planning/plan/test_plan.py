"""Plans: every rule orders every block validly, files are checked whole, and errors point at the wrong entry."""

import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from support.graphs import (
    EMBEDDING,
    ORDER_BLOCK,
    SMALL_LAYER,
    collective,
    compute,
    graphs,
    layout_of,
    linear,
    pair,
    priority_plan,
    profile_of,
    random_priority,
    random_times,
)

from hf_helix.config import AUTO, PLANS, RULES
from hf_helix.planning.graph.backward import GraphPair, derive_backward
from hf_helix.planning.graph.operator import Graph, Operator, Part
from hf_helix.planning.plan.block_plan import BARRIER, Block, BlockPlan, all_blocks, entries, sequential, validate_order
from hf_helix.planning.plan.list_scheduler import Priorities, PriorityPlan
from hf_helix.planning.plan.plan import Plan, graphs_digest
from hf_helix.planning.rules.registry import NEED_PROFILE, OF_BLOCKS, ONE_STRAND, load_plan, make_plan, parse_plan
from hf_helix.planning.text import first_difference
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.planning.window.layout import Layout

MODEL, MESH = "LlamaForCausalLM", {"dp_size": 1, "tp_size": 2}
UNITS = {
    "embedding": EMBEDDING,
    "layer": SMALL_LAYER,
    "head": pair("head", collective("gather", "x"), linear("logits", "gather")),
}
LAYER = SMALL_LAYER
PROFILE = profile_of(layout_of(UNITS, 3))


# Rules


def test_every_rule_can_be_asked_for_by_name():
    assert {*RULES, AUTO} == set(PLANS)
    assert {*OF_BLOCKS, *NEED_PROFILE, ONE_STRAND} < {*RULES}
    with pytest.raises(KeyError, match="nope"):
        make_plan("nope", PROFILE, model=MODEL, mesh=MESH)


def letters(rule: str, forward: Graph | None, backward: Graph | None) -> str:
    """An order in short: the strand of each entry, and `|` for a barrier."""
    return "".join("|" if e == BARRIER else e[0] for e in ORDER_BLOCK[rule](forward, backward, PROFILE))


def test_sequential_runs_one_strand_after_the_other_and_round_robin_both_in_turn():
    assert letters("sequential", LAYER.forward, LAYER.backward) == "B" * 8 + "|" + "F" * 6 + "|"
    assert letters("sequential", LAYER.forward, None) == "F" * 6 + "|"
    assert letters("sequential", None, LAYER.backward) == "B" * 8 + "|"
    assert letters("round_robin", LAYER.forward, LAYER.backward) == "FB" * 6 + "BB"


@pytest.mark.parametrize("rule", ["round_robin", "greedy"])
def test_a_plan_says_how_it_was_made_and_what_for(rule: str):
    plan = make_plan(rule, PROFILE, model=MODEL, mesh=MESH)
    assert (plan.rule, plan.model, plan.mesh) == (rule, MODEL, MESH)
    assert plan.graphs == graphs_digest(UNITS)
    assert isinstance(plan, PriorityPlan if rule == "greedy" else BlockPlan)
    assert isinstance(plan, PriorityPlan) or set(plan.orders) == set(all_blocks(UNITS))


def test_a_rule_that_forgets_an_operator_makes_no_plan():
    with pytest.raises(ValueError, match=r"block F\.embedding: the order lacks F\.lookup"):
        BlockPlan.of("lazy", lambda forward, backward, profile: (), PROFILE, model=MODEL, mesh=MESH)


# Random graphs


def factor(name: str, i: int, j: int) -> int:
    """Every operator is taken to be linear: output j is the sum of the inputs i times this."""
    return zlib.crc32(f"{name} {i} {j}".encode()) % 7 - 3


def run_forward(graph: Graph, values: dict[str, int]) -> dict[str, int]:
    for op in graph.operators:
        for j, written in enumerate(op.writes):
            values[written] = sum(factor(op.name, i, j) * values[read] for i, read in enumerate(op.reads))
    return values


def run_backward(order: list[Operator], values: dict[str, int]) -> dict[str, int]:
    for op in order:
        for i, written in enumerate(op.writes):
            values[written] = sum(factor(op.forward_name, i, j) * values[read] for j, read in enumerate(op.reads))
            if op.accumulates[i] is not None:
                values[written] += values[op.accumulates[i]]
    return values


def gradients_by_probing(graph: Graph, of_outputs: dict[str, int]) -> dict[str, int]:
    """The gradient of every input without any backward graph: raise one input by 1 and see what the outputs do."""
    result = {}
    for probed in graph.inputs:
        values = run_forward(graph, {value: int(value == probed) for value in graph.inputs})
        result[f"d.{probed}"] = sum(values[value] * of_outputs[f"d.{value}"] for value in graph.outputs)
    return result


@given(graphs())
def test_any_graph_has_a_backward_that_every_rule_orders_and_that_gives_the_right_gradients(graph: Graph):
    backward = derive_backward(graph)
    split = [op.name for op in graph.operators if op.splits_dgrad_wgrad]
    assert len(backward.operators) == len(graph.operators) + len(split)
    assert {op.forward_name for op in backward.operators if op.part is Part.W} == set(split)
    of_outputs = {f"d.{value}": place + 1 for place, value in enumerate(graph.outputs)}
    expected = gradients_by_probing(graph, of_outputs)
    profile = rough_profile(Layout([graph.name], {0: [0], 1: []}, {graph.name: GraphPair.of(graph)}))
    for rule in ORDER_BLOCK.values():
        validate_order(rule(graph, None, profile), graph, None)
        validate_order(rule(None, backward, profile), None, backward)
        order = rule(graph, backward, profile)
        validate_order(order, graph, backward)
        operators = entries(None, backward)
        values = run_backward([operators[entry] for entry in order if entry in operators], dict(of_outputs))
        assert {name: values[name] for name in backward.outputs} == expected


# Orders


def swapped(order: list[str], first: str, second: str) -> list[str]:
    exchange = {first: second, second: first}
    return [exchange.get(entry, entry) for entry in order]


@pytest.mark.parametrize(
    ("change", "message", "arrow"),
    [
        (lambda o: [*o[:3], "F.nonsense", *o[3:]], "'F.nonsense' is not an operator", "--> F.nonsense"),
        (lambda o: [*o, "B.norm"], "'B.norm' comes a second time", "--> B.norm"),
        (lambda o: swapped(o, "F.norm", "F.gather"), "'F.gather' comes before .* writes norm", "--> F.gather"),
        (lambda o: swapped(o, "B.gather", "B.up.I"), "'B.gather' comes before .* writes d.gather", "--> B.gather"),
        (lambda o: [e for e in o if e != "F.up"], "'F.down' comes before .* writes up", "--> F.down"),
        (lambda o: [e for e in o if e not in ("B.up.W", "B.norm")], r"the order lacks B\.up\.W, B\.norm:", None),
    ],
    ids=["unknown", "repeated", "too early", "too early in the backward", "missing with a reader", "missing"],
)
def test_an_error_prints_the_whole_order_with_an_arrow(change: Callable, message: str, arrow: str | None):
    order = change(list(sequential(LAYER.forward, LAYER.backward, PROFILE)))
    with pytest.raises(ValueError, match=rf"^block F\.layer \| B\.layer: {message}") as error:
        validate_order(order, LAYER.forward, LAYER.backward, block=Block("layer", "layer"))
    lines = str(error.value).splitlines()[1:]
    assert [line for line in lines if line.startswith("-->")] == ([arrow] if arrow else [])
    assert [line[4:] for line in lines] == order


def test_strands_do_not_read_each_other():
    """Both strands of a block may hold a value of the same name; one does not stand for the other."""
    graph = Graph("g", (compute("norm", "x"), compute("out", "norm")), ("x",), ("out",))
    with pytest.raises(ValueError, match=r"'F\.out' comes before"):
        validate_order(["B.norm", "F.out", "F.norm", "B.out"], graph, graph)


def test_a_barrier_may_be_anywhere_and_counts_for_nothing():
    bare = list(entries(LAYER.forward, None))
    validate_order([BARRIER, BARRIER, *bare[:2], BARRIER, *bare[2:]], LAYER.forward, None)
    with pytest.raises(ValueError, match=r"lacks F\.add"):
        validate_order([*bare[:-1], BARRIER], LAYER.forward, None)


def test_an_order_may_not_break_what_is_declared_to_come_after():
    """Nothing of the first is read by the second, and still it comes first; its backward does not stand for it."""
    operators = (compute("norm.0", "x"), compute("norm.1", "y", ordered_after=("norm.0",)))
    unit = pair("layer", *operators, inputs="x y", outputs="norm.0 norm.1")
    validate_order(["F.norm.0", "F.norm.1"], unit.forward, None)
    with pytest.raises(ValueError, match=r"'F\.norm\.1' comes before norm\.0:\n--> F\.norm\.1\n    F\.norm\.0"):
        validate_order(["F.norm.1", "F.norm.0"], unit.forward, None)
    with pytest.raises(ValueError, match=r"'F\.norm\.1' comes before norm\.0"):
        validate_order(["B.norm.1", "B.norm.0", "F.norm.1", "F.norm.0"], unit.forward, unit.backward)


# Files


def priorities() -> Priorities:
    layout = layout_of(UNITS, 3)
    priority = {name: round(seconds, 6) for name, seconds in random_priority(layout, 2).items()}
    return Priorities(random_times(layout, 1), priority, extra_live_layers=2)


@pytest.fixture(params=["blocks", "priorities"])
def plan(request: pytest.FixtureRequest) -> Plan:
    if request.param == "priorities":
        return PriorityPlan("by hand", MODEL, MESH, graphs_digest(UNITS), priorities())
    return make_plan("round_robin", PROFILE, model=MODEL, mesh=MESH)


@pytest.fixture
def file(plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


def check_refused(
    file: Path, message: str, pairs: Mapping[str, GraphPair] = UNITS, model: str = MODEL, mesh: Mapping[str, int] = MESH
) -> None:
    """With the file's name and a remedy."""
    with pytest.raises(ValueError, match=message) as error:
        load_plan(file, pairs, model=model, mesh=mesh)
    assert str(error.value).startswith(f"plan file {file} ")
    assert "Make a new one with `hf-helix plan` or `trainer.plan.save(path)`" in str(error.value)


def test_a_saved_plan_comes_back_the_same(plan: Plan, file: Path):
    loaded = load_plan(file, UNITS, model=MODEL, mesh=MESH)
    assert loaded.to_json() == plan.to_json() == file.read_text()
    assert type(loaded) is type(plan)
    if isinstance(plan, PriorityPlan):
        check_close(loaded.priorities, plan.priorities)
    else:
        assert loaded == plan
        assert loaded.order("layer", None) == plan.orders[Block("layer", None)]


def check_close(result: Priorities, expected: Priorities) -> None:
    """But for the last digits, which milliseconds may change."""
    assert result.times == pytest.approx(expected.times, rel=1e-8)
    assert result.priority == pytest.approx(expected.priority, rel=1e-8, abs=1e-12)
    assert result.extra_live_layers == expected.extra_live_layers


def test_priorities_that_were_read_are_written_and_read_the_same():
    """Files hold nine digits, so only the first time may round; an operator without a priority has none."""
    layout = layout_of(UNITS, 3)
    for seed in range(20):
        times = {name: seconds * math.pi for name, seconds in random_times(layout, seed).items()}
        result = Priorities(times, random_priority(layout, seed) if seed else {})
        loaded = parse_plan(priority_plan(result, layout).to_json(), UNITS, model="Llama", mesh={"tp_size": 2})
        check_close(loaded.priorities, result if seed else replace(result, priority=dict.fromkeys(times, 0.0)))
        again = parse_plan(loaded.to_json(), UNITS, model="Llama", mesh={"tp_size": 2})
        assert again.priorities == loaded.priorities
        assert again.to_json() == loaded.to_json()


def test_every_block_has_a_name_of_its_own():
    blocks = all_blocks(["a", "b"])
    assert sorted(map(str, blocks)) == ["B.a", "B.b", "F.a", "F.a | B.a", "F.a | B.b", "F.b", "F.b | B.a", "F.b | B.b"]


def test_a_plan_for_another_model_mesh_or_graphs_is_refused(file: Path):
    check_refused(file, "is for model 'LlamaForCausalLM', this run has 'Other'", model="Other")
    check_refused(file, "is for mesh .*'tp_size': 2.*, this run has .*'tp_size': 4", mesh={"dp_size": 1, "tp_size": 4})
    others = UNITS | {"head": pair("head", linear("logits", "x"))}
    check_refused(file, r"is for graphs '[0-9a-f]{16}', this run has '[0-9a-f]{16}'", others)


def swap_first(data: dict) -> None:
    order = data["blocks"]["F.layer"]
    order[0], order[1] = order[1], order[0]


def figures(data: dict) -> dict:
    return data["priorities"]["operators"]["layer"]


NEEDS = "is damaged: it needs `rule`, and one of `blocks`, `priorities`"
WHOLE = "must be a whole number of at least"
DAMAGES: list[tuple[str, Callable[[dict], object], str]] = [
    ("blocks", lambda data: data.update(format="hf_helix.plan/0"), "has format 'hf_helix.plan/0', this version reads"),
    ("blocks", lambda data: data.pop("format"), "has format None"),
    ("blocks", lambda data: data.pop("rule"), NEEDS),
    ("blocks", lambda data: data.pop("graphs"), "is for graphs None"),
    ("blocks", lambda data: data.pop("blocks"), NEEDS),
    ("blocks", lambda data: data.update(priorities={}), NEEDS),
    ("blocks", lambda data: data.update(blocks=[]), "is damaged"),
    ("blocks", lambda data: data["blocks"].pop("F.layer | B.head"), r"block 'F\.layer \| B\.head' is missing"),
    ("blocks", lambda data: data["blocks"].update({"X.layer": []}), "is damaged: this model has no block 'X.layer'"),
    ("blocks", lambda data: data["blocks"].update({"F.nope": ["F.anything"]}), "nope"),
    ("blocks", lambda data: data["blocks"].update({"F.layer": 5}), "is damaged"),
    ("blocks", swap_first, r"block F\.layer: 'F\.gather' comes before .* writes norm:\n--> F\.gather\n    F\.norm\n"),
    ("priorities", lambda data: data["priorities"].pop("operators"), "is damaged: it lacks 'operators'"),
    (
        "priorities",
        lambda data: data["priorities"].update(extra_live_layers=0.5),
        f"extra_live_layers {WHOLE} 0, got 0.5",
    ),
    (
        "priorities",
        lambda data: data["priorities"]["operators"].pop("head"),
        "unit 'head' lacks the operator 'F.gather'",
    ),
    ("priorities", lambda data: figures(data).update({"F.nope": {}}), "unit 'layer' has no operator 'F.nope'"),
    ("priorities", lambda data: figures(data)["F.up"].pop("priority_ms"), "layer F.up lacks 'priority_ms'"),
    ("priorities", lambda data: figures(data)["F.up"].update(ms=0), "impossible figures of layer F.up: .*'ms': 0"),
    ("priorities", lambda data: figures(data)["F.up"].update(priority_ms=math.nan), "impossible figures of .*': nan"),
    ("priorities", lambda data: figures(data)["F.up"].update(ms="long"), "is damaged: .*'long'"),
]


@pytest.mark.parametrize(("plan", "damage", "message"), DAMAGES, indirect=["plan"])
def test_a_damaged_file_is_refused_with_the_reason_and_a_remedy(file: Path, damage: Callable, message: str):
    data = json.loads(file.read_text())
    damage(data)
    file.write_text(json.dumps(data))
    check_refused(file, message)


def test_a_file_that_is_no_plan_is_refused(file: Path):
    whole = file.read_text()
    for text in ("", "[]", '"plan"', whole[: len(whole) // 2]):
        file.write_text(text)
        check_refused(file, r"is damaged: .*line|has format None")
    file.write_bytes(b"\xff\xfe")
    for path in (file, file.with_name("absent.json")):
        with pytest.raises(ValueError, match="neither the name of a rule nor a readable file"):
            load_plan(path, UNITS, model=MODEL, mesh=MESH)


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ("a\nb", "a\nb", ""),
        ("a\nb\nc", "a\n x\ny", "line 2: 'b' against 'x'"),
        ("a\nb", "a", "line 2: 'b' against '(nothing)'"),
        ("", "a", "line 1: '(nothing)' against 'a'"),
    ],
)
def test_the_first_difference(mine: str, theirs: str, expected: str):
    assert first_difference(mine, theirs) == expected
