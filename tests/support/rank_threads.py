"""Ranks of one axis as threads of this process: real collectives between real parts, without processes or gloo.

`on_ranks(2, work)` calls `work(rank)` in a thread for each rank. Operators on `Axis(ThreadTransport(meeting, rank))`
meet those of the other ranks. Nothing that traces runs in a thread: units are made before.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_helix.operators.communication.transport import SilentTransport

Result = TypeVar("Result")
PATIENCE = 60


class Meeting:
    """Where the ranks hand each other values, one after the other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self._brought: list[Any] = [None] * size

    def of_all(self, rank: int, value: Any) -> list[Any]:
        """What every rank brought, in order."""
        self._brought[rank] = value
        self.barrier.wait()
        result = list(self._brought)
        self.barrier.wait()
        return result


class ThreadTransport(SilentTransport):
    """A transport whose ranks are threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(meeting.size, rank)
        self._meeting = meeting

    def all_gather(self, out: Tensor, value: Tensor) -> None:
        out.copy_(torch.cat(self._meeting.of_all(self.rank, value.clone())))

    def reduce_scatter(self, out: Tensor, value: Tensor) -> None:
        parts = [each.chunk(self.size)[self.rank] for each in self._meeting.of_all(self.rank, value.clone())]
        out.copy_(sum(parts[1:], start=parts[0]))

    def exchange(self, out: Tensor, value: Tensor) -> None:
        rows = [len(value) // self.size] * self.size
        self.exchange_rows(out, value, rows, rows)

    def exchange_rows(self, out: Tensor, value: Tensor, arriving: Sequence[int], sent: Sequence[int]) -> None:
        pieces = self._meeting.of_all(self.rank, value.clone()[: sum(sent)].split(list(sent)))
        out[: sum(arriving)] = torch.cat([of_rank[self.rank] for of_rank in pieces])

    def shift(self, out: Tensor, value: Tensor) -> None:
        raise AssertionError("not between threads")


def on_ranks(meeting: Meeting, work: Callable[[int], Result]) -> list[Result]:
    """What each rank's work returns. The first error of a rank ends all."""

    def run(rank: int) -> Result:
        try:
            return work(rank)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(meeting.size) as threads:
        futures = [threads.submit(run, rank) for rank in range(meeting.size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
