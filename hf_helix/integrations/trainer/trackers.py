"""Callbacks of trackers that save or watch the model: those of Weights & Biases and DVCLive.

In:   the callbacks of a trainer, at construction and at the end of training.
Out:  a model that such a callback can save on rank 0; or an error with the variable of the environment.
Must hold: a callback uploads the files of `trainer.save_model`. Other callbacks of Transformers read the configuration,
the number of parameters and published checkpoints, all of which are those of the unsplit model.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_helix.models.direct_use import saving_copies
from hf_helix.runtime.distributed.agreement import agree_on_action, decide_on_rank_0
from hf_helix.runtime.distributed.mesh import rank

_SAVES: Mapping[str, Callable[[Any], bool]] = {
    "WandbCallback": lambda callback: callback._log_model.is_enabled,  # WANDB_LOG_MODEL
    "DVCLiveCallback": lambda callback: callback._log_model is True,  # HF_DVCLIVE_LOG_MODEL
}
"""Callbacks that save the model by a stock Trainer on rank 0, and whether they are asked to."""

_WATCHES = ("all", "gradients", "parameters")


def check_trackers(trainer: Any) -> None:
    """Refuses trackers that watch modules.

    Raises:
        ValueError: names the variable of the environment.
    """
    value = os.environ.get("WANDB_WATCH", "false")
    if value in _WATCHES and any("WandbCallback" in _names(each) for each in trainer.callback_handler.callbacks):
        raise ValueError(
            f"WANDB_WATCH={value!r} in the environment: use WANDB_WATCH=false: wandb watches modules by hooks, and the "
            "modules of a cut model are not called; a callback can log trainer.helix.full_gradient(name) in "
            "on_pre_optimizer_step"
        )


@contextlib.contextmanager
def model_for_trackers(trainer: Any, event: str) -> Iterator[None]:
    """Returns the context of an event in which trackers can save the model on rank 0. Collective at the end of
    training.

    The ranks write the model together to a folder in `output_dir`, which is deleted afterwards; `save_pretrained` of
    the model copies the folder.
    """
    mine = event == "on_train_end" and any(map(_saves, trainer.callback_handler.callbacks))
    if event != "on_train_end" or not agree_on_action("training has ended", [mine])[0]:
        yield
        return
    parent = trainer.args.output_dir
    folder = decide_on_rank_0(lambda: tempfile.mkdtemp(prefix="for_trackers-", dir=parent))
    try:
        trainer.helix.save_pretrained(folder, model=trainer.model)
        with saving_copies(trainer.model, Path(folder)) if rank() == 0 else contextlib.nullcontext():
            yield
    finally:
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _saves(callback: Any) -> bool:
    return any(_SAVES[name](callback) for name in _names(callback) & _SAVES.keys())


def _names(callback: Any) -> set[str]:
    """Returns the names of the classes of Transformers that a callback is of."""
    return {kind.__name__ for kind in type(callback).__mro__ if kind.__module__.startswith("transformers.")}
