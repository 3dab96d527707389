"""What is alive in a window when most is: nothing is left behind, and what is kept waiting is kept alive."""

from __future__ import annotations

from typing import Any

import pytest
from support.programs import build_programs
from support.simulated import case_of, counted, on_meta

from hf_helix.doctor.amounts.records import Amounts
from hf_helix.doctor.memory import Peak, held_until_over, held_until_waited, memory_of_program, peaks_of_schedules
from hf_helix.doctor.step import layout_of
from hf_helix.doctor.traffic import layout_with_traffic
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.graph.operator import Kind, Operator
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.planning.window.instructions import BARRIER_INSTRUCTION, Instruction

OPTIONS: dict[str, dict[str, Any]] = {
    "tp2 full": {"tp_size": 2, "recompute": "full"},
    "cp2 bf16": {"cp_size": 2, "bf16": True},
    "sharded": {"shard_parameters": True, "dp_size": 2},
    "sharded full": {"shard_parameters": True, "dp_size": 2, "recompute": "full", "bf16": True},
}


@pytest.fixture(scope="module", params=OPTIONS)
def amounts(request: pytest.FixtureRequest) -> Amounts:
    return counted(on_meta(num_hidden_layers=4), **OPTIONS[request.param])


def program_of(amounts: Amounts, count: int, rule: str) -> list[Instruction]:
    layout = layout_of(amounts, case_of())
    plan = make_plan(rule, rough_profile(layout), model="m", mesh={"tp_size": 1})
    (program,) = build_programs(Scheduler("auto", 1)(count), layout, plan)
    return program


def peak_of(amounts: Amounts, program: list[Instruction]) -> Peak:
    return max(memory_of_program(amounts, layout_of(amounts, case_of()), program), key=lambda peak: peak.total)


@pytest.mark.parametrize("rule", ["sequential", "greedy"])
def test_long_windows_need_what_short_ones_do(rule: str, amounts: Amounts) -> None:
    """So nothing of a micro-batch is left behind."""
    short, long = (peak_of(amounts, program_of(amounts, count, rule)) for count in (6, 18))
    assert long == short
    assert short.activations > 0


def test_one_strand_needs_what_its_schedule_says(amounts: Amounts) -> None:
    result = peak_of(amounts, program_of(amounts, 6, "sequential"))
    (expected,) = peaks_of_schedules(amounts, layout_of(amounts, case_of()), [Scheduler("auto", 1)(6)], False)
    assert result.total == pytest.approx(expected.total, rel=0.02)
    assert result.gradients == expected.gradients
    if amounts.spread:
        assert result.gradients == 4 * sum(amounts.weights[name].trained for name in amounts.model.units)
        assert result.weights > 0
    else:
        assert (result.weights, result.gradients) == (0, 0)


def test_full_gradients_of_a_single_microbatch_go_as_they_come() -> None:
    """A few units' gradients are alive, in a program as in its schedule; of several micro-batches all are."""
    amounts = counted(on_meta(num_hidden_layers=12), **OPTIONS["sharded"])
    case = case_of(dp=2, shard_parameters=True)
    layout = layout_of(amounts, case)
    layout = layout_with_traffic(layout, amounts, case)
    plan, found = make_plan("sequential", rough_profile(layout), model="m", mesh={"tp_size": 1}), {}
    for count in (1, 2):
        schedule = Scheduler("auto", 1)(count)
        (program,) = build_programs(schedule, layout, plan)
        (expected,) = peaks_of_schedules(amounts, layout, [schedule], False)
        most = max(peak.gradients for peak in memory_of_program(amounts, layout, program))
        found[count] = most, expected.gradients
    whole, layer = (
        4 * sum(amounts.weights[name].trained for name in amounts.model.units),
        max(sum(made.bytes for made in layout.reductions if made.adders[0][0] == unit) for unit in range(1, 13)),
    )
    assert found[1][0] == found[1][1] < whole - 6 * layer
    assert found[2][1] == whole <= found[2][0] <= whole + max(made.bytes for made in layout.reductions)


