"""Measures overlap: times each plan's window, its computation without communication, and the reverse.

In:   runners that differ in their plan or schedule only, and a window of micro-batches.
Out:  an `Overlap` for each runner, the same on every rank.
Must hold: all works are timed in turn in a run, and medians are taken, each of the slowest rank; there are no gradients
before and afterwards. Times include the time that computation loses to concurrent traffic. Bytes are counted as in
docs/data_parallelism.md, with padding.
"""

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hf_helix.measure.progress import Progress
from hf_helix.operators.communication.transport import Axis, Move, Recorder, SilentTransport, Transport
from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.zero.zero1 import Zero1FlatParameter
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.bounds import busiest_link
from hf_helix.runtime.cuda_graphs import WindowGraphs, Work
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.distributed.groups import control_group
from hf_helix.runtime.distributed.mesh import Mesh, world_size
from hf_helix.runtime.gradients.buckets import BoundBucket
from hf_helix.runtime.gradients.reduce import reduce_all_gradients
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner, forget_gradients
from hf_helix.runtime.streams.trace import Trace, common, merge


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Seconds of a window (an optimizer step without the optimizer), and their consequences.

    Attributes:
        step: the window as it runs.
        computation: the window without collectives; ranks of a pipeline still wait for each other.
        communication: all collectives of the window in a row, without computation.
        busiest: the communication of the busiest link. Links inside a host and between hosts may run concurrently, and
            gradient reductions concurrently with either; an emulated link carries everything.
        overlapped_fraction: communication time concurrent with computation / communication time, from a trace.
        tokens: tokens of the window, over all data-parallel ranks.
        bytes_moved: bytes that a rank sends in the window, without gradient reductions.
        overlapped_by_kind: the overlapped fraction of each kind of communication.
        bubble_fraction: the share of the computation's time in which ranks of a pipeline wait for each other (mean).
        link: the emulated link of the measurement, as text; empty without one.
        sums: seconds of the gradient reductions by themselves; part of `communication`.
        sums_overlapped: the share of gradient reductions concurrent with computation, from a trace.
        bytes_summed: bytes that a rank sends in gradient reductions, by formula.
        bytes_gathered: bytes that a rank sends in weight gathers; part of `bytes_moved`.
        bytes_spared: bytes of weights and AdamW's states that a rank saves by sharding, by formula.
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
        """1 - exposed / communication by itself: wall-clock saved. Negative if contention costs more."""
        return 1 - self.exposed / self.communication if self.communication else 0.0

    @property
    def bound(self) -> float:
        """Seconds that no plan can beat: the larger of computation and the busiest link, each by itself."""
        return max(self.computation, self.communication if self.busiest is None else self.busiest)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, over all ranks."""
        return self.tokens / self.step


def measure_overlap(
    runners: Mapping[str, Runner],
    window: Sequence[MicroBatch],
    repeats: int = 5,
    progress: Progress | None = None,
    graphs: WindowGraphs | None = None,
    close: float = math.inf,
) -> dict[str, Overlap]:
    """Returns the worth of overlap under the plan of every runner. Collective; there must be no gradients.

    Args:
        runners: by name, runners that differ in their plan or schedule only.
        window: the micro-batches.
        repeats: the number of times that count, whose medians are taken.
        progress: called in every round.
        graphs: the CUDA graphs of the run: windows and their computation are timed as replays, and traced operator by
            operator. None to time them operator by operator.
        close: windows that take more than this many times the fastest in the first round are timed only once.

    Raises:
        ValueError: fewer than one repeat.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: times need at least one repeat, such as repeats=5")
    first = next(iter(runners.values()))
    mesh = first.mesh
    # Traced windows also warm the timed ones up.
    with _recorded(mesh.axes) as recorded:
        overlapped = [_overlapped_fractions(first, window)]
    overlapped += [_overlapped_fractions(runner, window) for runner in [*runners.values()][1:]]
    # Ranks of a pipeline wait for each other as their schedule has it, so each schedule has a computation of its own.
    schedules: dict[str, Runner] = {}
    for runner in runners.values():
        schedules.setdefault(runner.scheduler.name, runner)

    def reduce_gradients() -> None:
        reduce_all_gradients(first.rank_units.units, mesh, first.executor.streams)

    def windows(batches: Sequence[MicroBatch]) -> list[Work]:
        alone = [functools.partial(_compute, runner, batches) for runner in schedules.values()]
        return [*alone, *(functools.partial(runner.train_window, batches) for runner in runners.values())]

    with _replayed(first, window, windows, graphs) as timed:
        alone, steps = timed[: len(schedules)], timed[len(schedules) :]
        works = [*alone, reduce_gradients, *_collectives_alone(mesh, recorded), *steps]
        times = time_in_turn(
            works, first, repeats, (reduce_gradients,), progress, warm_up=graphs is not None, rivals=steps, close=close
        )
    medians = map(statistics.median, times)
    computation = {name: next(medians) for name in schedules}
    reduction = next(medians)
    if world_size() == mesh.pipe.size and not first.layout.reductions:
        reduction = 0.0  # no rank has a replica, and nothing was reduced
    reduction *= max(1.0, bytes_summed(first, len(window)) / max(1, bytes_summed(first, 1)))
    moving = [next(medians) for _ in mesh.axes]

    reduces = bool(first.layout.reductions)  # if not, only tensor parallelism sums parts of a few gradients
    bubbles = {name: _bubble_fraction(runner, window) for name, runner in schedules.items()}
    sent = sum(transport.bytes_sent for transport in recorded)
    over = {flat.gather_axis for flat in first.rank_units.flat_parameters}
    result = {}
    for (name, runner), step, fractions in zip(runners.items(), medians, overlapped, strict=True):
        result[name] = Overlap(
            step=step,
            computation=computation[runner.scheduler.name],
            communication=sum(moving) + reduction,
            busiest=busiest_link(link_loads(mesh, moving, reduction, sent)),
            overlapped_fraction=fractions.pop(""),
            tokens=sum(batch.num_tokens for batch in window) * mesh.dp_size,
            bytes_moved=sent,
            overlapped_by_kind=fractions,
            bubble_fraction=bubbles[runner.scheduler.name],
            link=str(mesh.link or ""),
            sums=reduction if reduces else 0.0,
            sums_overlapped=_reduction_overlapped(runner, window) if reduces else 0.0,
            bytes_summed=bytes_summed(first, len(window)),
            bytes_gathered=sum(each.bytes_sent for axis, each in zip(mesh.axes, recorded, strict=True) if axis in over),
            bytes_spared=sum(map(bytes_spared, first.rank_units.flat_parameters)),
        )
    forget_gradients(first)
    return result


