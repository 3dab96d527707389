"""What the executor itself costs, in microseconds per operator.

Measured: `Runner.train_window` on the units of a Llama whose operators have been replaced by ones that do nothing: they
return tensors made beforehand. What is left is the bookkeeping of schedule, unit runs and executor, and the sums of
gradients that the executor makes itself (two per layer, of 16 numbers each). With `tp_size=1` there are computations
only; with `tp_size=2` in one process communication, too: it is handed to the worker thread and waited for as in a real
run, but moves nothing. The two run in turn, some windows each round; a round gives the median of its windows.

    python -m benchmarks.executor_overhead
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import add_outputs, columns, facts, llama, options_of, save
from benchmarks.gpu.windows import silent_mesh
from hf_helix.config import RULES, HelixConfig
from hf_helix.engine.synthetic import Workload
from hf_helix.operators.base import (
    Communication,
    OperatorContext,
    SplitComputation,
    TensorOperator,
    Tensors,
    TransferFn,
)
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner

TARGET = 30.0
"""Microseconds that the executor may cost per operator."""

CPU = torch.device("cpu")
HIDDEN, SEQUENCE = 8, 2
NOTHING = torch.zeros(SEQUENCE, 1, HIDDEN)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function that runs one window and returns its seconds; how many operators that are, and of them transfers."""

    run: Callable[[], float]
    operators: int
    communications: int


def main() -> None:
    parser = options_of(__doc__, layers=4, microbatches=4, windows=20, rounds=20, warmup_rounds=2)
    parser.add_argument("--plan", default="greedy", choices=RULES)
    add_outputs(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = {tp_size: make_case(tp_size, options) for tp_size in (1, 2)}
    rounds = []
    for _ in range(options.warmup_rounds + options.rounds):
        windows = {tp_size: [case.run() for _ in range(options.windows)] for tp_size, case in cases.items()}
        rounds.append({tp_size: statistics.median(seconds) for tp_size, seconds in windows.items()})
    text, result = describe(rounds[options.warmup_rounds :], cases, options)
    print(text)
    print("\n".join(f"{name}: {value}" for name, value in facts().items()))
    save(options, "The executor", __doc__, text, result)


# -- operators that do nothing -----------------------------------------------------------------------------------


class Idle(SplitComputation):
    """Stands for any computation: returns as many tensors as are expected, and computes nothing."""

    trained = 1.0

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.outputs = (NOTHING,) * num_outputs
        self.gradients = (NOTHING,) * num_inputs

    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        return self.outputs

    def input_gradient(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        return self.gradients

    def weight_gradient(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        return ()


class IdleCommunication(Communication):
    """Stands for any communication: returns as many tensors as are expected, and moves nothing."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.outputs = (NOTHING,) * num_outputs
        self.gradients = (NOTHING,) * num_inputs

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        return self.outputs if part is Part.F else self.gradients, _do_nothing


def _do_nothing() -> None:
    pass


def make_idle(unit: Unit) -> Unit:
    """The unit with the same graphs, and operators that do nothing."""
    operators: dict[str, TensorOperator] = {
        op.name: (IdleCommunication if op.kind.communicates else Idle)(len(op.reads), len(op.writes))
        for op in unit.graphs.forward.operators
    }
    return dataclasses.replace(unit, operators=operators)


# -- cases -------------------------------------------------------------------------------------------------------


def make_case(tp_size: int, options: argparse.Namespace) -> Case:
    """A tiny Llama as rank 0 of a tensor-parallel group without other ranks has it."""
    config, mesh = llama(HIDDEN, options.layers, 16, 2, intermediate_size=HIDDEN), silent_mesh(CPU, tp_size)
    made = Workload(config, HelixConfig(tp_size=tp_size), CPU, mesh)
    plan = make_plan(options.plan, rough_profile(made.runner.layout), model="", mesh={})
    units = {place: make_idle(unit) for place, unit in made.runner.rank_units.all_units.items()}
    idle = dataclasses.replace(made.runner.rank_units, all_units=units)
    runner = Runner(idle, plan, mesh, made.runner.executor.streams, made.runner.scheduler, seed=0)
    side = made.window(1, 1, SEQUENCE)[0].prepare()
    window = [MicroBatch(lambda: side, (0, place)) for place in range(options.microbatches)]

    def run() -> float:
        start = time.perf_counter()
        runner.train_window(window)
        return time.perf_counter() - start

    graphs = [graph for unit in units.values() for graph in (unit.graphs.forward, unit.graphs.backward)]
    kinds = [op.kind for graph in graphs for op in graph.operators] * options.microbatches
    return Case(run, len(kinds), sum(kind.communicates for kind in kinds))


def describe(
    rounds: list[dict[int, float]], cases: dict[int, Case], options: argparse.Namespace
) -> tuple[str, dict[str, Any]]:
    """Returns the table, and its figures. What a window with communication takes longer than its computations would is
    what communication costs."""
    alone, both = cases[1], cases[2]
    names = {1: "computation", 2: "computation and communication"}
    micros = {name: [1e6 * each[size] / cases[size].operators for each in rounds] for size, name in names.items()}
    computations = (both.operators - both.communications) / alone.operators
    each = statistics.median(1e6 * (r[2] - r[1] * computations) / both.communications for r in rounds)
    rows = [
        (name, str(cases[size].operators), *(f"{of(micros[name]):.1f}" for of in (statistics.median, min, max)))
        for size, name in names.items()
    ]
    worst = max(map(statistics.median, micros.values()))
    lines = [
        f"Llama, {options.layers} layers, {options.microbatches} micro-batches, plan {options.plan}; "
        f"{options.rounds} rounds of {options.windows} windows of each case, in turn",
        columns(("operators that do nothing", "operators", "us per operator", "min", "max"), rows),
        f"one communication, with hand-over to its thread and waiting for it: {each:.1f} us",
        f"target: below {TARGET:.0f} us per operator on average, {'met' if worst < TARGET else 'missed'}",
    ]
    return "\n".join(lines), {"microseconds": micros, "communication": each}


if __name__ == "__main__":
    main()
