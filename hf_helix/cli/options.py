"""How a command declares its options, so that `--help` says every option, its default and examples.

In:   the name of a command, what it does, examples.
Out:  a parser to add options to.
Must hold: nothing here imports torch.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_helix.config import nearest

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


SIZES = {
    "tp_size": "ranks that share every layer (tensor and sequence parallelism)",
    "pp_size": "ranks of the pipeline, each with layers of its own (pipeline parallelism)",
    "cp_size": "ranks that share every sequence (context parallelism)",
    "ep_size": "data-parallel ranks that share the experts of a mixture of experts (expert parallelism)",
}
"""What the sizes of a mesh mean, by the options of `HelixConfig`."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults where there are any, and keeps the line breaks of descriptions and examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        without = action.default is None or action.default is False or action.default == []
        return action.help if without else super()._get_help_string(action)


class CommandParser(argparse.ArgumentParser):
    """Takes hyphens for underscores in options, and says what an unknown one may stand for."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args([self._spelled(word) for word in args or ()], namespace)

    def _spelled(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name == "--":
            return word
        spelled, known = "--" + name[2:].replace("-", "_"), ["--help", *re.findall(r"--\w+", self.format_usage())]
        if not any(option.startswith(spelled) for option in known):
            self.error(f"unknown option {name}{nearest(spelled, known)}")
        return spelled + equals + value


def add_parser(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], None], summary: str, text: str
) -> argparse.ArgumentParser:
    """Declare a command.

    Args:
        commands: where it is added.
        name: of the command.
        run: what it does with its options.
        summary: one line, for the list of commands.
        text: what stands below the options in its own `--help`: examples and explanations.
    """
    description = f"{summary[0].upper()}{summary[1:]}."
    parser = commands.add_parser(
        name, help=summary, description=description, epilog=text, formatter_class=HelpFormatter
    )
    parser.set_defaults(run=run)
    return parser
