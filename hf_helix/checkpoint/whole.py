"""Whole checkpoints: a look into every file that a resumed run reads, and the remedy for a damaged one.

In:   the folder of a checkpoint.
Out:  its manifest; an error whose first line names the damaged file, the fault, and the newest whole checkpoint.
Must hold: nothing is loaded, and no file runs code. Only the begin of files of weights and states is read; the rest
of their bytes is checked by size.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

from hf_helix.checkpoint.manifest import Manifest
from hf_helix.checkpoint.plain_files import DamagedFile, fits, read_json, read_metadata, read_torch
from hf_helix.checkpoint.reader import INDEX_NAME, Checkpoint, open_safetensors
from hf_helix.checkpoint.training_state import Generators, check_generators

OPTIMIZER = "optimizer"  # the folder of the optimizer's states
GENERATORS = "helix_rng_{}.pt"
NUMBERED = re.compile(r"checkpoint-(\d+)")

_STATE = {
    "global_step": int,
    "max_steps": int,
    "num_train_epochs": int,
    "epoch": float | None,
    "log_history": list[dict[str, Any]],
    "stateful_callbacks": dict[str, Any],
    "best_global_step": int | None,
    "best_model_checkpoint": str | None,
    "num_input_tokens_seen": int,
    "total_flos": float,
}
_CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")


def check_whole(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint after a look into all of its files. Raises ValueError for no checkpoint,
    DamagedFile for a damaged file."""
    manifest = Manifest.read(folder)
    data = read_json(folder / TRAINER_STATE_NAME, _STATE)
    try:
        TrainerState(**data)
    except TypeError as error:
        raise DamagedFile(folder / TRAINER_STATE_NAME, f"is damaged: {error}") from None
    for name in _CONFIGS:
        if (folder / name).exists():
            read_json(folder / name, {})
    for name in manifest.files:
        if name.endswith(".safetensors"):
            _check_weights(folder / name)
        elif Path(name).name.startswith(GENERATORS.partition("{")[0]):
            read_generators(folder / name)
    if (folder / INDEX_NAME).exists():
        _named(folder / INDEX_NAME, lambda: Checkpoint(folder))
    if manifest.optimizer is not None:
        read_schedule(folder)
        read_metadata(folder / OPTIMIZER)
    return manifest


def is_complete(folder: Path) -> bool:
    """Returns whether a folder is a complete checkpoint, by its manifest."""
    try:
        Manifest.read(folder)
    except ValueError:
        return False
    return True


def _check_weights(path: Path) -> None:
    def look() -> None:
        with open_safetensors(path) as file:
            file.keys()

    _named(path, look)


def _named(path: Path, look: Callable[[], object]) -> None:
    """Raises an error of weights as one of a checkpoint, whose remedy is another."""
    try:
        look()
    except ValueError as error:
        raise DamagedFile(path, f"is damaged: {error}".replace(f"{path} ", "")) from None


def read_schedule(folder: Path) -> dict[str, Any]:
    """Returns the state of the schedule. Raises DamagedFile."""
    path = folder / SCHEDULER_NAME
    state = read_torch(path)
    if not fits(state, dict[str, Any]):
        raise DamagedFile(path, f"is damaged: it holds a {type(state).__name__} instead of a schedule's state")
    return state


def read_generators(path: Path) -> dict[str, Generators]:
    """Returns the states of a rank's generators, "now" and at the start of the "epoch". Raises DamagedFile."""
    states = read_torch(path)
    try:
        for name in ("now", "epoch"):
            check_generators(states[name])
    except Exception as error:
        raise DamagedFile(path, f"is damaged: it holds no states of generators ({error!r})") from None
    return states


# -- the remedy --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def with_remedy(folder: Path) -> Iterator[None]:
    """Adds the remedy to the error of a damaged file of a checkpoint: the newest whole one next to it."""
    try:
        yield
    except DamagedFile as error:
        raise ValueError(f"{error}; {_remedy(folder)}") from None


def _remedy(folder: Path) -> str:
    for other in numbered(folder.parent):
        if other.name == folder.name:
            continue
        with contextlib.suppress(ValueError):
            check_whole(other)
            return f"resume from {other}, the newest whole one: trainer.train(resume_from_checkpoint={str(other)!r})"
    return f"{folder.parent} has no other whole checkpoint: start anew, trainer.train(resume_from_checkpoint=None)"


def numbered(folder: Path) -> list[Path]:
    """Returns the folders named as checkpoints, the newest first."""
    steps = {path: int(name[1]) for path in folder.glob("*") if (name := NUMBERED.fullmatch(path.name))}
    return sorted(steps, key=steps.__getitem__, reverse=True)
