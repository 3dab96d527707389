"""Operators that are issued ahead: where they stand in a window, and what backward makes of them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.arrays import arrays_of, window_instructions
from support.graphs import autograd, compute, linear, loss_gradient, pair, pipeline_of, profile_of, schedule_of
from support.programs import build_programs

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Kind, Operator, Part
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.plan.program import build_program, validate_program
from hf_helix.planning.plan.repetition import order_window
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.schedule.actions import Action, Schedule, Slot
from hf_helix.planning.schedule.named import build_schedule
from hf_helix.planning.schedule.placement import FOLD, stage_ranks
from hf_helix.planning.timing.operator_clock import simulate
from hf_helix.planning.timing.profile_file import graph_data, graph_from
from hf_helix.planning.timing.recompute import recomputed
from hf_helix.planning.window.instructions import Instruction, pass_instructions, unit_instructions
from hf_helix.planning.window.layout import Key, Layout, named_operators
from hf_helix.planning.window.window import COMPUTE, Window

READ = {"weights": ("weights",), "dgrad_weights": ("weights",)}


def gather(again: bool, ahead: int = 2) -> Operator:
    return Operator(
        name="weights",
        kind=Kind.INTER_NODE,
        reads=(),
        writes=("weights",),
        non_differentiable=("weights",),
        recomputed=again,
        ahead=ahead,
    )


def layer(ahead: int = 2) -> GraphPair:
    operators = autograd("norm", "x", **READ), linear("up", "norm", **READ), compute("add", "up")
    return pair("layer", gather(True, ahead), *operators, repeats=True)


def layout_of(layers: int, ahead: int) -> Layout:
    """On one rank, in two virtual stages."""
    lookup = compute("lookup", "", weights=("weights",))
    pairs = {
        "embedding": pair("embedding", gather(False, ahead), lookup, inputs=""),
        "layer": layer(ahead),
        "head": pair("head", gather(False, ahead), linear("logits", "x", **READ), compute("loss", "logits")),
    }
    half, count = 1 + layers // 2, layers + 2
    units = ["embedding", *["layer"] * layers, "head"]
    return Layout(units, {0: range(half), 1: range(half, count)}, pairs)


LAYOUT = layout_of(2, ahead=2)
LAYER, PAIRS = LAYOUT.graphs["layer"], LAYOUT.graphs


def places(made: list[Instruction]) -> list[tuple[int, str]]:
    return [(each.unit, each.operator.name) for each in made if each.operator]


def test_weights_come_with_the_unit_before_and_in_backward_with_the_unit_behind():
    assert places(pass_instructions(LAYOUT, (0, 0, True))) == [(0, "weights"), (1, "weights"), (0, "lookup")]
    layer = pass_instructions(LAYOUT, (0, 1, True))
    assert places(layer) == [(2, "weights"), (1, "norm"), (1, "up"), (1, "add")]
    assert places(pass_instructions(LAYOUT, (0, 3, True))) == [(3, "logits"), (3, "loss")]
    assert places(pass_instructions(LAYOUT, (0, 3, False)))[0] == (2, "weights.again")
    assert (0, "weights.again") not in places(pass_instructions(LAYOUT, (0, 1, False))), "a lookup needs none"
    assert places(unit_instructions(LAYOUT, (0, 2, True)))[0] == (2, "weights"), "a unit by itself has its own"


def test_backward_reads_them_anew_and_weight_gradients_do_not_read_them():
    backward = LAYER.backward
    assert backward["weights.again"].part is Part.R
    assert backward["weights.again"].writes == ("r.weights",)
    assert backward["up.I"].weights == backward["norm"].weights == ("r.weights",)
    assert backward["up.W"].weights == ()
    head = PAIRS["head"].backward
    assert head["logits.I"].weights == ("weights",), "the last unit keeps what forward gathered"
    assert "weights" in head.saved_values
    recomputing = GraphPair.of(recomputed(LAYER.forward, "full")).backward
    assert recomputing["norm.again"].weights == ("r.weights",)
    assert [op.name for op in recomputing.operators].count("weights.again") == 1
    data = graph_data(LAYER.forward)
    assert graph_from("layer", data) == LAYER.forward
    data["operators"][0]["ahead"] = True  # as files had it before
    assert graph_from("layer", data).operators[0].ahead == 1


@pytest.mark.parametrize("count", [1, 3])
def test_a_window_as_numbers_is_what_its_instructions_are(count: int):
    """Units of one name differ in what is issued in them: in the last layer, the weights of the head."""
    profile, schedule = profile_of(LAYOUT), schedule_of(count)
    made, window = window_instructions(schedule, LAYOUT), Window(schedule, LAYOUT)
    assert window.instructions(range(len(window))) == made
    expected, result = arrays_of(made, LAYOUT, profile.times), window.arrays(profile.times)
    assert [sorted(needs) for needs in result.needs] == [sorted(needs) for needs in expected.needs]
    assert replace(result, needs=[]) == replace(expected, needs=[])


# -- how far ahead ---------------------------------------------------------------------------------------------------


def turns_of(program: Sequence[Instruction]) -> tuple[list[tuple[int, int, bool]], dict[tuple[int, Key], int]]:
    """The units in which weights are read, as they come (micro-batch, unit, whether forward), and the turn in which
    what was gathered is first read."""
    units: list[tuple[int, int, bool]] = []
    first: dict[tuple[int, Key], int] = {}
    for each in program:
        for key in each.weights:
            if (each.microbatch, key) not in first:
                place = each.microbatch, each.unit, each.operator is not None and each.operator.part is Part.F
                units += [] if place in units else [place]
                first[each.microbatch, key] = units.index(place)
    return units, first


def distances(program: Sequence[Instruction]) -> list[int]:
    """How many units before its own each gather is issued, counted from the unit that begins next."""
    _, first = turns_of(program)
    now, found = -1, []
    for each in program:
        for key in each.weights:
            now = max(now, first[each.microbatch, key])
        if each.operator and each.operator.ahead:
            found.append(first[each.microbatch, each.writes[0]] - now - 1)
    return found


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_one_strand_gathers_as_many_units_ahead_as_operators_say(ahead: int):
    """Also from the end of one micro-batch to the beginning of the next: at the head, and at the embedding."""
    layout = layout_of(6, ahead)
    program = program_of("sequential", layout, [[Slot.alone(Action(s, "F", k)) for k in (0, 1) for s in (0, 1)]])
    assert distances(program) == [*range(ahead), *[ahead] * (16 - ahead)]
    alive = most = 0
    for each in program:
        alive += sum(name == "weights" for _, name in each.writes)
        most = max(most, alive)
        alive -= sum(name == "weights" for _, name in each.frees if name == "weights")
    assert most == ahead + 1


@pytest.mark.parametrize("rule", ["sequential", "round_robin", "dhelix", "greedy"])
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_every_plan_gathers_once_and_far_enough_ahead_for_few_units_at_a_time(rule: str, ahead: int):
    """Those that compute, those that are ahead, and the head, which keeps what forward has gathered."""
    program = [each for each in program_of(rule, layout_of(6, ahead), schedule_of(4)) if each.operator]
    gathers = {(each.microbatch, each.unit, each.operator.name) for each in program if each.operator.ahead}
    found = distances(program)
    assert len(found) == len(gathers) == 4 * (8 + 6)
    assert all(each >= ahead for each in found[ahead:])
    if rule == "sequential" and ahead > 1:  # each strand has the weights of its next unit: two units ahead of two
        assert set(found[ahead:]) == {ahead}
    now = most = 0
    for each in program:
        now += sum(name in ("weights", "r.weights") for _, name in each.writes)
        most = max(most, now)
        now -= sum(name in ("weights", "r.weights") for _, name in each.frees)
    assert most <= max(ahead, 2) + 2 + (rule == "greedy")  # whose strands are both in the middle of a unit
    assert now == 0, "each is freed with its last reader"


def test_everything_else_keeps_its_order():
    near, far = (program_of("greedy", layout_of(6, ahead), schedule_of(4)) for ahead in (1, 4))

    def others(program: Sequence[Instruction]) -> list[tuple[int, int, str]]:
        return [(i.microbatch, i.unit, i.operator.name) for i in program if i.operator and not i.operator.ahead]

    assert others(near) == others(far)
    assert distances(near) != distances(far)


@pytest.mark.parametrize("rule", ["sequential", "greedy"])
@pytest.mark.parametrize(("num_ranks", "ahead"), [(1, 2), (1, 5), (2, 2)])
def test_long_windows_gather_alike(rule: str, num_ranks: int, ahead: int):
    """Of a long window the steady state is there once; what it gathers for the next one comes with it. In a pipeline,
    gathers go from one to the other also where the stretch that repeats is made and its ends are cut; all can run."""
    ranks = stage_ranks(FOLD, num_ranks)
    layout = layout_of(2, ahead) if num_ranks == 1 else pipeline_of(PAIRS, [2] * len(ranks), ranks)
    schedule = build_schedule("folded_1f1b", num_ranks, 40)
    plan, programs = make_plan(rule, profile_of(layout), model="m", mesh={}), []
    for rank in range(num_ranks):
        short = build_program(schedule, layout, plan, rank)
        ordered = order_window(plan, schedule, layout, rank=rank)
        whole = ordered.lengthened(ordered.repeats, rank).ordered.program(rank)
        assert short.repeats
        assert len(short.once) < len(whole)
        assert [each._replace(frees=(), ends=False) for each in short] == whole
        assert num_ranks > 1 or list(short) == build_programs(schedule, layout, plan)[0]
        validate_program(short, [loss_gradient(layout)], layout)
        programs += list(short)
    simulate(arrays_of(programs, layout, profile_of(layout).times))


def test_no_barrier_waits_for_them():
    """A gather that takes as long as two computations is hidden behind a unit of each strand, and a barrier between."""
    layout = layout_of(6, 2)
    seconds = {name: 2e-3 if op.ahead else 1e-3 for name, op in named_operators(layout)}
    profile = replace(profile_of(layout), times=seconds)
    plan = make_plan("sequential", profile, model="m", mesh={})
    predicted = predict(plan, profile, schedule_of(4), timeline=True)
    program, timeline = predicted.instructions, predicted.timeline
    assert any(each.operator is None for each in program)
    arrays, order = plan.issue(schedule_of(4), layout).arrays(seconds)
    assert simulate(arrays, None, order).seconds == pytest.approx(timeline.seconds)
    computing = sum(each for each, stream in zip(arrays.seconds, arrays.streams, strict=True) if stream == COMPUTE)
    assert timeline.seconds <= computing + 2 * 2e-3, "only the first units wait"


def program_of(rule: str, layout: Layout, schedule: Schedule) -> list[Instruction]:
    plan = make_plan(rule, profile_of(layout), model="m", mesh={}, schedule=schedule_of(4))
    (program,) = build_programs(schedule, layout, plan, [(len(layout.units) - 1, "loss")])
    validate_program(program, [(len(layout.units) - 1, "d.loss")], layout)
    return program
