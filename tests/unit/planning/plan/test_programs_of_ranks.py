"""Programs of several ranks: whole and valid, no rank waits for ever, and both ends of every way keep one order."""

import functools
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arrays import arrays_of, window_instructions
from support.graphs import (
    ORDER_BLOCK,
    SMALL,
    by_operator,
    loss_gradient,
    most_layers_alive,
    operators_of,
    pipeline_of,
    priority_plan,
    profile_of,
    random_priority,
    random_times,
    timeline_of,
)
from support.programs import build_programs
from support.schedules import live_activations

from hf_helix.config import RECOMPUTE
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.plan import search
from hf_helix.planning.plan.bounds import lower_bound
from hf_helix.planning.plan.list_scheduler import Priorities
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.plan.program import validate_program
from hf_helix.planning.plan.search import greedy
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.schedule.named import PLACEMENT_OF, build_schedule
from hf_helix.planning.schedule.placement import FOLD, stage_ranks
from hf_helix.planning.timing.operator_clock import simulate
from hf_helix.planning.timing.recompute import recomputed
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Layout

BLOCKS = tuple(ORDER_BLOCK)
SHAPES = {
    "name": st.sampled_from(sorted(PLACEMENT_OF)),
    "num_ranks": st.integers(1, 3),
    "num_microbatches": st.integers(1, 6),
    "counts": st.lists(st.integers(1, 3), min_size=6, max_size=6),
}
SEEDS = st.integers(0, 999)


def case(
    name: str, num_ranks: int, num_microbatches: int, counts: list[int], recompute: str = "none"
) -> tuple[Layout, Schedule]:
    ranks = stage_ranks(PLACEMENT_OF[name], num_ranks)
    graphs = {**SMALL, "layer": GraphPair.of(recomputed(SMALL["layer"].forward, recompute))}
    return pipeline_of(graphs, counts[: len(ranks)], ranks), build_schedule(name, num_ranks, num_microbatches)


@functools.cache
def block_plan_of(rule: str) -> Plan:
    layout, _ = case("folded_1f1b", 2, 1, [1] * 4)
    return make_plan(rule, profile_of(layout), model="m", mesh={"tp_size": 2})


def random_flow(layout: Layout, seed: int) -> Priorities:
    return Priorities(random_times(layout, seed), random_priority(layout, seed + 1), extra_live_layers=seed % 3)


def transfers(program: Iterable[Instruction]) -> dict[tuple[int, bool], list[int]]:
    """By unit and direction of what crosses, the micro-batches in order."""
    result: dict[tuple[int, bool], list[int]] = {}
    for i in program:
        if i.operator is not None and i.operator.kind is Kind.PIPELINE:
            result.setdefault((i.unit, i.operator.part is Part.F), []).append(i.microbatch)
    return result


def check_ranks(programs: list[list[Instruction]], layout: Layout, schedule: Schedule) -> None:
    everything = [i for program in programs for i in operators_of(program)]
    bare = [i._replace(frees=(), ends=False) for i in everything]
    assert by_operator(bare) == by_operator(window_instructions(schedule, layout))
    for rank, (program, slots) in enumerate(zip(programs, schedule, strict=True)):
        assert {layout.rank_of(i.unit) for i in program} == {rank}
        validate_program(program, [loss_gradient(layout)], layout, slots)
    moved = transfers(everything)
    assert len(moved) == 2 * sum(map(layout.transfers, range(len(layout.units))))
    for (unit, forward), order in moved.items():
        assert order == sorted(order)
        other = unit + (1 if layout.units[unit] == "send" else -1)
        assert moved[other, forward] == order
    times = random_times(layout, 0)
    seconds = simulate(arrays_of(everything, layout, times)).seconds  # raises if a rank waits for ever
    assert seconds >= lower_bound(profile_of(layout, times), schedule) - 1e-9


@given(**SHAPES, rule=st.sampled_from(BLOCKS))
def test_programs_of_blocks(name: str, num_ranks: int, num_microbatches: int, counts: list[int], rule: str):
    layout, schedule = case(name, num_ranks, num_microbatches, counts)
    check_ranks(build_programs(schedule, layout, block_plan_of(rule)), layout, schedule)


