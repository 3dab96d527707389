"""Measures what overlap is worth: windows as they run, their computation alone, their communication alone.

In:   runners that differ in their plan only, and a window of micro-batches.
Out:  step times and what follows from them, the same on every rank.
Must hold: everything is timed in turn in one run and medians are taken, each the maximum over ranks; parameters and
gradients are left as they were found (no gradients). Times include what computation loses to traffic beside it.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hf_helix.measure.progress import Progress
from hf_helix.operators.communication.transport import Axis, Move, Recorder, SilentTransport, Transport
from hf_helix.operators.zero.flat_parameter import FlatParameter
from hf_helix.operators.zero.zero1 import Zero1FlatParameter
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.bounds import busiest_link
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.distributed.groups import control_group
from hf_helix.runtime.distributed.mesh import Mesh, world_size
from hf_helix.runtime.gradients.buckets import Bucket
from hf_helix.runtime.gradients.reduce import reduce_all_gradients
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.trace import Trace, common, merge


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Seconds for one window (optimizer step without the optimizer), and what follows from them.

    Attributes:
        step: the window as it runs.
        computation: the same without collectives; ranks of a pipeline still wait for each other.
        communication: its collectives one after the other, without any computation.
        busiest: the communication of the busiest link: what is between hosts and what is not may run side by side, with
            the sums of gradients beside either; an emulated link carries everything.
        overlapped_fraction: communication time that ran beside computation / communication time, from a trace.
        tokens: tokens of the window, over all data-parallel ranks.
        bytes_moved: what a rank sends in the window, the sums of gradients left out.
        overlapped_by_kind: the overlapped fraction of each kind of communication.
        bubble_fraction: of the time of the computation alone, what ranks of a pipeline wait for each other (mean).
        link: the emulated link that everything was measured on, as text; empty where bytes went as they are.
        sums: seconds of the sums of gradients alone; they are part of `communication`.
        sums_overlapped: the part of their time in which computation ran beside them, from a trace.
        bytes_summed: what a rank sends in these sums, by formula.
        bytes_gathered: what it sends in gathers of weights, which is part of `bytes_moved`.
        bytes_spared: of weights and AdamW's states, what a rank keeps less of because they are spread, by formula.
    """

    step: float
    computation: float
    communication: float
    overlapped_fraction: float
    tokens: int
    bytes_moved: int = 0
    overlapped_by_kind: Mapping[str, float] = field(default_factory=dict)
    bubble_fraction: float = 0.0
    busiest: float | None = None
    link: str = ""
    sums: float = 0.0
    sums_overlapped: float = 0.0
    bytes_summed: int = 0
    bytes_gathered: int = 0
    bytes_spared: int = 0

    @property
    def exposed(self) -> float:
        """Seconds that communication adds to the step."""
        return max(0.0, self.step - self.computation)

    @property
    def hidden_fraction(self) -> float:
        """1 - exposed / communication alone: wall-clock saved. Negative where contention costs more than it saves."""
        return 1 - self.exposed / self.communication if self.communication else 0.0

    @property
    def bound(self) -> float:
        """No plan can be faster than the larger of the two alone."""
        return max(self.computation, self.communication if self.busiest is None else self.busiest)

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens / self.step


