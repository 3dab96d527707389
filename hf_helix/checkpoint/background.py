"""Writing in the background: what a save still has to write once training may go on.

In:   this rank's tensors, to be copied on the host; functions that write files, and the one that publishes them.
Out:  the same files, written by a thread; the same error on every rank if any could not write.
Must hold: the thread uses no process group and no device, so it meets no communication of training; it takes what
computation leaves of the cores. Weights and states on the host are copied by the thread while the next window runs,
since they do not change before the optimizer's step, which copies the rest; everything else is copied at once.
Files are published when all ranks have written. Only what this rank writes is copied, and each copy is freed once
written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from hf_helix.checkpoint.direct import BUFFER, after_write
from hf_helix.runtime.distributed.agreement import (
    all_gather_object,
    decide_on_rank_0,
    error_text,
    on_all_ranks,
    remote_error,
)
from hf_helix.runtime.distributed.host import usable_cores
from hf_helix.runtime.distributed.mesh import rank, ranks_of_host
from hf_helix.runtime.failures.exchange import StoreExchange

LARGEST_SHARE = 0.8
"""The largest part of the host's free memory that copies may take. The rest is for dirty pages of the files, and for
what training allocates meanwhile."""

_LEAST = 1 << 20  # bytes of a copy with memory of its own

_NICE = 19
"""The priority of the thread that writes. On Linux it gets a seventieth of a core that computation keeps busy, and all
of a core that waits for communication. Two ranks on two cores took 1.7 times as long for the step that met a save of
0.5 GB a rank with 0, 1.5 times with 10, and 1.3 times with 19, in which a second step took 1.25 times as long."""

SHARE, LONGEST = 0.03, 60.0
"""The share of a core that the thread takes on a host whose cores all compute, and the seconds after which it rests no
more: a long save loses more steps if the run dies before it is complete."""


class Writes(NamedTuple):
    """The rest of a save, without communication.

    Attributes:
        write: writes this rank's files to the disk; returns what rank 0 has to know of them.
        finish: completes the files on rank 0, from the results of all ranks.
    """

    write: Callable[[], Any]
    finish: Callable[[Sequence[Any]], object]


def write_now(writes: Writes) -> None:
    """Writes and completes files. Collective. Raises on every rank if any could not write, see `on_all_ranks`."""
    results = all_gather_object(on_all_ranks(writes.write))
    decide_on_rank_0(lambda: writes.finish(results))


class BackgroundSave:
    """Files that a thread writes and publishes.

    Args:
        writes: the parts of the save.
        copies: of their tensors.
        publish: publishes the files, on rank 0.
        abandon: removes unfinished files after an error, on rank 0.
        exchange: of all ranks.
        yields: whether the thread takes only what others leave of the cores.
        rests: whether it also rests, since others leave nothing.
    """

    def __init__(
        self,
        writes: Sequence[Writes],
        copies: Copies,
        publish: Callable[[], object],
        abandon: Callable[[], object],
        exchange: StoreExchange,
        yields: bool,
        rests: bool = False,
    ) -> None:
        self._writes, self._copies, self._publish, self._abandon = writes, copies, publish, abandon
        self._exchange, self._yields = exchange, yields
        self._pace = Pace(LONGEST if yields and rests else 0.0)
        self._error: Exception | None = None
        self._has_written = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_helix-save", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether the files are not yet published."""
        return self._thread.is_alive()

    def wait_for_mine(self) -> None:
        """Waits until this rank has written its files, or failed to."""
        self._hurry()
        self._has_written.wait()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the files are published, or for some seconds."""
        self._hurry()
        self._thread.join(seconds)

    def _hurry(self) -> None:
        """Ends the rests of the thread, and gives it the priority of others, if the system allows this process to."""
        self._pace.end()
        if self._thread.is_alive() and self._thread.native_id is not None:
            _set_priority(self._thread.native_id, 0)

    def check(self) -> None:
        """Raises the error of the save, on every rank: this rank's own, or a ValueError with the rank."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        if self._yields:
            _yield_cores()
        if self._pace.has_ended:  # somebody waits already
            self._hurry()
        try:
            self._copies.fill()
            self._pace.begin()
            results: list[Any] = []
            mine = _attempt(lambda: results.extend(each.write() for each in self._writes))
            self._has_written.set()
            of_ranks = self._exchange.gather((results, error_text(mine)))
            failed = next(((other, text) for other, (_, text) in enumerate(of_ranks) if text), None)
            if rank() == 0 and failed is None:
                mine = _attempt(lambda: self._complete([results for results, _ in of_ranks]))
                failed = (0, error_text(mine)) if mine is not None else None
            if rank() == 0 and failed is not None:
                _attempt(self._abandon)
            failed = self._exchange.answer(failed)
            self._error = mine or (remote_error(*failed) if failed is not None else None)
        except Exception as error:  # of the store
            self._error = error
        finally:
            self._has_written.set()
            self._writes = ()

    def _complete(self, results: Sequence[Sequence[Any]]) -> None:
        for each, of_ranks in zip(self._writes, zip(*results, strict=True), strict=True):
            each.finish(of_ranks)
        self._publish()


