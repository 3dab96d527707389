"""What runs programs: operators bound once, stretches that repeat, and backward in the thread that issues it."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.models import tiny
from torch import Tensor

from hf_helix.config import HelixConfig
from hf_helix.engine.synthetic import Workload
from hf_helix.operators import autograd_operator
from hf_helix.operators.base import Precision
from hf_helix.planning.plan.program import Program
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.planning.window.instructions import BARRIER_INSTRUCTION
from hf_helix.planning.window.layout import Layout
from hf_helix.runtime import executor
from hf_helix.runtime.executor import MAX_PROGRAMS, Executor, no_sources
from hf_helix.runtime.streams.streams import CpuStreams


def test_backward_runs_in_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd has a thread of its own for a GPU, and handing every small graph to it and back costs the host more than
    the graph. On a CPU it does so anyway; that autograd may use threads is asked of autograd."""
    ran: list[tuple[int, bool]] = []
    stock = autograd_operator.run_backward

    def noting(edges: Sequence[Any], gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        def note(given: object) -> None:
            ran.append((threading.get_ident(), torch._C._is_multithreading_enabled()))

        edges[0].node.register_prehook(note)
        stock(edges, gradients, inputs)

    monkeypatch.setattr(autograd_operator, "run_backward", noting)
    work = Workload(tiny("llama", num_hidden_layers=1).config, HelixConfig(), torch.device("cpu"))
    work.runner.train_window(work.window(2, 1, 8))
    assert len(ran) > 4
    assert set(ran) == {(threading.get_ident(), False)}


def test_the_least_recently_run_program_is_bound_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, bind = list[object](), executor.bind
    monkeypatch.setattr(executor, "bind", lambda made, *others: (bound.append(made), bind(made, *others))[1])
    usual, *others = programs = [[BARRIER_INSTRUCTION] for _ in range(2 * MAX_PROGRAMS)]
    runs = Executor({}, CpuStreams(), 0, Precision(), Layout([], {}, {}))
    for other in others:
        for program in (usual, other):
            runs.run(program, [], no_sources, saves_for_backward=False)
    assert len(bound) == len(programs)
    runs.run(others[0], [], no_sources, saves_for_backward=False)
    assert len(bound) == len(programs) + 1


COUNT = 30


@pytest.mark.parametrize("rule", ["sequential", "greedy"])
def test_repeated_stretches_give_the_same_bits(rule: str) -> None:
    """As the same window with every instruction written out."""
    work = Workload(tiny("llama", num_hidden_layers=2).config, HelixConfig(), torch.device("cpu"))
    plan = make_plan(rule, rough_profile(work.runner.layout), model="m", mesh=HelixConfig().option_sizes)
    window, result = work.window(COUNT, 2, 6), []
    for written_out in (False, True):
        runner = work.runner.with_plan(plan)
        program = runner.program(COUNT)
        assert program.repeats > COUNT // 2
        if written_out:
            runner._programs[COUNT] = Program(list(program))
        losses = torch.stack(runner.train_window(window))
        result.append((losses, [parameter.grad.clone() for parameter in work.model.parameters()]))
        work.model.zero_grad()
    (losses, gradients), (expected, wanted) = result
    assert len(set(losses.tolist())) == COUNT
    assert torch.equal(losses, expected)
    assert all(map(torch.equal, gradients, wanted))


@pytest.mark.parametrize("fused", [True, False])
def test_every_runner_of_a_run_has_its_choice_of_fused_kernels(fused: bool) -> None:
    """Whatever a later model in the process chooses."""
    of_run, later = (
        Workload(tiny("llama", num_hidden_layers=1).config, HelixConfig(fused_kernels=each), torch.device("cpu"))
        for each in (fused, not fused)
    )
    assert [of_run.runner.precision.fused, later.runner.precision.fused] == [fused, not fused]
    assert of_run.runner.with_plan(later.runner.plan).precision.fused == fused
    assert of_run.runner.executor._precision is of_run.runner.precision
