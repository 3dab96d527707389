"""Claims: the mark of hf_helix on a folder, with the name of the writing process.

In:   the path of a mark, or a folder for unfinished files.
Out:  a locked mark; the name of the process with the lock; the unfinished folders of ended processes.
Must hold: only folders with a mark are unfinished folders, never symbolic links. A lock ends with its process, after
any kind of end, and forked processes do not share the lock. A file system without locks has marks without holders.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from hf_helix.runtime.distributed.groups import host_name

MARK = ".hf_helix"  # in an unfinished folder
_TITLE = "Written by hf_helix: "
_TAKEN = (errno.EACCES, errno.EAGAIN)


class Held(Exception):
    """Another process holds the claim; the message names the process."""


@dataclass
class Claim:
    """A mark in the hands of this process; `release` deletes the mark."""

    path: Path
    file: int
    has_lock: bool
    uses: int = 1

    def release(self) -> None:
        """Ends a use of the claim; the last use deletes the mark."""
        self.uses -= 1
        if self.uses:
            return
        _held.pop(_key(self.path), None)
        with contextlib.suppress(OSError):
            self.path.unlink()  # before the lock ends: another process may take it after that
        os.close(self.file)


_held: dict[tuple[int, Path], Claim] = {}  # by process, since forks share memory and no locks


def _key(path: Path) -> tuple[int, Path]:
    return os.getpid(), path.parent.resolve() / path.name


def take_claim(path: Path) -> Claim:
    """Returns a claim on a mark; a process may take a claim several times.

    Raises:
        Held: another process holds the mark.
        OSError: the mark cannot be written, or is a symbolic link.
    """
    claim = _held.get(_key(path))
    if claim is not None:
        claim.uses += 1
        return claim
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            has_lock = _lock(file)
            is_there = path.exists() and os.path.samestat(os.fstat(file), path.lstat())
        except BaseException:
            os.close(file)
            raise
        if is_there:
            break
        os.close(file)  # its holder has just released it, and deleted the file
    os.ftruncate(file, 0)
    os.pwrite(file, f"{_TITLE}{_process()}\n".encode(), 0)
    claim = _held[_key(path)] = Claim(path, file, has_lock)
    return claim


def _lock(file: int) -> bool:
    """Locks a file; False if the file system has no locks. Raises Held."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike `flock`, not held by forked workers of a dead process
    except OSError as error:
        if error.errno in _TAKEN:
            text = os.pread(file, 1000, 0).decode(errors="replace").strip()
            raise Held(text.removeprefix(_TITLE) or "a process without a name") from None
        return False
    return True


def _process() -> str:
    return f"process {os.getpid()} on {host_name().split()[0]} since {time.strftime('%Y-%m-%d %H:%M:%S')}"


# -- unfinished folders ------------------------------------------------------------------------------------------------


def make_unfinished(parent: Path, prefix: str) -> Path:
    """Makes a folder of a new name with a mark."""
    folder = Path(mkdtemp(prefix=prefix, dir=parent))
    take_claim(folder / MARK)
    return folder


def delete_unfinished(folder: Path) -> None:
    """Deletes a folder of `make_unfinished`, and ends its claim. Links inside are deleted, not followed."""
    claim = _held.get(_key(folder / MARK))
    shutil.rmtree(folder, ignore_errors=True)
    if claim is not None:
        claim.release()


def find_unfinished(parent: Path, prefix: str) -> Iterator[Path]:
    """Yields the unfinished folders of ended processes."""
    for folder in sorted(parent.glob(f"{prefix}*")):
        mark = folder / MARK
        if folder.is_symlink() or mark.is_symlink() or not mark.is_file() or _key(mark) in _held:
            continue
        with contextlib.suppress(OSError, Held):
            if mark.read_text(errors="replace").startswith(_TITLE):
                take_claim(mark)
                yield folder
