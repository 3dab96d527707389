"""Timing on the streams of a rank.

In:   works, programs, windows.
Out:  spans in the order of their starts, or seconds of every repeat.
Must hold: a GPU is held until the host has issued the timed work, so that times are times of the device and not of
kernel launches. A single collective can look faster than its link, so several collectives run in a row.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.window.instructions import BARRIER_INSTRUCTION, Instruction
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.executor import Sources
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams.streams import CudaStreams, Streams
from hf_helix.runtime.streams.trace import Span

# Seconds for which a GPU is held for each operator, so that the host has issued it: in a window, where the host gets
# further ahead with each, more than the mean (0.16 ms with an H100); else more than the slowest (attention, 0.63 ms).
ISSUING, ISSUING_SLOWEST = 3e-4, 1e-3
CLOCK = 2.5e9  # cycles of a GPU in a second; a GPU with a slower clock is held longer

FEWEST, MOST = 5, 200  # repeats of a timed work
Work = Callable[[], object]


def hold(streams: Streams, seconds: float) -> None:
    """Keeps the compute stream of a GPU, and all streams that wait for it, from running.

    Without the hold, the device would wait for the host, and an operator of a few small kernels would take the time of
    their launches. An operator in which the host waits for the device still takes the time of that wait, as in a step.
    """
    if isinstance(streams, CudaStreams):
        torch.cuda._sleep(int(seconds * CLOCK))


def record(streams: Streams, issue: Work, issuing: float = 0.0) -> list[Span]:
    """Returns the spans of some work in the order of their starts.

    Args:
        issue: issues the work.
        issuing: seconds of the host for the work, for which a GPU is held.
    """
    streams.synchronize()
    with streams.tracing() as trace:
        if issuing:
            hold(streams, issuing)
        issue()
    return sorted(trace.spans, key=lambda span: span.start)


def issue_together(streams: Streams, works: Iterable[tuple[Kind, Work, str]], lane: str = "") -> None:
    """Runs works at the same time; computation is issued last, since it would hold communication up.

    Args:
        streams: the streams of the rank.
        works: works, each with its kind, which names the stream, and its label.
        lane: the lane of the streams.
    """
    works = list(works)
    events = [streams.issue(kind, work, (), label, lane) for kind, work, label in works if kind.communicates]
    for _, work, label in (each for each in works if not each[0].communicates):
        streams.compute(work, label)
    for event in events:
        streams.wait(event)


def time_in_a_row(streams: Streams, kind: Kind, work: Work, repeats: int, lane: str = "") -> list[float]:
    """Returns the seconds of every repeat of a communication, all repeats issued in a row.

    Args:
        work: this rank's part of the communication.
        repeats: the number of repeats; the first warms up.
        lane: the lane of the stream.
    """
    works = [(kind, work, kind.value)] * repeats
    spans = record(streams, lambda: issue_together(streams, works, lane), repeats * ISSUING_SLOWEST)
    return [span.seconds for span in spans]


def time_gradient_stream(streams: Streams, work: Work, repeats: int, issuing: float) -> list[float]:
    """Returns the seconds for which every repeat of a work keeps the stream of gradients busy, without the first."""

    def issue() -> None:
        for _ in range(repeats):
            work()

    spans = record(streams, issue, repeats * issuing)
    seconds = [span.seconds for span in spans if span.stream == Kind.GRADIENTS.value]
    parts = len(seconds) // repeats  # a reduction has a part for each type of gradients, and for gradients of experts
    return [sum(seconds[first : first + parts]) for first in range(parts, len(seconds), parts)]


def traced(
    runner: Runner,
    program: Sequence[Instruction],
    batches: Sequence[MicroBatch],
    sources: Sources,
    issuing: float = ISSUING_SLOWEST,
) -> list[Span]:
    """Returns the spans of a program, whose timed instructions follow a barrier: there a GPU is held until the host is
    at the next barrier. `issuing` are the seconds of the host for an operator."""
    counts = _operators_after_barriers(program)

    def hold_next() -> None:
        hold(runner.executor.streams, next(counts) * issuing)

    def run() -> None:
        runner.executor.run(program, batches, sources, saves_for_backward=True, at_barrier=hold_next)

    return record(runner.executor.streams, run)


def apart(program: Iterable[Instruction]) -> list[Instruction]:
    """Returns the program with a barrier, at which a GPU can be held, before every computation."""
    result: list[Instruction] = []
    for instruction in program:
        if instruction.operator is not None and not instruction.operator.kind.communicates:
            result.append(BARRIER_INSTRUCTION)
        result.append(instruction)
    return result


def _operators_after_barriers(program: Iterable[Instruction]) -> Iterator[int]:
    """The number of operators between each barrier and the next."""
    counts: list[int] = []
    for instruction in program:
        if instruction.operator is None:
            counts.append(0)
        elif counts:
            counts[-1] += 1
    return iter(counts)


def meet(runner: Runner) -> None:
    """Waits until all ranks of every axis are here, so that all start together. Collective."""
    runner.executor.streams.synchronize()
    for axis in runner.mesh.axes:
        if axis.group is not None:
            dist.barrier(group=axis.group)


class Stopwatch:
    """A stopwatch for computations, the same on every rank, with `budget` seconds for the repeats of a work. On a CPU
    ranks share memory and cores, so all ranks run the same work at the same time."""

    def __init__(self, streams: Streams, device: torch.device, budget: float) -> None:
        self.device = device
        self._streams = streams
        self._budget = budget

    def seconds(self, work: Work) -> float:
        """Returns the mean over repeats, of the slowest rank: a window is a sum over many operators. Collective."""
        return self._of_slowest(work, self._mean)

    def host_seconds(self, work: Work) -> float:
        """Returns the same for the host's part of a work, which a GPU runs faster than the host issues. Collective.

        The GPU is not held: events of the device would lack the time of the hold.
        """
        return self._of_slowest(work, self._host_mean)

    def _of_slowest(self, work: Work, mean: Callable[[Work, int], float]) -> float:
        work()
        once = max(all_gather_object(mean(work, 1)))
        repeats = min(MOST, max(FEWEST, int(self._budget / max(once, 1e-9))))
        all_gather_object(None)  # so that all ranks start together
        return max(all_gather_object(mean(work, repeats)))

    def _mean(self, work: Work, repeats: int) -> float:
        def run() -> None:
            for _ in range(repeats):
                work()

        (span,) = record(self._streams, lambda: self._streams.compute(run, "work"), repeats * ISSUING_SLOWEST)
        return span.seconds / repeats

    def _host_mean(self, work: Work, repeats: int) -> float:
        self._streams.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - start) / repeats
