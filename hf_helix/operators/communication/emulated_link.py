"""An emulated link: every rank sends and receives at a given speed, whatever really carries the bytes.

In:   transfers, each with the bytes that this rank sends and receives in it.
Out:  the same transfers, which end no earlier than on such a link: in each direction they follow one another, each
      for bytes / rate, and arrive a latency later.
Must hold: a rank has one link, full duplex, which all its axes and streams share. The bytes really move while the link
is carrying them, so a transfer takes what it takes here or what the link needs, whichever is more. Waiting is sleeping:
no core is taken, and no lock is held. Deadlines are absolute, so errors of the clock do not add up.

Every rank keeps its own clock. In a collective it counts from the moment when this rank begins it; what a single rank
sends to another (a pipeline) is held back by the one that receives it, from the moment when it is there.

For runs on CPU, whose transfers run in threads of their own (`hf_helix.runtime.streams`); nothing here knows CUDA.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import final

import torch.distributed as dist
from torch import Tensor

from hf_helix.config import LinkSpeed
from hf_helix.operators.communication.collectives import P2PChannel
from hf_helix.operators.communication.transport import Method, Transport, TransportWrapper, bytes_moved


class Direction:
    """One way of a link. What goes over it goes one after the other."""

    def __init__(self) -> None:
        self.bytes = 0
        self._free = 0.0
        self._lock = threading.Lock()

    def reserve(self, count: int, seconds: float, now: float) -> float:
        """Counts bytes that occupy this way for so many seconds; returns when the last of them has passed.

        Args:
            count: bytes.
            seconds: that they occupy this way.
            now: the time at which they may begin, in seconds.
        """
        with self._lock:
            self.bytes += count
            self._free = max(self._free, now) + seconds
            return self._free


class EmulatedLink:
    """What connects a rank with all others.

    Args:
        speed: see `LinkSpeed`. Until a rate that is to be found by measuring is known, nothing waits.
        clock, sleep: seconds, and to let them pass.

    Attributes:
        rate: bits a second each way; None while transfers run as they are.
        out, into: the two ways, with the bytes that went over them.
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
        """Runs a transfer that all its ranks take part in at the same time.

        Args:
            sent, received: bytes that leave this rank, and that come to it.
            move: really moves them, and returns when they are there.
        """
        now = self._clock()
        ends = self._reserve(self.out, sent, now), self._reserve(self.into, received, now)
        move()
        if sent or received:
            self._wait_until(max(ends))

    def send(self, count: int, move: Callable[[], object]) -> None:
        """Runs a transfer to a rank that receives it with `receive`."""
        end = self._reserve(self.out, count, self._clock())
        move()
        self._wait_until(end)

    def receive(self, count: int, move: Callable[[], object]) -> None:
        """Runs the other end of `send`."""
        move()
        self._wait_until(self._reserve(self.into, count, self._clock()))

    def _reserve(self, way: Direction, count: int, now: float) -> float:
        return way.reserve(count, self.seconds(count), now)

    @property
    def speed_now(self) -> LinkSpeed:
        """With the rate that was found."""
        return replace(self.speed, rate=self.rate)

    def __str__(self) -> str:
        is_measured = self.rate is not None and self.speed.rate is None
        return f"{self.speed_now}{' (even)' if is_measured else ''}"

    def seconds(self, count: int) -> float:
        """How long so many bytes occupy one way."""
        return 0.0 if self.rate is None else 8 * count / self.rate

    def _wait_until(self, end: float) -> None:
        if self.rate is None:
            return
        while (left := end + self.speed.latency - self._clock()) > 0:
            self._sleep(left)


@final
class LinkedTransport(TransportWrapper):
    """A transport whose bytes go over an emulated link."""

    def __init__(self, inner: Transport, link: EmulatedLink) -> None:
        super().__init__(inner)
        self.group = inner.group
        self._link = link

    def move(self, name: str, run: Method, out: Tensor, value: Tensor, *rows: Sequence[int]) -> None:
        sent, received = bytes_moved(name, out, value, self.size, self.rank, rows)
        self._link.carry(sent, received, lambda: run(out, value, *rows))


class LinkedChannel(P2PChannel):
    """A way between two ranks of a pipeline over an emulated link."""

    def __init__(self, inner: P2PChannel, link: EmulatedLink) -> None:
        self.inner = inner
        self._link = link

    def send(self, value: Tensor, forward: bool) -> None:
        self._link.send(value.nbytes, lambda: self.inner.send(value, forward))

    def receive(self, out: Tensor, forward: bool) -> None:
        self._link.receive(out.nbytes, lambda: self.inner.receive(out, forward))


@contextmanager
def bare(link: EmulatedLink | None) -> Iterator[None]:
    """Within it, transfers go as they are."""
    if link is None:
        yield
        return
    rate, link.rate = link.rate, None
    try:
        yield
    finally:
        link.rate = rate


def all_reduce(value: Tensor, group: dist.ProcessGroup, link: EmulatedLink | None) -> None:
    """Sums a value over a group, in place; over a link as the ring that moves least.

    Args:
        value: is overwritten with the sum.
        group: the ranks that sum.
        link: the emulated link that the sum goes over; None where there is none.
    """
    if link is None:
        dist.all_reduce(value, group=group)
        return
    size = dist.get_world_size(group)
    moved = 2 * value.nbytes * (size - 1) // size
    link.carry(moved, moved, lambda: dist.all_reduce(value, group=group))