def test_full_gradients_go_as_they_come_where_every_micro_batch_is_reduced() -> None:
    """As of a single micro-batch, however many there are."""
    amounts = counted(on_meta(num_hidden_layers=12), **OPTIONS["sharded"])
    case = case_of(dp=2, shard_parameters=True, reduce_gradients="microbatch")
    layout = layout_of(amounts, case)
    layout = layout_with_traffic(layout, amounts, case)
    whole = sum(made.bytes for made in layout.reductions)
    for rule in ("sequential", "greedy"):
        plan, found = make_plan(rule, rough_profile(layout), model="m", mesh={"tp_size": 1}), {}
        for count in (1, 4, 12):
            schedule = Scheduler("auto", 1)(count)
            (program,) = build_programs(schedule, layout, plan)
            (expected,) = peaks_of_schedules(amounts, layout, [schedule], rule != "sequential", often=True)
            memory = list(memory_of_program(amounts, layout, program))
            found[count] = most = max(peak.gradients for peak in memory)
            assert min(peak.gradients for peak in memory) >= 0
            assert expected.gradients < whole / 2
            assert most == expected.gradients if rule == "sequential" else most < whole / 2
        assert found[4] == found[12]


# -- until when collectives hold what they work with --------------------------------------------------


def an(
    name: str,
    reads: str = "",
    writes: str = "",
    frees: str = "",
    microbatch: int = 0,
    ends: bool = False,
    ahead: int = 0,
) -> Instruction:
    """An operator of one unit; what is called "gather..." is a collective. Values are single letters."""
    kind = Kind.INTRA_NODE if name.startswith("gather") else Kind.COMPUTE
    op = Operator(name=name, kind=kind, reads=tuple(reads), writes=tuple(writes), ahead=ahead)
    keys = [tuple((0, value) for value in values) for values in (reads, writes, frees)]
    return Instruction(microbatch, 0, op, reads=keys[0], writes=keys[1], frees=keys[2], ends=ends)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ([an("gather", "a", "b"), an("other", "c"), an("up", "b")], {0: 2}),
        ([an("gather", "a", "b"), an("other", "c"), BARRIER_INSTRUCTION, an("up", "b")], {0: 2}),
        ([an("gather", "", "b", ahead=1), BARRIER_INSTRUCTION, an("up", "b")], {0: 2}),
        ([an("gather", "a", "b"), an("other", "c", ends=True), an("up", "b", microbatch=1)], {0: 2}),
        # The second comes after the first, whose event it knows until it is waited for itself.
        (
            [an("gather1", "a", "b"), an("gather2", "b", "c", "b"), an("other", "d"), an("up", "c")],
            {0: 3, 1: 3},
        ),
        ([an("gather1", "a", "b"), an("gather2", "b", "c"), an("up", "b"), an("down", "c")], {0: 2, 1: 3}),
        # Nothing waits for a value that nothing reads: its event is gone with it.
        ([an("gather", "a", "b"), an("other", "c", frees="b"), an("up", "c")], {0: 2}),
        ([an("gather", "a", "b"), an("up", "b", microbatch=1), an("up", "b")], {0: 2}),
    ],
)
def test_a_gpu_holds_until_computation_is_told_to_wait(program: list[Instruction], expected: dict[int, int]):
    assert held_until_waited(program) == expected


def test_a_cpu_holds_until_the_collective_is_over():
    program = [an("gather1", "a", "b"), an("first", "c"), an("gather2", "d", "e"), an("second", "c")]
    program += [an("third", "b"), an("gather3", "f", "g")]
    starts, ends = [0.0, 0.0, 1.0, 1.0, 3.0, 4.0], [2.0, 1.0, 3.0, 3.0, 4.0, 5.0]
    assert held_until_over(program, starts, ends) == {0: 4, 2: 4, 5: 6}
