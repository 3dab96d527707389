"""The runner: takes a window of micro-batches through a schedule.

In:   the rank's stage, a plan, and per window the side inputs of its micro-batches.
Out:  their losses, and complete gradients in `parameter.grad`.
Must hold: a slot runs its forward action beside its backward action unit by unit, through the plan; the k-th
micro-batch adds its gradients before the k+1-th; a window may have any number of micro-batches of any shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from hf_helix.operators.unit import Unit
from hf_helix.planning.plan import Plan
from hf_helix.planning.schedule import Action, Schedule, Slot, build_schedule
from hf_helix.runtime.executor import Executor, Step, compile_order
from hf_helix.runtime.gradients import complete_gradients
from hf_helix.runtime.mesh import Mesh
from hf_helix.runtime.stage import Stage
from hf_helix.runtime.strand import Carried, MicroBatch, UnitRun
from hf_helix.runtime.streams import Streams

LOSS = "loss"
LOGITS = "head.logits"


class Runner:
    """Runs windows on one rank.

    Args:
        stage: what this rank holds.
        plan: the order of every block.
        schedule: the schedule's name.
        seed: of the run; each operator's randomness derives from it and from its place.
    """

    def __init__(self, stage: Stage, plan: Plan, mesh: Mesh, streams: Streams, schedule: str, seed: int) -> None:
        self.stage = stage
        self.plan = plan
        self.mesh = mesh
        self.schedule = schedule
        self.executor = Executor(streams)
        # Ranks of one batch hold different heads and tokens, so they draw different numbers.
        self._seed = seed * mesh.tp.size + mesh.tp.rank
        self._compiled: dict[tuple[str | None, str | None, frozenset[str]], list[Step]] = {}
        self._schedules: dict[int, Schedule] = {}

    def train_window(self, microbatches: Sequence[MicroBatch], complete: bool = True) -> list[Tensor]:
        """Forward and backward of a window; losses by micro-batch, gradients added to `parameter.grad`.

        Args:
            complete: also sum the gradients over the ranks. Off, each rank keeps what it saw.
        """
        window = _Window(self, microbatches)
        for slot in self._slots(len(microbatches)):
            window.run(slot.forward, slot.backward)
        if complete:
            complete_gradients(self.stage.placements, self.mesh)
        return window.losses

    def evaluate(self, microbatch: MicroBatch, keep_logits: bool = False) -> tuple[Tensor, Tensor | None]:
        """Forward only: the loss and, if asked for, this rank's logits [sequence, batch, vocabulary slice]."""
        keep = frozenset({LOGITS} if keep_logits else ())
        carried: Carried | None = None
        for chunk in self.stage.chunks.values():
            for unit in chunk:
                run = UnitRun(unit, microbatch, training=False, seed=self._seed)
                if carried is not None:
                    run.give(unit.graphs.forward.inputs, carried)
                self.executor.run(self.steps(unit, None, keep), run, None)
                carried = run.take(unit.graphs.forward.outputs)
        assert carried is not None
        return carried.values[0], run.values.get(LOGITS)

    def steps(self, forward: Unit | None, backward: Unit | None, keep: Collection[str] = frozenset()) -> list[Step]:
        """The compiled block in which two units meet."""
        names = (forward.name if forward else None, backward.name if backward else None)
        key = (*names, frozenset(keep))
        if key not in self._compiled:
            self._compiled[key] = compile_order(
                self.plan.order(*names),
                forward.graphs if forward else None,
                backward.graphs if backward else None,
                keep,
            )
        return self._compiled[key]

    def new_run(self, unit: Unit, microbatch: MicroBatch) -> UnitRun:
        return UnitRun(unit, microbatch, training=True, seed=self._seed)

    def _slots(self, num_microbatches: int) -> Sequence[Slot]:
        if num_microbatches not in self._schedules:
            self._schedules[num_microbatches] = build_schedule(self.schedule, 1, num_microbatches)
        return self._schedules[num_microbatches][0]


class _Window:
    """The state of one window: the unit runs between forward and backward, and what is on its way between units."""

    def __init__(self, runner: Runner, microbatches: Sequence[MicroBatch]) -> None:
        self.runner = runner
        self.microbatches = microbatches
        self.losses: list[Tensor] = [torch.empty(0)] * len(microbatches)
        self._runs: dict[tuple[int, str], UnitRun] = {}
        self._carried: dict[tuple[int, str], Carried] = {}

    def run(self, forward: Action | None, backward: Action | None) -> None:
        """One slot: the i-th unit of the forward action beside the i-th unit of the backward action."""
        chunks = self.runner.stage.chunks
        forward_units = chunks[forward.stage] if forward else []
        backward_units = chunks[backward.stage][::-1] if backward else []
        for going, coming in zip_longest(forward_units, backward_units):
            f = self._start_forward(going, forward.microbatch) if going and forward else None
            b = self._start_backward(coming, backward.microbatch) if coming and backward else None
            self.runner.executor.run(self.runner.steps(going, coming), f, b)
            if f is not None and forward is not None:
                self._end_forward(f, forward.microbatch)
            if b is not None and backward is not None:
                self._end_backward(b, backward.microbatch)

    def _start_forward(self, unit: Unit, k: int) -> UnitRun:
        run = self._runs[k, unit.label] = self.runner.new_run(unit, self.microbatches[k])
        if unit.graphs.forward.inputs:
            run.give(unit.graphs.forward.inputs, self._carried.pop((k, "F")))
        return run

    def _end_forward(self, run: UnitRun, k: int) -> None:
        carried = run.take(run.unit.graphs.forward.outputs)
        if run.unit.graphs.forward.outputs == (LOSS,):
            self.losses[k] = carried.values[0]
            carried = Carried([torch.ones_like(carried.values[0])], [None])
            self._carried[k, "B"] = carried
        else:
            self._carried[k, "F"] = carried

    def _start_backward(self, unit: Unit, k: int) -> UnitRun:
        run = self._runs.pop((k, unit.label))
        run.give(unit.graphs.backward.inputs, self._carried.pop((k, "B")))
        return run

    def _end_backward(self, run: UnitRun, k: int) -> None:
        if run.unit.graphs.backward.outputs:
            self._carried[k, "B"] = run.take(run.unit.graphs.backward.outputs)
        self.runner.executor.drain(run)