def _compute(runner: Runner, batches: Sequence[MicroBatch]) -> None:
    """Runs a window without collectives."""
    with _silenced(runner.mesh.axes):
        runner.train_window(batches, complete=False)


def time_computation(runner: Runner, window: Sequence[MicroBatch], repeats: int) -> float:
    """Returns the median seconds of a window without collectives, which has run before. Collective; there must be no
    gradients."""
    (times,) = time_in_turn([functools.partial(_compute, runner, window)], runner, repeats, warm_up=False)
    forget_gradients(runner)
    return statistics.median(times)


def _collectives_alone(mesh: Mesh, recorded: Sequence[Recorder]) -> list[Callable[[], None]]:
    """For each axis, a work that moves as much as its collectives in a window."""
    kinds = {kind for transport in recorded for move in transport.moved for kind in (move.out, move.value)}
    # Written once, or the first use would pay for the pages.
    buffers = {kind: torch.ones(kind[0], dtype=kind[1], device=mesh.device) for kind in kinds}
    outputs = {kind: torch.ones_like(buffer) for kind, buffer in buffers.items()}

    def move_all(axis: Axis, moved: Sequence[Move]) -> None:
        for move in moved:
            getattr(axis.transport, move.name)(outputs[move.out], buffers[move.value], *move.rows)

    return [
        functools.partial(move_all, axis, transport.moved) for axis, transport in zip(mesh.axes, recorded, strict=True)
    ]


