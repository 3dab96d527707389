"""Files whose data go to the disk past the system's page cache.

In:   data and their offsets in a file.
Out:  the same bytes as by ordinary writes.
Must hold: whole blocks go through an aligned buffer straight to the disk, the rest through the cache; no block is
written both ways. Files on other than local disks, and small pieces, are written through the cache.

The cache would take as much memory as the checkpoint has bytes, from the data that a training reads, and fill it by a
core that computes: on two cores, writes of 0.5 GB took 1.3 s of a core through fresh pages of the cache, and 0.1 s past
it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import mmap
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from torch.distributed.checkpoint.filesystem import FileSystem

LOCAL = frozenset({"ext4", "xfs"})
"""Types of file systems on local disks. Between hosts, writes past the cache make each other wait."""

BLOCK = 4096  # bytes; a multiple of the block of every disk
LEAST = 16 * BLOCK  # bytes of blocks in a row that are worth a write of their own
BUFFER = 8 << 20  # bytes of the aligned memory

after_write: ContextVar[Callable[[int], object]] = ContextVar("after_write", default=lambda count: None)
"""Called with the bytes of each write, at most `BUFFER`; for every thread its own."""


class DirectFile(io.RawIOBase):
    """A file that is written at any offset, or on from its position.

    Args:
        path: of the file, which is made if there is none.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._direct = _open_direct(path)
        self._memory: mmap.mmap | None = None
        self._position = 0

    def write_at(self, data: Any, offset: int) -> None:
        """Writes a buffer of bytes to an offset."""
        view = memoryview(data).cast("B")
        first = -offset % BLOCK
        end = first + (len(view) - first) // BLOCK * BLOCK
        if self._direct is None or end - first < LEAST:
            first = end = len(view)
        cached = functools.partial(_write, self._file)
        for begin, stop, write in ((0, first, cached), (first, end, self._write_blocks), (end, len(view), cached)):
            for start in range(begin, stop, BUFFER):
                part = view[start : min(start + BUFFER, stop)]
                write(part, offset + start)
                after_write.get()(len(part))

    def _write_blocks(self, view: memoryview, offset: int) -> None:
        assert self._direct is not None
        if self._memory is None:
            self._memory = mmap.mmap(-1, BUFFER, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        filled = np.frombuffer(self._memory, np.uint8, len(view))
        np.copyto(filled, np.frombuffer(view, np.uint8))  # other threads of Python may run
        try:
            _write(self._direct, filled.data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:  # of a disk that wants other blocks
                raise
            _write(self._file, view, offset)

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self.write_at(data, self._position)
        self._position += count
        return count

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def fileno(self) -> int:
        return self._file

    def sync(self) -> None:
        """Flushes all writes to the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
            if self._direct is not None:
                os.close(self._direct)
        super().close()


class DirectFileSystem(FileSystem):
    """The file system of DCP, with direct writes."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        Path(path).unlink(missing_ok=True)
        with DirectFile(Path(path)) as file:
            yield file


def _open_direct(path: str | Path) -> int | None:
    """Returns an open file whose writes go past the cache; None if its disk has no such writes."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None or _kind_of_disk(str(Path(path).resolve().parent)) not in LOCAL:
        return None
    with contextlib.suppress(OSError):
        return os.open(path, os.O_WRONLY | flag)
    return None


@functools.lru_cache(16)
def _kind_of_disk(folder: str) -> str:
    """Returns the type of the file system of a folder."""
    parents = {str(each) for each in (Path(folder), *Path(folder).parents)}
    found = [each for each in psutil.disk_partitions(all=True) if each.mountpoint in parents]
    return max(found, key=lambda each: len(each.mountpoint)).fstype if found else ""


def _write(file: int, view: memoryview, offset: int) -> None:
    """Writes all of the data: the system may write less at a time, at most 2 GiB."""
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count
