"""Liveness: when one rank fails, every rank ends soon and says which one it was.

In:   heartbeats of all ranks and the first error of any, through a small store of its own beside the process group.
Out:  an error that names the rank; a process that ends.
Must hold: the watch never ends a healthy run: a rank counts as dead only after `DEAD_AFTER` seconds without a
heartbeat, or when communication with it has failed. Process groups are destroyed at exit, unless the run failed. What
is printed at the end is left to `endings`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from hf_helix.runtime import endings
from hf_helix.runtime.mesh import forget_meshes

INTERVAL = 0.5
DEAD_AFTER = 30.0
GRACE = 5.0


class RankFailure(RuntimeError):
    """Another rank failed or died; the message names it."""


class Watch:
    """Heartbeats of this rank and an eye on the others. One per process, see `start_watch`."""

    has_spoken = False  # whether this rank has said why it ends

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._store = self._connect()
        self._stop = threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._in_step = False
        self._failure = ""  # what another rank has said of its end
        self._dead: set[int] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="hf_helix-liveness", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around everything that communicates: errors of communication become errors that name a rank."""
        before, self._in_step = self._in_step, True
        try:
            yield
        except RankFailure:
            raise
        except RuntimeError as error:
            culprit = self.find_culprit() if _is_communication_error(error) else None
            if culprit is None:
                raise
            raise RankFailure(culprit) from error
        finally:
            self._in_step = before

    def report(self, why: str, follows: bool = False) -> str:
        """Tell the other ranks why this one ends, and wait until they have said their line.

        Args:
            why: this rank's own error, or the rank that it has found to blame. Without the latter, ranks that notice a
                little later would blame the ones that have ended because of it.
            follows: whether another rank is to blame. Then only rank 0 waits, with which the store ends.

        Returns:
            What the first rank that reported has said.
        """
        first = why
        with contextlib.suppress(Exception):
            first = self._store.compare_set("failed", "", why).decode()
            self._store.set(f"told/{self.rank}", "1")
            deadline = time.monotonic() + (GRACE if self.rank == 0 or not follows else 0)
            while time.monotonic() < deadline and any(not self._has_heard(other) for other in range(self.world)):
                time.sleep(INTERVAL / 5)
        return first

    def _has_heard(self, other: int) -> bool:
        gone = other in self._dead or self._store.check([f"left/{other}"])
        return gone or self._store.check([f"told/{other}"])

    def close(self) -> None:
        """Stop watching; this rank leaves in good order."""
        with contextlib.suppress(Exception):
            self._store.set(f"left/{self.rank}", "1")
        self._stop.set()
        self._thread.join(2 * INTERVAL)

    def _connect(self) -> TCPStore:
        host = os.environ.get("MASTER_ADDR", "localhost")
        server = TCPStore(host, 0, is_master=True, wait_for_workers=False) if self.rank == 0 else None
        port: list[int | None] = [server.port if server else None]
        dist.broadcast_object_list(port, src=0)
        assert port[0] is not None
        return server or TCPStore(host, port[0], is_master=False)

    def _run(self) -> None:
        count = 0
        while not self._stop.wait(INTERVAL):
            try:
                count += 1
                self._store.set(f"alive/{self.rank}", str(count))
                failure = self._read_failure() or self._silent(DEAD_AFTER, self._seen)
            except Exception:
                # The store lives in rank 0. It may have left in good order, so only a step that hangs is ended.
                failure = "rank 0 died or has ended: its store is gone"
                self._stop.wait(DEAD_AFTER if not self._in_step else GRACE)
                if not self._in_step:
                    return
            if failure:
                self._end(failure)

    def _read_failure(self) -> str:
        with self._lock:  # both threads read
            if not self._failure and self._store.check(["failed"]):
                self._failure = self._store.get("failed").decode()
                if not _failed:  # a rank whose own error ends it says that
                    self._say(self._failure)
                self._store.set(f"told/{self.rank}", "1")
        return self._failure

    def _say(self, failure: str) -> None:
        """Say, once, that this rank ends because of another."""
        if not self.has_spoken:
            self.has_spoken = True
            endings.say_line(self.rank, failure)

    def _silent(self, limit: float, seen: dict[int, tuple[bytes, float]]) -> str | None:
        """Of the ranks without a sign of life for so long, the one that has been silent longest."""
        now, silent = time.monotonic(), []
        for other in range(self.world):
            if other == self.rank or self._store.check([f"left/{other}"]):
                continue
            beat = self._store.get(f"alive/{other}") if self._store.check([f"alive/{other}"]) else b""
            if seen.get(other, (None, 0.0))[0] != beat:
                seen[other] = (beat, now)
            elif now - seen[other][1] > limit:
                silent.append((seen[other][1], other))
        if not silent:
            return None
        _, dead = min(silent)
        self._dead.add(dead)
        return f"rank {dead} died: no sign of life for {limit:.0f} s"

    def find_culprit(self) -> str | None:
        """Whose fault a communication error is: wait until a rank has said so or has fallen silent."""
        deadline = time.monotonic() + GRACE + 4 * INTERVAL
        seen: dict[int, tuple[bytes, float]] = {}
        try:
            while time.monotonic() < deadline:
                found = self._read_failure() or self._silent(4 * INTERVAL, seen)
                if found:
                    return found
                time.sleep(INTERVAL)
            gone = [r for r in range(self.world) if self._store.check([f"left/{r}"])]
        except Exception:
            return self._failure or "rank 0 died: the connection to it is gone"
        if gone:
            return f"rank {gone[0]} has ended its script while rank {self.rank} still communicates with it"
        return None

    def _end(self, failure: str) -> None:
        """Give the main thread time to raise the error itself and to say it, then end the process."""
        if self._stop.wait(GRACE) or (_failed and self._stop.wait(GRACE)):
            return
        self._say(failure)
        endings.record(failure, late=True)
        os._exit(1)


