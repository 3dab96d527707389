"""What a piece of the acceptance is given, and what it tells.

In:   the outcome of each check, as the piece goes on.
Out:  a PASS or FAIL line for each on the screen, and one JSON line for each in a file that the parent process reads.
Must hold: everything told so far is on disk, so that a piece that crashes or hangs keeps what it had found.

A piece is a module with a function `run(report: Report, options: Options) -> None`, listed in `pieces.py`. It runs in a
process of its own, and an exception that leaves `run` is a failed check.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Options:
    """What a piece is run with.

    Attributes:
        dry: on a machine without a GPU, with tiny sizes and stand-ins: it shows that the piece runs, and no more.
        device: `cuda:0`, or `cpu` when dry.
        seconds: how long the piece may take before it is killed; what it measures is to fit in half of that.
    """

    dry: bool
    device: torch.device
    seconds: float


class Report:
    """Takes the outcomes of one piece.

    Args:
        piece: its name, which is printed before every line.
        path: the file that takes the JSON lines; None to print only.
    """

    def __init__(self, piece: str, path: str | Path | None = None) -> None:
        self.piece = piece
        self.failed = 0
        self._path = path
        self._start = time.monotonic()

    def check(self, name: str, passed: bool, figure: str) -> None:
        """One PASS or FAIL. `figure` says what was found and what was asked, such as `2.1e-07 (at most 1e-05)`."""
        self.failed += not passed
        self._tell("PASS" if passed else "FAIL", name, figure)

    def note(self, name: str, figure: str) -> None:
        """A figure that nothing is asked of."""
        self._tell("note", name, figure)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Around one case: an exception is a FAIL of that case, and the piece goes on. The trace goes to stderr."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            said = str(error).strip().splitlines() or [""]
            self.check(name, False, f"{type(error).__name__}: {said[0]}")

    def _tell(self, outcome: str, name: str, figure: str) -> None:
        seconds = round(time.monotonic() - self._start, 1)
        print(f"{outcome} {self.piece}: {name}: {figure} [{seconds} s]", flush=True)
        if self._path is not None:
            entry = {"piece": self.piece, "outcome": outcome, "name": name, "figure": figure, "seconds": seconds}
            with open(self._path, "a") as file:
                file.write(json.dumps(entry) + "\n")
        sys.stdout.flush()