def time_steps(
    runners: Mapping[str, Runner],
    window: Sequence[MicroBatch],
    repeats: int,
    graphs: WindowGraphs | None = None,
    warm_up: bool = True,
) -> dict[str, list[float]]:
    """Returns the seconds of every repeat of a window, by runner. Collective; there must be no gradients.

    Args:
        runners: by name, runners that differ in their plan or schedule only.
        window: the micro-batches.
        repeats: the number of times that count.
        graphs: see `measure_overlap`.
        warm_up: see `time_in_turn`.
    """
    first = next(iter(runners.values()))

    def windows(batches: Sequence[MicroBatch]) -> list[Work]:
        return [functools.partial(runner.train_window, batches) for runner in runners.values()]

    with _replayed(first, window, windows, graphs) as works:
        times = time_in_turn(works, first, repeats, warm_up=warm_up)
    forget_gradients(first)
    return dict(zip(runners, times, strict=True))


def _replayed(
    runner: Runner,
    window: Sequence[MicroBatch],
    make: Callable[[Sequence[MicroBatch]], Sequence[Work]],
    graphs: WindowGraphs | None,
) -> contextlib.AbstractContextManager[Sequence[Work]]:
    """Returns a context with works over a window, as replays if the run has graphs."""
    return contextlib.nullcontext(make(window)) if graphs is None else graphs.replays(runner, window, make)


def time_in_turn(
    works: Sequence[Work],
    first: Runner,
    repeats: int,
    with_gradients: Sequence[Work] = (),
    progress: Progress | None = None,
    *,
    warm_up: bool = True,
    rivals: Sequence[Work] = (),
    close: float = math.inf,
) -> list[list[float]]:
    """Returns the seconds of every work on the slowest rank, round by round, in turn, so that a disturbance slows all
    works. Collective. Gradients are zeros before the works `with_gradients`, and absent before the others.

    Args:
        works: the timed works.
        first: the runner whose parameters they use.
        repeats: the number of rounds that count.
        with_gradients: the works that read gradients.
        progress: called in every round.
        warm_up: whether a round that does not count comes first.
        rivals: works of which the first round leaves only those that take at most `close` times the fastest.
        close: see `rivals`.
    """
    times: list[list[float]] = [[] for _ in works]
    running = list(range(len(works)))
    for round_ in range(-warm_up, repeats):
        if progress is not None:
            progress((round_ + warm_up) / (repeats + warm_up))
        mine = [_timed(works[number], first, works[number] in with_gradients) for number in running]
        if round_ < 0:
            continue
        for number, *column in zip(running, *all_gather_object(mine), strict=True):
            times[number].append(max(column))
        limit = close * min((times[number][0] for number in running if works[number] in rivals), default=math.inf)
        running = [number for number in running if works[number] not in rivals or times[number][0] <= limit]
    return times


@contextlib.contextmanager
def _recorded(axes: Sequence[Axis]) -> Iterator[list[Recorder]]:
    """Returns a context in which the moves of the collectives are recorded, axis by axis."""
    recorders = [Recorder(axis.transport) for axis in axes]
    with transports(axes, recorders):
        yield recorders


def record_moves(runner: Runner, window: Sequence[MicroBatch]) -> list[Recorder]:
    """Returns the moves of the collectives of a window, which runs, axis by axis. Collective; no gradients are left."""
    with _recorded(runner.mesh.axes) as recorders:
        runner.train_window(window, complete=False)
        runner.executor.streams.synchronize()
    forget_gradients(runner)
    return recorders


