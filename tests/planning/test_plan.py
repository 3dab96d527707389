"""Plans: every rule orders every block validly, files are checked whole, and errors point at the wrong entry."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_helix.config import PLANS
from hf_helix.planning.graph import Graph, Kind, Operator, Part, derive_backward
from hf_helix.planning.plan import (
    BARRIER,
    Block,
    GraphPair,
    Plan,
    all_blocks,
    entries,
    first_difference,
    load_plan,
    make_plan,
    validate_order,
)
from hf_helix.planning.rules import RULES

MODEL, MESH = "LlamaForCausalLM", {"dp": 1, "tp": 2}


def operator(name: str, reads: str, kind: Kind = Kind.COMPUTE, *, split: bool = False, effort: float = 1.0) -> Operator:
    return Operator(name=name, kind=kind, reads=tuple(reads.split()), writes=(name,), split=split, effort=effort)


def pair(name: str, *operators: Operator, inputs: tuple[str, ...] = ("x",)) -> GraphPair:
    forward = Graph(name, operators, inputs, operators[-1].writes)
    return GraphPair(forward, derive_backward(forward))


def units() -> dict[str, GraphPair]:
    """An embedding, a layer and a head, each with communication."""
    return {
        "embedding": pair("embedding", operator("lookup", ""), operator("scatter", "lookup", Kind.LOCAL), inputs=()),
        "layer": pair(
            "layer",
            operator("norm", "x"),
            operator("gather", "norm", Kind.LOCAL, effort=4),
            operator("up", "gather", split=True, effort=4),
            operator("down", "up", split=True, effort=4),
            operator("scatter", "down", Kind.CROSS, effort=4),
            operator("add", "x scatter"),
        ),
        "head": pair("head", operator("gather", "x", Kind.LOCAL), operator("logits", "gather", split=True)),
    }


def graphs_of(block: Block, pairs: Mapping[str, GraphPair]) -> tuple[Graph | None, Graph | None]:
    return (
        pairs[block.forward].forward if block.forward else None,
        pairs[block.backward].backward if block.backward else None,
    )


# Rules


def test_every_rule_can_be_asked_for_by_name():
    assert {*RULES, "auto"} == set(PLANS)


def test_every_block_is_listed_once():
    blocks = all_blocks(["a", "b"])
    assert sorted(map(str, blocks)) == ["B.a", "B.b", "F.a", "F.a | B.a", "F.a | B.b", "F.b", "F.b | B.a", "F.b | B.b"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", all_blocks(units()), ids=str)
def test_every_rule_orders_every_block(rule: str, block: Block):
    forward, backward = graphs_of(block, units())
    order = RULES[rule](forward, backward)
    validate_order(order, forward, backward)
    assert sorted(set(order) - {BARRIER}) == sorted(entries(forward, backward))
    assert len(order) - order.count(BARRIER) == len(entries(forward, backward))
    assert order == RULES[rule](forward, backward), "a rule gives the same order every time"


def letters(rule: str, forward: Graph | None, backward: Graph | None) -> str:
    """An order in short: the strand of each entry, and `|` for a barrier."""
    return "".join("|" if entry == BARRIER else entry[0] for entry in RULES[rule](forward, backward))


def test_sequential_runs_one_strand_after_the_other():
    layer = units()["layer"]
    assert letters("sequential", layer.forward, layer.backward) == "F" * 6 + "|" + "B" * 8 + "|"
    assert letters("sequential", layer.forward, None) == "F" * 6 + "|"
    assert letters("sequential", None, layer.backward) == "B" * 8 + "|"


def test_round_robin_takes_the_strands_in_turn():
    layer = units()["layer"]
    assert letters("round_robin", layer.forward, layer.backward) == "FB" * 6 + "BB"


def test_greedy_keeps_weight_gradients_for_the_time_of_a_collective():
    """B.down.W could run before B.up.I; it waits until B.gather is on its way and nothing else could run."""
    order = RULES["greedy"](None, units()["layer"].backward)
    assert order.index("B.up.I") < order.index("B.gather") < order.index("B.down.W") < order.index("B.norm")


def test_greedy_takes_a_weight_gradient_last_even_if_it_is_long():
    short, long = pair("short", operator("act", "x")), pair("long", operator("up", "x", split=True, effort=4))
    assert RULES["greedy"](short.forward, long.backward) == ("B.up.I", "F.act", "B.up.W")


def test_greedy_computes_one_strand_while_the_other_communicates():
    layer = units()["layer"]
    order = RULES["greedy"](layer.forward, layer.backward)
    issued, used = order.index("F.gather"), order.index("F.up")
    assert any(entry.startswith("B.") and entry not in ("B.gather", "B.scatter") for entry in order[issued:used])


def test_a_rule_that_forgets_an_operator_makes_no_plan():
    with pytest.raises(ValueError, match="lacks"):
        make_plan("lazy", lambda forward, backward: (), units(), model=MODEL, mesh=MESH)


# Random graphs


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph whose collectives' inputs have no later reader."""
    inputs = tuple(f"x{i}" for i in range(draw(st.integers(1, 3))))
    open_values, unread, operators = list(inputs), set(inputs), []
    for number in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(list(Kind))) if open_values else Kind.COMPUTE
        backward_kind, split, count = None, False, 1
        if kind.communicates:
            reads = [draw(st.sampled_from(open_values))]
            backward_kind = draw(st.sampled_from([None, Kind.COMPUTE]))
            if backward_kind is None:
                open_values.remove(reads[0])
        else:
            reads = draw(st.lists(st.sampled_from(open_values), unique=True, max_size=3)) if open_values else []
            split, count = draw(st.booleans()), draw(st.integers(1, 2))
        writes = tuple(f"v{number}.{i}" for i in range(count))
        operators.append(
            Operator(
                name=f"op{number}",
                kind=kind,
                reads=tuple(reads),
                writes=writes,
                split=split,
                backward_kind=backward_kind,
                effort=draw(st.sampled_from([0.5, 1.0, 4.0])),
            )
        )
        open_values.extend(writes)
        unread.difference_update(reads)
        unread.update(writes)
    return Graph("random", tuple(operators), inputs, tuple(sorted(unread)))


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
            values[written] = sum(factor(op.of, i, j) * values[read] for j, read in enumerate(op.reads))
            if op.adds[i] is not None:
                values[written] += values[op.adds[i]]
    return values


