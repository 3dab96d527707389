"""Looks: a traced window now and then, of which all ranks compare their times.

In:   the windows of a rank, and the activities between them.
Out:  the verdicts on rank 0, a line for each new one, figures for the logs.
Must hold: all ranks look at the same windows, which cost `MOST` of a run's time. A look uses no process group and
keeps no rank waiting: each sets a key of the store in a thread of its own, and rank 0's thread reads the keys when all
are there. What a thread cannot do in time is left out.
"""

import contextlib
import dataclasses
import json
import math
import platform
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_helix.runtime.distributed.agreement import decide_on_rank_0, gather_numbers
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.failures import activity
from hf_helix.runtime.failures.bounded_store import BoundedStore
from hf_helix.runtime.failures.restarts import connect_store
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.notices import say
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.stragglers.pauses import Pauses
from hf_helix.runtime.stragglers.times import Names, operators_of, transfers_of
from hf_helix.runtime.stragglers.verdict import History, RankTimes, Verdict, compare
from hf_helix.runtime.streams.trace import Trace

MOST = 0.004  # of a run's time, for looks
A_SPAN, A_LOOK = 4e-6, 2e-3  # seconds of the host, for an operator in a trace, and for everything else
COUNTED = 2  # the window of a plan that says what a look costs; the windows before compile and make workspaces
PATIENCE = 20.0  # seconds that rank 0 waits for the times of others
SOONEST, LATEST = 0.02, 0.5  # seconds between two questions for them; each wait is twice the one before
MOST_NAMED = 1000  # verdicts that are kept
KEPT = 8  # looks of a rank in the store
QUIET = 20  # looks without a verdict after which the same one is printed again
SILENCE = 30.0  # seconds after which the store counts as lost


class _Since(NamedTuple):
    """The state of the clocks at the last look."""

    time: float
    activities: Mapping[str, float]


class _Counted(NamedTuple):
    """A look before its numbers are made.

    Attributes:
        number: of the look.
        window: the number of windows that this rank had trained.
        trace: of the last of them; None if it was replayed as a CUDA graph.
        names: of the operators; another object for another plan, whose looks are not compared with those before.
        times: without those of operators.
    """

    number: int
    window: int
    trace: Trace | None
    names: Names
    times: RankTimes


class Named(NamedTuple):
    """A verdict, and the number of windows that had been trained."""

    window: int
    verdict: Verdict


class Looks:
    """The looks of a rank at the windows that it trains.

    Attributes:
        every: the number of windows from one look to the next.
        is_paused: whether there are no looks for now; the same on all ranks.
    """

    is_paused = False

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._runner: Runner | None = None
        self._num_windows = self.every = self._num_spans = self._number = self._total = 0
        self._seconds = 0.0  # of the window that counts
        self._since = _now()
        self._is_active = world_size() > 1
        self._pauses = Pauses()
        self._comparison: Comparison | None = None

    def begin(self, runner: Runner) -> bool:
        """Notes that a window begins; returns whether ranks look at it. Collective for some windows of a plan."""
        if not self._is_active:
            return False
        if runner is not self._runner:
            self._runner, self._names, self._num_windows = runner, Names(runner.rank_units.units, self._mesh), 0
        if self._num_windows == COUNTED and self._seconds < 0:  # the window has not come to its end
            self._num_windows -= 1
        if self._num_windows == COUNTED:
            self.every, self._since = self._agree(), _now()
            self._pauses.take()
            if self._comparison is None:
                self._comparison = Comparison()
                self._pauses.start()
        self._num_windows += 1
        self._total += 1
        self._seconds = -time.perf_counter()
        return self._is_due

    @property
    def _is_due(self) -> bool:
        later = self._num_windows - COUNTED
        if self.is_paused:
            return False
        return later == 0 or (later > 0 and later % self.every == 0)

    def end(self, window: Sequence[MicroBatch], trace: Trace | None) -> None:
        """Notes that a window has ended, with its trace if ranks look at it and it can be traced."""
        if not self._is_active or not self._is_due:
            return
        self._seconds += time.perf_counter()
        self._num_spans = 0 if trace is None else len(trace.spans)
        if self._num_windows == COUNTED or self._comparison is None:
            return
        self._number += 1
        self._comparison.add(_Counted(self._number, self._total, trace, self._names, self._times(window)))
        self._since = _now()

    def _times(self, window: Sequence[MicroBatch]) -> RankTimes:
        now, since = _now(), self._since
        spent = {name: seconds - since.activities.get(name, 0.0) for name, seconds in now.activities.items()}
        host = {name: seconds for name, seconds in spent.items() if name.startswith(activity.CALLBACKS)}
        host |= self._pauses.take()
        rest = sum(spent.get(name, 0.0) for name in activity.APART)
        return RankTimes(
            host=platform.node(),
            seconds=max(now.time - since.time - rest, 1e-6) / self.every,
            windows=self.every,
            tokens=sum(batch.num_tokens for batch in window) / max(len(window), 1),
            data=spent.get(activity.DATA, 0.0) / self.every,
            host_busy={name: seconds / self.every for name, seconds in host.items()},
        )

    def _agree(self) -> int:
        """Returns the number of windows from one look to the next, the largest of any rank."""
        share = (A_LOOK + self._num_spans * A_SPAN) / max(self._seconds, 1e-6)
        mine = torch.tensor([max(1, math.ceil(share / MOST))], device=self._mesh.device)
        return max(most for (most,) in gather_numbers(mine))

    def entries(self) -> dict[str, float]:
        """Returns the figures of a log. Collective."""
        if self._comparison is None:
            return {}
        comparison = self._comparison
        found = decide_on_rank_0(lambda: comparison.slowest)
        return {} if found is None else {"helix/slowest_rank": found[0], "helix/slowest_rank_share": round(found[1], 4)}

    def describe(self) -> str:
        """Returns the slow ranks of the run so far, a line for each; empty before the first look. On rank 0."""
        return "" if self._comparison is None else self._comparison.describe()

    @property
    def named(self) -> Sequence[Named]:
        """The last verdicts, on rank 0."""
        return () if self._comparison is None else self._comparison.named

    def close(self) -> None:
        """Ends the threads."""
        self._is_active = False
        if self._comparison is not None:
            self._pauses.close()
            self._comparison.close()


