"""What the executor itself costs, in microseconds per operator.

Measured: `Runner.train_window` on the units of a Llama whose operators have been replaced by ones that do nothing: they
return tensors made beforehand. What is left is the bookkeeping of schedule, unit runs and executor, and the sums of
gradients that the executor makes itself (two per layer, of 16 numbers each). Four cases, with and without a trace:

- tensor-parallel size 1: computations only;
- tensor-parallel size 2 in one process: communication, too. It is handed to the worker thread and waited for as in a
  real run, but moves nothing.

How: the cases run in turn in one process, some windows each round. A round gives one time per case, the median of its
windows; the table shows median, minimum and maximum over rounds. From the idle cases follows what one communication
costs: what a window of size 2 takes longer than its computations would at the cost per operator of size 1.

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
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import add_outputs, columns, facts, options_of, save
from hf_helix.config import RULES
from hf_helix.models.batch_inputs import SequenceCut
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.registry import family_of
from hf_helix.operators.base import (
    Communication,
    OperatorContext,
    SplitComputation,
    TensorOperator,
    Tensors,
    TransferFn,
)
from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.operators.unit import Unit
from hf_helix.planning.graph.operator import Operator, Part
from hf_helix.planning.plan.registry import make_plan
from hf_helix.planning.schedule.scheduler import Scheduler
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.distributed.pipe import Pipe
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.rank_units import place_units
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams import make_streams
from hf_helix.runtime.trace import Trace

TARGET = 30.0
"""Microseconds that the executor may cost per operator."""

HIDDEN, SEQUENCE, VOCABULARY = 8, 2, 16
NOTHING = torch.zeros(SEQUENCE, 1, HIDDEN)

IDLE, IDLE_COMMUNICATING, TRACED = "idle, computation", "idle, computation and communication", ", traced"


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
    result = summarise(rounds[options.warmup_rounds :], cases)
    text = describe(result, options)
    print(text)
    print("\n".join(f"{name}: {value}" for name, value in facts().items()))
    save(options, "The executor", __doc__, text, result)


def parse_arguments() -> argparse.Namespace:
    parser = options_of(__doc__, layers=4, micro_batches=4, windows=20, rounds=20, warmup_rounds=2)
    parser.add_argument("--plan", default="greedy", choices=[rule for rule in RULES if rule != "intra_batch"])
    add_outputs(parser)
    return parser.parse_args()


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


def make_cases(options: argparse.Namespace) -> dict[str, Case]:
    """What is timed, by name."""
    cases: dict[str, Case] = {}
    for tp_size, what in ((1, IDLE), (2, IDLE_COMMUNICATING)):
        units, window = make_window(options, tp_size)
        idle = make_runner([make_idle(unit) for unit in units], tp_size, options.plan)
        for trace in (False, True):
            name = what + (TRACED if trace else "")
            cases[name] = Case(timed_window(idle, window, trace), *count_operators(units, options))
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
    rank_units = place_units(units)
    sizes = {"dp": 1, "pp": 1, "cp": 1, "tp": tp_size, "ep": 1}
    axis = _axis(tp_size)
    mesh = Mesh(sizes, torch.device("cpu"), None, axis, Axis.single(), axis, Pipe([0]), None, None, None, None)
    plan = make_plan(rule, rough_profile(rank_units.layout), model="LlamaForCausalLM", mesh={"tp_size": tp_size})
    return Runner(rank_units, plan, mesh, make_streams(mesh.device), Scheduler("folded_1f1b", 1), seed=0)


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


# -- measuring and printing --------------------------------------------------------------------------------------


def run_round(cases: dict[str, Case], windows: int) -> dict[str, float]:
    """Microseconds per operator of each case."""
    return {
        name: statistics.median(case.run() for _ in range(windows)) / case.num_operators * 1e6
        for name, case in cases.items()
    }


def summarise(rounds: list[dict[str, float]], cases: dict[str, Case]) -> dict[str, Any]:
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
        "communication": {
            name: statistics.median(_per_communication(each, cases, name) for each in rounds) for name in ("", TRACED)
        },
    }


def _per_communication(round_: dict[str, float], cases: dict[str, Case], traced: str) -> float:
    case = cases[IDLE_COMMUNICATING + traced]
    whole = round_[IDLE_COMMUNICATING + traced] * case.num_operators
    computations = round_[IDLE + traced] * (case.num_operators - case.num_communications)
    return (whole - computations) / case.num_communications


def describe(result: dict[str, Any], options: argparse.Namespace) -> str:
    rows, communication = result["microseconds"], result["communication"]
    cells = [
        (name, str(row["operators"]), *(f"{row[key]:.1f}" for key in ("median", "min", "max")))
        for name, row in rows.items()
    ]
    worst = max(row["median"] for name, row in rows.items() if name.startswith(IDLE))
    verdict = "met" if worst < TARGET else "missed"
    lines = [
        f"Llama, {options.layers} layers, {options.micro_batches} micro-batches, plan {options.plan}; "
        f"{options.rounds} rounds of {options.windows} windows of each case, in turn",
        columns(("case", "operators", "us per operator", "min", "max"), cells),
        f"one communication, with hand-over to its thread and waiting for it: {communication['']:.1f} us, "
        f"traced {communication[TRACED]:.1f} us",
        f"target: below {TARGET:.0f} us per operator on average, {verdict} (worst idle case {worst:.1f} us)",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
