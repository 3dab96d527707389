"""A program is bound to its operators once, however many others run between."""

import pytest

from hf_helix.operators.base import Precision
from hf_helix.planning.window.instructions import BARRIER_INSTRUCTION
from hf_helix.runtime import executor
from hf_helix.runtime.executor import MAX_PROGRAMS, Executor, no_sources
from hf_helix.runtime.streams import CpuStreams


def test_the_least_recently_run_program_is_bound_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, bind = list[object](), executor.bind
    monkeypatch.setattr(executor, "bind", lambda made, *others: (bound.append(made), bind(made, *others))[1])
    usual, *others = programs = [[BARRIER_INSTRUCTION] for _ in range(2 * MAX_PROGRAMS)]
    runs = Executor({}, CpuStreams(), 0, Precision())
    for other in others:
        for program in (usual, other):
            runs.run(program, [], no_sources, saves_for_backward=False)
    assert len(bound) == len(programs)
    runs.run(others[0], [], no_sources, saves_for_backward=False)
    assert len(bound) == len(programs) + 1
