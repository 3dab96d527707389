"""An emulated link: every rank sends and receives at a given speed, whatever carries the bytes.

In:   transfers, each with the bytes that this rank sends and receives.
Out:  the same transfers, which end no earlier than on such a link: in each direction they follow one another, each for
      bytes / rate, and arrive a latency later.
Must hold: a rank has a single link, full duplex, for all its axes and streams. The bytes really move during the
emulated transfer, so a transfer takes the longer of the real and the emulated time. Waiting is sleeping: it takes no
core and holds no lock. Deadlines are absolute, so errors of the clock do not add up.

Every rank keeps its own clock. A collective starts when this rank begins it. The receiver holds back a P2P transfer of
a pipeline, from its arrival on.

For runs on CPU, whose transfers run in threads of their own (`hf_helix.runtime.streams`); nothing here knows CUDA.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import final

import torch.distributed as dist
from torch import Tensor

from hf_helix.config import LinkSpeed
from hf_helix.operators.communication.collectives import P2PChannel
from hf_helix.operators.communication.transport import Transport, TransportWrapper, bytes_moved


class Direction:
    """A direction of a link. Its transfers follow one another."""

    def __init__(self) -> None:
        self.bytes = 0
        self._free = 0.0
        self._lock = threading.Lock()

    def reserve(self, count: int, seconds: float, now: float) -> float:
        """Counts bytes that occupy the direction for some seconds; returns the time when the last byte has passed."""
        with self._lock:
            self.bytes += count
            self._free = max(self._free, now) + seconds
            return self._free


class EmulatedLink:
    """The link between a rank and all others.

    Args:
        speed: see `LinkSpeed`. Nothing waits until a rate to be measured is known.
        clock, sleep: the time in seconds, and a wait of some seconds.

    Attributes:
        rate: bits a second in each direction; None while transfers are not slowed down.
        out, into: the two directions, with the bytes so far.
    """

    def __init__(
        self,
        speed: LinkSpeed,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.speed = speed
        self.rate = speed.rate
        self.out, self.into = Direction(), Direction()
        self._clock = clock
        self._sleep = sleep

    def carry(self, sent: int, received: int, move: Callable[[], object]) -> None:
        """Runs a collective transfer.

        Args:
            sent, received: bytes from this rank, and bytes to it.
            move: really moves the bytes, and returns after their arrival.
        """
        now = self._clock()
        ends = self._reserve(self.out, sent, now), self._reserve(self.into, received, now)
        move()
        if sent or received:
            self._wait_until(max(ends))

    def send(self, count: int, move: Callable[[], object]) -> None:
        """Runs a transfer to a rank that calls `receive`."""
        end = self._reserve(self.out, count, self._clock())
        move()
        self._wait_until(end)

    def receive(self, count: int, move: Callable[[], object]) -> None:
        """Runs the other end of `send`."""
        move()
        self._wait_until(self._reserve(self.into, count, self._clock()))

    def _reserve(self, direction: Direction, count: int, now: float) -> float:
        return direction.reserve(count, self.seconds(count), now)

    @property
    def speed_now(self) -> LinkSpeed:
        """The speed with the measured rate."""
        return replace(self.speed, rate=self.rate)

    def __str__(self) -> str:
        is_measured = self.rate is not None and self.speed.rate is None
        return f"{self.speed_now}{' (even)' if is_measured else ''}"

    def seconds(self, count: int) -> float:
        """Returns how long a number of bytes occupies a direction."""
        return 0.0 if self.rate is None else 8 * count / self.rate

    def _wait_until(self, end: float) -> None:
        if self.rate is None:
            return
        while (left := end + self.speed.latency - self._clock()) > 0:
            self._sleep(left)


@final
class LinkedTransport(TransportWrapper):
    """A transport over an emulated link."""

    def __init__(self, inner: Transport, link: EmulatedLink) -> None:
        super().__init__(inner)
        self.group = inner.group
        self._link = link

    def move(self, name: str, out: Tensor, value: Tensor, *rows: Sequence[int]) -> None:
        run, moved = getattr(self.inner, name), bytes_moved(name, out, value, self.size, self.rank, rows)
        self._link.carry(*moved, lambda: run(out, value, *rows))

    def start_sum(self, value: Tensor) -> Callable[[], object]:
        moved, wait = bytes_moved("start_sum", value, value, self.size, self.rank), self.inner.start_sum(value)
        thread = ThreadPoolExecutor(1)
        carried = thread.submit(self._link.carry, *moved, wait)
        thread.shutdown(wait=False)  # after its work
        return carried.result


class LinkedChannel(P2PChannel):
    """A P2P channel of a pipeline over an emulated link."""

    def __init__(self, inner: P2PChannel, link: EmulatedLink) -> None:
        self.inner = inner
        self._link = link

    def send(self, value: Tensor, forward: bool) -> None:
        self._link.send(value.nbytes, lambda: self.inner.send(value, forward))

    def receive(self, out: Tensor, forward: bool) -> None:
        self._link.receive(out.nbytes, lambda: self.inner.receive(out, forward))


@contextmanager
def bare(link: EmulatedLink | None) -> Iterator[None]:
    """Returns a context in which transfers are not slowed down."""
    if link is None:
        yield
        return
    rate, link.rate = link.rate, None
    try:
        yield
    finally:
        link.rate = rate


def all_reduce(value: Tensor, group: dist.ProcessGroup, link: EmulatedLink | None) -> None:
    """Sums a value over a group, in place; over a link with the bytes of a ring."""
    if link is None:
        dist.all_reduce(value, group=group)
        return
    moved = bytes_moved("start_sum", value, value, dist.get_world_size(group), dist.get_rank(group))
    link.carry(*moved, lambda: dist.all_reduce(value, group=group))
