"""The search against an exact solver (CP-SAT) on small windows: the same rules, no interference, whole microseconds."""

import pytest
from ortools.sat.python import cp_model
from support.arrays import arrays_of, window_instructions
from support.graphs import (
    collective,
    compute,
    layout_of,
    linear,
    pair,
    profile_of,
    random_times,
    schedule_of,
    timeline_of,
)
from support.marks import slow

from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.plan.bounds import bound
from hf_helix.planning.plan.list_scheduler import EXTRA_LIVE_LAYERS
from hf_helix.planning.plan.search import search
from hf_helix.planning.schedule.actions import Action, Schedule, Slot
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.instructions import entry_of
from hf_helix.planning.window.layout import Layout

ENDS = {"embedding": pair("embedding", compute("lookup"), inputs=""), "head": pair("head", compute("loss", "x"))}
LAYERS = {
    3: pair("layer", compute("norm", "x"), collective("gather", "norm"), linear("up", "gather"), repeats=True),
    5: pair(
        "layer",
        compute("norm", "x"),
        collective("gather", "norm"),
        linear("up", "gather"),
        collective("scatter", "up", kind=Kind.INTER_NODE),
        compute("add", "x scatter"),
        repeats=True,
    ),
}


def optimum(profile: Profile, schedule: Schedule, most_layers: int) -> int:
    """Microseconds of the shortest window. The rules are said anew here: nothing of `list_scheduler` or `cost` is used.

    Communication needs no rule about what is issued before it: issued directly after what it reads, it waits for
    nothing else.
    """
    layout = profile.layout
    made = window_instructions(schedule, layout)
    seconds = [round(profile.times[entry_of(i, layout)] * 1e6) for i in made]
    model = cp_model.CpModel()
    starts = [model.new_int_var(0, sum(seconds), "") for _ in made]
    ends = [start + length for start, length in zip(starts, seconds, strict=True)]
    spans = [model.new_fixed_size_interval_var(start, d, "") for start, d in zip(starts, seconds, strict=True)]
    for kind in Kind:
        model.add_no_overlap([span for span, i in zip(spans, made, strict=True) if i.operator.kind is kind])

    writers = {(i.microbatch, key): place for place, i in enumerate(made) for key in i.writes}
    latest: dict[tuple[int, str], int] = {}
    called: dict[tuple[int, int, str], int] = {}
    named = {
        (i.microbatch, i.unit, i.operator.name): place for place, i in enumerate(made) if i.operator.part is Part.I
    }
    visits: dict[bool, dict[tuple[int, int], list[int]]] = {True: {}, False: {}}
    for place, i in enumerate(made):
        op, forward = i.operator, i.operator.part is Part.F
        before = [writers.get((i.microbatch, key)) for key in i.needs]
        if forward:
            called[i.microbatch, i.unit, op.forward_name] = place
        else:  # what forward kept; gradients in the order of the micro-batches
            before += [called.get((i.microbatch, i.unit, op.forward_name)), latest.get((i.unit, op.name))]
            latest[i.unit, op.name] = place
        for other in before:
            if other is not None:
                model.add(starts[place] >= ends[other])
        if op.part is not Part.W:
            visits[forward].setdefault((i.microbatch, i.unit), []).append(place)
    for strand in map(list, (visits[True].values(), visits[False].values())):
        for earlier, later in zip(strand, strand[2:], strict=False):
            model.add(starts[later[0]] >= ends[earlier[-1]])

    shares = [op.name for op in layout.graphs["layer"].forward.operators if op.kind is Kind.COMPUTE]
    taken = {Part.F: 1, Part.I: 1, Part.W: -2}  # an activation; the gradient that W waits with; both given back
    changes = {
        place: taken.get(i.operator.part, -1)
        for place, i in enumerate(made)
        if layout.units[i.unit] == "layer" and i.operator.forward_name in shares
    }
    for place, i in enumerate(made):
        if i.operator.part is Part.W:
            model.add(starts[place] >= ends[named[i.microbatch, i.unit, f"{i.operator.forward_name}.I"]])
        if i.operator.part is Part.F and place in changes:  # only forward is held up
            earlier = {other: model.new_bool_var("") for other in changes if other != place}
            for other, is_earlier in earlier.items():
                model.add(starts[other] < starts[place]).only_enforce_if(is_earlier)
                model.add(starts[other] >= starts[place]).only_enforce_if(is_earlier.negated())
            alive = sum(changes[other] * is_earlier for other, is_earlier in earlier.items())
            model.add(alive + 1 <= most_layers * len(shares))
    total = model.new_int_var(0, sum(seconds), "")
    model.add_max_equality(total, ends)
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)


def whole_window(size: int, num_layers: int, num_microbatches: int, seed: int) -> tuple[Profile, Schedule, int]:
    """Everything from the embedding to the head, and how many layers may be alive."""
    layout = layout_of({**ENDS, "layer": LAYERS[size]}, num_layers)
    in_turns = num_layers + (num_layers % 2 if num_microbatches > 1 else 0)
    return profile_of(layout, random_times(layout, seed)), schedule_of(num_microbatches), in_turns + EXTRA_LIVE_LAYERS


def pair_of_strands(size: int, num_layers: int, seed: int) -> tuple[Profile, Schedule, int]:
    """Layers forward beside as many backward, the middle of a window; one layer in, one out."""
    layout = Layout(["layer"] * num_layers, {0: list(range(num_layers))}, {"layer": LAYERS[size]})
    return (
        profile_of(layout, random_times(layout, seed)),
        [[Slot(Action(0, "F", 1), Action(0, "B", 0))]],
        EXTRA_LIVE_LAYERS,
    )


@pytest.mark.parametrize(
    ("given", "tolerance"),
    [
        (whole_window(3, 2, 1, seed=0), 1.0),
        (pair_of_strands(3, 1, seed=0), 1.0),
        (pair_of_strands(3, 2, seed=0), 1.0),
        slow(whole_window(5, 1, 2, seed=1), 1.0),
        slow(whole_window(5, 2, 1, seed=0), 1.0),
        slow(pair_of_strands(5, 2, seed=0), 1.013),  # 96 ms where 95 are possible
    ],
)
def test_the_search_finds_the_shortest_window(given: tuple[Profile, Schedule, int], tolerance: float):
    profile, schedule, most_layers = given
    best = optimum(profile, schedule, most_layers)
    found = round(timeline_of(search(profile, schedule), profile, schedule).seconds * 1e6)
    assert best <= found <= best * tolerance
    work = arrays_of(window_instructions(schedule, profile.layout), profile.layout, profile.times)
    assert round(bound(work, profile.layout) * 1e6) <= best
