"""A hyperparameter search that fails leaves a trainer that trains."""

from pathlib import Path
from typing import Any

import optuna
from support.jobs import build
from support.loop_jobs import said
from support.models import sequences, tiny


def train_after_a_failed_search(folder: str) -> tuple[str, int]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options = {"model_init": lambda: tiny(num_hidden_layers=2), "train_dataset": sequences(count=8)}
    trainer: Any = build(folder, {"tp_size": 2, "plan": "sequential", "cache": False}, {"max_steps": 1}, **options)
    words = said(lambda: trainer.hyperparameter_search(hp_space=lambda _: {"fp16_full_eval": True}, n_trials=1))
    trainer.args.fp16_full_eval = False
    return words, trainer.train().global_step


def test_training_after_a_failed_search(cluster_of: Any, tmp_path: Path) -> None:
    for words, steps in cluster_of(2).run(train_after_a_failed_search, folder=str(tmp_path)):
        assert "use fp16_full_eval=False" in words
        assert steps == 1
