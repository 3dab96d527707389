"""The cost function: small programs by hand, random ones against other ways to find the same times."""

import dataclasses
import random
from itertools import pairwise

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arrays import arrays_of
from support.graphs import collective, compute, linear, pair, random_times

from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.operator_clock import Slowdown, Timeline, simulate
from hf_helix.planning.window.instructions import BARRIER_INSTRUCTION, entry_of, unit_instructions
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.window import NONE, STREAMS, WindowArrays

COMPUTE, LOCAL, CROSS = Kind.COMPUTE, Kind.INTRA_NODE, Kind.INTER_NODE


def work(*rows: tuple[Kind, float, list[int]]) -> WindowArrays:
    """Instructions as (stream, seconds, needs); each runs an operator of its own, named by its place."""
    return WindowArrays(
        streams=[STREAMS.index(kind) for kind, _, _ in rows],
        seconds=[seconds for _, seconds, _ in rows],
        needs=[list(needs) for _, _, needs in rows],
        entries=list(range(len(rows))),
        names=[("unit", str(place)) for place in range(len(rows))],
        ranks=[0] * len(rows),
        lanes=[0] * len(rows),
        size_sources=[NONE] * len(rows),
    )


def spans(timeline: Timeline) -> list[tuple[float, float]]:
    return [(round(a, 9), round(b, 9)) for a, b in zip(timeline.starts, timeline.ends, strict=True)]


# By hand


def test_communication_waits_for_everything_issued_before_it_on_the_compute_stream():
    """Even where it reads nothing of it: an event after the last computation is what it waits for."""
    late = work((COMPUTE, 1, []), (COMPUTE, 3, []), (LOCAL, 4, [0]), (COMPUTE, 2, [2]))
    assert spans(simulate(late)) == [(0, 1), (1, 4), (4, 8), (8, 10)]
    assert spans(simulate(late, order=[0, 2, 1, 3])) == [(0, 1), (1, 4), (1, 5), (5, 7)]


def test_a_stream_runs_in_the_order_of_issue():
    """The second transfer could start at 1 and waits for the first, which waits for a long computation."""
    held = work((COMPUTE, 1, []), (COMPUTE, 5, []), (LOCAL, 1, [1]), (LOCAL, 1, [0]), (COMPUTE, 1, [3]))
    assert spans(simulate(held)) == [(0, 1), (1, 6), (6, 7), (7, 8), (8, 9)]
    assert simulate(held, order=[0, 3, 1, 2, 4]).seconds == 7


def test_nothing_is_issued_before_the_host_knows_the_sizes():
    """The second transfer is as long as the first says, so the computation behind it is issued late."""
    rows = work((COMPUTE, 1, []), (LOCAL, 4, [0]), (LOCAL, 2, [1]), (COMPUTE, 3, []))
    assert spans(simulate(rows)) == [(0, 1), (1, 5), (5, 7), (1, 4)]
    known = dataclasses.replace(rows, size_sources=[-1, -1, 1, -1])
    assert spans(simulate(known)) == [(0, 1), (1, 5), (5, 7), (5, 8)]
    assert spans(simulate(known, order=[0, 1, 3, 2])) == [(0, 1), (1, 5), (5, 7), (1, 4)]


def test_at_a_barrier_the_compute_stream_waits_for_all_communication():
    operators = compute("norm", "x", "n m"), collective("gather", "n"), compute("act", "m")
    layer = pair("layer", *operators, outputs="gather act")
    layout = Layout(["layer"], {0: [0]}, {"layer": layer})
    times = {("layer", "F.norm"): 1.0, ("layer", "F.gather"): 4.0, ("layer", "F.act"): 2.0}
    norm, gather, act = unit_instructions(layout, (0, 0, True))
    assert simulate(arrays_of([norm, gather, act], layout, times)).seconds == 5
    barred = simulate(arrays_of([norm, gather, BARRIER_INSTRUCTION, act], layout, times))
    assert spans(barred) == [(0, 1), (1, 5), (5, 5), (5, 7)]
    assert barred.arrays.entries == [0, 1, NONE, 2]
    assert [name for _, name in barred.arrays.names] == ["F.norm", "F.gather", "F.act"]


def factors(table: dict[tuple[int, int], float]) -> Slowdown:
    """By places of instructions."""
    return lambda a, b: table.get((int(a[1]), int(b[1])), 1.0)


