"""The runner: takes a window of micro-batches through a schedule.

In:   the rank's units, a plan, and the micro-batches of a window.
Out:  their losses, on every rank, and complete gradients in `parameter.grad`.
Must hold: gradients add up in the order of the micro-batches; a window may have any number of micro-batches of any
shapes; all ranks of a pipeline run the same window.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_helix.operators.base import Precision
from hf_helix.operators.experts.moe import RouterMeter
from hf_helix.operators.matmul_dtype import CastWeights
from hf_helix.operators.parameters.host_shard import arrived
from hf_helix.operators.zero.zero3 import casts_of
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.program import Program, build_program, validate_program
from hf_helix.planning.schedule.actions import Schedule, Slot
from hf_helix.planning.window.layout import Key
from hf_helix.runtime.distributed.groups import broadcast_object
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.executor import Executor, Sources, WindowEnded, no_sources
from hf_helix.runtime.gradients.buckets import bound_buckets
from hf_helix.runtime.gradients.reduce import GradientReducer
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.rank_units import RankUnits
from hf_helix.runtime.streams.streams import Streams


class Runner:
    """Runs windows on one rank.

    Args:
        rank_units: the units of this rank.
        plan: the order in which operators are issued.
        scheduler: makes the schedule of a window from its number of micro-batches.
        seed: of the run; each operator's randomness derives from the seed and the operator's position.
        autocast_dtype: the type of matrix products under autocast, such as `torch.bfloat16`; None for no autocast.
        fused: whether fused kernels run, see `Precision`.

    Attributes:
        layout: the units of all ranks.
        buckets: the gradients that are reduced together.
    """

    def __init__(
        self,
        rank_units: RankUnits,
        plan: Plan,
        mesh: Mesh,
        streams: Streams,
        scheduler: Scheduler,
        seed: int,
        autocast_dtype: torch.dtype | None = None,
        fused: bool = True,
    ) -> None:
        self.rank_units = rank_units
        self.plan = plan
        self.mesh = mesh
        self.scheduler = scheduler
        self.layout = rank_units.layout
        self.seed = seed
        casts = CastWeights(casts_of(rank_units.flat_parameters))
        self.precision = Precision(mesh.device.type, autocast_dtype, casts, fused)
        # Ranks hold different heads, tokens or batches, so they draw different numbers.
        self.executor = Executor(rank_units.units, streams, seed * world_size() + rank(), self.precision, self.layout)
        self._programs: dict[object, Program] = {}
        head = self.rank_units.head
        (output,) = self.layout.graphs[self.layout.units[head]].forward.outputs  # the loss, or the decoder's output
        self._output: Key = (head, output)
        self._output_gradient: Key = (head, f"d.{output}")
        self._loss_shape = self.rank_units.all_units[head].loss_shape
        self._token_figures = self.rank_units.all_units[head].token_figures
        self._ends_at_decoder = self.rank_units.all_units[head].ends_at_decoder
        self._logits: Key = (rank_units.slice, self.rank_units.all_units[head].logits or "")
        self._last = self.layout.rank_of(head)
        graphs = {unit: self.layout.graph(unit, True) for unit in rank_units.units if not self.layout.transfers(unit)}
        self._absent: dict[Key, Tensor | None] = {
            self.layout.key(unit, f"d.{value}", forward=False): None
            for unit, graph in graphs.items()
            for value in graph.shown
        }
        self._fill_buckets()

    def with_plan(self, plan: Plan, scheduler: Scheduler | None = None) -> Runner:
        """Returns a runner of the same parameters and streams, with another plan (and other schedules)."""
        return self.of_units(self.rank_units, plan, scheduler)

    def of_units(self, rank_units: RankUnits, plan: Plan, scheduler: Scheduler | None = None) -> Runner:
        """Returns a runner like this one, with other units of the same parameters.

        Args:
            rank_units: such as units in tiles.
            plan: of these units.
            scheduler: None for the scheduler of this runner.
        """
        scheduler, streams, types = scheduler or self.scheduler, self.executor.streams, self.precision
        return Runner(rank_units, plan, self.mesh, streams, scheduler, self.seed, types.autocast_dtype, types.fused)

    @plain_parameters()
    def train_window(
        self,
        microbatches: Sequence[MicroBatch],
        complete: bool = True,
        may_begin: Callable[[int], bool] | None = None,
        note: Callable[[nn.Parameter], object] | None = None,
    ) -> list[Tensor]:
        """Runs forward and backward of a window; returns losses by micro-batch, and adds gradients to `parameter.grad`.
        Where a caller computes the loss, a window repeats calls for measurements; there are no losses.

        Args:
            microbatches: the window.
            complete: also reduce the gradients over the ranks. Off, each rank keeps its own gradients.
            may_begin: see `Executor.run`; equal on every rank.
            note: see `GradientReducer`.

        Raises:
            WindowEnded: `may_begin` has ended the window. Its gradients are incomplete.
        """
        program = self.program(len(microbatches))
        reduction = self.reduction(len(microbatches) - 1, note) if complete else None
        self.rank_units.mark_weights_stale()  # an optimizer may have stepped
        try:
            kept = self.executor.run(
                program, microbatches, self.sources(), saves_for_backward=True, reduction=reduction, may_begin=may_begin
            )
        except WindowEnded:
            if reduction:
                reduction.abandon()
            raise
        self.rank_units.mark_weights_stale()  # a step follows, or a measured window moved nothing
        if reduction:
            reduction.finish()
        if self._ends_at_decoder:
            return []
        losses = [values[self._output] for _, values in sorted(kept.items()) if self._output in values]
        return self._everywhere(losses, microbatches)

    def reduction(
        self, last: int | None = None, note: Callable[[nn.Parameter], object] | None = None
    ) -> GradientReducer:
        """Returns the gradient reduction of a window; `last` and `note`: see `GradientReducer`."""
        if self._trained() != self._trained_before:
            self._fill_buckets()
        often = self.buckets_reduced_often
        return GradientReducer(self.buckets, self.mesh, self.executor.streams, self._numbers, often, last, note)

    @property
    def buckets_reduced_often(self) -> Collection[int]:
        """The buckets that every micro-batch reduces, as indices into `buckets`."""
        often = (each.unit for each in self.layout.reductions if each.every_microbatch)
        return [self._numbers[unit] for unit in often if unit in self._numbers]

    def _fill_buckets(self) -> None:
        """Finds the buckets, and the bucket of each traffic in the layout.

        Where the user has frozen or unfrozen parameters since the layout was made, the buckets differ from the
        program's. Then no bucket is a reduction of the layout, and all are reduced at the end.
        """
        self._trained_before = self._trained()
        self.buckets = bound_buckets(self.rank_units.rows, self.rank_units.units, self.mesh.place)
        planned = {number: made.row for number, made in enumerate(self.buckets) if made.row.is_planned}
        known = [each for each in self.layout.traffic_of(self.rank_units.rank) if each.adders]
        is_same = [each.adders for each in known] == [bucket.adders for bucket in planned.values()]
        self._numbers = {each.unit: number for each, number in zip(known, planned, strict=is_same)} if is_same else {}

    def _trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.rank_units.own_rows]

    @plain_parameters()
    def evaluate(self, microbatches: Sequence[MicroBatch], keep_logits: bool = False) -> tuple[Tensor, Tensor | None]:
        """Runs forward only; returns the sum of the losses and, if asked for, this rank's logits.

        Args:
            microbatches: the rows of a batch, as one micro-batch or as several that run concurrently.
            keep_logits: whether to return logits.

        Returns:
            The loss on every rank, and the logits of all rows [sequence, batch, vocabulary slice].
        """
        keys = (self._output, self._logits) if keep_logits else (self._output,)
        found = self.run_forward(microbatches, keys)
        loss = torch.stack(self._everywhere(found[self._output], microbatches)).sum(0)
        if not keep_logits:
            return loss, None
        joined = torch.cat(found[self._logits], 1) if found[self._logits] else None
        return loss, joined if self.layout.is_spread else self.share(joined)

    @plain_parameters()
    def run_forward(self, microbatches: Sequence[MicroBatch], keys: tuple[Key, ...]) -> dict[Key, list[Tensor]]:
        """Runs forward only; returns values of the micro-batches in order, without values of units on other ranks."""
        case = len(microbatches), keys
        if case not in self._programs:
            self._programs[case] = self.build_program(self.forward_schedule(len(microbatches)), keys)
        kept = self.executor.run(self._programs[case], microbatches, no_sources, saves_for_backward=False)
        of_all = [values for _, values in sorted(kept.items())]
        return {key: [values[key] for values in of_all if key in values] for key in keys}

    def forward_schedule(self, num_microbatches: int) -> Schedule:
        """Returns the forward slots of a window."""
        return [
            [Slot(forward=slot.forward) for slot in slots if slot.forward] for slots in self.scheduler(num_microbatches)
        ]

    def sources(self) -> Sources:
        """Returns the values that micro-batches of a window start with: the gradient of the loss; 0 for the decoder's
        output if a caller computes the loss."""
        return self._without_loss if self._ends_at_decoder else self._with_loss

    def _with_loss(self, batch: MicroBatch) -> dict[Key, Tensor | None]:
        gradient = torch.zeros(self._shape_of(batch), device=self.mesh.device)
        gradient.view(-1)[:1] = 1.0  # figures after the loss have no gradient
        return {self._output_gradient: gradient}

    def _without_loss(self, batch: MicroBatch) -> dict[Key, Tensor | None]:
        if batch.output is None:
            return self._absent
        return {**self._absent, self._output_gradient: torch.zeros_like(batch.output, device=self.mesh.device)}

    def absent_gradients(self, batch: MicroBatch) -> dict[Key, Tensor | None]:
        """Returns None for every gradient that a caller of the decoder may give."""
        return self._absent

    def program(self, num_microbatches: int) -> Program:
        """Returns this rank's program for a window of a number of micro-batches."""
        if num_microbatches not in self._programs:
            program = self.build_program(self.scheduler(num_microbatches), (self._output,))
            given = [self._output_gradient, *self._absent]
            validate_program(program.once, given, self.layout, program.slots)
            self._programs[num_microbatches] = program
        return self._programs[num_microbatches]

    def build_program(self, schedule: Schedule, keep: Collection[Key]) -> Program:
        """Returns this rank's program for a schedule, see `planning.plan.program.build_program`."""
        ahead = self.executor.streams.slots_ahead
        return build_program(schedule, self.layout, self.plan, self.rank_units.rank, keep, ahead)

    def _everywhere(self, losses: Sequence[Tensor], microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        """Returns the losses of all tokens on every rank, from the ranks with the head."""
        assert not self._ends_at_decoder
        shapes = [self._shape_of(batch) for batch in microbatches]
        sizes = [math.prod(shape) for shape in shapes]
        flat = [each.reshape(-1) for each in losses]
        result = torch.cat(flat) if flat else torch.zeros(sum(sizes), device=self.mesh.device)
        result = self.share(result, kind=(result.shape, result.dtype))
        group = self.mesh.cp.group
        if group is not None:
            dist.all_reduce(result, group=group)
        return [part.view(shape) for part, shape in zip(result.split(sizes), shapes, strict=True)]

    def _shape_of(self, batch: MicroBatch) -> tuple[int, ...]:
        """Returns the shape of the head's output for a micro-batch: a scalar, or a loss followed by figures."""
        if not self.has_token_loss:
            return self._loss_shape
        return (self._loss_shape[0] + self._token_figures * batch.num_tokens,)

    @property
    def has_token_loss(self) -> bool:
        """Whether code of the caller's computes the loss from log-probabilities, see `TokenLoss`."""
        return self._token_figures > 0

    def share(
        self, value: Tensor | None, unit: int | None = None, kind: tuple[Sequence[int], torch.dtype] | None = None
    ) -> Tensor:
        """Returns a value of the rank with a unit on every rank of the pipeline.

        Args:
            value: None on the other ranks.
            unit: the index of the unit; None for the last.
            kind: shape and type; None if the other ranks do not know them.
        """
        pipe = self.mesh.pipe
        if pipe.group is None:
            assert value is not None
            return value
        owner = pipe.ranks[self._last if unit is None else self.layout.rank_of(unit)]
        if kind is None:
            about: Any = None if value is None else (tuple(value.shape), value.dtype)
            kind = broadcast_object(about, owner, pipe.ranks)
        shape, dtype = kind
        shared = torch.empty(shape, dtype=dtype, device=self.mesh.device) if value is None else value.contiguous()
        dist.broadcast(shared, owner, group=pipe.group)
        return shared


def forget_gradients(runner: Runner) -> None:
    """Leaves the parameters without gradients, as between two optimizer steps."""
    for parameter in (*runner.rank_units.own_rows, *runner.rank_units.stepped):
        parameter.grad = None


@contextlib.contextmanager
def set_aside(runner: Runner) -> Iterator[None]:
    """Returns a context for a window that keeps the gradients of earlier windows apart. Earlier gradients are reduced
    already, so they are added after the reductions of this window. A window that fails leaves no gradients of its
    own."""
    parameters = runner.rank_units.stepped
    held = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    for parameter in held:
        parameter.grad = None
    try:
        yield
    except BaseException:
        forget_gradients(runner)
        raise
    finally:
        arrived([*held.values(), *(parameter.grad for parameter in held)])
        for parameter, earlier in held.items():
            parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)


@contextlib.contextmanager
def counting_apart(runner: Runner) -> Iterator[list[RouterMeter]]:
    """Returns a context with the meters of this rank's routers; at the end their sums are as before."""
    meters = [meter for unit in runner.rank_units.units.values() for meter in unit.meters]
    counted = [meter.sums for meter in meters]
    try:
        yield meters
    finally:
        for meter, sums in zip(meters, counted, strict=True):
            meter.sums = sums


@contextlib.contextmanager
def measured(runner: Runner) -> Iterator[None]:
    """Returns a context for windows that are measured, not trained on: afterwards the gradients, and the counts of the
    routers that the logs show, come only from training."""
    with counting_apart(runner), set_aside(runner):
        yield
