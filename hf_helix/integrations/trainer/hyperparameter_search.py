"""Hyperparameter search under the stock Trainer: every rank runs the same trials.

In:   the arguments of `Trainer.hyperparameter_search`.
Out:  the best run, on rank 0.
Must hold: no rank waits for a trial that never comes; options that would end a trial only on rank 0 are refused. The
stock Trainer lets rank 0 choose the trials and sends the trials to the others, which expect `n_trials` trials.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from transformers.trainer_utils import HPSearchBackend

from hf_helix.integrations.trainer.checks import check_arguments
from hf_helix.integrations.trainer.stock import TrainerAttributes
from hf_helix.integrations.upstream import overrides
from hf_helix.runtime.distributed.agreement import agree_on_action, decide_on_rank_0
from hf_helix.runtime.distributed.mesh import rank, world_size

# Options of a study that would end a trial, or the search, only on rank 0.
_ALONE = {
    "pruner": "leave it out: trials run to their end",
    "catch": "leave it out: a trial that fails ends the search on every rank",
    "n_jobs": "leave it out: trials run one after the other",
}


class _SearchEnded(Exception):
    """Raised when rank 0 has no more trials."""


class SearchHooks(TrainerAttributes):
    """The part of `HelixTrainerMixin` that searches hyperparameters."""

    _num_trials = 0

    @overrides("Trainer", otherwise="the other ranks would wait for a trial that never comes", caller=None)
    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Searches as the stock method does; on several ranks only with Optuna and without pruning. Collective.

        Returns:
            The best run on rank 0, None on the others.

        Raises:
            ValueError: an option cannot be honoured on several ranks. No trial has begun then.
        """
        stock = super().hyperparameter_search  # type: ignore[misc]
        if world_size() == 1:
            return stock(*args, **kwargs)
        given = inspect.signature(stock).bind(*args, **kwargs)
        given.apply_defaults()
        _check_options(given.arguments["backend"], given.arguments["kwargs"])
        self._num_trials = 0
        agree_on_action("trainer.hyperparameter_search() is called")
        try:
            best = stock(*args, **kwargs)
        except _SearchEnded:
            return None
        finally:
            self.hp_search_backend = None  # also after an error: `train` then is no trial
        if rank() == 0 and self._num_trials < given.arguments["n_trials"]:  # a timeout, or an exhausted sampler
            dist.broadcast_object_list([None], src=0)
        return best

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as the stock method does, and counts the trials."""
        if self.hp_search_backend is not None and world_size() > 1:
            if trial is None:
                raise _SearchEnded
            self._num_trials += 1
        return super().train(resume_from_checkpoint, trial, *args, **kwargs)  # type: ignore[misc]

    @overrides("Trainer", otherwise="arguments that cannot be honoured would be ignored")
    def _hp_search_setup(self, trial: Any) -> None:
        """Sets the arguments of a trial as the stock method does, and checks the arguments."""
        super()._hp_search_setup(trial)  # type: ignore[misc]
        if self.hp_search_backend is not None and trial is not None:
            check_arguments(self.args, self.helix_config)

    def call_model_init(self, trial: Any = None) -> Any:
        """Makes a model as the stock method does.

        Raises:
            ValueError: on every rank, names parameters that `model_init` asks for and `hp_space` does not.
        """
        make = super().call_model_init  # type: ignore[misc]
        if trial is None or self.hp_search_backend is None or world_size() == 1:
            return make(trial)
        made: list[Any] = []

        def newly_asked() -> list[str]:
            known = set(trial.params)
            made.append(make(trial))
            return sorted(set(trial.params) - known)

        names = decide_on_rank_0(newly_asked)
        if names:
            raise ValueError(
                f"model_init asks the trial for {', '.join(names)}, and on {world_size()} ranks the others have got "
                "the trial by then: ask for it in hp_space, and read trial.params in model_init"
            )
        return made[0] if made else make(trial)

    @overrides("Trainer", otherwise="a pruned trial would end on rank 0 alone")
    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Reports as the stock method does; on several ranks without pruning, since only rank 0 would know of a pruned
        trial."""
        if self.hp_search_backend is None or trial is None or world_size() == 1:
            super()._report_to_hp_search(trial, step, metrics)  # type: ignore[misc]
        else:
            self.objective = self.compute_objective(metrics.copy())


def _check_options(backend: Any, options: Mapping[str, Any]) -> None:
    if backend is not None and HPSearchBackend(backend) is not HPSearchBackend.OPTUNA:
        raise ValueError(
            f"hyperparameter_search(backend={backend!r}) on {world_size()} ranks: use backend='optuna', of which every "
            "rank runs the same trials"
        )
    for name, instead in _ALONE.items():
        if name in options:
            raise ValueError(
                f"hyperparameter_search({name}={options[name]!r}) on {world_size()} ranks, of which only rank 0 would "
                f"know: {instead}"
            )
