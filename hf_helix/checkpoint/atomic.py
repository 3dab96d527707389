"""Publishes a checkpoint's folder only once everything in it is written.

In:   the folder that holds the checkpoints, and in it a staging folder with the next one.
Out:  the checkpoint under its name.
Must hold: a process that is killed at any moment leaves the last complete checkpoint usable, also where the new one
replaces one of the same step; the next save deletes what an unfinished one has left. Rank 0 alone calls this.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

PREFIX = "checkpoint"  # as the Trainer names them
STAGING = "_saving"  # pushes to the Hub leave out `_*`


def recover(folder: Path, is_complete: Callable[[Path], bool]) -> None:
    """Deletes what an unfinished save has left. A checkpoint that was complete, but not yet moved, is moved."""
    staging = folder / STAGING
    if not staging.is_dir():
        return
    for left in staging.glob(f"{PREFIX}-*"):
        if is_complete(left) and not (folder / left.name).exists():
            left.rename(folder / left.name)
    shutil.rmtree(staging)


def publish(staged: Path, folder: Path, mark: Callable[[], None]) -> None:
    """Moves a checkpoint from the staging folder to its place, in one step. It replaces one of the same name.

    Args:
        staged: the checkpoint in the staging folder.
        folder: the folder that holds the checkpoints.
        mark: writes into the folder that the checkpoint is complete; called once everything else is on the disk.
    """
    to_disk(staged)
    mark()
    to_disk(staged)
    final = folder / staged.name
    if final.exists():  # a process that ends here leaves the rest to `recover`
        final.rename(staged.parent / "replaced")
    staged.rename(final)
    _sync(folder)
    shutil.rmtree(staged.parent)


def to_disk(folder: Path) -> None:
    """Writes a folder to the disk, so that it survives a crash of the machine and not only of the process."""
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
