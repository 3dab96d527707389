"""Commands and their options: the fields of a dataclass, as `HfArgumentParser` of Transformers has them.

In:   a subclass of `Command`; names of files, profiles, the words of a command line.
Out:  its parser, and an instance with the options of a command line; what several commands share: paths, profiles,
      sizes and schedules; processes with a process group, each on its device.
Must hold: nothing here imports torch at module level; a command ends with the status of its processes; an option
of `HelixConfig` has its words and its default from there.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from errno import EACCES
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin, get_type_hints

from hf_helix.config import AUTO, SCHEDULES, HelixConfig, described_options, nearest
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.choice.slot_clock import stage_costs
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.timing.profile_file import load_profile
from hf_helix.planning.timing.recompute import recompute_profile

if TYPE_CHECKING:
    import torch

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

COUNTS = ("batch_size", "microbatches", "sequence_length", "top", "width", "pp", "layers", "processes")
"""Options of commands that count something, and so are 1 or more; besides, all whose names end with `_size`."""

MOST, MOST_TOKENS = 10**6, 2**24
"""The largest count, and the most tokens of a sequence and of a micro-batch, that a command can answer about."""

OUTPUTS = ("output", "html", "trace", "write")
"""Options of commands with the path of a file that is written."""

VALUES = {
    "schedule": f": {', '.join(SCHEDULES)}, or the path of a file of actions",
    "expert_capacity_factor": "; left out, none is dropped",
    "inter_node_axes": "; left out, the names of the hosts decide",
    "link": ", such as 300mbit or 10gbit,50us",
}
"""The values of an option of `HelixConfig` on a command line, after its words."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults if there are any, and keeps the line breaks of descriptions and examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


class CommandParser(argparse.ArgumentParser):
    """Takes hyphens for underscores in options, and names the option nearest to an unknown word."""

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


@dataclass(kw_only=True)
class Command:
    """A command of `hf-helix`: the fields are its options, the docstring and the epilog its `--help`. `PlanCommand` is
    `plan`."""

    epilog: ClassVar[str] = ""

    def run(self) -> None:
        """Runs the command."""
        raise NotImplementedError

    @classmethod
    def run_all(cls, commands: Sequence[Any]) -> None:
        """Runs the commands of one command line: several if options with `several` have several values."""
        for command in commands:
            command.run()

    @classmethod
    def _word(cls) -> str:
        return cls.__name__.removesuffix("Command").lower()

    @classmethod
    def add_command(cls, commands: Commands) -> None:
        """Adds the parser of the command."""
        summary, _, text = inspect.cleandoc(cls.__doc__ or "").partition(".\n\n")
        summary = summary.rstrip(".")
        names, hints = [each.name for each in fields(cls)], get_type_hints(cls)

        several = {each.name: str(each.metadata["several"]) for each in fields(cls) if each.metadata.get("several")}

        def run(given: argparse.Namespace) -> None:
            lists = {
                name: _divided(value, separator)
                for name, separator in several.items()
                if isinstance(value := getattr(given, name), list)
            }
            commands = [
                cls(**{**{name: getattr(given, name) for name in names}, **dict(zip(lists, values, strict=True))})
                for values in product(*lists.values())
            ]
            for command in commands:
                command.check_values()
            cls.run_all(commands)

        parser = commands.add_parser(
            cls._word(),
            help=summary[:1].lower() + summary[1:],
            description=f"{summary}.",
            epilog=text + cls.epilog,
            formatter_class=HelpFormatter,
        )
        parser.set_defaults(run=run)
        for each in fields(cls):
            arguments = {**_taking(hints[each.name]), **each.metadata}
            prefix = "" if arguments.pop("positional", False) else "--"
            arguments |= {"nargs": "+"} if arguments.pop("several", False) else {}
            parser.add_argument(prefix + each.name, **arguments)

    def check_values(self) -> None:
        """Raises ValueError if a count is below 1 or beyond any answer, or a file cannot be written."""
        for name, value in vars(self).items():
            is_count = name in COUNTS or name.endswith("_size")
            if is_count and isinstance(value, int) and value < 1:
                raise ValueError(f"--{name} {value}: give 1 or more")
            most = MOST_TOKENS if name == "sequence_length" else MOST
            if is_count and isinstance(value, int) and value > most:
                raise ValueError(f"--{name} {value}: give {most:,} or less")
            if name in OUTPUTS and isinstance(value, Path):
                check_output(name, value)
        rows, tokens = (vars(self).get(name) for name in ("batch_size", "sequence_length"))
        if rows and tokens and rows * tokens > MOST_TOKENS:
            raise ValueError(
                f"--batch_size {rows} and --sequence_length {tokens}: a micro-batch of {rows * tokens:,} tokens; give "
                f"{MOST_TOKENS:,} or less"
            )

    def of_config(self) -> dict[str, Any]:
        """Returns the options of `HelixConfig`."""
        return {each.name: vars(self)[each.name] for each in fields(HelixConfig) if each.name in vars(self)}

    def words(self) -> list[str]:
        """Returns the command line of this command."""
        words = [self._word()]
        for name, value in vars(self).items():
            if isinstance(value, list):
                words += [f"--{name}", *map(str, value)]
            elif value is not None and value is not False:
                words.append(f"--{name}" if value is True else f"--{name}={value}")
        return words