def _attempt(step: Callable[[], object]) -> Exception | None:
    try:
        step()
    except Exception as error:
        return error
    return None


def _yield_cores() -> None:
    """Gives this thread a low priority."""
    _set_priority(threading.get_native_id(), _NICE)


def _set_priority(thread: int, number: int) -> None:
    """Sets the priority of a thread, on systems in which threads have their own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, number)


class Pace:
    """Rests of a thread after every `BUFFER` bytes of its writes, so that it takes `SHARE` of a core.

    A small save has no rests: a run that dies loses it, and the rests would take longer than the writes.

    Args:
        longest: the seconds after which the thread rests no more.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._ended = threading.Event()
        self._written = 0  # bytes since the last rest

    @property
    def has_ended(self) -> bool:
        """Whether somebody waits for the thread."""
        return self._ended.is_set()

    def begin(self) -> None:
        """Begins the rests of this thread."""
        self._start, self._used = time.perf_counter(), time.thread_time()
        after_write.set(self._note)

    def end(self) -> None:
        """Ends all rests: somebody waits for the thread."""
        self._ended.set()

    def _note(self, count: int) -> None:
        """Counts written bytes, and rests if they are enough."""
        self._written += count
        if self._written < BUFFER:
            return
        self._written = 0
        took = min((time.thread_time() - self._used) / SHARE, self._longest)
        self._ended.wait(max(0.0, self._start + took - time.perf_counter()))


def cores_are_busy(device: torch.device) -> bool:
    """Returns whether training leaves no core of this host: the ranks' threads take every core.

    Args:
        device: of training.
    """
    return device.type == "cpu" and usable_cores() <= ranks_of_host() * torch.get_num_threads()


# -- copies ----------------------------------------------------------------------------------------------------------


class Copies:
    """Memory on the host for the copies of a save, taken again by the next save.

    A copy that is written leaves its memory mapped, and the system takes it back when it needs it (MADV_FREE). Memory
    that the system must find first takes longer to fill than memory of the save before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unfilled: deque[tuple[Tensor, Tensor]] = deque()  # copies, and what belongs in them
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)  # by bytes, of the save before
        self._returned: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def begin(self) -> None:
        """Begins a save, after the end of the one before."""
        self._free, self._returned = self._returned, defaultdict(list)

    def of(self, value: Tensor, is_held: bool = False) -> Tensor:
        """Returns a contiguous copy of a tensor.

        Args:
            value: the tensor.
            is_held: whether its memory keeps these values until the next step, so that the copy is made by `fill`.
        """
        copy = self._allocate(value)
        if is_held and value.device.type == "cpu" and value.nbytes >= _LEAST:
            self._unfilled.append((copy, value.detach()))
            return copy
        return copy.copy_(value.detach())

    def fill(self) -> None:
        """Makes the copies that are left. Several threads may call this; each returns once all copies are made."""
        while True:
            with self._lock:
                if not self._unfilled:
                    return
                copy, value = self._unfilled.popleft()
                copy.copy_(value)

    def _allocate(self, value: Tensor) -> Tensor:
        if value.nbytes < _LEAST:
            return torch.empty(value.shape, dtype=value.dtype)
        memory = self._memory(value.nbytes)
        elements = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(elements, _take_back, memory, self._returned[value.nbytes])
        return torch.from_numpy(elements).view(value.dtype).view(value.shape)

    def _memory(self, count: int) -> mmap.mmap:
        if self._free[count]:
            return self._free[count].pop()
        made = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _advise(made, "MADV_HUGEPAGE")
        return made


def _take_back(memory: mmap.mmap, returned: list[mmap.mmap]) -> None:
    _advise(memory, "MADV_FREE")
    returned.append(memory)


def _advise(memory: mmap.mmap, advice: str) -> None:
    with contextlib.suppress(OSError, AttributeError):  # of a system that does not know it
        memory.madvise(getattr(mmap, advice))


def has_room(count: int) -> bool:
    """Returns whether the host has room for `count` bytes of every rank on it."""
    return count * ranks_of_host() <= LARGEST_SHARE * _free_memory()


def _free_memory() -> int:
    """Returns the bytes of memory that the host, or the container, can still give."""
    free: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # "max" for no limit
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(counts["inactive_file"]))
    return free
