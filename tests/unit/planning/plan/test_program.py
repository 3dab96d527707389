"""Programs: whole windows are valid under every rule, run everything once, and keep the order that bits depend on."""

import functools
from dataclasses import replace

import pytest
from support.arrays import window_instructions
from support.graphs import (
    SMALL,
    compute,
    layout_of,
    loss_gradient,
    pair,
    profile_of,
    schedule_of,
)
from support.programs import build_programs

from hf_helix.config import RULES
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.plan import search
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.program import validate_program
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.window.instructions import BARRIER_INSTRUCTION, Instruction
from hf_helix.planning.window.layout import Layout


@functools.cache
def plan_of(rule: str) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "MAX_STEPS", 20)
        return make_plan(rule, profile_of(layout_of(SMALL, 3)), model="m", mesh={"tp_size": 2})


@functools.cache
def window(rule: str, num_layers: int, num_microbatches: int) -> tuple[Instruction, ...]:
    layout = layout_of(SMALL, num_layers)
    schedule = schedule_of(num_microbatches)
    return tuple(build_programs(schedule, layout, plan_of(rule), [(num_layers + 1, "loss")])[0])


@pytest.mark.parametrize("rule", RULES)
def test_a_value_is_freed_by_the_last_that_touches_it(rule: str):
    """And each micro-batch ends once and last."""
    program = window(rule, 3, 3)
    last = {}
    for place, i in enumerate(program):
        last.update({(i.microbatch, key): place for key in (*i.writes, *i.needs)})
    freed = {(i.microbatch, key): place for place, i in enumerate(program) for key in i.frees}
    assert freed == {value: place for value, place in last.items() if value[1] != (4, "loss")}
    for k in range(3):
        ends = [instruction.ends for instruction in program if instruction.microbatch == k and instruction.operator]
        assert ends == [False] * (len(ends) - 1) + [True]


def test_barriers_stay_where_the_plan_has_them():
    """`sequential` runs the units of both strands in turn, with a barrier after each."""
    program = window("sequential", 1, 2)
    runs: list[list[Instruction]] = [[]]
    for instruction in program:
        if instruction.operator is None:
            runs.append([])
        else:
            runs[-1].append(instruction)
    assert runs.pop() == []
    visits = [{(i.microbatch, i.unit, i.operator.part is Part.F) for i in run} for run in runs]
    assert all(len(visit) == 1 for visit in visits)
    assert [f"{k}{'F' if forward else 'B'}{unit}" for ((k, unit, forward),) in visits] == (
        ["0F0", "0F1", "0F2", "0B2", "1F0", "1F1", "0B1", "1F2", "0B0", "1B2", "1B1", "1B0"]
    )


def test_the_validator_finds_what_runs_twice_or_is_read_before_or_behind_its_time():
    program, sources = window("greedy", 2, 1), [(3, "d.loss")]
    validate_program(program, sources)
    validate_program([BARRIER_INSTRUCTION, *program], sources)
    place = next(i for i, result in enumerate(program) if result.operator.name == "norm")
    early = program[place]._replace(frees=program[place].reads)
    for wrong, known, said in (
        (program, [], r"instruction \d+ \(B0 unit 3 loss\) reads \[\(3, 'd\.loss'\)\]"),
        ([program[1], program[0], *program[2:]], sources, r"instruction 0 \(F0 unit 0 scatter\) reads .*not there"),
        ([program[0], *program], sources, r"instruction 1 \(F0 unit 0 lookup\) runs a second time"),
        (
            [*program[:place], early, *program[place + 1 :]],
            sources,
            r"\(F0 unit 1 add\) reads \[\(0, 'scatter'\)\], which is not there",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            validate_program(wrong, known)


def test_the_validator_finds_shared_gradients_out_of_turn():
    """The head and the embedding share a weight."""
    layout, schedule = replace(layout_of(SMALL, 1), shared=[[(2, "logits.W"), (0, "lookup")]]), schedule_of(2)
    (program,) = build_programs(schedule, layout, plan_of("greedy"))
    sources = [loss_gradient(layout)]
    adds = [i.operator.part is not Part.F and (i.unit, i.operator.name) in layout.shared[0] for i in program]
    places = [place for place, result in enumerate(adds) if result]
    late = program.pop(places[0])  # the head's of the first micro-batch, behind its embedding
    kept = [i._replace(frees=()) for i in program]
    moved = [*kept[: places[1]], late._replace(frees=()), *kept[places[1] :]]
    validate_program(moved, sources)  # nothing else is wrong with it
    with pytest.raises(ValueError, match=r"adds to a shared gradient out of turn"):
        validate_program(moved, sources, layout, schedule[0])


def test_the_validator_finds_gradients_that_add_up_in_another_order():
    layer = pair("layer", compute("norm", "x"), repeats=True)
    layout = Layout(["layer"], {0: [0], 1: []}, {"layer": layer})
    made = window_instructions(schedule_of(2), layout)
    forward = [i for i in made if i.operator.part is Part.F]
    backward = [i for i in made if i.operator.part is not Part.F]
    validate_program([*forward, *backward], [(0, "d.norm"), (-1, "x"), (0, "x")])
    with pytest.raises(ValueError, match=r"\(B0 unit 0 norm\) comes after a later micro-batch"):
        validate_program([*forward, *backward[::-1]], [(0, "d.norm"), (0, "x")])