def _divided(values: list[Any], separator: str) -> list[Any]:
    """Returns the values, of texts the parts between separators."""
    return [part for value in values for part in (value.split(separator) if isinstance(value, str) else [value])]


def option(default: Any, text: str, **given: Any) -> Any:
    """A field for an option with its text of `--help`; `...` makes it required, `given` goes to `add_argument`;
    `several=" "` makes a command for each of several values, with another text also between this text."""
    if default is ...:
        return field(metadata={"help": text, "required": True, **given})
    return field(default=default, metadata={"help": text, "default": default, **given})


def argument(default: Any, text: str, **given: Any) -> Any:
    """A field for a positional argument; see `option`."""
    if default is ...:
        return field(metadata={"help": text, "positional": True, **given})
    return option(default, text, positional=True, nargs="?", **given)


def config_option(name: str, **given: Any) -> Any:
    """A field for an option of `HelixConfig`: the default, unless given, and the first words of the description."""
    default = given.pop("default", getattr(HelixConfig, name))
    words = re.split(r"[.:;](?:\s|$)", described_options().get(name, ""), maxsplit=1)[0]
    return option(default, " ".join(words.split()) + VALUES.get(name, ""), **given)


def _taking(hint: Any) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for a type: a list takes several words, a bool none."""
    kind = next(part for part in get_args(hint) if part is not NoneType) if isinstance(hint, UnionType) else hint
    if kind is bool:
        return {"action": "store_true"}
    return {"nargs": "+", "type": get_args(kind)[0]} if get_origin(kind) is list else {"type": kind}


def check_output(name: str, path: Path) -> None:
    """Raises ValueError if a file cannot be written; `name` is the option with its path."""
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"--{name} {path} is a folder; give a file, such as {path / 'result'}")
    if not folder.is_dir():
        raise ValueError(f"--{name} {path}: there is no folder {folder}; make it, or give a file in another folder")
    try:
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
        tempfile.TemporaryFile(dir=folder).close()  # not every folder takes files, whatever its permissions say
    except OSError as error:
        raise ValueError(
            f"--{name} {path} cannot be written ({error.strerror}); give a file in a folder of yours, such as "
            f"{Path.home() / path.name}"
        ) from error


UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def parse_count(text: str, name: str, such_as: str) -> int:
    """Returns the number of a text, for example 512k, 4M or 100B.

    Args:
        text: of a command line.
        name: of the option.
        such_as: values that work.

    Raises:
        ValueError: the text has no number of 1 or more.
    """
    unit = text[-1:] if text[-1:] in UNITS else ""
    try:
        count = int(float(text.removesuffix(unit)) * UNITS[unit])
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ValueError(f"{name} {text}: give a number of tokens, such as {such_as}")
    return count


def length(text: str) -> int:
    """Returns the tokens of a sequence, for example 4096 or 8k; the type of an option."""
    try:
        return int(text) if text.removeprefix("-").isdecimal() else parse_count(text, "--sequence_length", "4096 or 8k")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# -- work of several commands ----------------------------------------------------------------------------------------


def configuration_file(model: str) -> str:
    """A folder or file as it is; for a name on the Hub, the path of its config.json; else, and for a class or what
    looks like one, ValueError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    if Path(model).exists():
        return model
    if model.isidentifier():
        _refuse_class(model)
    try:
        return hf_hub_download(model, "config.json")
    except (HfHubHTTPError, ValueError, OSError) as error:
        folders = {str(file.parent) for file in Path(model).parent.glob("*/config.json")}
        reason = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"{model}: there is no such folder or file here{nearest(str(Path(model)), folders)}, and the Hub gave no "
            f"config.json of that name ({type(error).__name__}: {reason}). Give a folder that model.save_pretrained() "
            "wrote, its config.json, or, with a connection and without HF_HUB_OFFLINE=1, a name such as Qwen/Qwen3-0.6B"
        ) from error


