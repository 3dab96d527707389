"""The activity of a rank: what its main thread does, where it stands, and how long each activity has taken.

In:   contexts around the activities of a run, such as data loading; the frames of the main thread.
Out:  the activity with the line of the user's code, for other ranks; the seconds of every activity.
Must hold: a context costs about a microsecond. Frames are read by another thread, without a stop of the main thread.
Contexts of other threads are not counted.
"""

import contextlib
import itertools
import os
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

DATA, TRAINING = "data loading", "training"
CALLBACKS = "callbacks of "
"""Begins the names of activities in callbacks."""

APART = CHECKPOINT, EVALUATION, TUNING = "checkpoint", "evaluation", "tuning"
"""Activities that are no part of a step."""

seconds: defaultdict[str, float] = defaultdict(float)
"""The seconds of every activity so far, without those in which other processes had the cores."""

num_changes = 0  # begins and ends of activities so far
longest_step = 0.0  # seconds from the begin of a step to the next, once there are `LEAST_STEPS`

LEAST_STEPS = 3
Detail = Callable[[], str]
_of_thread = threading.local()  # `file`: the system's statistics of the thread
_names: list[str] = []  # of nested activities, the innermost last
_details: list[Detail] = [str]  # of the activities
_steps: list[float] = []  # the begins of the last steps

_PACKAGE = str(Path(__file__).parents[2])
_FOREIGN = tuple({_PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))})
_STDLIB = sysconfig.get_path("stdlib")
_TORCH = "torch.distributed"
_MEETINGS = (_TORCH, "hf_helix.runtime.distributed", "hf_helix.runtime.failures")
_STREAMS = "hf_helix.runtime.streams.streams"


@contextmanager
def doing(name: str, more: Detail = str) -> Iterator[None]:
    """Returns the context of an activity of the main thread. Also decorates functions.

    Args:
        name: of the activity.
        more: returns what it is about at the moment, such as an operator; called by other threads.
    """
    if threading.get_ident() != threading.main_thread().ident:
        yield
        return
    start = _enter(name, more)
    try:
        yield
    finally:
        _leave(name, start)


def _enter(name: str, more: Detail) -> float:
    global num_changes
    num_changes += 1
    _names.append(name)
    _details.append(more)
    return time.perf_counter() - seconds_without_core()


def _leave(name: str, start: float) -> None:
    global num_changes
    num_changes += 1
    _names.pop()
    _details.pop()
    seconds[name] += max(0.0, time.perf_counter() - seconds_without_core() - start)


def seconds_without_core() -> float:
    """Returns for how long this thread has been ready to run while other processes had the cores; 0 if the system does
    not count it."""
    if (file := getattr(_of_thread, "file", None)) is None:
        file = _of_thread.file = _open_statistics()
    return int(os.pread(file, 64, 0).split()[1]) / 1e9 if file >= 0 else 0.0


def _open_statistics() -> int:
    """Returns the open file of the system's statistics of this thread; -1 if there is none."""
    with contextlib.suppress(OSError):
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        if len(os.pread(file, 64, 0).split()) > 1:
            return file
    return -1


def _forget_statistics() -> None:
    """Closes the file of a thread's statistics, which a forked process has of its parent."""
    if (file := getattr(_of_thread, "file", None)) is not None and file >= 0:
        os.close(file)
    _of_thread.file = None


os.register_at_fork(after_in_child=_forget_statistics)


def note_step() -> None:
    """Notes that the main thread begins a step."""
    global longest_step
    now = time.monotonic()
    _steps.append(now)
    if len(_steps) > LEAST_STEPS:
        longest_step = max(longest_step, *(later - earlier for earlier, later in itertools.pairwise(_steps)))
        del _steps[:-LEAST_STEPS]


def detail() -> str:
    """Returns what the activity of the main thread is about. For other threads."""
    try:
        return _details[-1]()
    except Exception:  # of an activity that has just ended
        return ""


def describe() -> str:
    """Returns the activity of the main thread, with the line of the user's code in which it is, if any: `data loading
    (train.py:31)`. For other threads."""
    name, frame = _names[-1] if _names else "the script", main_frame()
    while frame is not None and frame.f_code.co_filename.startswith((*_FOREIGN, "<")):
        frame = frame.f_back
    about = ", ".join(filter(None, [name, detail()]))
    return about if frame is None else f"{about} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def is_waiting() -> bool:
    """Returns whether the main thread waits for other ranks in a library: in a collective, or for a transfer of a
    stream. Collectives that the user's code calls itself may have groups and timeouts of their own, and do not count.
    For other threads."""
    frame = main_frame()
    while frame is not None and _is_stdlib(frame):
        frame = frame.f_back
    if frame is None:
        return False
    if _module(frame) == _STREAMS and frame.f_code.co_name == "wait":
        return True
    if not _module(frame).startswith(_MEETINGS):
        return False
    while frame is not None and (_is_stdlib(frame) or _module(frame).startswith(_TORCH)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_FOREIGN)


def main_frame() -> FrameType | None:
    """Returns the innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_stdlib(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_STDLIB) and "site-packages" not in name