def _silenced(axes: Sequence[Axis]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which nothing moves on the axes."""
    silent = [SilentTransport(axis.size, axis.rank, axis.transport) for axis in axes]
    return transports(axes, silent)


@contextlib.contextmanager
def transports(axes: Sequence[Axis], others: Sequence[Transport]) -> Iterator[None]:
    """Makes the axes use other transports within the context."""
    real = [axis.transport for axis in axes]
    try:
        for axis, transport in zip(axes, others, strict=True):
            axis.transport = transport
        yield
    finally:
        for axis, before in zip(axes, real, strict=True):
            axis.transport = before


def trace_window(runner: Runner, window: Sequence[MicroBatch], complete: bool = False) -> Trace:
    """Returns the trace of a window; no gradients are left. Collective.

    Args:
        runner: the runner of the window.
        window: the micro-batches.
        complete: whether gradients are also reduced over the ranks.
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


def _reduction_overlapped(runner: Runner, window: Sequence[MicroBatch]) -> float:
    """The share of the time of gradient reductions that computation overlapped: a mean over the ranks."""
    spans = trace_window(runner, window, complete=True).spans
    stream = Kind.GRADIENTS.value  # also the stream of weight gathers
    reductions = (span for span in spans if span.stream == stream and span.label.startswith(f"{stream}."))
    reducing = merge((span.start, span.end) for span in reductions)
    computing = merge((span.start, span.end) for span in spans if span.stream == Kind.COMPUTE.value)
    busy = sum(end - start for start, end in reducing)
    overlapped = sum(end - start for start, end in common(reducing, computing))
    return statistics.fmean(all_gather_object(overlapped / busy if busy else 1.0))


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
    length = max(end - start for _, start, end in ranks)
    return max(0.0, 1 - statistics.fmean(busy for busy, _, _ in ranks) / length)


def _timed(work: Callable[[], Any], runner: Runner, with_gradients: bool) -> float:
    forget_gradients(runner)
    if with_gradients:
        for parameter in (each for bucket in runner.buckets for each in bucket.rows):
            parameter.grad = torch.zeros_like(parameter)
    runner.executor.streams.synchronize()
    if dist.is_initialized():
        dist.barrier(group=control_group())
    start = time.perf_counter()
    work()
    runner.executor.streams.synchronize()
    return time.perf_counter() - start


# -- bytes and links --------------------------------------------------------------------------------------------------

STATES = 8
"""Bytes of an optimizer's states for an element: two numbers in fp32."""


def bytes_summed(runner: Runner, count: int) -> int:
    """Returns the bytes that this rank sends, to ranks with other tokens, in the gradient reductions of a window of
    `count` micro-batches."""
    often = runner.buckets_reduced_often
    buckets = ((number, bucket) for number, bucket in enumerate(runner.buckets) if bucket.row.spans_batches)
    return sum(_sent(bucket, runner, count if number in often else 1) for number, bucket in buckets)


def _sent(bucket: BoundBucket, runner: Runner, count: int) -> int:
    if bucket.flat is not None:  # reduce-scatters, and an all-reduce over the copies of the shard
        size = torch.promote_types(bucket.flat.shard.dtype, torch.float32).itemsize
        copies = bucket.flat.copies.size if bucket.flat.copies is not None else 1
        shard = bucket.flat.shard.numel() * size
        return count * (bucket.flat.gather_axis.size - 1) * shard + 2 * (copies - 1) * shard // copies
    total = 0
    for parameter, row in bucket.rows.items():  # an all-reduce
        group = runner.mesh.replica_group_of(row.cut)
        ranks = dist.get_world_size(group) if group is not None else 1
        size = torch.promote_types(parameter.dtype, torch.float32).itemsize
        total += 2 * (ranks - 1) * parameter.numel() * size // ranks
    return total


def bytes_spared(flat: FlatParameter) -> int:
    """Returns the bytes of weights and AdamW's states that this rank saves by sharding a flat parameter."""
    weight = flat.shard.element_size()
    states = STATES if flat.is_trained else 0
    kept = (weight + states) * flat.shard.numel()
    if flat.host is not None:
        copy = flat.buffer if isinstance(flat, Zero1FlatParameter) else flat.host.copy
        kept = 0 if copy is None else copy.nbytes
    elif isinstance(flat, Zero1FlatParameter):
        kept = flat.buffer.nbytes + (weight if flat.cast_to is not None else 0) * flat.shard.numel()
        kept += states * flat.shard.numel()
    return (weight + states) * flat.length - kept


def link_loads(mesh: Mesh, moved: Sequence[float], summing: float, sent: int) -> Iterator[tuple[str, float]]:
    """Yields the links of a window with their seconds, for `busiest_link`.

    Each kind has a link of its own; gradient reductions use the link of their ranks. All of them share an emulated
    link, over which latencies may pass concurrently.

    `moved` are the seconds of the collectives of each axis, `summing` the seconds of the gradient reductions, and
    `sent` the bytes that a rank sends over the axes.
    """
    if mesh.link:
        yield from ((f"axis {place}", seconds) for place, seconds in enumerate(moved))
        yield from (("all", seconds) for seconds in (mesh.link.seconds(sent), summing))
        return
    kinds = [*(axis.kind for axis in mesh.axes), Kind.GRADIENTS]
    for kind, seconds in zip(kinds, [*moved, summing], strict=True):
        yield (mesh.reduction_kind if kind is Kind.GRADIENTS else kind).value, seconds