def measure_overlap(
    runners: Mapping[str, Runner],
    window: Sequence[MicroBatch],
    repeats: int = 5,
    progress: Progress | None = None,
) -> dict[str, Overlap]:
    """Times a window under the plan of every runner. Collective; call it when there are no gradients.

    Args:
        runners: by name, runners that differ in their plan or schedule only.
        window: the micro-batches that are timed.
        repeats: how often each runner is timed; medians are taken.
        progress: called once in every round.

    Raises:
        ValueError: fewer than one repeat.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: times need at least one repeat, such as repeats=5")
    first = next(iter(runners.values()))
    recorded = record_moves(first, window)
    # Ranks of a pipeline wait for each other as their schedule has it, so each schedule has a computation of its own.
    schedules: dict[str, Runner] = {}
    for runner in runners.values():
        schedules.setdefault(runner.scheduler.name, runner)
    parts = _time_parts(runners, schedules, recorded, window, repeats, progress)

    overlapped = {name: _overlapped_fractions(runner, window) for name, runner in runners.items()}
    spanning = bool(first.layout.reductions)  # if not, only tensor parallelism sums parts of a few gradients
    beside_sums = {name: _sums_overlapped(runner, window) if spanning else 0.0 for name, runner in runners.items()}
    bubbles = {name: _bubble_fraction(runner, window) for name, runner in schedules.items()}
    mesh, sent = first.mesh, sum(transport.bytes_sent for transport in recorded)
    over = {flat.gather_axis for flat in first.stage.flat_parameters}
    gathered = sum(each.bytes_sent for axis, each in zip(mesh.axes, recorded, strict=True) if axis in over)
    forget_gradients(first)
    return {
        name: Overlap(
            step=step,
            computation=parts.computations[runner.scheduler.name],
            communication=sum(parts.moving) + parts.sums,
            busiest=busiest_link(link_loads(mesh, parts.moving, parts.sums, sent)),
            overlapped_fraction=overlapped[name].pop(""),
            tokens=sum(batch.num_tokens for batch in window) * mesh.dp_size,
            bytes_moved=sent,
            overlapped_by_kind=overlapped[name],
            bubble_fraction=bubbles[runner.scheduler.name],
            link=str(mesh.link or ""),
            sums=parts.sums if spanning else 0.0,
            sums_overlapped=beside_sums[name],
            bytes_summed=bytes_summed(first),
            bytes_gathered=gathered,
            bytes_spared=sum(map(bytes_spared, first.stage.flat_parameters)),
        )
        for (name, runner), step in zip(runners.items(), parts.steps, strict=True)
    }


class _Parts(NamedTuple):
    """Median seconds of a window and of what it is made of.

    Attributes:
        computations: without collectives, by schedule.
        sums: of the sums of gradients alone.
        moving: of the other collectives alone, by axis.
        steps: of the whole window, by runner.
    """

    computations: dict[str, float]
    sums: float
    moving: list[float]
    steps: list[float]


def _time_parts(
    runners: Mapping[str, Runner],
    schedules: Mapping[str, Runner],
    recorded: Sequence[Recorder],
    window: Sequence[MicroBatch],
    repeats: int,
    progress: Progress | None,
) -> _Parts:
    first = next(iter(runners.values()))
    mesh = first.mesh

    def compute(runner: Runner) -> None:
        with _silenced(mesh.axes):
            runner.train_window(window, complete=False)

    def reduce_gradients() -> None:
        reduce_all_gradients(first.stage.units, mesh, first.executor.streams)

    moving = _collectives_alone(mesh, recorded)
    works: list[Callable[[], Any]] = [
        *(functools.partial(compute, runner) for runner in schedules.values()),
        reduce_gradients,  # comes after a computation, so there are gradients to sum
        *moving,
        *(functools.partial(runner.train_window, window) for runner in runners.values()),
    ]
    times = time_in_turn(works, first, repeats, keep_gradients=(reduce_gradients,), progress=progress)
    medians = [statistics.median(of_work) for of_work in times]
    computing, (summing, *rest) = medians[: len(schedules)], medians[len(schedules) :]
    sums = summing if world_size() > mesh.pipe.size else 0.0
    computations = dict(zip(schedules, computing, strict=True))
    return _Parts(computations, sums, rest[: len(moving)], rest[len(moving) :])


def _collectives_alone(mesh: Mesh, recorded: Sequence[Recorder]) -> list[Callable[[], None]]:
    """For each axis, what moves as much as its collectives of a window did."""
    kinds = {kind for transport in recorded for move in transport.moved for kind in move.buffers}
    buffers = {kind: torch.zeros(kind[0], dtype=kind[1], device=mesh.device) for kind in kinds}
    outputs = {kind: torch.zeros_like(buffer) for kind, buffer in buffers.items()}

    def move_all(axis: Axis, moved: Sequence[Move]) -> None:
        for move in moved:
            getattr(axis.transport, move.name)(outputs[move.out], buffers[move.value], *move.rows)

    return [
        functools.partial(move_all, axis, transport.moved) for axis, transport in zip(mesh.axes, recorded, strict=True)
    ]


def time_steps(runners: Mapping[str, Runner], window: Sequence[MicroBatch], repeats: int) -> dict[str, list[float]]:
    """Times a window under the plan of every runner. Collective; call it without gradients.

    Args:
        runners: by name, runners that differ in their plan or schedule only.
        window: the micro-batches that are timed.
        repeats: how often each runner is timed.

    Returns:
        By name, the seconds of every repeat.
    """
    first = next(iter(runners.values()))
    works = [functools.partial(runner.train_window, window) for runner in runners.values()]
    times = time_in_turn(works, first, repeats)
    forget_gradients(first)
    return dict(zip(runners, times, strict=True))


def time_in_turn(
    works: Sequence[Callable[[], Any]],
    first: Runner,
    repeats: int,
    keep_gradients: Sequence[object] = (),
    progress: Progress | None = None,
) -> list[list[float]]:
    """Times pieces of work in turn, round by round, so that what slows the machine for a while slows all. Collective.

    Args:
        works: what is timed, all of them in every round; each may leave gradients.
        first: any of the runners, whose gradients are forgotten before each piece of work.
        repeats: how many rounds count; one more is run before, which warms up.
        keep_gradients: the works that need the gradients of the one before.
        progress: called once in every round.

    Returns:
        By piece of work, its seconds on the slowest rank in every round that counts; the same on every rank.
    """
    times: list[list[float]] = [[] for _ in works]
    for round_ in range(repeats + 1):
        if progress is not None:
            progress(round_ / (repeats + 1))
        for work, of_work in zip(works, times, strict=True):
            if work not in keep_gradients:
                forget_gradients(first)
            of_work.append(_timed(work, first))
    return [_maxima(of_work[1:]) for of_work in times]


def record_moves(runner: Runner, window: Sequence[MicroBatch]) -> list[Recorder]:
    """Runs a window and returns what its collectives move, axis by axis. Collective; no gradients are left.

    The window runs since routers decide how many tokens go to which rank.
    """
    axes = runner.mesh.axes
    recorders = [Recorder(axis.transport) for axis in axes]
    with transports(axes, recorders):
        runner.train_window(window, complete=False)
        runner.executor.streams.synchronize()
    forget_gradients(runner)
    return recorders


def _silenced(axes: Sequence[Axis]) -> contextlib.AbstractContextManager[None]:
    """For a while, nothing moves on the axes."""
    silent = [SilentTransport(axis.size, axis.rank, axis.transport) for axis in axes]
    return transports(axes, silent)


@contextlib.contextmanager
def transports(axes: Sequence[Axis], others: Sequence[Transport]) -> Iterator[None]:
    """For a while, the axes use other transports."""
    real = [axis.transport for axis in axes]
    try:
        for axis, transport in zip(axes, others, strict=True):
            axis.transport = transport
        yield
    finally:
        for axis, before in zip(axes, real, strict=True):
            axis.transport = before


def trace_window(runner: Runner, window: Sequence[MicroBatch], complete: bool = False) -> Trace:
    """Returns what runs in a window, and when; no gradients are left. Collective.

    Args:
        runner: runs the window.
        window: the micro-batches.
        complete: whether gradients are summed over the ranks, too.
    """
    streams = runner.executor.streams
    with streams.tracing() as trace:
        runner.train_window(window, complete=complete)
    forget_gradients(runner)
    return trace


def _overlapped_fractions(runner: Runner, window: Sequence[MicroBatch]) -> dict[str, float]:
    """The overlapped fractions by stream, and of all streams under "": means over the ranks."""
    trace = trace_window(runner, window)
    mine = {}
    for stream in (None, *trace.collective_streams()):
        busy = trace.busy(compute=False, stream=stream)
        mine[stream or ""] = trace.overlapped(stream) / busy if busy else 0.0
    ranks = all_gather_object(mine)
    streams = sorted({stream for fractions in ranks for stream in fractions})
    return {
        stream: statistics.fmean(fractions[stream] for fractions in ranks if stream in fractions) for stream in streams
    }


def _sums_overlapped(runner: Runner, window: Sequence[MicroBatch]) -> float:
    """The part of the time of sums of gradients in which computation ran beside them: a mean over the ranks."""
    spans = trace_window(runner, window, complete=True).spans
    stream = Kind.GRADIENTS.value  # which gathers of weights go over, too
    sums = (span for span in spans if span.stream == stream and span.label.startswith(f"{stream}."))
    summing = merge((span.start, span.end) for span in sums)
    computing = merge((span.start, span.end) for span in spans if span.stream == Kind.COMPUTE.value)
    busy = sum(end - start for start, end in summing)
    beside = sum(end - start for start, end in common(summing, computing))
    return statistics.fmean(all_gather_object(beside / busy if busy else 1.0))


def _bubble_fraction(runner: Runner, window: Sequence[MicroBatch]) -> float:
    """The share of a window without collectives in which ranks do not compute: a mean over the ranks."""
    if runner.mesh.pipe.size == 1:
        return 0.0
    with _silenced(runner.mesh.axes):
        trace = trace_window(runner, window)
    spans = [(span.start, span.end) for span in trace.spans if span.stream == "compute"]
    mine = trace.busy(compute=True), min(start for start, _ in spans), max(end for _, end in spans)
    ranks = all_gather_object(mine)
    # Clocks of hosts differ; rank 0 of a pipeline computes first and last on the fold.
    whole = max(end - start for _, start, end in ranks)
    return max(0.0, 1 - statistics.fmean(busy for busy, _, _ in ranks) / whole)


def _timed(work: Callable[[], Any], runner: Runner) -> float:
    runner.executor.streams.synchronize()
    if dist.is_initialized():
        dist.barrier(group=control_group())
    start = time.perf_counter()
    work()
    runner.executor.streams.synchronize()
    return time.perf_counter() - start


def _maxima(mine: list[float]) -> list[float]:
    """The time of the slowest rank, repeat by repeat. Collective."""
    return [max(column) for column in zip(*all_gather_object(mine), strict=True)]


def forget_gradients(runner: Runner) -> None:
    """Leaves the parameters without gradients, as between two optimizer steps."""
    for parameter in (*runner.stage.placements, *runner.stage.stepped):
        parameter.grad = None


# -- shares --------------------------------------------------------------------------------------------------------
# What a rank sends in a window: over which links, and in sums of gradients; what it saves by spreading parameters.
#
# In:   a runner, whose parameters may be spread over ranks, and times of its collectives.
# Out:  seconds by link; bytes of this rank, by formula.
# Must hold: what is counted is what docs/data_parallelism.md says of a window and of the time between windows;
# padding is
# counted.


AVERAGES = 8
"""Bytes of AdamW's two averages of an element, in float32."""


