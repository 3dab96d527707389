"""The acceptance on a GPU.

    python -m benchmarks.gpu                     every piece, in order of value
    python -m benchmarks.gpu --call 1            those of the first of three calls of at most ten minutes
    python -m benchmarks.gpu parity ranks        some of them
    python -m benchmarks.gpu --dry               on a machine without a GPU: shows that the pieces run

Run it from the root of the repository, with any Python that has torch, transformers and accelerate; hf_helix need not
be installed. Nothing is downloaded. The exit status is 0 if every piece passed.
"""

import argparse
import datetime
import os
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.environment import describe
from benchmarks.gpu.launch import ROOT, Outcome, run_pieces
from benchmarks.gpu.pieces import PIECES
from benchmarks.gpu.results import verdict, write_results

TAIL = 15
"""Lines of a failed piece's log that are shown."""


def main() -> int:
    options = parse_arguments()
    if not options.dry and not torch.cuda.is_available():
        print("torch.cuda.is_available() is False: no GPU is seen here; --dry runs the pieces on the CPU")
        return 2
    chosen = [piece for piece in PIECES if not options.pieces or piece.name in options.pieces]
    chosen = [piece for piece in chosen if options.call in (None, piece.call)]
    environment = describe()
    print("  ".join(f"{name}: {value}" for name, value in environment.items()), flush=True)
    kind = "gpu-dry" if options.dry else "gpu"
    name = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d-%H%M}-{kind}"
    ended: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="helix-gpu-") as scratch:

        def told(outcome: Outcome) -> None:
            ended.append(outcome)
            _say(outcome, Path(scratch))
            write_results(options.output, name, environment, ended)  # kept even if this process is killed

        outcomes = run_pieces(chosen, Path(scratch), options.dry, options.jobs, options.limit, told)
    files = write_results(options.output, name, environment, outcomes)
    print("\nSummary")
    for outcome in outcomes:
        print(f"  {outcome.piece.name:10} {outcome.seconds:6.1f} s  {verdict(outcome)}")
        for entry in outcome.failures:
            print(f"    FAIL {entry['name']}: {entry['figure']}")
    print(f"Written: {', '.join(map(str, files))}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def parse_arguments() -> argparse.Namespace:
    pieces = "\n".join(f"  {piece.name:10} {piece.about}" for piece in PIECES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=f"{__doc__}\npieces:\n{pieces}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [piece.name for piece in PIECES]
    parser.add_argument("pieces", nargs="*", metavar="piece", help=f"some of {', '.join(names)}; all by default")
    parser.add_argument("--call", type=int, choices=sorted({piece.call for piece in PIECES}), help="those of one call")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny sizes and gloo in place of NCCL")
    parser.add_argument("--output", type=Path, help="folder for results; benchmarks/results, or runs/gpu when dry")
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--jobs", type=int, default=max(1, min(3, cores // 4)), help="pieces that need not be alone run side by side"
    )
    parser.add_argument("--limit", type=float, default=1700.0, help="seconds for all pieces together (1700)")
    options = parser.parse_args()
    unknown = sorted(set(options.pieces) - set(names))
    if unknown:
        parser.error(f"unknown piece {', '.join(unknown)}; there are {', '.join(names)}")
    if options.output is None:
        options.output = ROOT / "runs" / "gpu" if options.dry else ROOT / "benchmarks" / "results"
    return options


def _say(outcome: Outcome, scratch: Path) -> None:
    print(f"{outcome.piece.name}: {verdict(outcome)} after {outcome.seconds:.0f} s", flush=True)
    log = scratch / f"{outcome.piece.name}.log"
    if not outcome.passed and log.exists():
        print("\n".join(f"  | {line}" for line in log.read_text(errors="replace").splitlines()[-TAIL:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
