"""Endings: the messages of the ranks of a launched run when an error or Ctrl-C ends the run.

In:   an uncaught exception on this rank, and the reports of other ranks about theirs.
Out:  the full error, from the rank that raised it; a line, or nothing, from every other rank; the sentence in torch's
      error file, for the launcher's summary.
Must hold: a rank prints its error in full unless it knows of another rank with the same error. A traceback is shortened
only for errors raised on purpose by hf_helix. Exceptions behave inside the program as always.
"""

import contextlib
import json
import linecache
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun names one for each rank and start
_CLAIM = "hf_helix_failure"
_NO_SCRIPTS = (_PACKAGE, sysconfig.get_path("stdlib"), "<frozen")
_TOLD = "_hf_helix_told"

_advice: Callable[[], str] | None = None


def is_launched() -> bool:
    """Returns whether a launcher has started this process and others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def mark_remote_error(error: Exception, description: str) -> Exception:
    """Returns the error, marked as an error of another rank, which prints it in full, with the description from
    `describe`."""
    setattr(error, _TOLD, description)
    return error


def remote_description(error: BaseException) -> str:
    """Returns the description of an error of another rank; empty for an error of this rank."""
    return str(getattr(error, _TOLD, ""))


def advise_on_interrupt(advice: Callable[[], str]) -> None:
    """Sets the message after Ctrl-C: how to continue the run."""
    global _advice
    _advice = advice


def describe(error: BaseException, rank: int) -> str:
    """Returns why a rank ends, for the other ranks: `rank 1 failed: RuntimeError: ...`."""
    if isinstance(error, KeyboardInterrupt):
        return f"rank {rank} was interrupted"
    return f"rank {rank} failed: {type(error).__name__}: {error}"


def is_same(one: str, other: str) -> bool:
    """Returns whether two descriptions give the same reason for different ranks."""
    return one.split(" ", 2)[2:] == other.split(" ", 2)[2:]


def claim_full_error(description: str) -> str:
    """Returns the description of the rank that prints its error in full on this host: the first caller.

    The ranks of a host share the folder of torchrun's error files; without a folder the result is empty.
    """
    folder = _shared_folder()
    if folder is None:
        return ""
    place, mine = folder / _CLAIM, folder / f"{_CLAIM}.{os.getpid()}"
    try:
        mine.write_text(description)
        with contextlib.suppress(FileExistsError):
            os.link(mine, place)  # unlike `open`, never a file without its content
        return place.read_text()
    except OSError:
        return ""


def wait_for_full_error(limit: float) -> None:
    """Waits until the full error is printed, at most `limit` seconds: when the first rank ends, torchrun ends the
    others."""
    folder = _shared_folder()
    if folder is None or not (folder / _CLAIM).exists():
        return
    said, mine = folder / f"{_CLAIM}.said", folder / f"{_CLAIM}.{os.getpid()}"
    if mine.exists() and mine.samefile(folder / _CLAIM):
        said.touch()
    deadline = time.monotonic() + limit
    while not said.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def _shared_folder() -> Path | None:
    """A folder shared by the ranks of this host, new for every start."""
    file = os.environ.get(_ERROR_FILE)
    return Path(file).parents[1] if file else None


def record(sentence: str, late: bool = False) -> None:
    """Writes torch's error file.

    Args:
        late: the rank ends because another has failed. The summary's root cause is the rank with the lowest time, in
            whole seconds.
    """
    file = os.environ.get(_ERROR_FILE)
    if not file or os.path.exists(file):  # `torch.distributed.elastic.multiprocessing.errors.record` was here
        return
    about = {"py_callstack": sentence, "timestamp": str(int(time.time()) + late)}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": sentence, "extraInfo": about}}))


def print_short_ending(rank: int, because: str) -> None:
    """Prints a line for a rank that ends because of another."""
    print_line(f"rank {rank} ends because {because.splitlines()[0]}")


def print_line(text: str) -> None:
    """Prints a line of hf_helix on the standard error, from any thread."""
    # Not through sys.stderr, which torch.distributed's exception hook replaces while it formats a traceback.
    os.write(2, f"hf_helix: {text}\n".encode(errors="replace"))


def print_error(error: BaseException, trace: TracebackType | None, show: Callable[..., object]) -> str:
    """Prints an error in full, on the rank that raised it.

    Returns:
        The sentence for the launcher's summary.
    """
    if isinstance(error, KeyboardInterrupt):
        sentence = "interrupted" + (f"; {_advice()}" if _advice is not None else "")
        print(f"hf_helix: {sentence}", file=sys.stderr, flush=True)
        return sentence
    if trace is not None and _is_on_purpose(trace):
        trace = _short(trace)
        error = error.with_traceback(trace)
        error.__cause__, error.__suppress_context__ = None, True
    show(type(error), error, trace)
    return f"{type(error).__name__}: {error}"


def _is_on_purpose(trace: TracebackType) -> bool:
    """Whether a `raise` of hf_helix itself has raised the error."""
    last = _frames(trace)[-1]
    file = last.tb_frame.f_code.co_filename
    line = linecache.getline(file, last.tb_lineno, last.tb_frame.f_globals)
    return file.startswith(_PACKAGE) and line.lstrip().startswith("raise ")


def _short(trace: TracebackType) -> TracebackType:
    """The frames of the user's own code, and the last frame."""
    *others, last = _frames(trace)
    short = TracebackType(None, last.tb_frame, last.tb_lasti, last.tb_lineno)
    for other in reversed(others):
        if _is_the_users(other.tb_frame.f_code.co_filename):
            short = TracebackType(short, other.tb_frame, other.tb_lasti, other.tb_lineno)
    return short


def _is_the_users(file: str) -> bool:
    return not file.startswith(_NO_SCRIPTS) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _frames(trace: TracebackType) -> list[TracebackType]:
    frames = [trace]
    while (following := frames[-1].tb_next) is not None:
        frames.append(following)
    return frames
