"""Saving and going on, for a `Cluster` and for one process. Named "support.resume_jobs:function" there."""

import contextlib
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support import jobs
from support.jobs import Stream
from support.models import sequences
from support.tuning_jobs import hasty

from hf_helix.runtime.divided import plain_parameters

# Three steps in an epoch of 12 samples: a run of four is interrupted in the first one and goes on into the second.
TRAINING = {
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    "include_num_input_tokens_seen": "all",
}


def run(folder: str, helix: dict[str, Any] | None, resume: Any = None, **options: Any) -> dict[str, Any]:
    """Train, from the start or from a checkpoint; what came out, and digests of what this rank steps."""
    trainer = make(folder, helix, **options)
    with hasty(), contextlib.redirect_stdout(io.StringIO()):
        trainer.train(resume_from_checkpoint=resume)
        evaluated = trainer.evaluate()["eval_loss"]
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    best = trainer.state.best_model_checkpoint
    stepped = trainer.model.parameters() if helix is None else trainer.helix.runner.rank_units.stepped
    with plain_parameters():
        weights = [digest(parameter) for parameter in stepped]
    return {
        "losses": {entry["step"]: entry["loss"] for entry in history},
        "rates": {entry["step"]: entry["learning_rate"] for entry in history},
        "eval": evaluated,
        "weights": weights,
        "checkpoints": sorted(path.name for path in Path(folder).iterdir()),
        "tokens": trainer.state.num_input_tokens_seen,
        "flos": trainer.state.total_flos,
        "best": None if best is None else str(Path(best).relative_to(folder)),
    }


def make(folder: str, helix: dict[str, Any] | None, freeze_later: Sequence[str] = (), **options: Any) -> Any:
    """A trainer. `freeze_later` names parameters that are frozen once it is made."""
    training = {**TRAINING, **options.pop("training", {})}
    data = {"count": 12, **options.pop("data", {})}
    if options.pop("streamed", False):
        options["train_dataset"] = Stream(sequences(40))
    # Batches of as many tokens, so that their mean does not depend on how they are shared out.
    evaluated = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in sequences(4, seed=9)]
    options.setdefault("eval_dataset", evaluated)
    options["model"] = {"num_hidden_layers": 4, **options.get("model", {})}
    trainer = jobs.make_trainer(folder, helix, data=data, training=training, **options)
    jobs.frozen(trainer.model, freeze_later)
    return trainer


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.detach().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
