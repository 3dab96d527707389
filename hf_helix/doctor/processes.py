"""Maps a function over items in a few forked processes.

In:   a function, and its items.
Out:  the results, in the order of the items.
Must hold: only items and results are pickled; the function may hold anything, since processes are forked. torch
computes with one thread in them: a forked process lacks the threads of its parent, and would wait for them for ever.
"""

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Piece = TypeVar("Piece")
Result = TypeVar("Result")

_work: Callable[[Any], Any] | None = None  # the function of a forked process


def in_processes(work: Callable[[Piece], Result], pieces: Sequence[Piece], workers: int) -> Iterator[Result]:
    """Yields the result of `work` for each piece."""
    if min(workers, len(pieces)) <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(work, pieces)
        return
    with multiprocessing.get_context("fork").Pool(min(workers, len(pieces)), _adopt, (work,)) as pool:
        yield from pool.imap(_do, pieces)


def _adopt(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    if "torch" in sys.modules:  # a question about counted amounts needs no torch
        sys.modules["torch"].set_num_threads(1)


def _do(piece: Any) -> Any:
    assert _work is not None
    return _work(piece)
