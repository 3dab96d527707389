"""Long windows are ordered and predicted by their steady state: like the whole window, or nearly, and validly."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arrays import arrays_of, window_instructions
from support.graphs import (
    SMALL,
    check_whole_and_in_order,
    loss_gradient,
    most_layers_alive,
    operators_of,
    pipeline_of,
    priority_plan,
    profile_of,
    random_priority,
)
from support.marks import slow
from support.programs import build_programs

from hf_helix.config import RECOMPUTE
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.plan.list_scheduler import Priorities
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.plan.program import build_program, validate_program
from hf_helix.planning.plan.repetition import Periodic, order_window
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.schedule.actions import Schedule, Slot
from hf_helix.planning.schedule.named import PLACEMENT_OF, build_schedule
from hf_helix.planning.schedule.placement import stage_ranks
from hf_helix.planning.timing.operator_clock import simulate
from hf_helix.planning.timing.profile import Pair, Profile
from hf_helix.planning.timing.recompute import recomputed
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Layout, Name
from hf_helix.planning.window.window import Window

NAMES = st.sampled_from(sorted(PLACEMENT_OF))
COUNTS = st.lists(st.integers(1, 2), min_size=8, max_size=8)


def drawn_times(layout: Layout, seed: int) -> dict[Name, float]:
    """No two orders take the same, so that rounding decides nothing."""
    draw = random.Random(seed)
    return {name: draw.uniform(1e-3, 9e-3) for name in random_priority(layout, 0)}


def profile_for(name: str, num_ranks: int, counts: list[int], seed: int, recompute: str = "none") -> Profile:
    """Of a pipeline; with an odd seed, an operator slows others down."""
    ranks = stage_ranks(PLACEMENT_OF[name], num_ranks)
    graphs = {**SMALL, "layer": GraphPair.of(recomputed(SMALL["layer"].forward, recompute))}
    layout = pipeline_of(graphs, counts[: len(ranks)], ranks)
    times = drawn_times(layout, seed)
    up, gather = ("layer", "F.up"), ("layer", "B.gather")
    pairs = {(up, gather): Pair.of(times[up], times[gather], 1.3, 1.1)} if seed % 2 else {}
    return profile_of(layout, times, pairs=pairs)


def plan_of(rule: str, profile: Profile, seed: int) -> Plan:
    if rule != "priorities":
        return make_plan(rule, profile, model="m", mesh={"tp_size": 2})
    priority = {name: 0.1 * seconds for name, seconds in random_priority(profile.layout, seed).items()}
    return priority_plan(Priorities(profile.times, priority, extra_live_layers=seed % 2), profile.layout)


def programs_of(schedule: Schedule, profile: Profile, plan: Plan) -> list[list[Instruction]]:
    """Every rank's own program, checked by itself, with its steady state unrolled."""
    result = []
    for rank, slots in enumerate(schedule):
        program = build_program(schedule, profile.layout, plan, rank)
        validate_program(program.once, [loss_gradient(profile.layout)], profile.layout, program.slots)
        result.append(list(program))
        assert len(program) == len(result[-1])
        validate_program(result[-1], [loss_gradient(profile.layout)], profile.layout, slots)
    return result


def without_order_of_frees(program: list[Instruction]) -> list[Instruction]:
    return [each._replace(frees=tuple(sorted(each.frees))) for each in program]


def test_a_schedule_without_a_rhythm_is_left_as_it_is():
    microbatches = [Slot.parse(f"0F{k}") for k in range(30)] + [Slot.parse(f"0B{k}") for k in range(30)]
    assert Periodic([microbatches]).periods == 0


@given(NAMES, st.integers(2, 4), st.integers(2, 12))
def test_ranks_are_cut_where_none_needs_what_comes_after(name: str, num_ranks: int, settling: int):
    num_microbatches = 60
    periodic = Periodic(build_schedule(name, num_ranks, num_microbatches))
    short = periodic.keep(settling + 14)
    points = periodic.sync_points(short, settling, 8)
    assert points
    for cut in range(2):
        done = [slots[: cuts[cut]] for slots, cuts in zip(short, points, strict=True)]
        counts = {(stage, part): 0 for stage in range(2 * num_ranks) for part in "FI"}
        for slot in (slot for slots in done for slot in slots):
            for action in slot.actions:
                for part in action.computation_type.replace("B", "I"):
                    counts[action.stage, part] = counts.get((action.stage, part), 0) + 1
        last = len(stage_ranks(PLACEMENT_OF[name], num_ranks)) - 1
        assert all(counts[stage, "F"] >= counts[stage + 1, "F"] for stage in range(last))
        assert all(counts[stage, "I"] <= counts[stage + 1, "I"] for stage in range(last))
        assert counts[last, "I"] <= counts[last, "F"]


