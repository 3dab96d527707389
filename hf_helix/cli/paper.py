"""hf-helix paper: the paper's tables and figures, by simulation, beside what it printed.

In:   the number of a figure or a table.
Out:  text; a picture where the paper has one.
Must hold: no device and no processes are needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hf_helix.cli.options import add_parser

if TYPE_CHECKING:
    from hf_helix.cli.options import Commands
    from hf_helix.paper.table import Artifact

EXAMPLES = """\
examples:
  hf-helix paper --figure 11                       speeds on 64 A40, the paper's and ours
  hf-helix paper --figure 11 --output fig11.svg    the same as a picture, too
  hf-helix paper --table 6
  hf-helix paper --section 6.5                     the largest model that fits
  hf-helix paper --all --output paper.md           everything as a page, with pictures beside it; takes some minutes

There are figures 3, 4, 5 and 10 to 16, tables 1, 6 and 7, and section 6.5. docs/paper.md holds the output and says
how it is made.
"""


def add_command(commands: Commands) -> None:
    """Declare the command and its options."""
    summary = "the DHelix paper's tables and figures by simulation, with the paper's numbers beside ours"
    parser = add_parser(commands, "paper", run, summary, EXAMPLES)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--figure", help="the number of a figure, such as 11")
    what.add_argument("--table", help="the number of a table, such as 6")
    what.add_argument("--section", help="the number of a section, 6.5")
    what.add_argument("--all", action="store_true", help="everything, with the errors by group")
    parser.add_argument(
        "--output", type=Path, help="a picture (.svg, .png, .pdf); with --all a page (.md), pictures beside it"
    )


def run(options: argparse.Namespace) -> None:
    """Text, and files where `--output` is given."""
    from hf_helix.paper.artifacts import makers_of
    from hf_helix.paper.runs import Runs

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
    from hf_helix.paper.artifacts import all_artifacts
    from hf_helix.paper.page import write_page
    from hf_helix.paper.runs import Runs

    if output is None:
        for artifact in all_artifacts(Runs()):
            print(artifact.text(), "", sep="\n", flush=True)
    else:
        write_page(output, all_artifacts(Runs()))
        print(output)
