"""The Trainer over a pipeline and over data-parallel ranks, for a `Cluster`; and a script that test_pipeline_refusals
launches. Named "support.pipeline_trainer_jobs:function" there.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support import jobs, pipeline_jobs, script
from support.models import arguments, llama, sequences, tiny
from support.tuning_jobs import hasty
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.gradients import buckets
from hf_helix.runtime.gradients import reduce as gradients
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.trace import Trace
from hf_helix.tuning import tuner as tuning

LAYERS = 5  # four virtual stages, and one that holds more than the others
PADDED: dict[str, Any] = {
    "model": {"tie_word_embeddings": True},
    "data": {"count": 22, "lengths": (15, 8, 12), "padding": "left"},
    "training": {
        "gradient_accumulation_steps": 5,
        "max_steps": -1,
        "num_train_epochs": 2,
        "max_grad_norm": 0.5,
    },
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


def train_on(folder: str, helix: dict[str, Any] | None, source: str, steps: int = 5) -> list[float]:
    """Load a checkpoint, train a little more on other data, save; the losses."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    common: dict[str, Any] = {
        "model": model,
        "args": arguments(folder, max_steps=steps, gradient_accumulation_steps=3),
        "train_dataset": sequences(40, seed=7),
    }
    trainer = Trainer(**common) if helix is None else HelixTrainer(**common, helix_config=HelixConfig(**helix))
    trainer.train()
    trainer.save_model(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_twice(folder: str, helix: dict[str, Any] | None, **options: Any) -> list[float]:
    """One trainer, two calls of train(): the second goes on with the optimizer of the first."""
    trainer = jobs.make_trainer(folder, helix, model=model_of(), **options)
    trainer.train()
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def save_untrained(folder: str, helix: dict[str, Any], model: dict[str, Any], own_weights: bool = False) -> None:
    """Save a model as it was before training. `own_weights`: ranks other than 0 start from other ones."""
    made = tiny(**model_of(**model))
    if own_weights and own_rank() > 0:
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_()
    HelixTrainer(model=made, args=arguments(folder), helix_config=HelixConfig(**helix)).save_model()


def predict(folder: str, helix: dict[str, Any] | None, count: int, **data: Any) -> dict[str, Any]:
    """As `jobs.predict`, with enough layers."""
    return jobs.predict(folder, helix, count, model_of(), **data)


def train_with(folder: str, helix: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """As `jobs.train_with`, with enough layers."""
    return jobs.train_with(folder, helix, model=model_of(), **options)


# -- what ranks get ------------------------------------------------------------------------------------------------


class OwnLength(jobs.Stream):
    """A stream that ends at another place on every data-parallel rank."""

    def __init__(self, rows: list[dict[str, Any]], lengths: Sequence[int], ranks_per_batch: int) -> None:
        super().__init__(rows[: lengths[own_rank() // ranks_per_batch]])


def samples_of(folder: str, helix: dict[str, Any] | None, count: int, streamed: bool, steps: int) -> list[list[int]]:
    """The first tokens of every sample that this rank trains on, in order."""
    rows = sequences(count)
    options: dict[str, Any] = {"max_steps": steps, "gradient_accumulation_steps": 2}
    if streamed:
        options["accelerator_config"] = {"dispatch_batches": False}
    dataset: Any = jobs.Stream(rows) if streamed else rows
    trainer = jobs.build(folder, helix, options, model=llama(**model_of()), train_dataset=dataset)
    seen: list[list[int]] = []
    prepare = trainer._prepare_inputs

    def noted(batch: dict[str, Tensor]) -> Any:
        seen.extend(row[:6].tolist() for row in batch["input_ids"])
        return prepare(batch)

    trainer._prepare_inputs = noted  # type: ignore[method-assign]
    trainer.train()
    return seen


def train_on_streams_of_other_lengths(folder: str, helix: dict[str, Any], lengths: Sequence[int]) -> None:
    """Streams that end early on some data-parallel ranks."""
    config = HelixConfig(**helix)
    dataset = OwnLength(sequences(60), lengths, config.ranks_per_batch)
    args = arguments(folder, gradient_accumulation_steps=3, max_steps=6, accelerator_config={"dispatch_batches": False})
    HelixTrainer(model=llama(**model_of()), args=args, train_dataset=dataset, helix_config=config).train()


def train_with_accumulation_of_rank(folder: str, helix: dict[str, Any], late: bool) -> None:
    """Windows of another number of micro-batches on every rank; `late`: from after construction on."""
    steps = 2 + own_rank()
    training = {"gradient_accumulation_steps": 2 if late else steps, "max_steps": 2}
    trainer = jobs.make_trainer(folder, helix, model=model_of(), training=training)
    trainer.args.gradient_accumulation_steps = steps
    trainer.train()


# -- gradients -----------------------------------------------------------------------------------------------------


@plain_parameters()
def reductions(
    folder: str, helix: dict[str, Any], sizes: Sequence[int], model: dict[str, Any], count: int = 3
) -> dict[str, Any]:
    """One window: this rank's gradients as it saw them, and complete for every size of buckets; norm and traces."""
    trainer: Any = pipeline_jobs.make(folder, helix, model_of(**model))
    trainer.model.train()
    runner, streams = trainer.helix.runner, trainer.helix.runner.executor.streams
    window = pipeline_jobs.window_of(trainer, count, 2, (9, 5, 8))
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    placements = runner.stage.placements

    def run(runner: Runner, complete: bool) -> dict[str, Any]:
        trainer.model.zero_grad()
        runner.train_window(window, complete=complete)
        return {names[p]: p.grad.numpy().copy() for p in placements if p.grad is not None}

    issue = streams.issue

    def noted(kind: Kind, work: Any, after: Any, label: str, lane: str = "") -> Any:
        if kind is Kind.GRADIENTS and streams.trace is not None:
            streams.trace.note("issue", label)
        return issue(kind, work, after, label, lane)

    streams.issue = noted
    result: dict[str, Any] = {"seen": run(runner, complete=False), "complete": {}, "to come": {}}
    for size in sizes:
        changed = with_buckets(runner, size)
        streams.trace = trace = Trace()
        result["complete"][size] = run(changed, complete=True)
        streams.trace = None
        result["to come"][size] = computations_to_come(trace)
    result["sums"] = {names[p]: placement.sums_gradient for p, placement in placements.items()}
    result["norm"] = gradients.gradient_norm(placements, trainer.helix.mesh).item()
    result["whole"] = pipeline_jobs.whole_gradients(trainer)
    streams.close()
    return result


def computations_to_come(trace: Trace) -> list[int]:
    """Of every sum over data-parallel ranks, how many computations were issued after it."""
    runs = [place for place, (verb, _) in enumerate(trace.events) if verb == "run"]
    sums = [place for place, event in enumerate(trace.events) if event == ("issue", "gradients.average")]
    return [sum(run > place for run in runs) for place in sums]


def windows(bucket_bytes: int, **case: Any) -> list[dict[str, Any]]:
    """As `pipeline_jobs.windows`."""
    with buckets_of(bucket_bytes):
        return pipeline_jobs.windows(**case)


def optimizer_bytes(folder: str, helix: dict[str, Any], **options: Any) -> dict[str, int]:
    """Bytes of the optimizer's states on this rank after a step, and of the parameters that the rank trains."""
    trainer: Any = jobs.make_trainer(folder, helix, model=model_of(), **options)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    held = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    trained = [parameter for parameter in trainer.helix.runner.stage.placements if parameter.requires_grad]
    return {
        "states": sum(value.nbytes for value in held if value.dim()),
        "parameters": sum(parameter.nbytes for parameter in trained),
        "kind": type(optimizer).__name__,  # type: ignore[dict-item]
    }


# -- tuning --------------------------------------------------------------------------------------------------------


class Measured(RuntimeError):
    """Something was measured that should have been known."""


def tune(
    folder: str, cache: str, helix: dict[str, Any], forbidden: bool = False, extras: bool = False, **options: Any
) -> dict[str, Any]:
    """Train a little with a cache of its own: plan, schedule, what was measured, what was said.

    Args:
        forbidden: measuring operators raises.
        extras: also what the trainer measures afterwards; rank 0 writes a trace into the folder.
    """
    usual, measured, output = tuning.measure_profile, [], io.StringIO()

    def counted(*args: Any, **kwargs: Any) -> Any:
        if forbidden:
            raise Measured
        measured.append(1)
        return usual(*args, **kwargs)

    options["model"] = model_of(**options.get("model", {}))
    environment = mock.patch.dict(os.environ, {"HELIX_CACHE": cache})
    counting = mock.patch.object(tuning, "measure_profile", counted)
    with environment, counting, hasty(), contextlib.redirect_stdout(output):
        trainer: Any = jobs.make_trainer(folder, {"tuning_share": 1.0, **helix}, **options)
        trainer.train()
    results = trainer.tuning
    said = [line for line in output.getvalue().splitlines() if line.startswith("hf_helix: ")]
    result: dict[str, Any] = {
        "plan": trainer.plan.to_json(),
        "schedule": trainer.helix.runner.scheduler.name,
        "measured": len(measured),
        "said": said,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "kept": None if results is None else results.chosen,
        "report": results and results.report,
        "steps": {} if results is None else {name: overlap.step for name, overlap in results.overlaps.items()},
        "predicted": {} if results is None else dict(results.predicted),
        "profiled": [] if results is None or results.profile is None else sorted(results.profile.times),
    }
    return result | (_extras(trainer, folder) if extras else {})


@plain_parameters()
def _extras(trainer: Any, folder: str) -> dict[str, Any]:
    overlap = trainer.measure_overlap(repeats=2)
    memory = trainer.measure_memory()
    trainer.trace(Path(folder, "trace.json"))
    dist.barrier()
    return {
        "overlap": overlap,
        "memory": memory,
        "gradients": sum(parameter.grad is not None for parameter in trainer.model.parameters()),
        "losses after": _one_more_window(trainer),
    }


def _one_more_window(trainer: Any) -> list[float]:
    """What is trained after measuring: nothing was left behind."""
    losses = [loss.item() for loss in trainer.helix.runner.train_window(trainer.helix.last_window)]
    trainer.model.zero_grad()
    return losses


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


def train_some(folder: str, helix: dict[str, Any], **options: Any) -> None:
    """For errors that only a window shows."""
    jobs.make_trainer(folder, helix, model=model_of(), **options).train()


if __name__ == "__main__":  # support/script.py with enough layers
    script.llama = functools.partial(llama, **model_of())  # type: ignore[assignment]
    sys.exit(script.main())  # type: ignore[func-returns-value]
