"""Links and streams at random paces, and streams with one mistake each, which must show.

In:   a device.
Out:  transports and streams that take the place of those of an engine.
Must hold: paces change no value; a sleep lies on the stream (on a CPU, in the thread) whose work it delays.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.windows import Local
from hf_helix.operators.base import TransferFn
from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.streams import CpuStreams, CudaStreams, Event, Streams

CYCLES = 1.7e9
"""Of a second of `torch.cuda._sleep`, about."""

Pace = Callable[[], float]
"""Seconds to sleep, drawn anew each time."""


def random_pace(seed: int, most: float) -> Pace:
    """Mostly short, at times long, often nothing."""
    draws = random.Random(seed)
    return lambda: draws.choice((0.0, 0.0, 0.02, 0.1, 0.3, 1.0)) * most


def sleep(seconds: float, device: torch.device) -> None:
    """Let the current stream wait; on a CPU, this thread."""
    if seconds and device.type == "cuda":
        torch.cuda._sleep(int(seconds * CYCLES))
    elif seconds:
        time.sleep(seconds)


class Paced(Local):
    """A link that takes its time, and then fills the buffer with what it would have without."""

    def __init__(self, size: int, rank: int, pace: Pace, device: torch.device) -> None:
        super().__init__(size, rank)
        self.pace = pace
        self.device = device

    def all_gather(self, out: Tensor, value: Tensor) -> None:
        sleep(self.pace(), self.device)
        super().all_gather(out, value)

    def exchange(self, out: Tensor, value: Tensor) -> None:
        sleep(self.pace(), self.device)
        super().exchange(out, value)

    def exchange_rows(self, out: Tensor, value: Tensor, arriving: Sequence[int], sent: Sequence[int]) -> None:
        sleep(self.pace(), self.device)
        super().exchange_rows(out, value, arriving, sent)

    def reduce_scatter(self, out: Tensor, value: Tensor) -> None:
        sleep(self.pace(), self.device)
        super().reduce_scatter(out, value)

    def shift(self, out: Tensor, value: Tensor) -> None:
        sleep(self.pace(), self.device)
        super().shift(out, value)

    def shift_back(self, out: Tensor, value: Tensor) -> None:
        sleep(self.pace(), self.device)
        super().shift_back(out, value)


class PacedStreams(CudaStreams):
    """CUDA streams whose compute stream takes its time, too: it sleeps after each operator that communication reads."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pace: Pace = at_once

    def issue(self, kind: Kind, work: TransferFn, after: Sequence[Any], label: str, lane: str = "") -> Event:
        event = super().issue(kind, work, after, label, lane)
        sleep(self.pace(), torch.device("cuda"))
        return event


class Forgetful(PacedStreams):
    """Mistake: what communication reads and writes is not kept until it is over."""

    def issue(self, kind: Kind, work: TransferFn, after: Sequence[Any], label: str, lane: str = "") -> Event:
        event: Any = super().issue(kind, work, after, label, lane)
        event.keep = None
        return event


class Hasty(PacedStreams):
    """Mistake: communication does not wait for what was computed."""

    def _wait_for_computed(self, stream: Any, computed: Any) -> None:
        pass


class Impatient(PacedStreams):
    """Mistake: computation does not wait for communication."""

    def wait(self, event: Any) -> None:
        event.keep = None


class ImpatientCpu(CpuStreams):
    """The same on a CPU."""

    def wait(self, event: Any) -> None:
        pass

    def close(self) -> None:
        threads = [worker._thread for worker in self._workers.values()]
        super().close()
        for thread in threads:
            thread.join()  # nobody has waited for what they do


def paced_streams(device: torch.device, pace: Pace) -> Streams:
    """Streams without a mistake."""
    if device.type != "cuda":
        return CpuStreams()
    return with_pace(PacedStreams(device), pace)


def mutants(device: torch.device, slow: Pace) -> dict[str, Callable[[], tuple[Streams, Pace]]]:
    """By what it is, what makes streams with a mistake, and the pace of the links at which it must show.

    What is slow is the side that a correct stream would have waited for: the links, or the computation. Both at once
    might end together. A CPU frees what its threads hold only when they have let go of it.
    """
    if device.type != "cuda":
        return {"computation does not wait for communication": lambda: (ImpatientCpu(), slow)}
    return {
        "buffers of communication are not kept": lambda: (Forgetful(device), slow),
        "communication does not wait for computation": lambda: (with_pace(Hasty(device), slow), at_once),
        "computation does not wait for communication": lambda: (Impatient(device), slow),
    }


def at_once() -> float:
    """The pace without a delay."""
    return 0.0


def with_pace(streams: PacedStreams, pace: Pace) -> PacedStreams:
    """The streams, sleeping so."""
    streams.pace = pace
    return streams
