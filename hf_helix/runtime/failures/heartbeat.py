"""Liveness: when one rank fails, every rank ends soon and names the failed rank.

In:   heartbeats of all ranks and the first error of any, through the store of the process group.
Out:  an error that names the rank; a process that ends.
Must hold: the watch never ends a healthy run: a rank counts as dead only after `DEAD_AFTER` seconds without a
heartbeat, or after failed communication with it; the host of the store after the same time without an answer; and one
that lives as `progress` says. The
load of the store per second does not grow with the number of ranks: rank 0 watches all ranks, the others watch rank 0
and the report of a failure. Process groups are destroyed at exit, unless the run failed. `endings` prints the messages.
"""

import atexit
import contextlib
import math
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

import torch.distributed as dist

from hf_helix.runtime.distributed import agreement, endings
from hf_helix.runtime.distributed.groups import timeout_of, wait_for_gloo
from hf_helix.runtime.distributed.mesh import forget_meshes, world_size
from hf_helix.runtime.failures import activity
from hf_helix.runtime.failures.bounded_store import BoundedStore
from hf_helix.runtime.failures.progress import Progress, Standing, describe_late
from hf_helix.runtime.failures.restarts import connect_store

SHORTEST, LONGEST = 0.5, 4.0  # seconds between two heartbeats of a rank
RANKS_A_SECOND = 256  # heartbeats a second, at most: the store is one thread of one process
DEAD_AFTER = 30.0
GRACE = 5.0  # longer than `LONGEST`, so a rank's exit message arrives first

FAILED, LEFT, TOLD = "failed", b"left", b" told"
SILENT = f"rank 0 (or its launcher) was stopped, or its host is lost: the store has not answered for {DEAD_AFTER:.0f} s"


class RankFailure(RuntimeError):
    """Another rank failed or died; the message names the rank."""


