"""Objects of all ranks through the store of the process group, for a thread during collectives of the main thread.

In:   an object of every rank; the answer of rank 0.
Out:  all objects on rank 0; the answer on every rank.
Must hold: no process group is used, and every exchange has keys of its own. A rank that has died is waited for: the
main thread, which communicates, and the watch (`heartbeat`) end the process then.
"""

import base64
import contextlib
import itertools
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hf_helix.runtime.distributed.mesh import rank, world_size
from hf_helix.runtime.failures.restarts import connect_store

_TURN = timedelta(days=365)


class StoreExchange:
    """Two turns through the store, as often as needed, by one thread at a time. Making one is collective."""

    def __init__(self) -> None:
        self._store = connect_store() if world_size() > 1 else None
        self._numbers = itertools.count()

    def gather(self, mine: Any) -> list[Any]:
        """Returns the objects of all ranks, in order, on rank 0; nothing on the others."""
        if self._store is None:
            return [mine]
        self._number = next(self._numbers)
        if rank() > 0:
            self._store.set(self._key(rank()), _packed(mine))
            return []
        others = [self._key(other) for other in range(1, world_size())]
        return [mine, *map(_unpacked, self._wait(others))]

    def answer(self, mine: Any) -> Any:
        """Returns rank 0's object on every rank."""
        if self._store is None:
            return mine
        if rank() > 0:
            return _unpacked(self._wait([self._key(0)])[0])
        self._store.set(self._key(0), _packed(mine))
        return mine

    def _wait(self, keys: Sequence[str]) -> list[bytes]:
        assert self._store is not None
        self._store.wait(list(keys), _TURN)
        values = [self._store.get(key) for key in keys]
        if rank() == 0:
            for key in keys:
                with contextlib.suppress(dist.DistError, RuntimeError):  # a store of files keeps what it has
                    self._store.delete_key(key)
        return values

    def _key(self, number: int) -> str:
        return f"exchange/{self._number}/{number}"


def _packed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: bytes) -> Any:
    return pickle.loads(base64.b64decode(text))
