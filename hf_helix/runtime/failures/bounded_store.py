"""A store with a limit for every request: for a host without an answer, and for a lost host.

In:   a connection to the store of a process group.
Out:  the answers of the store; an error for a lost or silent store.
Must hold: a request ends within `limit` seconds, in which this process runs: the time in which the process is stopped
does not count. No request goes to a lost host, since torch would print C++ frames for each request.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public all the same

T = TypeVar("T")

TURN = 0.5  # seconds of one wait for an answer


class BoundedStore:
    """A store with a limit for every request except `wait`.

    Args:
        store: a connection without other users.
        limit: the seconds of a request before the store counts as silent.
    """

    def __init__(self, store: Store, limit: float) -> None:
        self.store = store
        self._limit = limit
        self._line = _line_to(store)

    def wait(self, keys: Sequence[str]) -> None:
        """Waits for keys, as long as the timeout of the process group."""
        self.store.wait(list(keys))

    def set(self, key: str, value: str) -> None:
        """Sets a key. Raises dist.DistError for a lost store, TimeoutError for a silent store, as every request."""
        self._ask(lambda: self.store.set(key, value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of several keys, in one request."""
        return self._ask(lambda: self.store.multi_get(list(keys)))

    def has(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are set."""
        return self._ask(lambda: self.store.check(list(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key that has the expected value; returns its value.

        Args:
            key: of the store.
            expected: the value now; empty for no value.
            desired: the value to set.
        """
        return self._ask(lambda: self.store.compare_set(key, expected, desired))

    def _ask(self, request: Callable[[], T]) -> T:
        if self._line is not None and _is_cut(self._line):
            raise dist.DistNetworkError("the host of the store is gone")
        answers: list[T] = []
        errors: list[BaseException] = []
        has_ended = threading.Event()

        def ask() -> None:
            try:
                answers.append(request())
            except BaseException as error:
                errors.append(error)
            has_ended.set()

        threading.Thread(target=ask, name="hf_helix-store", daemon=True).start()
        for _ in range(max(1, round(self._limit / TURN))):
            if has_ended.wait(TURN):
                break
        if errors:
            raise errors[0]
        if not answers:
            raise TimeoutError(f"the store has not answered for {self._limit:.0f} s")
        return answers[0]


def _line_to(store: Any) -> socket.socket | None:
    """Opens a connection without messages to the host of a store, cut by the end of the host. None for a store without
    a host."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        with contextlib.suppress(OSError):
            line = socket.create_connection((store.host, store.port), timeout=5)
            line.setblocking(False)
            return line
    return None


def _is_cut(line: socket.socket) -> bool:
    try:
        return not line.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
