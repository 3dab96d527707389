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
import json
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.common import ROOT, facts
from benchmarks.gpu.pieces import PIECES, Outcome, page, run_pieces

TAIL = 15
"""Lines of a failed piece's log that are shown."""


def main() -> int:
    options = parse_arguments()
    if not options.dry and not torch.cuda.is_available():
        print("torch.cuda.is_available() is False: no GPU is seen here; --dry runs the pieces on the CPU")
        return 2
    chosen = [piece for piece in PIECES if not options.pieces or piece.name in options.pieces]
    chosen = [piece for piece in chosen if options.call in (None, piece.call)]
    environment = facts()
    print("  ".join(f"{name}: {value}" for name, value in environment.items()), flush=True)
    now = datetime.datetime.now(datetime.timezone.utc)
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / f"{now:%Y-%m-%d-%H%M}-{'gpu-dry' if options.dry else 'gpu'}.json"
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="helix-gpu-") as scratch:
        for outcome in run_pieces(chosen, Path(scratch), options.dry, options.limit):
            outcomes.append(outcome)
            print(f"{outcome.piece.name}: {outcome.verdict} after {outcome.seconds:.0f} s", flush=True)
            log = Path(scratch, f"{outcome.piece.name}.log")
            if not outcome.passed and log.exists():
                lines = log.read_text(errors="replace").splitlines()[-TAIL:]
                print("\n".join(f"  | {line}" for line in lines), flush=True)
            found = [{"name": o.piece.name, "ending": o.ending, "entries": o.entries} for o in outcomes]
            file.write_text(json.dumps({"environment": environment, "pieces": found}, indent=1) + "\n")
            file.with_suffix(".md").write_text(page(environment, outcomes))  # kept even if this process is killed
    print("\nSummary")
    for outcome in outcomes:
        print(f"  {outcome.piece.name:10} {outcome.seconds:6.1f} s  {outcome.verdict}")
        for entry in outcome.failures:
            print(f"    FAIL {entry['name']}: {entry['figure']}")
    print(f"Written: {file}, {file.with_suffix('.md')}")
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
    parser.add_argument("--limit", type=float, default=1700.0, help="seconds for all pieces together (1700)")
    options = parser.parse_args()
    if unknown := sorted(set(options.pieces) - set(names)):
        parser.error(f"unknown piece {', '.join(unknown)}; there are {', '.join(names)}")
    if options.output is None:
        options.output = ROOT / "runs" / "gpu" if options.dry else ROOT / "benchmarks" / "results"
    return options


if __name__ == "__main__":
    sys.exit(main())