def gradients_by_probing(graph: Graph, of_outputs: dict[str, int]) -> dict[str, int]:
    """The gradient of every input without any backward graph: raise one input by 1 and see what the outputs do."""
    found = {}
    for probed in graph.inputs:
        values = run_forward(graph, {value: int(value == probed) for value in graph.inputs})
        found[f"d.{probed}"] = sum(values[value] * of_outputs[f"d.{value}"] for value in graph.outputs)
    return found


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_any_graph_has_a_backward_that_every_rule_orders_and_that_gives_the_right_gradients(graph: Graph):
    backward = derive_backward(graph)
    split = [op.name for op in graph.operators if op.split]
    assert len(backward.operators) == len(graph.operators) + len(split)
    assert {op.of for op in backward.operators if op.part is Part.W} == set(split)
    of_outputs = {f"d.{value}": place + 1 for place, value in enumerate(graph.outputs)}
    expected = gradients_by_probing(graph, of_outputs)
    for rule in RULES.values():
        validate_order(rule(graph, None), graph, None)
        validate_order(rule(None, backward), None, backward)
        order = rule(graph, backward)
        validate_order(order, graph, backward)
        operators = entries(None, backward)
        values = run_backward([operators[entry] for entry in order if entry in operators], dict(of_outputs))
        assert {name: values[name] for name in backward.outputs} == expected


# Orders


def wrong_lines(error: pytest.ExceptionInfo[ValueError]) -> tuple[list[str], list[str]]:
    """The lines with an arrow, and every line below the first one without its mark."""
    lines = str(error.value).splitlines()[1:]
    return [line for line in lines if line.startswith("-->")], [line[4:] for line in lines]


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
    ],
    ids=["unknown", "repeated", "too early", "too early in the backward", "missing with a reader"],
)
def test_an_error_prints_the_whole_order_with_an_arrow(change: Callable[[list[str]], list[str]], message, arrow):
    layer = units()["layer"]
    order = change(list(RULES["sequential"](layer.forward, layer.backward)))
    with pytest.raises(ValueError, match=rf"^block F\.layer \| B\.layer: {message}") as error:
        validate_order(order, layer.forward, layer.backward, block=Block("layer", "layer"))
    arrows, printed = wrong_lines(error)
    assert arrows == [arrow]
    assert printed == order


def test_the_arrow_is_at_the_repetition_not_at_the_first_time():
    layer = units()["layer"]
    order = ["F.norm", "F.norm"]
    with pytest.raises(ValueError, match="second time") as error:
        validate_order(order, layer.forward, None)
    assert str(error.value).splitlines()[1:] == ["    F.norm", "--> F.norm"]


def test_an_order_that_lacks_what_nobody_reads_names_it():
    layer = units()["layer"]
    order = [entry for entry in RULES["sequential"](None, layer.backward) if entry not in ("B.up.W", "B.norm")]
    with pytest.raises(ValueError, match=r"the order lacks B\.up\.W, B\.norm:") as error:
        validate_order(order, None, layer.backward)
    assert wrong_lines(error) == ([], order)


