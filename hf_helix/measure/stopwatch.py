"""What a piece of work takes on a device.

In:   work, which calls torch.
Out:  seconds, the same on every rank.
Must hold: all ranks run the same work at the same time, since on a CPU they share memory and cores; a GPU is held until
the host has issued what is timed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

from hf_helix.measure.timing import ISSUING_SLOWEST, hold
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.streams import make_streams

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
