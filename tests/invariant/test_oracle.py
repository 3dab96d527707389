"""Our runner does what the runtime of torch.distributed.pipelining does with the same action table."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.marks import slow
from support.models import llama
from support.pipeline_jobs import (
    Batch,
    Step,
    batches_of,
    items_in,
    runner_of,
    steps_of,
    trainer_of,
    whole_gradients,
    window_of,
)
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from hf_helix.planning.schedule.actions import format_schedule
from hf_helix.planning.schedule.named import PLACEMENT_OF, build_schedule
from hf_helix.planning.schedule.placement import stage_ranks
from hf_helix.runtime.trace import Trace


@pytest.mark.parametrize(
    ("size", "schedule", "tied"),
    [
        *((2, schedule, schedule == "folded_1f1b") for schedule in PLACEMENT_OF),
        slow(2, "folded_1f1b", False),
        slow(2, "dualpipe_v", True),
        *(slow(4, schedule, False) for schedule in PLACEMENT_OF),
    ],
)
def test_ranks_run_as_torch_runs_them(size: int, schedule: str, tied: bool, cluster_of: Any, tmp_path: Any) -> None:
    counts = {2: (2, 1, 1, 2), 4: (1, 2, 1, 1, 1, 1, 1, 2)}[size]
    if schedule == "1f1b":
        counts = (2, 3) if size == 2 else (1, 2, 1, 1)
    window_sizes = sorted({1, size, size + 1, 2 * size + 1})
    job = {"size": size, "model": {"tie_word_embeddings": tied}, "counts": counts, "schedule": schedule}
    ranks = cluster_of(size).run("invariant.test_oracle:both", folder=str(tmp_path), **job, window_sizes=window_sizes)
    placement = stage_ranks(PLACEMENT_OF[schedule], size)
    for place, count in enumerate(window_sizes):
        result = [rank[place] for rank in ranks]
        for rank, of in enumerate(result):
            assert of["ours"]["order"] == of["theirs"]["order"], f"rank {rank}, M={count}"
            assert len(of["ours"]["order"]) == 3 * count * placement.count(rank)
            np.testing.assert_allclose(of["ours"]["losses"], result[placement[-1]]["theirs"]["losses"], rtol=1e-6)
        ours = result[0]["ours"]["gradients"]
        theirs = {name: gradient for of in result for name, gradient in of["theirs"]["gradients"].items()}
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert np.linalg.norm(ours[name] - gradient) <= 1e-5 * np.linalg.norm(gradient), f"{name}, M={count}"


# -- in the processes of a cluster ---------------------------------------------------------------------------------


class Piece(nn.Module):
    """A virtual stage: some of a Llama's layers, with the embedding before its first, norm and head behind its last."""

    def __init__(self, model: Any, layers: range) -> None:
        super().__init__()
        inner = model.model
        last = layers.stop == len(inner.layers)
        self.embedding = inner.embed_tokens if layers.start == 0 else None
        self.rotary = inner.rotary_emb
        self.layers = nn.ModuleList(inner.layers[index] for index in layers)
        self.head = nn.Sequential(inner.norm, model.lm_head) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        for layer in self.layers:
            x = layer(x, position_ids=positions, position_embeddings=self.rotary(x, positions))
        return x if self.head is None else self.head(x)


def both(
    folder: str, size: int, model: dict[str, Any], counts: Sequence[int], schedule: str, window_sizes: Sequence[int]
) -> list[dict[str, dict[str, Any]]]:
    """Windows of these sizes: losses, gradients and the order of what started, ours and torch's.

    Args:
        size: of the pipeline, and of the world.
        counts: how many layers each virtual stage has.
    """
    model = {"num_hidden_layers": sum(counts), **model}
    helix = {"pp_size": size, "schedule": schedule, "layers_per_stage": list(counts)}
    trainer = trainer_of(folder, helix, model)
    result = []
    for count in window_sizes:
        theirs = through_torch(model, counts, schedule, batches_of(count))
        result.append({"ours": through_ours(trainer, schedule, count), "theirs": theirs})
    trainer.helix.runner.executor.streams.close()
    return result


def through_ours(trainer: Any, schedule: str, count: int) -> dict[str, Any]:
    """Under `sequential`, where slots run in turn."""
    runner = runner_of(trainer, "sequential", schedule)
    streams = runner.executor.streams
    streams.trace = trace = Trace()
    losses = runner.train_window(window_of(trainer, count, rows=2, lengths=(9,)))
    streams.trace = None
    gradients = whole_gradients(trainer)
    trainer.model.zero_grad()
    order = started(steps_of(runner, trace.events))
    return {"losses": [loss.item() for loss in losses], "gradients": gradients, "order": order}


def started(steps: Sequence[Step]) -> list[str]:
    """The parts of every stage and micro-batch by their first operator, such as 0F2, 0I2, 0W2."""
    return list(dict.fromkeys(f"{stage}{part}{microbatch}" for part, microbatch, stage, _, _ in steps))


def through_torch(
    model: dict[str, Any], counts: Sequence[int], schedule: str, batches: Sequence[Batch]
) -> dict[str, Any]:
    """Gradients are those of this rank's stages; losses those of the rank with the last."""
    made = llama(**model).train()
    rank, size, count = dist.get_rank(), dist.get_world_size(), len(batches)
    ranks = stage_ranks(PLACEMENT_OF[schedule], size)
    order: list[str] = []
    stages = []
    for index, home in enumerate(ranks):
        if home == rank:
            piece = Piece(made, range(sum(counts[:index]), sum(counts[: index + 1])))
            stages.append(recorded(PipelineStage(piece, index, len(ranks), torch.device("cpu")), order))
    items = items_in(batches)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return (
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / items
        )

    runtime = _PipelineScheduleRuntime(stages, count, loss_fn=loss_of, scale_grads=False)
    runtime._prepare_schedule_with_comms(action_table(format_schedule(build_schedule(schedule, size, count))))
    ids, labels = (torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels"))
    losses: list[Tensor] = []
    first = (ids,) if any(stage.is_first for stage in stages) else ()
    target = labels if any(stage.is_last for stage in stages) else None
    runtime.step(*first, target=target, losses=losses, return_outputs=False)
    gradients = {name: p.grad.numpy().copy() for name, p in made.named_parameters() if p.grad is not None}
    return {"losses": [loss.item() for loss in losses], "gradients": gradients, "order": order}


def action_table(text: str) -> dict[int, list[_Action | None]]:
    """Torch's actions from our text."""
    rows = [line.partition(":")[2].split() for line in text.splitlines()]
    return {rank: [_Action.from_str(word) for word in row] for rank, row in enumerate(rows)}


def recorded(stage: PipelineStage, order: list[str]) -> PipelineStage:
    """Note what torch's runtime has the stage do; a whole backward is an I and a W."""

    def record(method: str, parts_of: Callable[[Any], str]) -> None:
        run = getattr(stage, method)

        def noted(microbatch: int, *args: Any, **options: Any) -> Any:
            order.extend(f"{stage.stage_index}{part}{microbatch}" for part in parts_of(options))
            return run(microbatch, *args, **options)

        setattr(stage, method, noted)

    record("forward_one_chunk", lambda options: "F")
    record("backward_one_chunk", lambda options: "IW" if options["full_backward"] else "I")
    record("backward_weight_one_chunk", lambda options: "W")
    return stage