def _now() -> _Since:
    return _Since(time.perf_counter(), dict(activity.seconds))


class Comparison:
    """The comparison of all ranks' looks, in a thread. Making one is collective.

    Attributes:
        named: the last verdicts, on rank 0.
        slowest: see `History.slowest`.
    """

    def __init__(self) -> None:
        self.named: deque[Named] = deque(maxlen=MOST_NAMED)
        self.slowest: tuple[int, float] | None = None
        self._counts: Counter[object] = Counter()  # of verdicts, by ranks and cause
        self._store = BoundedStore(connect_store(), SILENCE)
        self._queue: queue.SimpleQueue[_Counted | None] = queue.SimpleQueue()
        self._is_closed = False
        self._num_looks = 0
        self._history = History()
        self._names: Names | None = None
        self._said: dict[object, int] = {}  # by ranks and cause, the look of the last line
        threading.Thread(target=self._run, name="hf_helix-looks", daemon=True).start()

    def add(self, look: _Counted) -> None:
        """Compares a look of this rank."""
        self._queue.put(look)

    def describe(self) -> str:
        """See `Looks.describe`."""
        last = {each.verdict.about: each.verdict for each in self.named}
        lines = [f"in {self._counts[about]} of {self._num_looks} looks, {last[about]}" for about in last]
        return "\n".join(lines) if lines or not self._num_looks else f"none in {self._num_looks} looks"

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed = True
        self._queue.put(None)

    def _run(self) -> None:
        with contextlib.suppress(dist.DistError, TimeoutError):  # the watch of the run ends it, if it has to
            while (look := self._queue.get()) is not None:
                self._compare(look)

    def _compare(self, look: _Counted) -> None:
        mine = _completed(look)
        if rank() > 0:
            self._store.set(_key(look.number, rank()), json.dumps([look.number, vars(mine)]))
            return
        others = self._gathered(look.number)
        if not others:
            return
        if look.names is not self._names:
            self._names = look.names
            self._history = History()
        self._num_looks += 1
        if verdict := self._history.add(compare([mine, *others])):
            self.named.append(Named(look.window, verdict))
            self._counts[verdict.about] += 1
            self._say(verdict)
        self.slowest = self._history.slowest()

    def _say(self, verdict: Verdict) -> None:
        """Prints a verdict, unless a line has just said the same."""
        before = self._said.get(verdict.about)
        self._said[verdict.about] = self._num_looks
        if before is None or self._num_looks - before > QUIET:
            say(str(verdict))

    def _gathered(self, number: int) -> list[RankTimes]:
        """Returns the times of the other ranks; nothing if some have not come in time."""
        keys = [_key(number, other) for other in range(1, world_size())]
        deadline, waits = time.monotonic() + PATIENCE, SOONEST
        while not self._is_closed and time.monotonic() < deadline:
            time.sleep(waits)  # first, too: the other ranks end their windows at about this time
            waits = min(2 * waits, LATEST)
            if self._store.has(keys):
                found = [json.loads(text) for text in self._store.multi_get(keys)]
                if {each for each, _ in found} == {number}:
                    return [RankTimes.read(times) for _, times in found]
        return []


def _key(number: int, of: int) -> str:
    """Returns the key of a rank's look; keys are used again, so the store does not grow."""
    return f"look/{number % KEPT}/{of}"


def _completed(look: _Counted) -> RankTimes:
    if look.trace is None:
        return look.times
    operators, transfers = operators_of(look.trace.spans, look.names), transfers_of(look.trace.spans, look.names)
    return dataclasses.replace(look.times, operators=operators, transfers=transfers)
