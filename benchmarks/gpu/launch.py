"""Runs pieces, each in a process of its own.

In:   the pieces that were asked for, and time limits.
Out:  what each of them found.
Must hold: a piece that crashes, hangs or leaves CUDA in an error takes no other with it; one that says so runs
alone; nothing that a piece started is left behind.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.pieces import Piece

ROOT = Path(__file__).resolve().parents[2]
LEAST = 20.0
"""Seconds that must be left to start a piece."""


@dataclass
class Outcome:
    """What a piece found. `ending` says how its process ended."""

    piece: Piece
    entries: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    ending: str = "not run"

    @property
    def passed(self) -> bool:
        """Whether it ran to its end, and no check failed."""
        return self.ending == "done" and bool(self.entries) and not self.failures

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The checks that failed."""
        return [entry for entry in self.entries if entry["outcome"] == "FAIL"]


def run_pieces(
    pieces: Sequence[Piece], folder: Path, dry: bool, jobs: int, limit: float, told: Callable[[Outcome], object]
) -> list[Outcome]:
    """Run them, those that need not be alone side by side and first.

    Args:
        folder: for records and logs.
        jobs: how many may run side by side.
        limit: seconds for all of them; a piece that cannot be started in time is not run.
        told: called with the outcome of each piece as it ends.
    """
    end = time.monotonic() + limit
    outcomes = {piece.name: Outcome(piece) for piece in pieces}

    def run(piece: Piece) -> Outcome:
        left = end - time.monotonic()
        if left >= LEAST:
            outcomes[piece.name] = _run(piece, folder, dry, min(piece.seconds, left))
        return outcomes[piece.name]

    for group, width in (([p for p in pieces if not p.alone], jobs), ([p for p in pieces if p.alone], 1)):
        with ThreadPoolExecutor(width) as threads:
            for done in as_completed([threads.submit(run, piece) for piece in group]):
                told(done.result())
    return list(outcomes.values())


def _run(piece: Piece, folder: Path, dry: bool, seconds: float) -> Outcome:
    record, log = folder / f"{piece.name}.jsonl", folder / f"{piece.name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.run_piece", piece.name, "--seconds", str(seconds)]
    command += ["--record", str(record), *(["--dry"] if dry else [])]
    start = time.monotonic()
    with log.open("w") as errors, _started(command, folder, errors) as process:
        try:
            status = process.wait(seconds)
            ending = "done" if status in (0, 1) else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            ending = f"killed after {seconds:.0f} s"
    entries = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    if ending == "done" and not entries:
        ending = "ended without telling anything"
    return Outcome(piece, entries, time.monotonic() - start, ending)


@contextlib.contextmanager
def _started(command: Sequence[str], folder: Path, errors: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process at the head of a group of its own, all of which is killed in the end."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    environment = os.environ | quiet | {"PYTHONPATH": os.pathsep.join(paths), "HELIX_CACHE": str(folder / "cache")}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