def test_loads_are_sums_by_stream():
    rows = work((COMPUTE, 1, []), (LOCAL, 4, []), (CROSS, 8, []), (COMPUTE, 2, []), (LOCAL, 16, []))
    assert rows.loads() == {**dict.fromkeys(Kind, 0), COMPUTE: 3, LOCAL: 20, CROSS: 8}
    assert simulate(work()).seconds == 0


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        ([(COMPUTE, 1, [1]), (COMPUTE, 1, [])], 2),
        ([(COMPUTE, 1, []), (LOCAL, 1, [2]), (LOCAL, 1, [])], 2),
        ([(COMPUTE, 1, [1]), (LOCAL, 1, [])], 2),  # the transfer is issued after what waits for it
    ],
)
def test_an_order_that_cannot_run_is_an_error(rows: list[tuple[Kind, float, list[int]]], left: int):
    with pytest.raises(ValueError, match=f"cannot run: {left} instructions wait for later ones"):
        simulate(work(*rows))


# Works from programs


def test_backward_needs_what_forward_kept_and_what_is_read():
    layer = pair("layer", compute("norm", "x"), linear("up", "norm"), repeats=True)
    layout = Layout(["layer"] * 2, {0: [0, 1]}, {"layer": layer})
    program = [i for unit in (0, 1) for i in unit_instructions(layout, (0, unit, True))]
    program += [i for unit in (1, 0) for i in unit_instructions(layout, (0, unit, False))]
    result = arrays_of(program, layout, random_times(layout, 0))
    text = [f"{entry_of(i, layout)[1]}{i.unit}" for i in program]
    needs = {name: {text[need] for need in result.needs[place]} for place, name in enumerate(text)}
    assert needs == {
        "F.norm0": set(),
        "F.up0": {"F.norm0"},
        "F.norm1": {"F.up0"},
        "F.up1": {"F.norm1"},
        "B.up.I1": {"F.up1"},
        "B.up.W1": {"F.up1", "F.norm1"},
        "B.norm1": {"B.up.I1", "F.norm1"},
        "B.up.I0": {"B.norm1", "F.up0"},
        "B.up.W0": {"B.norm1", "F.up0", "F.norm0"},
        "B.norm0": {"B.up.I0", "F.norm0"},
    }


# Random ones


@st.composite
def works(draw: st.DrawFn) -> WindowArrays:
    """Anything that can run: instructions that need some of the earlier ones."""
    rows = []
    for place in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from([COMPUTE, COMPUTE, LOCAL, CROSS]))
        needs = draw(st.lists(st.integers(0, place - 1), unique=True, max_size=3)) if place else []
        rows.append((kind, draw(st.integers(0, 40)) / 8, needs))
    return work(*rows)


def prerequisites(work: WindowArrays) -> list[list[int]]:
    """What must be done before each: its needs, the one before it on its stream, and for communication the computation
    issued last before it."""
    result = []
    for place, stream in enumerate(work.streams):
        same = [i for i in range(place) if work.streams[i] == stream][-1:]
        computed = [i for i in range(place) if STREAMS[work.streams[i]] is COMPUTE][-1:]
        result.append([*work.needs[place], *same, *computed])
    return result


@given(works())
def test_without_slowdown_it_is_the_longest_path(work: WindowArrays):
    graph = networkx.DiGraph()
    for place, (seconds, before) in enumerate(zip(work.seconds, prerequisites(work), strict=True)):
        graph.add_edge(("start", place), ("end", place), weight=seconds)
        graph.add_edges_from([(("end", other), ("start", place)) for other in before], weight=0)
    timeline = simulate(work)
    assert timeline.seconds == pytest.approx(networkx.dag_longest_path_length(graph, "weight"))
    for place in range(len(work)):
        upstream = graph.subgraph(networkx.ancestors(graph, ("end", place)) | {("end", place)})
        assert timeline.ends[place] == pytest.approx(networkx.dag_longest_path_length(upstream, "weight"))


@given(works(), st.integers(0, 999))
def test_with_slowdown_each_does_its_work_at_the_rates_of_what_runs_beside_it(work: WindowArrays, seed: int):
    """Only one timeline starts everything at once when it may, and does exactly its work at these rates."""
    draw = random.Random(seed)
    table = {(a, b): draw.choice([1.0, 1.25, 2.0]) for a in range(len(work)) for b in range(len(work))}
    timeline = simulate(work, factors(table))
    starts, ends = timeline.starts, timeline.ends
    moments = sorted({*starts, *ends})
    for place, before in enumerate(prerequisites(work)):
        assert starts[place] == max((ends[i] for i in before), default=0.0)
        done = 0.0
        for a, b in pairwise(moments):
            if starts[place] <= a and b <= ends[place]:
                rate = 1.0
                for other in range(len(work)):
                    if other != place and starts[other] <= a and b <= ends[other]:
                        rate *= table[place, other]
                done += (b - a) / rate
        assert done == pytest.approx(work.seconds[place], abs=1e-9)
