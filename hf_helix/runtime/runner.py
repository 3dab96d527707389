"""The runner: takes a window of micro-batches through a schedule.

In:   the rank's stage, a plan, and the micro-batches of a window.
Out:  their losses, and complete gradients in `parameter.grad`.
Must hold: the k-th micro-batch adds its gradients before the k+1-th; a window may have any number of micro-batches of
any shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_helix.planning.plan import Plan
from hf_helix.planning.program import build_program, validate_program
from hf_helix.planning.schedule import Slot, build_schedule
from hf_helix.planning.window import Instruction, Key
from hf_helix.runtime.executor import Executor
from hf_helix.runtime.gradients import complete_gradients
from hf_helix.runtime.mesh import Mesh, rank, world_size
from hf_helix.runtime.stage import Stage
from hf_helix.runtime.strand import MicroBatch
from hf_helix.runtime.streams import Streams

LOGITS = "head.logits"


class Runner:
    """Runs windows on one rank.

    Args:
        stage: what this rank holds, its collectives not yet cut into the tiles that a plan may ask for.
        plan: the order of every block.
        schedule: the schedule's name.
        seed: of the run; each operator's randomness derives from it and from its place.
    """

    def __init__(self, stage: Stage, plan: Plan, mesh: Mesh, streams: Streams, schedule: str, seed: int) -> None:
        self.whole = stage
        self.stage = stage.tiled(plan.tiles)
        self.plan = plan
        self.mesh = mesh
        self.schedule = schedule
        self.layout = self.stage.layout
        self._seed = seed
        # Ranks hold different heads, tokens or batches, so they draw different numbers.
        self.executor = Executor(self.stage.units, streams, seed * world_size() + rank())
        self._programs: dict[object, list[Instruction]] = {}
        head = len(self.stage.units) - 1
        (loss,) = self.stage.units[head].graphs.forward.outputs
        self._loss: Key = (head, loss)
        self._loss_gradient: Key = (head, f"d.{loss}")
        self._logits: Key = (head, LOGITS)

    def with_plan(self, plan: Plan) -> Runner:
        """A runner of the same parameters, on the same streams, with another plan."""
        return Runner(self.whole, plan, self.mesh, self.executor.streams, self.schedule, self._seed)

    def train_window(self, microbatches: Sequence[MicroBatch], complete: bool = True) -> list[Tensor]:
        """Forward and backward of a window; losses by micro-batch, gradients added to `parameter.grad`.

        Args:
            complete: also sum the gradients over the ranks. Off, each rank keeps what it saw.
        """
        program = self.program(len(microbatches))
        kept = self.executor.run(program, microbatches, self.sources(), training=True)
        if complete:
            complete_gradients(self.stage.placements, self.mesh)
        return [kept[k][self._loss] for k in range(len(microbatches))]

    def evaluate(self, microbatch: MicroBatch, keep_logits: bool = False) -> tuple[Tensor, Tensor | None]:
        """Forward only: the loss and, if asked for, this rank's logits [sequence, batch, vocabulary slice]."""
        name = "logits" if keep_logits else "loss"
        if name not in self._programs:
            keep = (self._loss, self._logits) if keep_logits else (self._loss,)
            slots = [Slot(forward=slot.forward) for slot in self.slots(1) if slot.forward]
            self._programs[name] = build_program(slots, self.layout, self.plan, keep)
        kept = self.executor.run(self._programs[name], [microbatch], {}, training=False)[0]
        return kept[self._loss], kept.get(self._logits)

    def sources(self) -> dict[Key, Tensor]:
        """What every micro-batch starts with: the gradient of its loss."""
        return {self._loss_gradient: torch.ones((), device=self.mesh.device)}

    def slots(self, num_microbatches: int) -> list[Slot]:
        """What this rank runs for a window of so many micro-batches."""
        return build_schedule(self.schedule, 1, num_microbatches)[0]

    def program(self, num_microbatches: int) -> list[Instruction]:
        """What is issued for a window of so many micro-batches."""
        if num_microbatches not in self._programs:
            slots = self.slots(num_microbatches)
            program = build_program(slots, self.layout, self.plan, (self._loss,))
            validate_program(program, [self._loss_gradient], self.layout)
            self._programs[num_microbatches] = program
        return self._programs[num_microbatches]
