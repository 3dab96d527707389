"""Pauses of the host: times in which a Python thread of this process could not run, and garbage collections.

In:   a thread that sleeps for moments; the callbacks of Python's garbage collector.
Out:  the seconds of pauses by cause since the last question.
Must hold: the thread wakes `1 / TICK` times a second. Times in which other processes have the cores are no pauses, and
neither are delays shorter than `LEAST`.
"""

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from hf_helix.runtime.failures import activity

TICK = 0.04  # seconds of a sleep
LEAST = 0.04  # seconds of the shortest pause
COLLECTION, STOPPED = "garbage collection", "the process stood still"


class Pauses:
    """The pauses of this process, from `start` to `close`."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._began = 0.0  # of the present collection
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="hf_helix-pauses", daemon=True)

    def start(self) -> None:
        """Starts to count."""
        gc.callbacks.append(self._note_collection)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Returns the seconds by cause since the last call. A collection also stops the thread that counts pauses."""
        now, self._seconds = self._seconds, defaultdict(float)
        collected = now[COLLECTION]
        return {COLLECTION: collected, STOPPED: max(0.0, now[STOPPED] - collected)}

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed = True
        if self._note_collection in gc.callbacks:
            gc.callbacks.remove(self._note_collection)

    def _watch(self) -> None:
        now = _with_core()
        while not self._is_closed:
            time.sleep(TICK)
            before, now = now, _with_core()
            late = now - before - TICK
            if late > LEAST:
                self._seconds[STOPPED] += late

    def _note_collection(self, phase: str, about: Mapping[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._seconds[COLLECTION] += time.perf_counter() - self._began


def _with_core() -> float:
    """Returns the time of a clock that stands still while other processes have the cores."""
    return time.monotonic() - activity.seconds_without_core()
