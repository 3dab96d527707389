"""The paper's tables and figures, by simulation, beside what it printed: `python -m benchmarks.paper`.

In:   the number of a figure or a table.
Out:  text; a picture where the paper has one.
Must hold: no device and no processes are needed.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.artifacts import all_artifacts, makers_of
from benchmarks.paper.runs import Runs
from benchmarks.paper.table import Artifact, write_page

EXAMPLES = """\
examples:
  python -m benchmarks.paper --figure 11                       speeds on 64 A40, the paper's and ours
  python -m benchmarks.paper --figure 11 --output fig11.svg    the same as a picture, too
  python -m benchmarks.paper --table 6
  python -m benchmarks.paper --section 6.5                     the largest model that fits
  python -m benchmarks.paper --all --output paper.md           everything as a page, with pictures; takes some minutes

There are figures 3, 4, 5 and 10 to 16, tables 1, 6 and 7, and section 6.5. benchmarks/paper/README.md holds the output
and says how it is made.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Text, and files where `--output` is given; errors of use end with status 2 and one message."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description="The DHelix paper's tables and figures by simulation, with the paper's numbers beside ours.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--figure", help="the number of a figure, such as 11")
    what.add_argument("--table", help="the number of a table, such as 6")
    what.add_argument("--section", help="the number of a section, 6.5")
    what.add_argument("--all", action="store_true", help="everything, with the errors by group")
    parser.add_argument(
        "--output", type=Path, help="a picture (.svg, .png, .pdf); with --all a page (.md), pictures beside it"
    )
    options = parser.parse_args(arguments)
    try:
        run(options)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def run(options: argparse.Namespace) -> None:
    if options.all:
        return _everything(options.output)
    kind = next(kind for kind in ("figure", "table", "section") if getattr(options, kind) is not None)
    makers = makers_of(kind, getattr(options, kind))
    runs = Runs()
    for place, make in enumerate(makers):
        artifact = make(runs)
        print(artifact.text(), "", sep="\n")
        if options.output is not None:
            _draw(artifact, options.output, "" if place == 0 else f"-{place + 1}")


def _draw(artifact: Artifact, path: Path, suffix: str) -> None:
    if artifact.draw is None:
        raise ValueError(f"{artifact.name} is a table, so that there is no picture; leave out --output")
    artifact.draw(path.with_stem(path.stem + suffix))
    print(path.with_stem(path.stem + suffix))


def _everything(output: Path | None) -> None:
    if output is None:
        for artifact in all_artifacts(Runs()):
            print(artifact.text(), "", sep="\n", flush=True)
    else:
        write_page(output, all_artifacts(Runs()))
        print(output)


if __name__ == "__main__":
    main()
