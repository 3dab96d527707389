"""The pieces of the acceptance, each in a process of its own.

In:   names of pieces, and time limits.
Out:  what each of them found, also as a page.
Must hold: a piece that crashes, hangs or leaves CUDA in an error takes no other with it, and keeps what it had found;
nothing that a piece started is left behind.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, markdown

LEAST = 20.0
"""Seconds that must be left to start a piece."""


@dataclass(frozen=True)
class Piece:
    """One piece.

    Attributes:
        name: on the command line; the module `benchmarks.gpu.<name>` has its `run`.
        about: what it shows, in one line.
        seconds: its time limit on a GPU; a CPU may take as long as all may together.
        call: of the calls of at most ten minutes, the one that the piece is run in (`--call`).
    """

    name: str
    about: str
    seconds: float
    call: int = 1


PIECES = (
    Piece("trainer", "HelixTrainer on one GPU against the stock Trainer: step time, loss, memory", 180),
    Piece("profile", "the kernels of a step, and the share of it without a kernel", 60),
    Piece("overlap", "how much communication is hidden at the shapes of an 8B model", 150),
    Piece("graphs", "windows from CUDA graphs against the same operator by operator, bit for bit", 90),
    Piece("attention", "the kernels of context parallelism against attention written out; costs", 60),
    Piece("ranks", "two NCCL ranks: every layout against one process, a save, a kill, the Trainer", 420, 2),
    Piece("parity", "losses and gradients against fp64, bf16's error, GPU = CPU", 150, 3),
    Piece("sizes", "windows of large models: time and memory beside the doctor's", 150, 3),
    Piece("stress", "plans, links at random paces and poisoned memory change no bit", 180, 3),
)
"""In order of value."""


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

    @property
    def verdict(self) -> str:
        """Such as `PASS (9 checks)`, or `FAIL (2 of 9 checks)`."""
        checks = sum(entry["outcome"] != "note" for entry in self.entries)
        if self.passed:
            return f"PASS ({checks} checks)"
        counts = f"{len(self.failures)} of {checks} checks" if self.failures else ""
        return f"FAIL ({', '.join(filter(None, [counts, '' if self.ending == 'done' else self.ending]))})"


def run_pieces(pieces: Sequence[Piece], folder: Path, dry: bool, limit: float) -> Iterator[Outcome]:
    """Runs one after the other, and yields what each found.

    Args:
        pieces: in their order.
        folder: for records and logs.
        dry: on the CPU, with tiny sizes.
        limit: seconds for all of them; a piece that cannot be started in time is not run.
    """
    end = time.monotonic() + limit
    for piece in pieces:
        left = end - time.monotonic()
        seconds = left if dry else min(piece.seconds, left)
        yield _run(piece, folder, dry, seconds) if left >= LEAST else Outcome(piece)


def _run(piece: Piece, folder: Path, dry: bool, seconds: float) -> Outcome:
    record, log = folder / f"{piece.name}.jsonl", folder / f"{piece.name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.report", piece.name, "--seconds", str(seconds)]
    command += ["--record", str(record), *(["--dry"] if dry else [])]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    environment = os.environ | quiet | {"PYTHONPATH": os.pathsep.join(paths), "HELIX_CACHE": str(folder / "cache")}
    start = time.monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, start_new_session=True)
        try:
            status = process.wait(seconds)
            ending = "done" if status in (0, 1) else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            ending = f"killed after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it is at the head of a group of its own
            process.wait()
    entries = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    if ending == "done" and not entries:
        ending = "ended without telling anything"
    return Outcome(piece, entries, time.monotonic() - start, ending)


def page(environment: Mapping[str, str], outcomes: Sequence[Outcome]) -> str:
    """Returns what was found, and what it was made with, in Markdown."""
    facts = "\n".join(f"- {name}: {value}" for name, value in environment.items())
    parts = ["# Acceptance on a GPU", facts]
    for outcome in outcomes:
        about = outcome.piece.about[0].upper() + outcome.piece.about[1:]
        parts += [f"## {outcome.piece.name}: {outcome.verdict}", f"{about}. {outcome.seconds:.0f} s."]
        rows = [(entry["outcome"], entry["name"], entry["figure"]) for entry in outcome.entries]
        parts += [markdown(("", "what", "found"), rows)] if rows else []
    return "\n\n".join(parts) + "\n"
