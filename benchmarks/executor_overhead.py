"""What the executor itself costs, in microseconds per operator.

Measured: `Runner.train_window` on the units of a Llama whose operators have been replaced by ones that do nothing: they
return tensors made beforehand. What is left is the bookkeeping of schedule, unit runs and executor, and the sums of
gradients that the executor makes itself (two per layer, of 16 numbers each). Four cases, with and without a trace:

- tensor-parallel size 1: computations only;
- tensor-parallel size 2 in one process: communication, too. It is handed to the worker thread and waited for as in a
  real run, but moves nothing.

Beside them, for scale: the real operators on tensors of hidden size 8 and sequence length 2, once through the executor
and once called directly, one after the other in the order in which the executor calls them. Their difference is another
measure of the same cost, with real operators' allocations and cache misses around it.

How: the cases run in turn in one process, some windows each round. A round gives one time per case, the median of its
windows; the table shows median, minimum and maximum over rounds. From the idle cases follows what one communication
costs: what a window of size 2 takes longer than its computations would at the cost per operator of size 1.

    OMP_NUM_THREADS=1 python benchmarks/executor_overhead.py
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from one_process import environment
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_helix.models.batch_inputs import SequenceCut
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.registry import family_of
from hf_helix.operators.base import (
    Call,
    Communication,
    Method,
    SplitComputation,
    TensorOperator,
    Tensors,
    Work,
    explicit_gradients,
)
from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.operators.unit import Unit
from hf_helix.planning.graph.operator import Operator, Part
from hf_helix.planning.pipeline.scheduler import Scheduler
from hf_helix.planning.plans.registry import RULES, make_plan
from hf_helix.planning.profile import rough_profile
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.distributed.pipe import Pipe
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.stage import place_units
from hf_helix.runtime.streams import make_streams
from hf_helix.runtime.trace import Trace

TARGET = 30.0
"""Microseconds that the executor may cost per operator."""

HIDDEN, SEQUENCE, VOCABULARY = 8, 2, 16
NOTHING = torch.zeros(SEQUENCE, 1, HIDDEN)

IDLE, IDLE_COMMUNICATING, TRACED = "idle, computation", "idle, computation and communication", ", traced"
REAL, DIRECT = "real, by the executor", "real, called directly"


@dataclasses.dataclass(frozen=True)
class Case:
    """A function that runs one window and returns its seconds; how many operators that are, and of them transfers."""

    run: Callable[[], float]
    num_operators: int
    num_communications: int


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    cases = make_cases(options)
    rounds = [run_round(cases, options.windows) for _ in range(options.warmup_rounds + options.rounds)]
    result = summarise(rounds[options.warmup_rounds :], cases, options)
    print_result(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches in a window")
    parser.add_argument("--plan", default="greedy", choices=[rule for rule in RULES if rule != "intra_batch"])
    parser.add_argument("--windows", type=int, default=20, help="windows of each case in a round")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count")
    parser.add_argument("--warmup-rounds", type=int, default=2)
    parser.add_argument("--json", help="also write the result to this file")
    return parser.parse_args()


# -- operators that do nothing -----------------------------------------------------------------------------------


class Idle(SplitComputation):
    """Stands for any computation: returns as many tensors as are expected, and computes nothing."""

    trained = 1.0

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.outputs = (NOTHING,) * num_outputs
        self.gradients = (NOTHING,) * num_inputs

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        return self.outputs

    def input_gradient(self, call: Call, *gradients: Tensor) -> Tensors:
        return self.gradients

    def weight_gradient(self, call: Call, *gradients: Tensor) -> Tensors:
        return ()


class IdleCommunication(Communication):
    """Stands for any communication: returns as many tensors as are expected, and moves nothing."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.outputs = (NOTHING,) * num_outputs
        self.gradients = (NOTHING,) * num_inputs

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, Work]:
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


def make_cases(options: argparse.Namespace) -> dict[str, Case]:
    """What is timed, by name."""
    cases: dict[str, Case] = {}
    for tp_size, what in ((1, IDLE), (2, IDLE_COMMUNICATING)):
        units, window = make_window(options, tp_size)
        idle = make_runner([make_idle(unit) for unit in units], tp_size, options.plan)
        for trace in (False, True):
            name = what + (TRACED if trace else "")
            cases[name] = Case(timed_window(idle, window, trace), *count_operators(units, options))
        if tp_size == 1:
            real = make_runner(units, tp_size, options.plan)
            counts = count_operators(units, options)
            cases[REAL] = Case(timed_window(real, window, trace=False), *counts)
            cases[DIRECT] = Case(timed_calls(real, window), *counts)
    return cases