def _refuse_class(name: str) -> None:
    from hf_helix.models.stock.causal_lm import causal_lm_classes

    classes = causal_lm_classes()
    near = nearest(name, classes)
    if name in classes:
        raise ValueError(
            f"{name} is a class, which has no sizes; give a folder with a config.json, or a name on the Hub such as "
            "Qwen/Qwen3-8B"
        )
    if near or name.endswith(("ForCausalLM", "LMHeadModel")):
        raise ValueError(
            f"{name} is no class of Transformers {version('transformers')}{near}; `hf-helix models` lists those "
            "that are known; a model of a class of your own is checked by hf_helix.testing.check_family(model)"
        )


def read_profile(file: Path, recompute: str | None) -> Profile:
    """The profile of a file, as if it had been measured with `recompute`."""

    profile = load_profile(file)
    if recompute is None:
        return profile
    if "recompute" in profile.about:
        raise ValueError(f"{file} was measured with recompute {profile.about['recompute']}; leave --recompute out")
    return recompute_profile(profile, recompute)


def made_for(profile: Profile) -> tuple[str, dict[str, int]]:
    """The model's class and the mesh, as plan files name them."""
    try:
        sizes = {"pp": "1", **dict(part.split("=") for part in profile.about["mesh"].split())}
        mesh = {f"{axis}_size": int(sizes[axis]) for axis in ("tp", "pp", "cp", "ep") if axis in ("tp", *sizes)}
        return profile.about["model"].split()[0], mesh
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(
            f"the profile does not say what it is for ({error}); measure anew with `hf-helix profile`"
        ) from error


def schedule_for(profile: Profile, microbatches: int, name: str = AUTO) -> Schedule:
    """The schedule of a window on the ranks of a profile.

    Args:
        profile: of a run, with the number of pipeline ranks.
        microbatches: of a window.
        name: of a schedule, as in `HelixConfig`.
    """

    return Scheduler(name, profile.layout.num_ranks, stage_costs(profile), spread=profile.layout.is_spread)(
        microbatches
    )


def start(words: Sequence[str], processes: int) -> None:
    """Runs a command of hf-helix, given by its words, in several processes of this host, by torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    code = subprocess.call([*launcher, "-m", "hf_helix", *words], env={"OMP_NUM_THREADS": "1", **os.environ})
    if code:
        sys.exit(code)


def join(pp_size: int = 1) -> torch.device:
    """Joins the processes of a launcher and returns the device of this process: its GPU, or the CPU."""
    import torch
    import torch.distributed as dist

    from hf_helix.runtime.distributed.environment import check_environment, load_eagerly

    if pp_size > 1:
        load_eagerly()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        for notice in check_environment(pp_size):
            print(notice, file=sys.stderr)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device
