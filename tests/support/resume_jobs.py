"""Saving and going on, for a `Cluster` and for one process. Named "support.resume_jobs:function" there."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support import jobs
from support.jobs import Stream
from support.models import arguments, llama, sequences
from support.tuning_jobs import hasty
from transformers import TrainerCallback

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.checkpoint.manifest import describe_parameters
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.gradients.reduce import gradient_norm
from hf_helix.runtime.zero import local_parameters

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
    stepped = trainer.model.parameters() if helix is None else trainer.helix.runner.stage.stepped
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


def described(folder: str, helix: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What a checkpoint would say of the parameters."""
    trainer = make(folder, helix, **options)
    helix = trainer.helix
    result = describe_parameters(local_parameters(helix.model, helix.runner.stage, helix.mesh), helix.mesh)
    trainer.helix.close()
    return result


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
    return hashlib.sha256(value.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


class Hub:
    """Instead of the Hub's client: what was uploaded, with the files as they were."""

    def __init__(self) -> None:
        self.uploads: list[dict[str, Any]] = []

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        return mock.Mock(repo_id=repo_id)

    def upload_folder(self, *, folder_path: str, commit_message: str, **options: Any) -> Future[None]:
        ignored = [pattern for pattern in options.get("ignore_patterns") or () if pattern != "_*"]
        assert all(pattern == "checkpoint-*" for pattern in ignored)
        paths = (path.relative_to(folder_path) for path in Path(folder_path).rglob("*") if path.is_file())
        names = [str(path) for path in paths if not (ignored and str(path).startswith(("_", "checkpoint-")))]
        self.uploads.append({"message": commit_message, "path": options.get("path_in_repo"), "files": sorted(names)})
        done: Future[None] = Future()
        done.set_result(None)
        return done


def push(folder: str, helix: dict[str, Any] | None, strategy: str) -> list[dict[str, Any]]:
    """The uploads of a run, in order."""
    hub = Hub()
    training = {"push_to_hub": True, "hub_strategy": strategy, "hub_model_id": "someone/model", "max_steps": 4}
    with mock.patch("transformers.trainer.hf_api", return_value=hub):
        trainer = make(folder, helix, training={**training, "save_steps": 2, "hub_always_push": True})
        trainer.train()
        trainer.save_model()
    return hub.uploads


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Contents of `trainer_state.json`."""
    return json.loads((checkpoint / "trainer_state.json").read_text())  # type: ignore[no-any-return]


def run_into_nan(folder: str, victim: int) -> None:
    """Two data-parallel ranks; the embedding of a token that one of them meets in its second step is broken."""
    training = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "save_steps": 1}
    rows = [{name: value.clamp(max=120) for name, value in row.items()} for row in sequences(8)]
    rows[2 + victim]["input_ids"][5] = 127  # the samples 2 and 3 are those of the second step
    model = llama(tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[127] = torch.nan
    args = arguments(folder, **{**TRAINING, **training, "train_sampling_strategy": "sequential", "weight_decay": 0.0})
    config = HelixConfig(plan="sequential")
    HelixTrainer(model=model, args=args, train_dataset=rows, helix_config=config).train()


def run_into_bad_gradients(folder: str) -> None:
    """A gradient that is infinite in the second step, while all losses are sound."""
    trainer = make(folder, {"plan": "sequential"}, training={"save_steps": 1, "max_grad_norm": 0.0})
    steps = iter(range(100))

    def spoil(*given: Any) -> Any:
        return gradient_norm(*given) * (1.0 if next(steps) == 0 else torch.inf)

    with mock.patch("hf_helix.engine.engine.gradient_norm", spoil):
        trainer.train()


ROOM = {
    "for the model": "hf_helix.checkpoint.folders.write_slice",
    "for states": "hf_helix.checkpoint.training_state.FileSystemWriter.write_data",
    "for generators": "hf_helix.integrations.trainer.checkpoints.generators",
    "on the disk": "hf_helix.checkpoint.folders._sync",
}


def run_out_of_room(folder: str, where: str) -> None:
    """Train, and find the disk full in the second save."""
    trainer = make(folder, {"plan": "greedy"})

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Arm(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                stack.enter_context(mock.patch(ROOM[where], fail))

    trainer.add_callback(Arm())
    with contextlib.ExitStack() as stack:
        trainer.train()