class Watch:
    """Heartbeats of this rank, and a watch over the others. A process has one watch, see `start_watch`.

    The heartbeat of a rank is a number and its standing, with " told" after them once the rank has given the reason of
    its end, or "left".

    Args:
        rank, world: this rank, and the number of ranks.
        store: shared by all ranks, empty.
        timeout: of the process group, in seconds.
    """

    has_spoken = False  # whether this rank has given the reason of its end

    def __init__(self, rank: int, world: int, store: BoundedStore, timeout: float = math.inf) -> None:
        self.rank = rank
        self.world = world
        self.interval = interval_of(world)
        self._store = store
        self._stop = threading.Event()
        self._watched = range(world) if rank == 0 else range(1)
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._in_step = False
        self._count = 0
        self._host = platform.node()
        self._progress = Progress(timeout, self.interval)
        self._failure = ""  # the reason that another rank has given for its end
        self._has_told = False
        self._dead: set[int] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="hf_helix-liveness", daemon=True)
        self._beat()
        if rank == 0:
            store.wait([_beat_of(other) for other in range(world)])
            store.set(FAILED, "")
        else:
            store.wait([FAILED])

    def start(self) -> None:
        """Starts to watch, in a thread."""
        self._thread.start()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Returns a context for communication: its errors become errors with the name of a rank."""
        before, self._in_step = self._in_step, True
        try:
            yield
        except RankFailure:
            raise
        except RuntimeError as error:
            culprit = self.find_culprit(_is_late(error)) if _is_communication_error(error) else None
            if culprit is None:
                raise
            raise RankFailure(culprit) from error
        finally:
            self._in_step = before

    def report(self, why: str, follows: bool = False) -> str:
        """Tells the other ranks why this rank ends, and waits until they have printed their line.

        Args:
            follows: whether another rank is to blame. Then only rank 0 waits: the store ends with rank 0.

        Returns:
            The report of the first rank.
        """
        first = self._failure or why  # the store may have ended with the rank that has failed first
        with contextlib.suppress(Exception):
            first = self._store.compare_set(FAILED, "", why).decode()
            self._has_told = True
            self._beat()
            deadline = time.monotonic() + (GRACE if self.rank == 0 or not follows else 0)
            while time.monotonic() < deadline and not self._all_have_heard():
                time.sleep(SHORTEST / 5)
        return first

    def close(self) -> None:
        """Stops watching; this rank leaves in good order."""
        self._stop.set()
        self._thread.join(2 * SHORTEST)
        with contextlib.suppress(Exception):
            self._store.set(_beat_of(self.rank), LEFT.decode())

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException:  # of the watch itself: this rank goes on, and is not missed
            self._store.set(_beat_of(self.rank), LEFT.decode())
            raise

    def _watch(self) -> None:
        while not self._waits():
            try:
                failure = self._round()
            except TimeoutError:
                failure = SILENT if self._in_step else ""
            except dist.DistError:  # of the store's connection
                # The store may live in rank 0, which may have left in good order: end only a hanging step.
                failure = "rank 0 died or has ended: its store is gone"
                self._stop.wait(DEAD_AFTER if not self._in_step else GRACE)
                if not self._in_step:
                    return
            if failure:
                self._end(failure)

    def _waits(self) -> bool:
        """Waits for the next round; returns whether there is none."""
        before = time.monotonic()
        has_ended = self._stop.wait(self.interval)
        if time.monotonic() - before > DEAD_AFTER / 2:  # this process was stopped, so its last look is of no use
            self._seen.clear()
        return has_ended

    def _round(self) -> str:
        """Sends a heartbeat and reads the others', in two requests; returns why this rank must end."""
        self._beat()
        failure = self._look(self._watched, DEAD_AFTER, self._seen) or self._look_at_progress()
        if failure and not self._failure:
            failure = self._store.compare_set(FAILED, "", failure).decode()  # for the others
        return failure

    def _beat(self) -> None:
        self._count += 1
        standing = Standing.mine(self._host).pack()
        self._store.set(_beat_of(self.rank), f"{self._count}\t{standing}{TOLD.decode() if self._has_told else ''}")

    def _look_at_progress(self) -> str:
        """Returns a rank without progress, by the last heartbeats; prints a notice before it comes to that."""
        if self.rank > 0:
            return ""
        now = time.monotonic()
        self._progress.note(_standings(self._seen), now)
        if notice := self._progress.notice(now, activity.longest_step):
            endings.print_line(notice)
        return self._progress.failure(now)

    def _look(self, others: Sequence[int], limit: float, seen: dict[int, tuple[bytes, float]]) -> str:
        """Returns the reported failure, or a rank after a long silence; in a single request."""
        with self._lock:  # both threads look
            if not self._failure:
                failed, *beats = self._store.multi_get([FAILED, *map(_beat_of, others)])
                if not failed:
                    return self._silent(dict(zip(others, beats, strict=True)), limit, seen)
                self._failure = failed.decode()
                if not _failed:  # a rank with an error of its own prints that error
                    self._say(self._failure)
                self._has_told = True
                self._beat()
        return self._failure

    def _beats(self) -> Iterator[tuple[int, bytes]]:
        return enumerate(self._store.multi_get([*map(_beat_of, range(self.world))]))

    def _all_have_heard(self) -> bool:
        return all(other in self._dead or beat == LEFT or beat.endswith(TOLD) for other, beat in self._beats())

    def _say(self, failure: str) -> None:
        """Prints, once, that this rank ends because of another."""
        if not self.has_spoken:
            self.has_spoken = True
            endings.print_short_ending(self.rank, failure)

    def _silent(self, beats: dict[int, bytes], limit: float, seen: dict[int, tuple[bytes, float]]) -> str:
        """Returns the rank with the longest silence among the ranks without a new heartbeat for `limit` seconds."""
        now, silent = time.monotonic(), []
        for other, beat in beats.items():
            if beat == LEFT:
                seen.pop(other, None)
            elif seen.get(other, (None, 0.0))[0] != beat:
                seen[other] = (beat, now)
            elif other != self.rank and now - seen[other][1] > limit:
                silent.append((seen[other][1], other))
        if not silent:
            return ""
        _, dead = min(silent)
        self._dead.add(dead)
        standing = _standing_of(seen[dead][0])
        return f"rank {dead} died: no sign of life for {limit:.0f} s (last seen on {standing.host} in {standing.text})"

    def find_culprit(self, is_late: bool = False) -> str | None:
        """Returns the rank that caused a communication error, after a wait for its report or its silence; if `is_late`,
        communication has waited too long, also a rank that does something else."""
        limit = 4 * self.interval
        deadline = time.monotonic() + GRACE + limit
        seen: dict[int, tuple[bytes, float]] = {}
        time.sleep(SHORTEST / 5)  # the connections of a dead rank end one by one, that to the store among the last
        try:
            while time.monotonic() < deadline:
                culprit = self._look(range(self.world), limit, seen)
                if culprit:
                    return culprit
                time.sleep(self.interval)
            gone = [other for other, beat in self._beats() if beat == LEFT]
            busy = {other: each for other, each in _standings(seen).items() if not each.waits} if is_late else {}
        except TimeoutError:
            return self._failure or SILENT
        except dist.DistError:
            return self._failure or "rank 0 died: the connection to it is gone"
        if gone:
            doing = f"{agreement.awaited} on rank {self.rank}: {agreement.TOGETHER}" if agreement.awaited else ""
            return (
                f"rank {gone[0]} has ended its script while {doing or f'rank {self.rank} still communicates with it'}"
            )
        return describe_late(busy) or None

    def _end(self, failure: str) -> None:
        """Gives the main thread time to raise and print the error itself, then ends the process."""
        if self._stop.wait(GRACE) or (_failed and self._stop.wait(GRACE)):
            return
        self._say(failure)
        endings.record(failure, late=True)
        os._exit(1)