@given(**SHAPES, seed=SEEDS, recompute=st.sampled_from(RECOMPUTE))
def test_programs_of_flows(
    name: str, num_ranks: int, num_microbatches: int, counts: list[int], seed: int, recompute: str
):
    layout, schedule = case(name, num_ranks, num_microbatches, counts, recompute)
    flow = random_flow(layout, seed)
    programs = build_programs(schedule, layout, priority_plan(flow, layout))
    check_ranks(programs, layout, schedule)
    for rank, (program, slots) in enumerate(zip(programs, schedule, strict=True)):
        most = max(counts[stage] for stage in layout.chunks if layout.rank_of(layout.chunks[stage][0]) == rank)
        room = live_activations(slots) * most + flow.extra_live_layers
        assert most_layers_alive(program, layout) <= room + 1e-3


def test_ranks_wait_for_each_other_by_hand():
    """Two ranks of one layer each, 1F1B, one micro-batch; a millisecond each, three to a neighbour.

    Forward 2 + 6, sent 3, forward 6 + 2; backward: 3 of the head, 7 of the layer (a W beside its collective), sent 3,
    and 7 + 2 of the layer and the embedding.
    """
    layout, schedule = case("1f1b", 2, 1, [1, 1])
    times = dict.fromkeys(random_times(layout, 0), 1e-3)
    times |= {(unit, f"{letter}.transfer"): 3e-3 for unit in ("send", "receive") for letter in "FB"}
    predicted = predict(block_plan_of("sequential"), profile_of(layout, times), schedule, timeline=True)
    program, timeline = predicted.instructions, predicted.timeline
    names = [("B" if i.operator.part is not Part.F else "F", i.unit) if i.operator else None for i in program]
    starts = {name: min(t for t, n in zip(timeline.starts, names, strict=True) if n == name) for name in names if name}
    assert {name: round(1e3 * start, 6) for name, start in starts.items() if name[1] in (1, 4)} == {
        ("F", 1): 2, ("F", 4): 11, ("B", 4): 22, ("B", 1): 32,
    }  # fmt: skip
    assert timeline.seconds == pytest.approx(41e-3)


def test_the_search_is_hardly_ever_longer_than_greedy_on_several_ranks(monkeypatch: pytest.MonkeyPatch):
    """With a schedule or without one."""
    monkeypatch.setattr(search, "MAX_STEPS", 20)
    layout, schedule = case("folded_1f1b", 2, 5, [2, 1, 2, 1])
    profile = profile_of(layout, random_times(layout, 3))
    longest = search.CLOSE * timeline_of(greedy(profile), profile, schedule).seconds
    for known in (schedule, None):
        seconds = timeline_of(search.search(profile, known), profile, schedule).seconds
        assert lower_bound(profile, schedule) - 1e-9 <= seconds
        assert seconds <= longest or known is None


@pytest.mark.parametrize("rule", [*BLOCKS, "priorities"])
@pytest.mark.parametrize("name", [name for name, placement in PLACEMENT_OF.items() if placement == FOLD])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_shared_gradient_adds_up_in_the_order_of_the_slots(rule: str, name: str, num_ranks: int):
    """Head and embedding are both on rank 0, and the next micro-batch's head may come before this one's embedding."""
    layout, schedule = case(name, num_ranks, 2 * num_ranks + 1, [1] * 2 * num_ranks)
    head = len(layout.units) - 1
    layout = replace(layout, shared=[[(head, "logits.W"), (0, "lookup")]])
    plan = priority_plan(random_flow(layout, 5), layout) if rule == "priorities" else block_plan_of(rule)
    program, *_ = build_programs(schedule, layout, plan)
    validate_program(program, [loss_gradient(layout)], layout, schedule[0])
    backward = [i for i in operators_of(program) if i.operator.part is not Part.F]
    result = [(i.microbatch, i.unit) for i in backward if (i.unit, i.operator.name) in layout.shared[0]]
    expected = []
    for action in (slot.backward for slot in schedule[0] if slot.backward is not None):
        if action.stage == 0 and action.computation_type in "BI":
            expected.append((action.microbatch, 0))
        elif action.stage == 2 * num_ranks - 1 and action.computation_type in "BW":
            expected.append((action.microbatch, head))
    assert result == expected
