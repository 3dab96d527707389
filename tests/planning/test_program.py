"""Programs: whole windows are valid under every rule, run everything once, and keep the order that bits depend on."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_helix.planning.graph import Graph, Kind, Operator, Part, derive_backward
from hf_helix.planning.plan import BARRIER, GraphPair, Plan, all_blocks, make_plan
from hf_helix.planning.program import Instruction, Layout, build_program, validate_program
from hf_helix.planning.rules import RULES
from hf_helix.planning.schedule import build_schedule


def op(name: str, reads: str, writes: str, *, split: bool = False, kind: Kind = Kind.COMPUTE) -> Operator:
    return Operator(name=name, kind=kind, reads=tuple(reads.split()), writes=tuple(writes.split()), split=split)


def pair(name: str, operators: list[Operator], inputs: str, outputs: str, repeats: bool = False) -> GraphPair:
    forward = Graph(name, tuple(operators), tuple(inputs.split()), tuple(outputs.split()), repeats)
    return GraphPair(forward, derive_backward(forward))


GRAPHS = {
    "embedding": pair("embedding", [op("lookup", "", "e"), op("scatter", "e", "s", kind=Kind.LOCAL)], "", "s"),
    "layer": pair(
        "layer",
        [
            op("norm", "x", "n"),
            op("gather", "n", "g", kind=Kind.LOCAL),
            op("up", "g", "u", split=True),
            op("down", "u", "d", split=True),
            op("scatter", "d", "s", kind=Kind.LOCAL),
            op("add", "x s", "y"),
        ],
        "x",
        "y",
        repeats=True,
    ),
    "head": pair(
        "head", [op("norm", "x", "n"), op("logits", "n", "l", split=True), op("loss", "l", "loss")], "x", "loss"
    ),
}


def layout(num_layers: int) -> Layout:
    half = (num_layers + 1) // 2
    units = ["embedding", *["layer"] * num_layers, "head"]
    return Layout(units, {0: range(half + 1), 1: range(half + 1, num_layers + 2)}, GRAPHS)


@functools.cache
def plan_of(rule: str) -> Plan:
    return make_plan(rule, RULES[rule], GRAPHS, model="m", mesh={})


def window(rule: str, num_layers: int, num_microbatches: int) -> list[Instruction]:
    plan = plan_of(rule)
    head = num_layers + 1
    return build_program(build_schedule("w", 1, num_microbatches)[0], layout(num_layers), plan, [(head, "loss")])


@pytest.mark.parametrize("rule", RULES)
@given(num_layers=st.integers(1, 7), num_microbatches=st.integers(1, 5))
def test_windows_are_valid_and_whole(rule: str, num_layers: int, num_microbatches: int) -> None:
    program = window(rule, num_layers, num_microbatches)
    validate_program(program, [(num_layers + 1, "d.loss")])
    operators = [instruction for instruction in program if instruction.operator is not None]
    a_batch = sum(len(g.forward.operators) + len(g.backward.operators) for g in GRAPHS.values())
    a_layer = len(GRAPHS["layer"].forward.operators) + len(GRAPHS["layer"].backward.operators)
    assert len(operators) == num_microbatches * (a_batch + (num_layers - 1) * a_layer)


@pytest.mark.parametrize("rule", RULES)
@given(num_layers=st.integers(1, 7), num_microbatches=st.integers(2, 5))
def test_gradients_are_added_in_the_order_of_micro_batches(rule: str, num_layers: int, num_microbatches: int) -> None:
    """Whatever adds to a parameter's gradient: W, and whole backwards (norms)."""
    added: dict[tuple[int, str], list[int]] = {}
    for instruction in window(rule, num_layers, num_microbatches):
        if instruction.operator is not None and instruction.operator.part in (Part.W, Part.B):
            added.setdefault((instruction.unit, instruction.operator.of), []).append(instruction.microbatch)
    assert all(order == list(range(num_microbatches)) for order in added.values())


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_left_alive_but_what_is_kept(rule: str) -> None:
    alive: set[tuple[int, tuple[int, str]]] = set()
    for instruction in window(rule, 4, 3):
        alive.update((instruction.microbatch, key) for key in instruction.writes)
        alive.difference_update((instruction.microbatch, key) for key in instruction.frees)
    assert alive == {(k, (5, "loss")) for k in range(3)}


def test_each_micro_batch_ends_once_and_last() -> None:
    program = window("greedy", 4, 3)
    for k in range(3):
        places = [i for i, instruction in enumerate(program) if instruction.microbatch == k]
        assert [program[i].ends for i in places] == [False] * (len(places) - 1) + [True]


def test_late_operators_run_in_the_next_block() -> None:
    """By hand: W of `up` one block late, on two layers in a row and then into a block that has no place for it."""
    orders = {block: tuple(RULES["sequential"](*_graphs(block))) for block in all_blocks(GRAPHS)}
    block = next(block for block in orders if (block.forward, block.backward) == ("layer", "layer"))
    entries = [entry for entry in orders[block] if entry not in (BARRIER, "B.up.W")]
    orders[block] = (entries[0], "B.up.W-1", *entries[1:])
    plan = Plan("by hand", "m", {}, "", orders)
    program = build_program(build_schedule("w", 1, 2)[0], layout(6), plan, [(7, "loss")])
    validate_program(program, [(7, "d.loss")])
    names = [(i.microbatch, i.unit, i.operator.name) for i in program if i.operator is not None]
    fused = [unit for k, unit, name in names if k == 0 and name == "up.W"]
    assert fused == [6, 5, 4, 3, 2, 1]
    # Unit 6's W comes after the block of unit 5 has begun, and so on.
    for unit in (6, 5):
        assert names.index((0, unit, "up.W")) > names.index((0, unit - 1, "add")) - 1
        assert names.index((0, unit, "up.W")) > names.index((0, unit, "norm"))


def test_a_late_operator_is_pulled_in_by_what_reads_it() -> None:
    """The forward's last addition, one block late, must come before the next unit reads it."""
    plan = make_plan("greedy", RULES["greedy"], GRAPHS, model="m", mesh={})
    block = next(block for block in plan.orders if (block.forward, block.backward) == ("layer", "layer"))
    order = tuple(f"{entry}-1" if entry == "F.add" else entry for entry in RULES["sequential"](*_graphs(block)))
    order = ("F.add-1", *(entry for entry in order if entry not in ("F.add-1", BARRIER)))
    changed = Plan("by hand", "m", {}, "", {**plan.orders, block: order})
    program = build_program(build_schedule("w", 1, 3)[0], layout(4), changed, [(5, "loss")])
    validate_program(program, [(5, "d.loss")])


def test_the_validator_finds_mistakes() -> None:
    program = window("greedy", 2, 1)
    sources = [(3, "d.loss")]
    validate_program(program, sources)
    with pytest.raises(ValueError, match="which is not there"):
        validate_program(program, [])
    with pytest.raises(ValueError, match="which is not there"):
        validate_program([program[1], program[0], *program[2:]], sources)
    with pytest.raises(ValueError, match=r"runs a second time|which is not there"):
        validate_program([*program[:3], program[0], *program[3:]], sources)


def _graphs(block):
    return (
        GRAPHS[block.forward].forward if block.forward else None,
        GRAPHS[block.backward].backward if block.backward else None,
    )
