"""Preemption: a request to any rank ends the window of all ranks between micro-batches.

In:   a request, such as by a signal; every micro-batch of a window before its first operator.
Out:  whether the micro-batch begins; the same on every rank.
Must hold: a micro-batch that has begun on one rank runs to its end on all, so communication stays matched, also between
pipeline stages. A window without a request costs the host nothing but a look at a flag. No process group is used.

Ranks agree through the store, in a thread of each:

    request   a rank sets a key, which the threads of all ranks wait for
    post      from then on no micro-batch begins on a rank, and the thread posts the last one that has
    limit     rank 0 answers with the last of all posts: micro-batches up to it begin, later ones do not
"""

import threading
from datetime import timedelta
from typing import Any

from hf_helix.runtime.distributed.mesh import world_size
from hf_helix.runtime.failures.exchange import StoreExchange
from hf_helix.runtime.failures.restarts import connect_store

_FOREVER = timedelta(days=365)
_REQUEST = "request"
_ASKED, _OVER = "asked", "over"
_LOOK = 1.0  # seconds after which a waiting rank looks whether its thread is alive

Place = tuple[int, int]
"""A step, and the number of micro-batches of it that have begun."""


class Preemption:
    """The requests of a run. Making one is collective."""

    def __init__(self) -> None:
        self.is_requested = False
        self._begun: Place = (-1, 0)
        self._posted = False
        self._limit: Place | None = None
        self._changed = threading.Condition()
        if world_size() == 1:
            return
        store: Any = connect_store()
        self._store = store
        self._second = store.clone()  # a store serves one request at a time, and the thread waits
        self._exchange = StoreExchange()
        self._thread = threading.Thread(target=self._listen, name="hf_helix-preemption", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Asks all ranks to end their windows. Not to be called in a handler of a signal itself, see `ask`."""
        self.is_requested = True
        if world_size() > 1:
            self._second.compare_set(_REQUEST, "", _ASKED)
        else:
            with self._changed:
                self._limit = self._post()

    def ask(self, *_: object) -> None:
        """Handles a signal: calls `request` in a thread, since the signal may have come while a lock was held."""
        threading.Thread(target=self.request, name="hf_helix-signal", daemon=True).start()

    def may_begin(self, step: int, microbatch: int) -> bool:
        """Returns whether a micro-batch may begin; waits for the agreement of the ranks after a request."""
        place = (step, microbatch + 1)
        with self._changed:
            while self._posted and self._limit is None:
                self._changed.wait(_LOOK)
                if self._limit is None and not self._thread.is_alive():
                    raise RuntimeError("the ranks could not agree on the end of the window: the store does not answer")
            if self._limit is not None and place > self._limit:
                return False
            self._begun = max(self._begun, place)
        return True

    def close(self) -> None:
        """Ends the threads of all ranks."""
        if world_size() > 1:
            self._second.compare_set(_REQUEST, "", _OVER)

    def _post(self) -> Place:
        self._posted = True
        return self._begun

    def _listen(self) -> None:
        self._store.wait([_REQUEST], _FOREVER)
        if self._store.get(_REQUEST).decode() == _OVER:
            return
        self.is_requested = True
        with self._changed:
            mine = self._post()
        limit = self._exchange.answer(max(self._exchange.gather(mine), default=None))
        with self._changed:
            self._limit = limit
            self._changed.notify_all()