_watch: Watch | None = None
_failed = False
_status = 1  # of this process, once it has failed


def start_watch() -> Watch | None:
    """The watch of this process, started on first use; None where there is only one process. Collective."""
    global _watch
    if _watch is None and dist.is_initialized() and dist.get_world_size() > 1:
        _watch = Watch()
        install_hook()
    return _watch


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """`Watch.step` where there is a watch. Groups that a failure has left with work under way are not used again."""
    try:
        with _watch.step() if _watch is not None else contextlib.nullcontext():
            yield
    except BaseException:
        forget_meshes()
        raise


def install_hook() -> None:
    """Say errors as `endings` does. Other exception hooks stay in use; what is installed twice acts once."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed, _status
        if _failed:
            previous(kind, error, trace)
            return
        _failed, _status = True, 130 if isinstance(error, KeyboardInterrupt) else 1
        _say_end(error, trace, previous)

    sys.excepthook = hook


def _say_end(error: BaseException, trace: TracebackType | None, show: Callable[..., object]) -> None:
    """Say why this rank ends: whole where nobody else does, and else in a line."""
    number = _watch.rank if _watch is not None else int(os.environ.get("RANK", "0"))
    culprit = _culprit_of(error)
    if culprit:
        _follow(number, culprit)
        return
    mine = endings.describe(error, number)
    first = endings.claim(mine)
    told = _watch.report(mine) if _watch is not None else mine
    if (first or told) == mine:
        endings.record(endings.say_whole(error, trace, show))
    elif endings.is_same(first, mine):
        endings.record(first, late=True)  # the same screen has it already
    else:
        _follow(number, first or told)


def _follow(number: int, culprit: str) -> None:
    """End this rank because of another, which has the word after it."""
    if _watch is None or not _watch.has_spoken:
        endings.say_line(number, culprit)
    endings.record(culprit, late=True)
    if _watch is not None:
        _watch.report(culprit, follows=True)


def _culprit_of(error: BaseException) -> str:
    """What another rank says of the end of this one; empty where the error arose here."""
    if isinstance(error, RankFailure):
        return str(error)
    if _watch is not None and isinstance(error, RuntimeError) and _is_communication_error(error):
        return _watch.find_culprit() or ""
    return endings.said_elsewhere(error)


def _is_communication_error(error: RuntimeError) -> bool:
    text = str(error).lower()
    signs = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe")
    return isinstance(error, dist.DistBackendError) or any(sign in text for sign in signs)


@atexit.register
def _leave() -> None:
    if _failed:
        # Destroying groups with work pending can hang; the peers have been told.
        sys.stdout.flush()
        sys.stderr.flush()
        endings.finish(GRACE)
        os._exit(_status)
    if _watch is not None:
        _watch.close()
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