def make_window(options: argparse.Namespace, tp_size: int) -> tuple[list[Unit], list[MicroBatch]]:
    """The units of a tiny Llama, and micro-batches for it."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=options.layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    model = LlamaForCausalLM(config).train()
    family = family_of(model)
    ids = torch.ones(1, SEQUENCE, dtype=torch.long)
    side = family.side_inputs(model, {"input_ids": ids, "labels": ids}, SequenceCut(tp_size), torch.tensor(1.0))
    window = [MicroBatch(lambda: side, (0, place)) for place in range(options.micro_batches)]
    return family.units(model, ParallelContext(_axis(tp_size))), window


def make_runner(units: list[Unit], tp_size: int, rule: str) -> Runner:
    stage = place_units(units)
    sizes = {"dp": 1, "pp": 1, "cp": 1, "tp": tp_size, "ep": 1}
    axis = _axis(tp_size)
    mesh = Mesh(sizes, torch.device("cpu"), None, axis, Axis.single(), axis, Pipe([0]), None, None, None, None)
    plan = make_plan(rule, rough_profile(stage.layout), model="LlamaForCausalLM", mesh={"tp_size": tp_size})
    return Runner(stage, plan, mesh, make_streams(mesh.device), Scheduler("folded_1f1b", 1), seed=0)


def _axis(tp_size: int) -> Axis:
    return Axis(SilentTransport(tp_size, 0))


def count_operators(units: list[Unit], options: argparse.Namespace) -> tuple[int, int]:
    """Operators that a window runs, forward and backward; how many of them communicate."""
    operators: list[Operator] = []
    for unit in units:
        operators += unit.graphs.forward.operators + unit.graphs.backward.operators
    communications = sum(operator.kind.communicates for operator in operators)
    return len(operators) * options.micro_batches, communications * options.micro_batches


def timed_window(runner: Runner, window: list[MicroBatch], trace: bool) -> Callable[[], float]:
    streams = runner.executor.streams

    def run() -> float:
        streams.trace = Trace() if trace else None
        start = time.perf_counter()
        runner.train_window(window)
        return time.perf_counter() - start

    return run


def timed_calls(runner: Runner, window: list[MicroBatch]) -> Callable[[], float]:
    """The operators of a window, called without the executor, as they were recorded when it called them."""

    def run() -> float:
        calls = record_calls(runner, window)
        start = time.perf_counter()
        with explicit_gradients():
            for call, arguments in calls:
                call(*arguments)
        return time.perf_counter() - start

    return run


def record_calls(runner: Runner, window: list[MicroBatch]) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Every call of an operator that a window makes, in order, with inputs that can be used once more.

    The recorded window itself runs with operators that hand out their own results, so `Call`s are replaced by fresh
    ones: a recorded backward finds what the recorded forward before it leaves.
    """
    recorded: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    fresh: dict[int, Call] = {}
    kept: list[Call] = []

    def note(function: Callable[..., Any], call: Call, inputs: tuple[Tensor, ...]) -> Any:
        if id(call) not in fresh:
            kept.append(call)  # so that no other call gets its id
            fresh[id(call)] = Call(call.side, call.seed, call.training, call.precision)
        recorded.append((function, (fresh[id(call)], *inputs)))
        return function(call, *inputs)

    units = [
        dataclasses.replace(unit, operators={name: _Noting(op, note) for name, op in unit.operators.items()})
        for unit in runner.stage.units.values()
    ]
    noting = Runner(place_units(units), runner.plan, runner.mesh, runner.executor.streams, runner.scheduler, seed=0)
    noting.train_window(window)
    return recorded


class _Noting(TensorOperator):
    """A computation that tells of every call."""

    def __init__(self, operator: TensorOperator, note: Callable[..., Any]) -> None:
        self._operator = operator
        self._note = note

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self._operator.parameters

    def method_of(self, part: Part) -> Method:
        method = self._operator.method_of(part)
        return lambda call, *inputs: self._note(method, call, inputs)


# -- measuring and printing --------------------------------------------------------------------------------------


def run_round(cases: dict[str, Case], windows: int) -> dict[str, float]:
    """Microseconds per operator of each case."""
    return {
        name: statistics.median(case.run() for _ in range(windows)) / case.num_operators * 1e6
        for name, case in cases.items()
    }


def summarise(rounds: list[dict[str, float]], cases: dict[str, Case], options: argparse.Namespace) -> dict[str, Any]:
    rows = {}
    for name, case in cases.items():
        micros = [each[name] for each in rounds]
        rows[name] = {
            "operators": case.num_operators,
            "median": statistics.median(micros),
            "min": min(micros),
            "max": max(micros),
        }
    return {
        "microseconds": rows,
        "real_difference": statistics.median(each[REAL] - each[DIRECT] for each in rounds),
        "communication": {
            name: statistics.median(_per_communication(each, cases, name) for each in rounds) for name in ("", TRACED)
        },
        "options": vars(options),
        "environment": environment(),
    }


def _per_communication(round_: dict[str, float], cases: dict[str, Case], traced: str) -> float:
    case = cases[IDLE_COMMUNICATING + traced]
    whole = round_[IDLE_COMMUNICATING + traced] * case.num_operators
    computations = round_[IDLE + traced] * (case.num_operators - case.num_communications)
    return (whole - computations) / case.num_communications


def print_result(result: dict[str, Any]) -> None:
    options, rows = result["options"], result["microseconds"]
    print(
        f"Llama, {options['layers']} layers, {options['micro_batches']} micro-batches, plan {options['plan']}; "
        f"{options['rounds']} rounds of {options['windows']} windows of each case, in turn\n"
    )
    print(f"| {'case':<43} | operators | us per operator |   min |   max |")
    print(f"|{'-' * 45}|{'-' * 10}:|{'-' * 16}:|{'-' * 6}:|{'-' * 6}:|")
    for name, row in rows.items():
        print(
            f"| {name:<43} | {row['operators']:>9} | {row['median']:>15.1f} | {row['min']:>5.1f} | {row['max']:>5.1f} |"
        )
    communication = result["communication"]
    print(f"\nreal operators, the executor's share: {result['real_difference']:.1f} us per operator")
    print(
        f"one communication, with hand-over to its thread and waiting for it: {communication['']:.1f} us, "
        f"traced {communication[TRACED]:.1f} us"
    )
    worst = max(row["median"] for name, row in rows.items() if name.startswith(IDLE))
    verdict = "met" if worst < TARGET else "missed"
    print(f"target: below {TARGET:.0f} us per operator on average, {verdict} (worst idle case {worst:.1f} us)\n")
    for name, value in result["environment"].items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
