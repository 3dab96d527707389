"""The options of a run: an argument, a plugin, the environment, or the YAML of `accelerate launch`.

In:   the arguments of the script, the environment, and the command line of the launcher.
Out:  a `HelixConfig`.
Must hold: the first `HelixConfig` of the four counts, and layouts in the words of Transformers and Accelerate are added
to it wherever they stand (see `layout`); without any of the four, the error shows all four.

`accelerate launch` does not pass the path of its YAML to its workers, so the command lines of parent processes are
read.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from hf_helix.config import HelixConfig, has_helix_block, read_yaml
from hf_helix.integrations.accelerate.foreign_sizes import (
    ForeignSizes,
    foreign_sizes_of,
    foreign_sizes_of_yaml,
    with_foreign_sizes,
)

CONFIG_FILE_VARIABLE = "HELIX_CONFIG_FILE"

WHERE = f"""use helix_config=HelixConfig(tp_size=2), or another of these ways (the first that is found counts):
  1. HelixTrainer(..., helix_config=HelixConfig(tp_size=2))
  2. TrainingArguments(..., parallelism_config=HelixPlugin(HelixConfig(tp_size=2)))
  3. {CONFIG_FILE_VARIABLE}=helix.yaml in the environment; the file holds `tp_size: 2`
  4. the YAML of `accelerate launch --config_file ...`:
       parallelism_config:
         helix:
           tp_size: 2
DistributedConfig of Transformers and ParallelismConfig of Accelerate serve for the layout in 1 and 2."""


def resolve_config(given: Any, plugin: Any) -> HelixConfig:
    """Returns the configuration of a run, by precedence: argument, plugin, environment, YAML of the launcher.

    Args:
        given, plugin: a `HelixConfig`, a layout of another library (see `foreign_sizes_of`), or None.

    Raises:
        TypeError: an argument is none of these.
        ValueError: no options, which shows every way to give options; or contradicting layouts.
    """
    all_foreign: list[ForeignSizes] = []
    configs: list[HelixConfig] = []
    for each in (given, plugin):
        if isinstance(each, HelixConfig):
            configs.append(each)
        elif (foreign := foreign_sizes_of(each)) is not None:
            all_foreign.append(foreign)
        elif each is not None:
            raise TypeError(f"helix_config must be a HelixConfig, got {type(each).__name__}: {each!r}")
    file, blocks = None if configs else options_file(), list[str]()
    for path in dict.fromkeys(filter(None, (file, launcher_config_file()))):
        if block := _layout_block(read_yaml(path)):
            blocks.append(str(path))
            if (foreign := foreign_sizes_of_yaml(block, str(path))) is not None:
                all_foreign.append(foreign)
    config = configs[0] if configs else options_in(file)
    if config is None and not all_foreign:
        empty = f": {' and '.join(blocks)} has parallelism_config without helix" if blocks else ""
        raise ValueError(f"no helix options were given{empty}; {WHERE}")
    config = config or HelixConfig()
    for foreign in all_foreign:
        config = with_foreign_sizes(config, foreign)
    return config


def options_file() -> Path | None:
    """Returns the file of the environment, or else the launcher's YAML; None without any."""
    path = os.environ.get(CONFIG_FILE_VARIABLE)
    return Path(path) if path else launcher_config_file()


def options_in(file: Path | None) -> HelixConfig | None:
    """Returns the options in a file of `options_file`; None if it lacks them."""
    options = None if file is None else read_yaml(file)
    is_ours = bool(os.environ.get(CONFIG_FILE_VARIABLE))  # and may have options at its top
    if file is not None and (has_helix_block(options) or (is_ours and not _layout_block(options))):
        return HelixConfig.from_contents(options, str(file))
    return None


def _layout_block(options: Any) -> Mapping[str, Any]:
    """Returns the block `parallelism_config` of a YAML's contents; empty without one."""
    block = options.get("parallelism_config") if isinstance(options, Mapping) else None
    return block if isinstance(block, Mapping) else {}


def launcher_config_file() -> Path | None:
    """Returns the `--config_file` of the `accelerate launch` above this process; None without a file."""
    try:
        parents = psutil.Process().parents()
    except psutil.Error:
        return None
    for process in parents[:3]:
        try:
            config_file = config_file_of(process.cmdline())
            if config_file is not None:
                return Path(process.cwd(), config_file)
        except psutil.Error:
            continue
    return None


def config_file_of(arguments: list[str]) -> str | None:
    """Returns the value of `--config_file` in the command line of an Accelerate launcher; None for other commands."""
    launched = False
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if _is_launcher(word):
            launched = True
        elif launched and name in ("--config_file", "--config-file"):
            return value if equals else "".join(arguments[index + 1 : index + 2]) or None
        elif word.endswith(".py"):  # the script; further words are its own arguments
            return None
    return None


def _is_launcher(word: str) -> bool:
    """Returns whether a word of a command line is Accelerate's launcher: its script, its module or its file."""
    return (
        word == "accelerate.commands.launch"
        or word.endswith("accelerate/commands/launch.py")
        or Path(word).name in ("accelerate", "accelerate-launch")
    )