@given(NAMES, st.integers(1, 3), st.integers(1, 7), COUNTS, st.sampled_from(RECOMPUTE))
def test_a_window_as_numbers_is_what_its_instructions_are(
    name: str, num_ranks: int, num_microbatches: int, counts: list[int], recompute: str
):
    profile = profile_for(name, num_ranks, counts, 3, recompute)
    schedule = build_schedule(name, num_ranks, num_microbatches)
    made, window = window_instructions(schedule, profile.layout), Window(schedule, profile.layout)
    assert window.instructions(range(len(window))) == made
    expected, result = arrays_of(made, profile.layout, profile.times), window.arrays(profile.times)
    assert [sorted(needs) for needs in result.needs] == [sorted(needs) for needs in expected.needs]
    assert replace(result, needs=[]) == replace(expected, needs=[])


@pytest.mark.parametrize(
    ("rule", "name", "num_ranks"),
    [
        *((rule, "folded_1f1b", 1) for rule in ("sequential", "round_robin", "greedy", "priorities")),
        ("sequential", "dualpipe_v", 3),
        ("round_robin", "1f1b", 4),
    ],
)
def test_the_order_is_that_of_the_whole_window(rule: str, name: str, num_ranks: int):
    """Of plans of blocks on any number of ranks, and of others on one."""
    profile = profile_for(name, num_ranks, [2, 1, 2, 2, 1, 2], 2 * num_ranks)
    schedule, plan = build_schedule(name, num_ranks, 30), plan_of(rule, profile, 0)
    assert order_window(plan, schedule, profile.layout).repeats
    programs, whole = programs_of(schedule, profile, plan), build_programs(schedule, profile.layout, plan)
    assert list(map(without_order_of_frees, programs)) == list(map(without_order_of_frees, whole))
    expected = predict(plan, profile, schedule, timeline=True).seconds
    assert predict(plan, profile, schedule).seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "num_ranks", "seed"),
    [("folded_1f1b", 2, 1), *(slow(name, 4, seed) for seed, name in enumerate(PLACEMENT_OF, 1))],
)
def test_priority_plans_of_several_ranks_are_valid_within_their_memory_and_hardly_longer(
    name: str, num_ranks: int, seed: int
):
    """What is predicted is what the programs take; the whole window, ordered at once, takes about as long."""
    profile = profile_for(name, num_ranks, [2, 1, 2, 2, 1, 2, 2, 2], seed)
    layout, schedule = profile.layout, build_schedule(name, num_ranks, 16 * num_ranks)
    plan = plan_of("greedy" if seed % 2 else "priorities", profile, seed)
    assert order_window(plan, schedule, layout).repeats
    programs, whole = programs_of(schedule, profile, plan), build_programs(schedule, layout, plan)
    for program, other, slots in zip(programs, whole, schedule, strict=True):
        bare = [each._replace(frees=(), ends=False) for each in program]
        check_whole_and_in_order(bare, window_instructions([slots], layout))
        assert most_layers_alive(program, layout) <= most_layers_alive(other, layout) + 2
    everything = [each for program in programs for each in operators_of(program)]
    work = arrays_of(everything, layout, profile.times)
    seconds = simulate(work, profile.slowdown if profile.pairs else None).seconds  # raises if a rank waits for ever
    assert predict(plan, profile, schedule).seconds == pytest.approx(seconds, rel=2e-3)
    assert seconds <= 1.05 * predict(plan, profile, schedule, timeline=True).seconds


@pytest.mark.parametrize("rule", ["sequential", "greedy"])
def test_a_rank_builds_no_more_for_more_microbatches(rule: str):
    profile = profile_for("1f1b", 4, [2] * 4, 1)
    layout, plan = profile.layout, plan_of(rule, profile, 0)
    few, many = (build_program(build_schedule("1f1b", 4, count), layout, plan, 1) for count in (104, 512))
    assert few.once == many.once
    shortest = [len(build_programs(build_schedule("1f1b", 4, count), layout, plan)[1]) for count in (8, 9)]
    assert len(many) - len(few) == 408 * (shortest[1] - shortest[0])
    for count in (1, 4, 11):  # short windows are ordered whole
        program = build_program(build_schedule("1f1b", 4, count), layout, plan, 2)
        assert program.repeats == 0
        assert list(program) == program.once