def interval_of(world: int) -> float:
    """Returns the seconds between two heartbeats of a rank."""
    return min(max(SHORTEST, world / RANKS_A_SECOND), LONGEST)


def _beat_of(rank: int) -> str:
    return f"beat/{rank}"


def _standing_of(beat: bytes) -> Standing:
    return Standing.read(beat.decode().removesuffix(TOLD.decode()).partition("\t")[2])


def _standings(seen: Mapping[int, tuple[bytes, float]]) -> dict[int, Standing]:
    """Returns the standings of ranks, by their last heartbeats."""
    return {other: _standing_of(beat) for other, (beat, _) in seen.items()}


_watch: Watch | None = None
_group: Callable[[], object] | None = None  # a weak reference to the watched process group
_failed = False
_status = 1  # of this process, once it has failed


def start_watch() -> Watch | None:
    """Returns the watch of this process, started on first use; None for a single process. Collective."""
    global _watch, _group
    if world_size() == 1:
        return _watch
    world = dist.group.WORLD
    if _group is None or _group() is not world:  # also after the group was destroyed, with its store, and made again
        if _watch is not None:
            _watch.close()
        store = BoundedStore(connect_store(), DEAD_AFTER)
        _watch = Watch(dist.get_rank(), dist.get_world_size(), store, timeout_of(world))
        _group = weakref.ref(world)
        _watch.start()
        install_hook()
    return _watch


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Returns the context `Watch.step` if there is a watch. After a failure, groups with pending work are not used
    again. Also decorates functions."""
    try:
        with _watch.step() if _watch is not None else contextlib.nullcontext():
            yield
    except BaseException:
        forget_meshes()
        raise


def install_hook() -> None:
    """Prints uncaught errors as `endings` does. Other exception hooks stay in use; a second installation has no
    effect."""
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
    """Prints why this rank ends: the full error if no other rank prints it, otherwise a line."""
    number = _watch.rank if _watch is not None else int(os.environ.get("RANK", "0"))
    culprit = _culprit_of(error)
    if culprit:
        _follow(number, culprit)
        return
    mine = endings.describe(error, number)
    first = endings.claim_full_error(mine)
    told = _watch.report(mine) if _watch is not None else mine
    if (first or told) == mine:
        endings.record(endings.print_error(error, trace, show))
    elif endings.is_same(first, mine):
        endings.record(first, late=True)  # the same screen shows the error already
    else:
        _follow(number, first or told)


def _follow(number: int, culprit: str) -> None:
    """Ends this rank because of another."""
    if _watch is None or not _watch.has_spoken:
        endings.print_short_ending(number, culprit)
    endings.record(culprit, late=True)
    if _watch is not None:
        _watch.report(culprit, follows=True)


def _culprit_of(error: BaseException) -> str:
    """Returns the report of another rank that explains the end of this rank; empty if the error arose here."""
    if isinstance(error, RankFailure):
        return str(error)
    if _watch is not None and isinstance(error, RuntimeError) and _is_communication_error(error):
        return _watch.find_culprit(_is_late(error)) or ""
    return endings.remote_description(error)


def _is_communication_error(error: RuntimeError) -> bool:
    text = str(error).lower()
    signs = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe")
    return isinstance(error, dist.DistBackendError) or any(sign in text for sign in signs)


def _is_late(error: RuntimeError) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


@atexit.register
def _leave() -> None:
    if _failed:
        # Destroying groups with work pending can hang; the peers know of the end.
        sys.stdout.flush()
        sys.stderr.flush()
        endings.wait_for_full_error(GRACE)
        os._exit(_status)
    if _watch is not None:
        _watch.close()
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    wait_for_gloo(GRACE)