def test_strands_do_not_read_each_other():
    """Both strands of a block may hold a value of the same name; one does not stand for the other."""
    graph = Graph("g", (operator("norm", "x"), operator("out", "norm")), ("x",), ("out",))
    with pytest.raises(ValueError, match=r"'F\.out' comes before"):
        validate_order(["B.norm", "F.out", "F.norm", "B.out"], graph, graph)


def test_a_barrier_may_be_anywhere_and_counts_for_nothing():
    layer = units()["layer"]
    bare = list(entries(layer.forward, None))
    validate_order([BARRIER, BARRIER, *bare[:2], BARRIER, *bare[2:]], layer.forward, None)
    with pytest.raises(ValueError, match=r"lacks F\.add"):
        validate_order([*bare[:-1], BARRIER], layer.forward, None)


# Files


@pytest.fixture
def plan() -> Plan:
    return make_plan("greedy", RULES["greedy"], units(), model=MODEL, mesh=MESH)


@pytest.fixture
def file(plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


def edit(file: Path, change: Callable[[dict], object]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def test_a_saved_plan_comes_back_the_same(plan: Plan, file: Path):
    loaded = load_plan(file, units(), model=MODEL, mesh=MESH)
    assert loaded == plan
    assert loaded.to_json() == plan.to_json()
    assert loaded.order("layer", None) == plan.orders[Block("layer", None)]


@pytest.mark.parametrize("block", all_blocks(units()), ids=str)
def test_a_block_reads_what_it_writes(block: Block):
    assert Block.parse(str(block)) == block


def test_what_is_not_a_block_is_refused():
    with pytest.raises(ValueError, match=r"not a block: 'X\.layer'"):
        Block.parse("X.layer")


def test_a_plan_for_another_model_is_refused(file: Path):
    with pytest.raises(ValueError, match=r"is for model 'LlamaForCausalLM', this run has 'Other'; save a new one"):
        load_plan(file, units(), model="Other", mesh=MESH)


def test_a_plan_for_another_mesh_is_refused(file: Path):
    with pytest.raises(ValueError, match=r"is for mesh .*'tp': 2.*, this run has .*'tp': 4"):
        load_plan(file, units(), model=MODEL, mesh={"dp": 1, "tp": 4})


def test_a_plan_for_other_graphs_is_refused(file: Path):
    others = units() | {"head": pair("head", operator("logits", "x", split=True))}
    with pytest.raises(ValueError, match=r"is for graphs '[0-9a-f]{16}', this run has '[0-9a-f]{16}'"):
        load_plan(file, others, model=MODEL, mesh=MESH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format="hf_helix.plan/0"), "has format 'hf_helix.plan/0', this version reads"),
        (lambda data: data.pop("format"), "has format None"),
        (lambda data: data.pop("blocks"), "is damaged: it lacks blocks"),
        (lambda data: data.pop("rule"), "is damaged: it lacks rule"),
        (lambda data: data.update(blocks=[]), "is damaged"),
        (lambda data: data["blocks"].pop("F.layer | B.head"), r"is damaged: block 'F\.layer \| B\.head' is missing"),
        (lambda data: data["blocks"].update({"X.layer": []}), "is damaged: not a block"),
        (lambda data: data["blocks"].update({"F.layer": None}), "is damaged"),
        (lambda data: data["blocks"]["F.layer"].remove("F.add"), r"is damaged: block F\.layer: the order lacks F\.add"),
        (lambda data: data["blocks"]["F.layer"].reverse(), r"is damaged: block F\.layer: (.|\n)*--> F\.add"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason_and_a_remedy(file: Path, change, message: str):
    edit(file, change)
    with pytest.raises(ValueError, match=message) as error:
        load_plan(file, units(), model=MODEL, mesh=MESH)
    assert str(file) in str(error.value)
    assert "trainer.plan.save(path)" in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "null", '"plan"'])
def test_a_file_that_is_no_plan_is_refused(file: Path, text: str):
    file.write_text(text)
    with pytest.raises(ValueError, match=r"damaged|has format None"):
        load_plan(file, units(), model=MODEL, mesh=MESH)


def test_a_truncated_file_is_refused(file: Path):
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"plan\.json is damaged \(.*line.*\); save a new one"):
        load_plan(file, units(), model=MODEL, mesh=MESH)


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="neither the name of a rule nor a readable file"):
        load_plan(tmp_path / "absent.json", units(), model=MODEL, mesh=MESH)


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
