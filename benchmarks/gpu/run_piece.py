"""One piece, in this process: `python -m benchmarks.gpu.run_piece parity --dry`.

In:   the name of a piece, and the file that its findings go to.
Out:  its PASS and FAIL lines; exit status 1 if a check failed or the piece raised.
"""

import argparse
import importlib
import sys
import traceback

import torch

from benchmarks.gpu.report import Options, Report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("piece")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long it may take")
    parser.add_argument("--record", help="append what is found to this file, a JSON line each")
    given = parser.parse_args()
    report = Report(given.piece, given.record)
    options = Options(given.dry, torch.device("cpu" if given.dry else "cuda:0"), given.seconds)
    try:
        importlib.import_module(f"benchmarks.gpu.{given.piece}").run(report, options)
    except BaseException as error:
        traceback.print_exc()
        said = str(error).strip().splitlines() or [""]
        report.check("runs to its end", False, f"{type(error).__name__}: {said[0]}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
