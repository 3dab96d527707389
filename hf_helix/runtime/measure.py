"""Measures what overlap is worth: a window as it runs, its computation alone, its communication alone.

In:   a runner and a window of micro-batches.
Out:  an `Overlap`, the same on every rank.
Must hold: the three are timed in turn in one run and medians are taken, each the maximum over ranks; parameters and
gradients are left as they were found (no gradients). Times include what computation loses to traffic beside it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_helix.operators.collectives import Axis, SilentTransport
from hf_helix.runtime.gradients import complete_gradients
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.strand import MicroBatch
from hf_helix.runtime.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Seconds for one window (optimizer step without the optimizer), and what follows from them.

    Attributes:
        step: the window as it runs.
        computation: the same without any communication.
        communication: its collectives one after the other, without any computation.
        beside: share of the communication time that ran beside computation, from a trace.
        tokens: tokens of the window, over all data-parallel ranks.
    """

    step: float
    computation: float
    communication: float
    beside: float
    tokens: int

    @property
    def overlapped_fraction(self) -> float:
        """Communication time that ran beside computation / communication time."""
        return self.beside

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
        return max(self.computation, self.communication)

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens / self.step


def measure_overlap(runner: Runner, window: Sequence[MicroBatch], repeats: int = 5) -> Overlap:
    """Time a window. Collective; call it between optimizer steps, when there are no gradients."""
    axis = runner.mesh.tp
    with _silenced(axis) as silent:
        runner.train_window(window, complete=False)
    _forget_gradients(runner)
    moved = list(silent.moved)

    def step() -> None:
        runner.train_window(window)

    def computation() -> None:
        with _silenced(axis):
            runner.train_window(window, complete=False)

    def communication() -> None:
        _replay(axis, moved, runner.mesh.device)
        complete_gradients(runner.stage.placements, runner.mesh)

    times: dict[Callable[[], None], list[float]] = {step: [], computation: [], communication: []}
    for _ in range(repeats):
        for work, found in times.items():
            # `communication` comes last, so there are gradients for it to reduce.
            if work is step:
                _forget_gradients(runner)
            found.append(_timed(work, runner))
    beside = _traced_fraction(runner, window)
    _forget_gradients(runner)
    tokens = sum(batch.side["ids"].shape[1] * batch.side["length"] for batch in window) * runner.mesh.dp_size
    medians = [statistics.median(_maxima(found)) for found in times.values()]
    return Overlap(
        step=medians[0],
        computation=medians[1],
        communication=medians[2] if axis.size * runner.mesh.dp_size > 1 else 0.0,
        beside=max(0.0, beside),
        tokens=tokens,
    )


@contextlib.contextmanager
def _silenced(axis: Axis) -> Iterator[SilentTransport]:
    """The axis with nothing moving on it."""
    real = axis.transport
    axis.transport = silent = SilentTransport(axis.size, axis.rank, real.prefers_exchange(torch.empty(0)))
    try:
        yield silent
    finally:
        axis.transport = real


def _replay(axis: Axis, moved: Sequence[tuple[str, torch.Size, torch.Size]], device: torch.device) -> None:
    for name, out_shape, value_shape in moved:
        out = torch.empty(out_shape, device=device)
        getattr(axis.transport, name)(out, torch.zeros(value_shape, device=device))


def _traced_fraction(runner: Runner, window: Sequence[MicroBatch]) -> float:
    streams = runner.executor.streams
    streams.trace = trace = Trace()
    try:
        runner.train_window(window, complete=False)
        streams.synchronize()
    finally:
        streams.trace = None
    busy = trace.busy(compute=False)
    mine = trace.beside() / busy if busy else 0.0
    return sum(_over_ranks(mine)) / len(_over_ranks(mine))


def _timed(work: Callable[[], None], runner: Runner) -> float:
    runner.executor.streams.synchronize()
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    work()
    runner.executor.streams.synchronize()
    return time.perf_counter() - start


def _maxima(mine: list[float]) -> list[float]:
    """The longest of every rank, repeat by repeat."""
    return [max(column) for column in zip(*_over_ranks(mine), strict=True)]


def _over_ranks(mine: object) -> list:  # type: ignore[type-arg]
    if not dist.is_initialized():
        return [mine]
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _forget_gradients(runner: Runner) -> None:
    for parameter in runner.stage.placements:
        parameter.grad = None