def bytes_summed(runner: Runner) -> int:
    """Returns what this rank sends in the sums of a window's gradients over the ranks that see other tokens."""
    return sum(_sent(bucket, runner) for bucket in runner.buckets if bucket.spans_batches)


def _sent(bucket: Bucket, runner: Runner) -> int:
    if bucket.flat is not None:  # a reduce-scatter
        size = torch.promote_types(bucket.flat.shard.dtype, torch.float32).itemsize
        return (bucket.flat.gather_axis.size - 1) * bucket.flat.shard.numel() * size
    total = 0
    for parameter, placement in bucket.placements.items():  # an all-reduce
        group = runner.mesh.replica_group_of(placement)
        ranks = dist.get_world_size(group) if group is not None else 1
        size = torch.promote_types(parameter.dtype, torch.float32).itemsize
        total += 2 * (ranks - 1) * parameter.numel() * size // ranks
    return total


def bytes_spared(flat: FlatParameter) -> int:
    """Returns what this rank keeps less of between windows because the parameters of a flat are spread: of weights, and
    of AdamW's states where they are trained."""
    weight = flat.shard.element_size()
    states = AVERAGES if any(shard.requires_grad for shard in flat.shards.values()) else 0
    kept = (weight + states) * flat.shard.numel()
    if isinstance(flat, Zero1FlatParameter):
        kept = flat.buffer.nbytes + (weight if flat.cast_to is not None else 0) * flat.shard.numel()
        kept += states * flat.shard.numel()
    return (weight + states) * flat.length - kept


def link_loads(mesh: Mesh, moved: Sequence[float], summing: float, sent: int) -> Iterator[tuple[str, float]]:
    """Yields what a window communicates, for `busiest_link`: by kinds, each on a link of its own, sums of gradients on
    that of their ranks. All of it shares an emulated link, over which latencies may pass side by side.

    Args:
        mesh: the axes.
        moved: seconds of the collectives of each.
        summing: seconds of the sums.
        sent: bytes that a rank sends over the axes.
    """
    if mesh.link:
        yield from ((f"axis {place}", seconds) for place, seconds in enumerate(moved))
        yield from (("all", seconds) for seconds in (mesh.link.seconds(sent), summing))
        return
    kinds = [*(axis.kind for axis in mesh.axes), Kind.GRADIENTS]
    for kind, seconds in zip(kinds, [*moved, summing], strict=True):
        yield (mesh.reduction_kind if kind is Kind.GRADIENTS else kind).value, seconds
