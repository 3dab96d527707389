"""Operators that are issued ahead: where they stand in a window, and what backward makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.graphs import compute, linear, pair, profile_of, schedule_of, segment

from hf_helix.planning.cost import work_of
from hf_helix.planning.graph.operator import Kind, Operator, Part
from hf_helix.planning.graph.pair import GraphPair
from hf_helix.planning.graph.recompute import recomputed
from hf_helix.planning.instructions import Instruction, pass_instructions, unit_instructions, window_instructions
from hf_helix.planning.layout import Layout
from hf_helix.planning.plans.registry import make_plan
from hf_helix.planning.program import build_programs, validate_program
from hf_helix.planning.window import Window

READ = {"weights": ("weights",), "dgrad_weights": ("weights",)}


def gather(again: bool) -> Operator:
    return Operator(
        name="weights",
        kind=Kind.INTER_NODE,
        reads=(),
        writes=("weights",),
        non_differentiable=("weights",),
        recomputed=again,
        ahead=2,
    )


LAYER = pair(
    "layer",
    gather(True),
    segment("norm", "x", **READ),
    linear("up", "norm", **READ),
    compute("add", "up"),
    repeats=True,
)
PAIRS = {
    "embedding": pair("embedding", gather(False), compute("lookup", "", weights=("weights",)), inputs=""),
    "layer": LAYER,
    "head": pair("head", gather(False), linear("logits", "x", **READ), compute("loss", "logits")),
}
LAYOUT = Layout(["embedding", "layer", "layer", "head"], {0: [0, 1], 1: [2, 3]}, PAIRS)


def places(made: list[Instruction]) -> list[tuple[int, str]]:
    return [(each.unit, each.operator.name) for each in made if each.operator]


def test_weights_come_with_the_unit_before():
    assert places(pass_instructions(LAYOUT, (0, 0), True)) == [(0, "weights"), (1, "weights"), (0, "lookup")]
    layer = pass_instructions(LAYOUT, (0, 1), True)
    assert places(layer) == [(2, "weights"), (1, "norm"), (1, "up"), (1, "add")]
    assert places(pass_instructions(LAYOUT, (0, 3), True)) == [(3, "logits"), (3, "loss")]


def test_in_backward_they_come_with_the_unit_behind():
    head = pass_instructions(LAYOUT, (0, 3), False)
    assert places(head)[0] == (2, "weights.again")
    assert (0, "weights.again") not in places(pass_instructions(LAYOUT, (0, 1), False)), "a lookup needs none"


def test_backward_reads_them_anew_and_weight_gradients_do_not_read_them():
    backward = {op.name: op for op in LAYER.backward.operators}
    assert backward["weights.again"].part is Part.R
    assert backward["weights.again"].writes == ("r.weights",)
    assert backward["up.I"].weights == backward["norm"].weights == ("r.weights",)
    assert backward["up.W"].weights == ()
    head = {op.name: op for op in PAIRS["head"].backward.operators}
    assert head["logits.I"].weights == ("weights",), "the last unit keeps what forward gathered"
    assert "weights" in PAIRS["head"].backward.saved_values


def test_recomputation_reads_them_anew_too():
    again = GraphPair.of(recomputed(LAYER.forward, "full")).backward
    assert again["norm.again"].weights == ("r.weights",)
    assert [op.name for op in again.operators].count("weights.again") == 1


def test_a_unit_by_itself_has_its_own():
    assert places(unit_instructions(LAYOUT, (0, 2), True))[0] == (2, "weights")


@pytest.mark.parametrize("count", [1, 3])
def test_a_window_as_numbers_is_what_its_instructions_are(count: int):
    """Units of one name differ in what is issued in them: in the last layer, the weights of the head."""
    profile, schedule = profile_of(LAYOUT), schedule_of(count)
    made, window = window_instructions(schedule, LAYOUT), Window(schedule, LAYOUT)
    assert [window.instruction(place) for place in range(len(window))] == made
    expected, result = work_of(made, LAYOUT, profile.times), window.work(profile.times)
    assert [sorted(needs) for needs in result.needs] == [sorted(needs) for needs in expected.needs]
    assert replace(result, needs=[]) == replace(expected, needs=[])


@pytest.mark.parametrize("rule", ["sequential", "round_robin", "dhelix", "greedy"])
def test_every_plan_gathers_them_once_and_in_time(rule: str):
    plan = make_plan(rule, profile_of(LAYOUT), model="m", mesh={}, schedule=schedule_of(3))
    (program,) = build_programs(schedule_of(3), LAYOUT, plan, [(3, "loss")])
    validate_program(program, [(3, "d.loss")], LAYOUT)
    gathers = [each for each in program if each.operator and each.operator.ahead]
    assert len(gathers) == len({(g.microbatch, g.unit, g.operator.name) for g in gathers if g.operator}) == 3 * 6
    freed = [key for each in program for key in each.frees if "weights" in key[1]]
    assert len(freed) == 3 * 6, "each is freed with its last reader"
