"""Measuring, tuning and scoring, for a `Cluster`. Named "support.tuning_jobs:function" there."""

import contextlib
import io
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.jobs import make_trainer
from support.models import arguments
from support.pipeline_jobs import window_of

from hf_helix.measure import operators as profiler
from hf_helix.measure.operators import Bench, measure_profile
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan import search
from hf_helix.planning.rules import dhelix
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.timing.profile_file import profile_json, save_profile
from hf_helix.planning.window.layout import named_operators
from hf_helix.runtime.divided import plain_parameters
from hf_helix.tuning import tuner as tuning


@contextlib.contextmanager
def hasty() -> Iterator[None]:
    """Plans need not be good: searches of a few steps, and operators timed once. Every `Cluster` works like this."""
    with (
        mock.patch.object(search, "EFFORT", 5_000),
        mock.patch.object(dhelix, "MAX_STATES", 30),
        mock.patch.object(profiler, "IN_A_ROW", 2),
    ):
        yield


# -- the profiler ------------------------------------------------------------------------------------------------


@plain_parameters()
def profile(folder: str, output: str = "", pairs: bool = True, **options: Any) -> dict[str, Any]:
    """Measure a window of two; what came out, and whether anything else changed. Rank 0 saves the file."""
    trainer = make_trainer(folder, {"tp_size": options.pop("tp_size", 2), "plan": "sequential"}, **options)
    trainer.model.train()
    window = window_of(trainer, 2, 2, options.get("data", {}).get("lengths", (17,)))
    trainer.helix.runner.train_window(window)  # whatever is made on first use
    trainer.model.zero_grad(set_to_none=True)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    buffers = [buffer.detach().clone() for buffer in trainer.model.buffers()]
    numbers = torch.get_rng_state()
    about = {**trainer.helix.session.tuner.fingerprint, "shapes": ", ".join(batch.shape for batch in window)}
    shares: list[float] = []
    result = measure_profile(trainer.helix.runner, window, about, pairs, progress=shares.append)
    if output and dist.get_rank() == 0:
        save_profile(result, output)
    dist.barrier()
    return {
        **_plain(result),
        "shares": shares,
        "same_parameters": all(map(torch.equal, before, trainer.model.parameters())),
        "same_buffers": all(map(torch.equal, buffers, trainer.model.buffers())),
        "same_random_state": torch.equal(numbers, torch.get_rng_state()),
        "gradients": sum(parameter.grad is not None for parameter in trainer.model.parameters()),
        "traced": trainer.helix.runner.executor.streams.trace is not None,
    }


@plain_parameters()
def beside_themselves(folder: str, helix: dict[str, Any], **options: Any) -> list[str]:
    """Every computation beside itself, each in a thread of its own; returns their names."""
    trainer = make_trainer(folder, {**helix, "plan": "sequential"}, **options)
    trainer.model.train()
    bench = Bench(trainer.helix.runner, window_of(trainer, 2, 2, (17,))[0], 2)
    for timed in bench.computing:
        ((first, second),) = bench.time_pair(timed, timed, (1, 1))
        assert first > 0 < second
    return [timed.name[1] for timed in bench.computing]


def _plain(result: Profile) -> dict[str, Any]:
    kinds = {name: op.kind for name, op in named_operators(result.layout)}
    return {
        "text": profile_json(result),
        "about": dict(result.about),
        "times": dict(result.times),
        "pairs": {names: (pair.together, pair.first, pair.second) for names, pair in result.pairs.items()},
        "like": dict(result.like),
        "kinds": {name: kind.value for name, kind in kinds.items()},
        "layers": [name for name in kinds if result.layout.graphs[name[0]].forward.repeats],
        "computing": [name for name, kind in kinds.items() if kind is Kind.COMPUTE],
    }


# -- tuning ------------------------------------------------------------------------------------------------------


class Measured(RuntimeError):
    """Something was measured that should have been known."""


def said_in(output: io.StringIO) -> list[str]:
    """The lines of the library, without those on a model and its layout."""
    lines = [line for line in output.getvalue().splitlines() if line.startswith("hf_helix: ")]
    return [line for line in lines if "; first plan " not in line]


def tune(
    folder: str, cache: str, helix: dict[str, Any], forbidden: bool = False, extras: bool = False, **options: Any
) -> dict[str, Any]:
    """Train a little with a cache of its own: the plan, what was measured and what was said.

    Args:
        forbidden: measuring operators raises.
        extras: also what the trainer measures afterwards; rank 0 writes a trace into the folder.
    """
    usual, measured, output = tuning.measure_profile, [], io.StringIO()

    def counted(*args: Any, **kwargs: Any) -> Profile:
        if forbidden:
            raise Measured
        called = {frame.name for frame in traceback.extract_stack()}
        measured.append(sorted(called & {"training_step", "get_batch_samples"}))
        return usual(*args, **kwargs)

    environment = mock.patch.dict(os.environ, {"HELIX_CACHE": cache})
    counting = mock.patch.object(tuning, "measure_profile", counted)
    with environment, counting, hasty(), contextlib.redirect_stdout(output):
        trainer: Any = make_trainer(folder, {"tp_size": 2, "tuning_share": 1.0, **helix}, **options)
        first = trainer.plan.rule
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    result = trainer.tuning
    found = {
        "first": first,
        "plan": trainer.plan.to_json(),
        "rule": trainer.plan.rule,
        "schedule": trainer.helix.runner.scheduler.name,
        "measured": len(measured),
        "measured_in": measured,
        "said": said_in(output),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "norms": [float(entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry],
        "eval": evaluated,
        "report": result and result.report,
        "kept": result and result.chosen,
        "steps": {} if result is None else {name: overlap.step for name, overlap in result.overlaps.items()},
        "predicted": {} if result is None else dict(result.predicted),
        "tuning": result
        and {
            "measured": result.measured,
            "bound": result.bound,
            "has_profile": result.profile is not None,
            "ranks": result.ranks,
            "schedule": result.schedule,
            "gradient_bytes": result.gradient_bytes,
        },
    }
    return found | (measured_afterwards(trainer, folder) if extras else {})


@plain_parameters()
def measured_afterwards(trainer: Any, folder: str) -> dict[str, Any]:
    """Overlap, memory and a trace; and the losses of one more window, in which nothing was left behind."""
    overlap, memory = trainer.measure_overlap(repeats=2), trainer.measure_memory()
    trainer.trace(Path(folder, "trace.json"))
    dist.barrier()
    gradients = sum(parameter.grad is not None for parameter in trainer.model.parameters())
    losses = [loss.item() for loss in trainer.helix.runner.train_window(trainer.helix.session.last_window)]
    trainer.model.zero_grad()
    return {"overlap": overlap, "memory": memory, "gradients": gradients, "losses after": losses}


def world() -> int:
    return arguments("unused").world_size
