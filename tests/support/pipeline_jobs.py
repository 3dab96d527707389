"""Windows through a pipeline, and the same through the unsplit model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.jobs import frozen
from support.models import arguments, sequences, tiny
from torch import Tensor

from benchmarks.paper.ablate import ablated
from hf_helix import HelixConfig, HelixTrainer
from hf_helix.checkpoint.cut_parameters import full_parameter
from hf_helix.engine.cut.microbatches import WindowMaker
from hf_helix.measure.overlap import trace_window
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.choice.slot_clock import stage_costs
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.runner import Runner

DECLARED = ("llama", "gpt2", "phimoe")
"""Families without a proof on first use; the verdict on any other is kept in the cache of the session."""

Batch = dict[str, Tensor]


def batches_of(
    count: int, rows: int = 2, seed: int = 1, lengths: Sequence[int] = (9,), kind: str = "dense"
) -> list[Batch]:
    """Micro-batches of `rows` sequences; their lengths differ from one to the next.

    Args:
        kind: `left` or `right`: padded there, all but the first row; `packed`: two documents in every row.
    """
    result = []
    for place in range(count):
        length = lengths[place % len(lengths)]
        options: dict[str, Any] = {"lengths": (length,)}
        if kind == "packed":
            options["documents"] = (length // 3, length - length // 3)
        elif kind != "dense":
            options = {"lengths": (length, *([max(2, length // 2)] * (rows - 1))), "padding": kind}
        made = sequences(rows, seed=100 * seed + place, **options)
        result.append({key: torch.stack([row[key] for row in made]) for key in made[0]})
    return result


def items_in(batches: Sequence[Batch]) -> int:
    """Tokens that count in the loss."""
    return int(sum((batch["labels"][:, 1:] != -100).sum() for batch in batches))


def reference(
    model: dict[str, Any],
    batches: Sequence[Batch],
    prepare: Callable[[Any], Callable[[int], object] | None] = lambda made: None,
) -> dict[str, Any]:
    """Losses and gradients of a window through the unsplit model, in this process.

    Args:
        prepare: changes the model, and may return what is called with the number of a micro-batch before it.
    """
    made = tiny(**model).train()
    begin = prepare(made)
    count = items_in(batches)
    losses = []
    for place, batch in enumerate(batches):
        if begin is not None:
            begin(place)
        # As the Trainer does: with a cache, Transformers does not look for documents in a row.
        loss = made(**batch, num_items_in_batch=count, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    gradients = {name: p.grad.numpy().copy() for name, p in made.named_parameters() if p.grad is not None}
    return {"losses": losses, "gradients": gradients}


def make(
    folder: str,
    helix: dict[str, Any],
    model: dict[str, Any],
    training: dict[str, Any] | None = None,
    freeze: Sequence[str] = (),
) -> HelixTrainer:
    return HelixTrainer(
        model=frozen(tiny(**model), freeze),
        args=arguments(folder, **(training or {})),
        train_dataset=sequences(4),
        helix_config=HelixConfig(**{"cache": model.get("family", "llama") not in DECLARED, **helix}),
    )


def windows(
    folder: str,
    helix: dict[str, Any],
    model: dict[str, Any],
    cases: Sequence[tuple[str, str, int]],
    rows: int = 2,
    lengths: Sequence[int] = (9,),
    kind: str = "dense",
    training: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """A window for each (plan, schedule, number of micro-batches): losses, and whole gradients on rank 0."""
    trainer = make(folder, helix, model, training)
    trainer.model.train()
    result = []
    for rule, schedule, count in cases:
        runner = runner_of(trainer, rule, schedule)
        window = window_of(trainer, count, rows, lengths, kind)
        losses = [loss.item() for loss in runner.train_window(window)]
        result.append({"losses": losses, "gradients": whole_gradients(trainer)})
        trainer.model.zero_grad()
    trainer.helix.runner.executor.streams.close()
    return result


def events_of_window(
    folder: str,
    helix: dict[str, Any],
    num_microbatches: int,
    without: Sequence[str] = (),
    model: dict[str, Any] | None = None,
) -> list[tuple[str, str]]:
    """What this rank runs, issues and waits for in a window.

    Args:
        without: what its plan must not use, see `ablate`.
    """
    trainer = trainer_of(folder, helix, model or {})
    runner = ablated(trainer.helix.runner, without) if without else trainer.helix.runner
    events = trace_window(runner, window_of(trainer, num_microbatches, 2, (9,))).events
    runner.executor.streams.close()
    return events


def runner_of(trainer: Any, rule: str, schedule: str) -> Runner:
    """The trainer's runner under another plan and schedule; `auto` is searched with rough times."""
    profile = rough_profile(trainer.helix.runner.rank_units.layout)
    plan = make_plan(rule, profile, model=trainer.plan.model, mesh=trainer.plan.mesh)
    costs = stage_costs(profile) if schedule == "auto" else None
    return trainer.helix.runner.with_plan(plan, Scheduler(schedule, trainer.helix.mesh.pipe.size, costs))


def window_of(trainer: Any, count: int, rows: int, lengths: Sequence[int], kind: str = "dense") -> list[Any]:
    """This rank's micro-batches: of data-parallel rank d those with the numbers d * count and up."""
    dp = trainer.helix.mesh.dp_size
    every = batches_of(count * dp, rows, lengths=lengths, kind=kind)
    place = 0 if trainer.helix.mesh.dp_group is None else torch.distributed.get_rank(trainer.helix.mesh.dp_group)
    mine = every[place * count : (place + 1) * count]
    scale = trainer.loss_scale(torch.tensor(items_in(every)))
    maker = WindowMaker(trainer.helix.base, trainer.helix.mesh)
    return [maker.microbatch(batch, scale, (0, number)) for number, batch in enumerate(mine)]


@plain_parameters()
def whole_gradients(trainer: Any) -> dict[str, Any]:
    """Of what is trained anywhere, by name, in fp32; None on ranks other than the first that shares the batch."""
    rows = trainer.helix.runner.rank_units.rows
    mine = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    trained = set().union(*all_gather_object(mine))
    result = {}
    for name, parameter in trainer.model.named_parameters():
        if name not in trained:
            continue
        whole = full_parameter(parameter.grad, rows[parameter], trainer.helix.mesh)
        result[name] = None if whole is None else whole.float().numpy().copy()
    return result


def trainer_of(folder: str, helix: dict[str, Any], model: dict[str, Any]) -> HelixTrainer:
    """A trainer whose model is in training."""
    trainer = make(folder, {"plan": "sequential", **helix}, model)
    trainer.model.train()
    return trainer
