"""hf-helix: measure operators, make plans from the measurement, and look at both.

In:   a command line.
Out:  JSON files that people can read, compare and hand to `HelixConfig(profile=..., plan=...)`; text and pictures.
Must hold: only `profile` needs the model and its processes; `plan` and `show` work from files alone, without torch.
Every command is one file of this folder, with `add_command` and `run`.

    hf-helix profile --model FOLDER --tp_size 2 --sequence_length 256 --output profile.json
    hf-helix plan profile.json --rule search --output plan.json
    hf-helix show plan.json --profile profile.json --output plan.svg
    hf-helix show profile.json
    hf-helix show --schedule w --pp 4 --microbatches 12 --output pipeline.svg
    hf-helix show --schedule all --gain 1.4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_helix.cli import plan, profile, show

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

COMMANDS = (profile, plan, show)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `hf-helix`; errors of use end with status 2 and one message."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"hf-helix {options.command}: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-helix", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add_command(commands)
    return parser
