"""Writes past the page cache: the bytes of ordinary writes, at any offset, on any disk."""

import errno
import io
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_helix.checkpoint import direct
from hf_helix.checkpoint.direct import BLOCK, BUFFER, LEAST, DirectFile, DirectFileSystem

SIZE = BUFFER + 40 * LEAST


def pieces(seed: int) -> list[tuple[int, int]]:
    """Bounds of the pieces of a file, in a random order; some are long, and few begin at a block."""
    draw = random.Random(seed)
    inner = [*(draw.randrange(SIZE // 8) for _ in range(20)), *(BLOCK * draw.randrange(20) for _ in range(3))]
    bounds = sorted({0, SIZE, *inner})
    found = list(itertools.pairwise(bounds))
    draw.shuffle(found)
    return found


@pytest.fixture(params=["this disk", "another disk", "a disk that refuses blocks"])
def blocks(request: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the writes past the cache."""
    sizes: list[int] = []
    write, open_direct = direct._write, direct._open_direct
    opened: list[int | None] = []

    def counting(file: int, view: Any, offset: int) -> None:
        if file in opened:
            if request.param == "a disk that refuses blocks":
                raise OSError(errno.EINVAL, "Invalid argument")
            assert offset % BLOCK == len(view) % BLOCK == 0
            sizes.append(len(view))
        write(file, view, offset)

    def opening(path: Any) -> int | None:
        opened.append(open_direct(path))
        return opened[-1]

    if request.param == "another disk":
        monkeypatch.setattr(direct, "LOCAL", frozenset())
    monkeypatch.setattr(direct, "_write", counting)
    monkeypatch.setattr(direct, "_open_direct", opening)
    return sizes


@pytest.mark.parametrize("seed", range(3))
def test_pieces_make_the_file(seed: int, blocks: list[int], tmp_path: Path) -> None:
    data = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)
    with DirectFile(tmp_path / "file") as file:
        for begin, end in pieces(seed):
            file.write_at(data[begin:end], begin)
        file.sync()
        if file._direct is None or not blocks:
            assert not blocks
        else:
            assert sum(blocks) > SIZE // 2
            assert max(blocks) == BUFFER
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_a_stream_takes_the_place_of_a_file(blocks: list[int], tmp_path: Path) -> None:
    """Of `torch.save`, which writes large tensors and small headers one after the other."""
    path, values = tmp_path / "file", [torch.randn(3 * LEAST // 4 + 1), torch.arange(5), torch.randn(100, 1000)]
    path.write_bytes(b"x" * 10 * SIZE)
    with DirectFileSystem().create_stream(path, "wb") as stream:
        ends = [0]
        for value in values:
            torch.save(value, stream)
            ends.append(stream.tell())
    with DirectFileSystem().create_stream(path, "rb") as stream:
        for (begin, end), value in zip(itertools.pairwise(ends), values, strict=True):
            assert torch.equal(torch.load(io.BytesIO(stream.read(end - begin))), value)
        assert not stream.read()


def test_a_full_disk_is_an_error(blocks: list[int], tmp_path: Path) -> None:
    with DirectFile("/dev/full") as file, pytest.raises(OSError, match="No space left"):
        file.write_at(bytes(SIZE), 0)
