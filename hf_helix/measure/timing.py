"""Traces of a program: what runs on the streams of a rank, and when.

In:   a program and its micro-batches, or a piece of work.
Out:  spans, in the order in which they start.
Must hold: a GPU is held until the host has issued what is timed, so that times are those of the device and not of
launching kernels.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.window.instructions import BARRIER_INSTRUCTION, Instruction
from hf_helix.planning.window.layout import Key
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams import CudaStreams, Streams, make_streams
from hf_helix.runtime.trace import Span

# Seconds for which a GPU is held for each operator, so that the host has issued it: in a window, where the host gets
# further ahead with each, more than the mean (0.16 ms beside an H100); else more than the slowest (attention, 0.63 ms).
ISSUING, ISSUING_SLOWEST = 3e-4, 1e-3
CLOCK = 2.5e9  # cycles of a GPU in a second; one with a slower clock is held longer


def traced(
    runner: Runner,
    program: Sequence[Instruction],
    batches: Sequence[MicroBatch],
    values: Mapping[Key, Tensor],
    issuing: float = ISSUING_SLOWEST,
) -> list[Span]:
    """Runs a program and returns its spans in the order in which they start.

    A GPU is held at every barrier until the host is at the next.

    Args:
        runner: whose executor and streams run the program.
        program: the instructions; what is to be timed on a GPU stands behind a barrier.
        batches: the micro-batches, by their number.
        values: the values that every micro-batch starts with.
        issuing: seconds that the host needs to issue an operator.
    """
    streams = runner.executor.streams
    counts = _counts_behind_barriers(program)

    def hold_next() -> None:
        hold(streams, next(counts) * issuing)

    with streams.tracing() as trace:
        runner.executor.run(program, batches, values, training=True, at_barrier=hold_next)
    return sorted(trace.spans, key=lambda span: span.start)


def apart(program: Iterable[Instruction]) -> list[Instruction]:
    """Returns the program with a barrier before every computation, at which a GPU can be held."""
    result: list[Instruction] = []
    for instruction in program:
        if instruction.operator is not None and not instruction.operator.kind.communicates:
            result.append(BARRIER_INSTRUCTION)
        result.append(instruction)
    return result


def _counts_behind_barriers(program: Iterable[Instruction]) -> Iterator[int]:
    """For each barrier, how many operators are issued between it and the next."""
    counts: list[int] = []
    for instruction in program:
        if instruction.operator is None:
            counts.append(0)
        elif counts:
            counts[-1] += 1
    return iter(counts)


def hold(streams: Streams, seconds: float) -> None:
    """Keeps the compute stream of a GPU, which all other streams wait for, from running what is issued meanwhile.

    Without it the device would wait for the host, and the time of an operator of a few small kernels would be that of
    launching them. An operator in which the host waits for the device still takes as long as that wait, as in a step.
    """
    if isinstance(streams, CudaStreams):
        torch.cuda._sleep(int(seconds * CLOCK))


def time_repeats(streams: Streams, repeat: Callable[[], None], repeats: int, issuing: float) -> list[float]:
    """Returns the seconds that the stream of gradients is busy with each repeat of some work, without the first.

    Args:
        streams: what the work runs on.
        repeat: issues the work once, as windows issue it.
        repeats: how often it runs in a row; the first run warms up.
        issuing: seconds that the host needs to issue it once.
    """
    streams.synchronize()
    with streams.tracing() as trace:
        hold(streams, repeats * issuing)
        for _ in range(repeats):
            repeat()
    spans = sorted(trace.spans, key=lambda span: span.start)
    seconds = [span.seconds for span in spans if span.stream == Kind.GRADIENTS.value]
    parts = len(seconds) // repeats  # a sum has one for each type of gradients, and for those of experts
    return [sum(seconds[first : first + parts]) for first in range(parts, len(seconds), parts)]


def meet(runner: Runner) -> None:
    """Waits until the ranks that share every layer are all here, so that they start together. Collective."""
    runner.executor.streams.synchronize()
    for axis in runner.mesh.axes:
        if axis.group is not None:
            dist.barrier(group=axis.group)


# -- stopwatch -----------------------------------------------------------------------------------------------------
# What a piece of work takes on a device.
#
# In:   work, which calls torch.
# Out:  seconds, the same on every rank.
# Must hold: all ranks run the same work at the same time, since on a CPU they share memory and cores; a GPU is held
# until
# the host has issued what is timed.


Work = Callable[[], object]

LEAST, MOST = 5, 200
"""Repeats of a piece of work."""


class Stopwatch:
    """Times work on a device.

    Args:
        device: that it runs on.
        budget: seconds for the repeats of a piece of work.
    """

    def __init__(self, device: torch.device, budget: float) -> None:
        self.device = device
        self._budget = budget
        self._streams = make_streams(device)

    def seconds(self, work: Work) -> float:
        """Returns the mean over repeats, that of the slowest rank: a window is a sum over many. Collective."""
        work()
        (once,) = self._repeat(work, 1)
        once = max(all_gather_object(once), default=once)
        repeats = min(MOST, max(LEAST, int(self._budget / max(once, 1e-9))))
        all_gather_object(None)  # so that all ranks start together
        return max(all_gather_object(statistics.fmean(self._repeat(work, repeats))))

    def _repeat(self, work: Work, repeats: int) -> list[float]:
        if self.device.type == "cuda":
            return self._repeat_on_gpu(work, repeats)
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return seconds

    def _repeat_on_gpu(self, work: Work, repeats: int) -> list[float]:
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        hold(self._streams, repeats * ISSUING_SLOWEST)
        ends[0].record()
        for end in ends[1:]:
            work()
            end.record()
        torch.cuda.synchronize(self.device)
        return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(ends)]
