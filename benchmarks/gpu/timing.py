"""Measuring on a device.

In:   a function that issues work.
Out:  seconds of the device, or of the host while it issues.
Must hold: a time is the device's own. The host issues everything while the device is held up by a kernel that sleeps,
so short kernels are not measured by how fast the host can launch them. Times are medians.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable

import torch

Work = Callable[[], object]

CYCLES_PER_SECOND = 2e9
"""No Hopper GPU has a faster clock, so a sleep of so many cycles lasts at least a second."""


def release() -> None:
    """Give memory that nothing refers to any more back to the device, between two cases."""
    gc.collect()
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # the device may be unusable after a failure
            torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_seconds(work: Work, device: torch.device, repeats: int = 15) -> float:
    """Median time that the device takes for `work`, which is issued to the current stream."""
    rounds = [issue_and_run(work, device) for _ in range(6)][3:]  # the first ones warm up
    issuing, seconds = (statistics.median(each) for each in zip(*rounds, strict=True))
    if device.type != "cuda":
        return seconds
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda._sleep(int(CYCLES_PER_SECOND * min(0.2, 1e-3 + 1.5 * repeats * issuing)))
    for start, end in events:
        start.record()
        work()
        end.record()
    synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def issue_and_run(work: Work, device: torch.device) -> tuple[float, float]:
    """Seconds until the host has issued the work, and until the device has done it."""
    synchronize(device)
    start = time.perf_counter()
    work()
    issued = time.perf_counter() - start
    synchronize(device)
    return issued, time.perf_counter() - start
