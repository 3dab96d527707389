"""One piece of the acceptance, in this process: `python -m benchmarks.gpu.report parity --dry`.

In:   the name of a piece, and the outcome of each check, as the piece goes on.
Out:  a PASS or FAIL line for each on the screen, and one JSON line for each in a file that the parent process reads;
      exit status 1 if a check failed or the piece raised.
Must hold: everything told so far is on disk, so that a piece that crashes or hangs keeps what it had found.

A piece is a module with a function `run(report: Report, options: Options) -> None`, listed in `pieces.py`.
"""

import argparse
import contextlib
import importlib
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

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

    def __init__(self, piece: str, path: str | None = None) -> None:
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

    def each(self, cases: Iterable[tuple[str, Callable[[], object]]], seconds: float = math.inf) -> None:
        """Runs cases by name, each as an attempt, and none once so many seconds of the piece are spent."""
        for name, run in cases:
            if time.monotonic() - self._start > seconds:
                self.note(name, "left out: the time for this piece is spent")
            else:
                with self.attempt(name):
                    run()

    def _tell(self, outcome: str, name: str, figure: str) -> None:
        seconds = round(time.monotonic() - self._start, 1)
        print(f"{outcome} {self.piece}: {name}: {figure} [{seconds} s]", flush=True)
        if self._path is not None:
            entry = {"piece": self.piece, "outcome": outcome, "name": name, "figure": figure, "seconds": seconds}
            with open(self._path, "a") as file:
                file.write(json.dumps(entry) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("piece")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long it may take")
    parser.add_argument("--record", help="append what is found to this file, a JSON line each")
    given = parser.parse_args()
    report = Report(given.piece, given.record)
    options = Options(given.dry, torch.device("cpu" if given.dry else "cuda:0"), given.seconds)
    with report.attempt("runs to its end"):
        importlib.import_module(f"benchmarks.gpu.{given.piece}").run(report, options)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
