"""The command `hf-helix`: measure operators, make plans, look at both, check models.

In:   a command line.
Out:  JSON files for people and for `HelixConfig(profile=..., plan=...)`; text and pictures.
Must hold: only `profile`, `check` and `cluster` need processes; all others work without torch, `env` apart.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from hf_helix.cli.check import CheckCommand
from hf_helix.cli.cluster import ClusterCommand
from hf_helix.cli.doctor import DoctorCommand
from hf_helix.cli.env import EnvCommand
from hf_helix.cli.models import ModelsCommand
from hf_helix.cli.options import CommandParser, HelpFormatter
from hf_helix.cli.plan import PlanCommand
from hf_helix.cli.profile import ProfileCommand
from hf_helix.cli.show import ShowCommand
from hf_helix.cli.simulate import SimulateCommand
from hf_helix.version import __version__

COMMANDS = (
    *(ProfileCommand, PlanCommand, ShowCommand, DoctorCommand, SimulateCommand, ClusterCommand),
    *(CheckCommand, ModelsCommand, EnvCommand),
)

WITH_PROCESSES = ("profile", "check", "cluster")
"""The commands whose process may be a rank of several, and leaves their group at its end."""

EXAMPLES = """\
examples:
  hf-helix profile --model Qwen/Qwen3-0.6B --tp_size 2 --sequence_length 256   writes profile.json
  hf-helix plan profile.json                                                   writes plan.json
  hf-helix show plan.json --profile profile.json                               draws it in the terminal
  hf-helix cluster --output here.yaml                                          what this machine computes and sends
  hf-helix check Qwen/Qwen3-0.6B                                               is the cut model equal?
  hf-helix models                                                              what is supported
  hf-helix env                                                                 what to paste into an issue

`hf-helix COMMAND --help` explains the options of a command. Training takes the files:
HelixConfig(plan="plan.json") or HelixConfig(profile="profile.json").
"""


def program() -> None:
    """The program `hf-helix`: `main` in a process of its own, which ends at once where that harms nothing. Python would
    free the memory of torch and Transformers object by object, for 1 to 2 s."""
    command = main()
    if command not in WITH_PROCESSES:
        sys.stderr.flush()
        os._exit(0)


def main(arguments: Sequence[str] | None = None) -> str:
    """Runs a command and returns its name; errors of use end with status 2 and a message."""
    parser = build_parser()
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given or ["--help"])
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"hf-helix {options.command}: {error}\n")
    return str(options.command)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    return command_parsers()["hf-helix"]


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """Returns the parser of `hf-helix` and of each of its commands, by the words that call it."""
    parser = argparse.ArgumentParser(
        prog="hf-helix",
        description="Measure a model's operators, make plans from the measurement, and look at both.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands: Any = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    for command in COMMANDS:
        command.add_command(commands)
    return {"hf-helix": parser, **{f"hf-helix {name}": each for name, each in commands.choices.items()}}
