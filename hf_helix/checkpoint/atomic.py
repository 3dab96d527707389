"""A checkpoint's folder appears only once everything in it is written.

In:   the folder that holds the checkpoints.
Out:  a place to write the next one; then that one under its name.
Must hold: a process that is killed at any moment leaves the last complete checkpoint usable, also where the new one
replaces one of the same step; what an unfinished save has left goes with the next one. Rank 0 alone calls this.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

PREFIX = "checkpoint"  # the Trainer's
STAGING = "_saving"  # pushes to the Hub leave out `_*`


def recover(folder: Path, is_complete: Callable[[Path], bool]) -> None:
    """Clear what an unfinished save has left. A checkpoint that was complete but for its place gets it."""
    staging = folder / STAGING
    if not staging.is_dir():
        return
    for found in staging.glob(f"{PREFIX}-*"):
        if is_complete(found) and not (folder / found.name).exists():
            found.rename(folder / found.name)
    shutil.rmtree(staging)


def publish(found: Path, folder: Path, mark: Callable[[], None]) -> None:
    """Give a checkpoint in the staging folder its place, in one step. One of the same name goes.

    Args:
        mark: says in the folder that the checkpoint is complete, once everything else is on the disk.
    """
    _to_disk(found)
    mark()
    _to_disk(found)
    final = folder / found.name
    if final.exists():  # a process that ends here leaves the rest to `recover`
        final.rename(found.parent / "replaced")
    found.rename(final)
    _sync(folder)
    shutil.rmtree(found.parent)


def _to_disk(folder: Path) -> None:
    """What was written survives the machine, not only the process."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot do it for folders
            raise
    finally:
        os.close(number)
