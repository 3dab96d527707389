"""The options of a run: an argument, a plugin, the environment, or the YAML of `accelerate launch`.

In:   the arguments of the script, the environment, and the command line of the launcher.
Out:  a `HelixConfig`.
Must hold: the first of the four counts; without any of the four, the error shows all four.

`accelerate launch` does not pass the path of its YAML to its workers, so the command lines of parent processes are
read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil

from hf_helix.config import HelixConfig, has_helix_block, read_yaml

CONFIG_FILE_VARIABLE = "HELIX_CONFIG_FILE"

WHERE = f"""use helix_config=HelixConfig(tp_size=2), or another of these ways (the first that is found counts):
  1. HelixTrainer(..., helix_config=HelixConfig(tp_size=2))
  2. TrainingArguments(..., parallelism_config=HelixPlugin(HelixConfig(tp_size=2)))
  3. {CONFIG_FILE_VARIABLE}=helix.yaml in the environment; the file holds `tp_size: 2`
  4. the YAML of `accelerate launch --config_file ...`:
       parallelism_config:
         helix:
           tp_size: 2"""


def resolve_config(given: HelixConfig | None, plugin: HelixConfig | None) -> HelixConfig:
    """Returns the configuration of a run, by precedence: argument, plugin, environment, YAML of the launcher.

    Raises:
        TypeError: the argument is no `HelixConfig`.
        ValueError: no options; shows every way to give options.
    """
    for config in (given, plugin):
        if config is not None:
            if not isinstance(config, HelixConfig):
                raise TypeError(f"helix_config must be a HelixConfig, got {type(config).__name__}: {config!r}")
            return config
    path = os.environ.get(CONFIG_FILE_VARIABLE)
    if path:
        return HelixConfig.from_file(path)
    launched = launcher_config_file()
    if launched is not None:
        options = read_yaml(launched)
        if has_helix_block(options):
            return HelixConfig.from_mapping(options["parallelism_config"]["helix"], str(launched))
        if isinstance(options, Mapping) and options.get("parallelism_config"):
            raise ValueError(f"no helix options were given: {launched} has parallelism_config without helix; {WHERE}")
    raise ValueError(f"no helix options were given; {WHERE}")


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
