"""Does one kind of work on several pieces, each in one of a few processes.

In:   work, and its pieces.
Out:  what the work returns for each piece, in the order of the pieces.
Must hold: the processes are forked, so that work may hold what cannot be sent; only pieces and results are. Work must
not use torch's threads, which a forked process does not have.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Piece = TypeVar("Piece")
Result = TypeVar("Result")

_work: Callable[[Any], Any] | None = None
"""What a forked process does with each piece."""


def in_processes(work: Callable[[Piece], Result], pieces: Sequence[Piece], workers: int) -> Iterator[Result]:
    """Yields what work returns for each piece."""
    if workers == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(work, pieces)
        return
    with multiprocessing.get_context("fork").Pool(min(workers, len(pieces)), _adopt, (work,)) as pool:
        yield from pool.imap(_do, pieces)


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _adopt(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work


def _do(piece: Any) -> Any:
    assert _work is not None
    return _work(piece)
