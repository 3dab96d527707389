"""The Trainer over a pipeline and over data-parallel ranks, for a `Cluster`. Named
"support.pipeline_trainer_jobs:function" there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from support import jobs, pipeline_jobs
from support.tuning_jobs import hasty

from hf_helix.runtime.gradients import buckets
from hf_helix.runtime.runner import Runner

LAYERS = 5  # four virtual stages, and one that holds more than the others
PADDED: dict[str, Any] = {
    "model": {"tie_word_embeddings": True},
    "data": {"count": 22, "lengths": (15, 8, 12), "padding": "left"},
    "training": {"gradient_accumulation_steps": 5, "max_steps": -1, "num_train_epochs": 2, "max_grad_norm": 0.5},
}
"""Options of `train`: 11 micro-batches an epoch, in windows of 5, 5 and 1. Tests of several dimensions share them."""


def model_of(**changes: Any) -> dict[str, Any]:
    return {"num_hidden_layers": LAYERS, **changes}


def own_rank() -> int:
    """Also before there is a process group."""
    return int(os.environ["RANK"])


@contextlib.contextmanager
def buckets_of(size: int) -> Iterator[None]:
    """Gradients are summed in buckets of so many bytes; 0 for the usual size."""
    with mock.patch.object(buckets, "BUCKET_BYTES", size or buckets.BUCKET_BYTES):
        yield


def with_buckets(runner: Runner, size: int) -> Runner:
    """The runner with buckets of another size."""
    with buckets_of(size):
        layout = buckets.layout_with_reductions(runner.stage.layout, runner.stage.model, runner.mesh)
        stage, streams = replace(runner.stage, layout=layout), runner.executor.streams
        return Runner(stage, runner.plan, runner.mesh, streams, runner.scheduler, runner.seed)


# -- training and evaluation ---------------------------------------------------------------------------------------


def train(folder: str, helix: dict[str, Any] | None, bucket_bytes: int = 0, **options: Any) -> dict[str, Any]:
    """As `jobs.train`."""
    options["model"] = model_of(**options.get("model", {}))
    with buckets_of(bucket_bytes), hasty(), contextlib.redirect_stdout(io.StringIO()):
        return jobs.train(folder, helix, **options)


def train_twice(folder: str, helix: dict[str, Any] | None, **options: Any) -> list[float]:
    """One trainer, two calls of train(): the second goes on with the optimizer of the first."""
    trainer = jobs.make_trainer(folder, helix, model=model_of(), **options)
    trainer.train()
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# -- gradients -----------------------------------------------------------------------------------------------------


def windows(bucket_bytes: int, **case: Any) -> list[dict[str, Any]]:
    """As `pipeline_jobs.windows`."""
    with buckets_of(bucket_bytes):
        return pipeline_jobs.windows(**case)


def tracks(path: Path) -> dict[int, set[str]]:
    """The streams of every rank in a Perfetto file."""
    events = json.loads(path.read_text())["traceEvents"]
    result: dict[int, set[str]] = {}
    for event in events:
        if event["name"] == "thread_name":
            result.setdefault(event["pid"] - 1, set()).add(event["args"]["name"])
    return result


# -- errors --------------------------------------------------------------------------------------------------------


def construct(folder: str, helix: dict[str, Any], layers: int = LAYERS, **options: Any) -> str:
    """Only construct."""
    return jobs.construct(folder, helix, model={"num_hidden_layers": layers, **options.pop("model", {})}, **options)


def construct_by_rank(folder: str, by_rank: Sequence[dict[str, Any]], train: bool = False) -> None:
    """Every rank brings other options."""
    trainer = jobs.make_trainer(folder, by_rank[own_rank()], model=model_of())
    if train:
        trainer.train()
