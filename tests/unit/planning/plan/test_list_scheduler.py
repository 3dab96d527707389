"""List scheduling: valid orders for any graph, times and priorities, within their memory, the same everywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arrays import window_instructions
from support.graphs import (
    LLAMA,
    SMALL,
    check_whole_and_in_order,
    collective,
    compute,
    layers,
    layers_only,
    layout_of,
    linear,
    list_scheduled,
    loss_gradient,
    most_layers_alive,
    pair,
    priority_plan,
    profile_of,
    random_priority,
    random_times,
    schedule_of,
)
from support.programs import build_programs

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Operator, Part
from hf_helix.planning.plan.list_scheduler import Priorities
from hf_helix.planning.plan.program import validate_program
from hf_helix.planning.plan.search import greedy
from hf_helix.planning.schedule.actions import Action, Schedule, Slot
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Layout


def flow_of(layout: Layout, seed: int, extra_live_layers: int = 1) -> Priorities:
    return Priorities(random_times(layout, seed), random_priority(layout, seed + 1), extra_live_layers)


def ordered(flow: Priorities, layout: Layout, schedule: Schedule) -> tuple[list[Instruction], list[Instruction]]:
    """A window of one rank under a flow, and the window before it was ordered."""
    (program,) = list_scheduled(schedule, layout, flow)
    return program, window_instructions(schedule, layout)


def names(program: list[Instruction]) -> list[str]:
    return [instruction.operator.name for instruction in program]


@given(layers(), st.integers(1, 4), st.integers(1, 6), st.integers(0, 999), st.integers(0, 2))
def test_any_window_is_valid_and_within_its_memory(
    layer: GraphPair, num_layers: int, num_microbatches: int, seed: int, extra_live_layers: int
):
    layout = layout_of({**LLAMA, "layer": layer}, num_layers)
    flow = flow_of(layout, seed, extra_live_layers)
    program, made = ordered(flow, layout, schedule_of(num_microbatches))
    check_whole_and_in_order(program, made)
    # In the W schedule, layer by layer: every layer of one micro-batch, and one more where the chunks are not equal.
    in_turns = num_layers + (num_layers % 2 if num_microbatches > 1 else 0)
    assert most_layers_alive(program, layout) <= in_turns + extra_live_layers + 1e-3

    (built,) = build_programs(schedule_of(num_microbatches), layout, priority_plan(flow, layout))
    validate_program(built, [loss_gradient(layout)])
    assert names(built) == names(program)


def test_memory_that_is_allowed_is_used_up_and_no_more():
    """Where weight gradients, which give memory back, are the least urgent, only the limit stops the forward strand."""
    layout = layout_of(LLAMA, 4)
    bias = {name: 1.0 if name[1].endswith(".W") else 0.0 for name in random_times(layout, 0)}
    for extra in range(3):
        program, _ = ordered(Priorities(random_times(layout, 0), bias, extra), layout, schedule_of(5))
        assert 4 + extra - 0.5 < most_layers_alive(program, layout) <= 4 + extra


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 999))
def test_a_strand_enters_a_unit_once_it_has_left_the_last_but_one(num_layers: int, num_microbatches: int, seed: int):
    layout = layout_of(LLAMA, num_layers)
    program, _ = ordered(flow_of(layout, seed), layout, schedule_of(num_microbatches))
    for forward in (True, False):
        strand = [i for i in program if (i.operator.part is Part.F) == forward and i.operator.part is not Part.W]
        visits = [(i.microbatch, i.unit) for i in strand]
        way = sorted(set(visits), key=lambda visit: (visit[0], visit[1] if forward else -visit[1]))
        for earlier, later in zip(way, way[2:], strict=False):
            left = max(place for place, visit in enumerate(visits) if visit == earlier)
            assert left < visits.index(later)


def repeated(*operators: Operator, num_layers: int = 2) -> Layout:
    """Layers of these operators between an embedding and a head."""
    layer = Graph("layer", operators, ("x",), operators[-1].writes, repeats=True)
    return layout_of({**SMALL, "layer": GraphPair.of(layer)}, num_layers)


def alone(letter: str) -> Schedule:
    """Three micro-batches in one direction."""
    stages = (0, 1) if letter == "F" else (1, 0)
    return [[Slot.alone(Action(stage, letter, k)) for k in range(3) for stage in stages]]


SPLIT = (
    compute("split", "x", "a b"),
    collective("gather.0", "a"),
    linear("up.0", "gather.0"),
    collective("gather.1", "b"),
    linear("up.1", "gather.1", ordered_after=("up.0",)),
    compute("join", "up.0 up.1"),
)
EIGHT = [linear(f"up.{n}", "enter", f"up.{n}.a up.{n}.b up.{n}.c") for n in range(8)]
SPECIAL: dict[str, tuple[Layout, Schedule]] = {
    "forward alone": (layout_of(LLAMA, 3), alone("F")),
    "backward alone": (layout_of(SMALL, 3), alone("B")),
    # However urgent it is, and although nothing of what comes first is read.
    "what is declared to come after": (repeated(*SPLIT), schedule_of(3)),
    # Only a unit's first operator waits for the strand, so one that reads nothing takes the memory of later units.
    "an operator that reads nothing": (
        repeated(compute("enter", "x"), compute("table"), compute("leave", "enter table")),
        schedule_of(3),
    ),
    # A rank in the middle of a pipeline: without embedding and head between them, two micro-batches share the forward
    # strand, and both may stop half way at the limit.
    "nothing but layers": (layers_only(LLAMA["layer"], 2), schedule_of(3)),
    # Eight linears read one value that runs again; each of their gradients takes more room than it.
    "gradients that fill the room of what their weights read": (
        repeated(
            compute("enter", "x", recomputed=True),
            *EIGHT,
            compute("leave", " ".join(value for op in EIGHT for value in op.writes)),
            num_layers=3,
        ),
        schedule_of(4),
    ),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_windows_are_ordered_without_any_room(case: str):
    layout, schedule = SPECIAL[case]
    flows = [flow_of(layout, seed, extra_live_layers=0) for seed in range(20)]
    flows.append(Priorities(random_times(layout, 0), {("layer", "F.table"): -1.0}, extra_live_layers=0))
    for flow in (*flows, greedy(profile_of(layout))):
        check_whole_and_in_order(*ordered(flow, layout, schedule))


@pytest.mark.parametrize(("transfer", "waits"), [(2.9, True), (3.1, False)])
def test_a_computation_that_is_more_urgent_is_waited_for(transfer: float, waits: bool):
    """By hand: `urgent` (bias 2 ms) can start `transfer` ms later than `other` (bias 5 ms)."""
    layer = pair(
        "layer",
        compute("enter", "x", "a b"),
        collective("gather", "a"),
        compute("urgent", "gather"),
        compute("other", "b"),
        compute("leave", "urgent other"),
    )
    layout = Layout(["layer"], {0: [0], 1: []}, {"layer": layer})
    times = dict.fromkeys(random_times(layout, 0), 1e-3) | {("layer", "F.gather"): transfer * 1e-3}
    flow = Priorities(times, {("layer", "F.urgent"): 2e-3, ("layer", "F.other"): 5e-3})
    program, _ = ordered(flow, layout, [[Slot(forward=Action(0, "F", 0))]])
    middle = ["urgent", "other"] if waits else ["other", "urgent"]
    assert names(program) == ["enter", "gather", *middle, "leave"]


def test_communication_is_issued_as_soon_as_its_input_is():
    """Directly after the computation that writes it, but for other communication."""
    layout = layout_of(LLAMA, 3)
    program, _ = ordered(flow_of(layout, 5), layout, schedule_of(3))
    writers = {(i.microbatch, key): place for place, i in enumerate(program) for key in i.writes}
    for place, i in enumerate(program):
        if i.operator.kind.communicates:
            written = max(writers[i.microbatch, key] for key in i.reads)
            assert all(between.operator.kind.communicates for between in program[written + 1 : place])


def test_what_only_weight_gradients_read_runs_again_in_time():
    """Backward reaches the other end of this layer without anything that runs again."""
    enter, up = compute("enter", "x", recomputed=True), linear("up", "enter", "up.a up.b")
    layout = repeated(enter, up, compute("leave", "up.a up.b"))
    for seed in range(40):
        program, made = ordered(flow_of(layout, seed, extra_live_layers=0), layout, schedule_of(4))
        check_whole_and_in_order(program, made)
        waiting = most = 0
        for i in program:
            if layout.units[i.unit] == "layer" and i.operator.forward_name == "up":
                waiting += {Part.F: 0, Part.I: 1, Part.W: -1}[i.operator.part]
                most = max(most, waiting)
        assert most <= 4, "two strands in a layer each, and what ran again for two layers more"
