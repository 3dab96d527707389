"""More of what the processes of a `Cluster` run: pieces by themselves. Named "support.more_jobs:function" there."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from support.jobs import _microbatches, make_trainer
from support.models import arguments, llama, sequences, tiny
from support.pipeline_jobs import runner_of
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.operators.base import Call
from hf_helix.operators.communication.collectives import (
    AllGather,
    AllGatherReplicated,
    ReduceScatter,
    prepare_all_gather,
    prepare_reduce_scatter,
)
from hf_helix.operators.communication.group_transports import GlooTransport
from hf_helix.operators.unit import COPIED, COPIED_ON_SHARDS, CUT_COLUMNS, CUT_ROWS, Placement, Unit
from hf_helix.planning.graph.operator import Graph, Part
from hf_helix.planning.graph.pair import GraphPair
from hf_helix.planning.pipeline.placement import FOLD, stage_ranks
from hf_helix.runtime import grad_reduce as gradients
from hf_helix.runtime.distributed.agreement import agree_on_number
from hf_helix.runtime.distributed.mesh import Mesh, build_mesh
from hf_helix.runtime.streams import make_streams
from hf_helix.tuning.measure.memory import Tally

# -- collectives and gradients -----------------------------------------------------------------------------------


@functools.cache
def world() -> int:
    """The number of ranks, once training arguments have made the process group."""
    return arguments("unused").world_size


@functools.cache
def mesh_of(tp_size: int, pp_size: int = 1) -> Mesh:
    """One mesh for many tests, since every new one opens connections."""
    assert world() % (tp_size * pp_size) == 0
    return build_mesh(tp_size, "cpu", pp_size)


def contribution(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a rank brings; the test knows it, too."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


def move(shape: tuple[int, ...], dtype: str, seed: int) -> dict[str, Any]:
    """One collective of each sort over shards of `shape`, as lists of numbers (bf16 has no numpy type)."""
    axis = mesh_of(world()).tp
    assert isinstance(axis.transport, GlooTransport)
    shard = contribution(axis.rank, shape, getattr(torch, dtype), seed)
    whole = contribution(axis.rank, (axis.size * shape[0], *shape[1:]), getattr(torch, dtype), seed)
    gathered, gather = prepare_all_gather(axis, shard)
    gather()
    exchanged = torch.empty_like(whole)
    axis.transport.exchange(exchanged, whole)
    sums = []
    for _ in range(2):
        reduced, work = prepare_reduce_scatter(axis, whole)
        work()
        sums.append(reduced)
    assert {t.dtype for t in (gathered, exchanged, *sums)} == {shard.dtype}
    found = {"gathered": gathered, "exchanged": exchanged, "reduced": sums[0], "again": sums[1]}
    return {name: value.float().numpy().copy() for name, value in found.items()}


def inner_products(operator: str, seed: int) -> tuple[float, float]:
    """This rank's part of <G x, y> and of <x, G^T y> in float64; y of `AllGatherReplicated` is the same everywhere."""
    axis = mesh_of(world()).tp
    shard, whole = (3, 2, 5), (3 * axis.size, 2, 5)
    made = {"AllGather": AllGather, "ReduceScatter": ReduceScatter, "AllGatherReplicated": AllGatherReplicated}[
        operator
    ](axis)
    sizes = (whole, shard) if operator == "ReduceScatter" else (shard, whole)
    x = contribution(axis.rank, sizes[0], torch.float64, seed)
    y = contribution(0 if operator == "AllGatherReplicated" else axis.rank, sizes[1], torch.float64, seed + 1)
    call = Call({}, 0, True)
    (forward,), work = made.prepare(call, Part.F, x)
    work()
    (backward,), work = made.prepare(call, Part.B, y)
    work()
    if isinstance(made, AllGatherReplicated):
        return (forward * y).sum().item() / axis.size, (x * backward).sum().item()
    return (forward * y).sum().item(), (x * backward).sum().item()


def group_ranks(tp_size: int, pp_size: int = 1, ep_size: int = 1) -> dict[str, Any]:
    """Who shares what with this rank."""
    mesh = build_mesh(tp_size, "cpu", pp_size, ep_size=ep_size)

    def members(group: dist.ProcessGroup | None) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    return {
        "tp": members(mesh.tp.group),
        "dp": members(mesh.dp_group),
        "pp": mesh.pipe.ranks,
        "batch": members(mesh.batch_group),
        "experts": members(mesh.experts.group),
        "expert copies": members(mesh.expert_copies_group),
        "places": (mesh.tp.rank, mesh.tp.size, mesh.dp_size),
    }


def agree_on_count_of_rank(counts: list[int]) -> None:
    assert world() == len(counts)
    agree_on_number(counts[dist.get_rank()], torch.device("cpu"))


def pass_on(pp_size: int) -> list[list[float]]:
    """Every rank of a fold sends down and up the pipe and back, all ways at once; what arrived."""
    mesh = mesh_of(world() // pp_size, pp_size)
    pipe, found, threads = mesh.pipe, {}, []
    ranks = stage_ranks(FOLD, pp_size)

    def both(boundary: int, peer: int, outward: bool) -> None:
        passage = pipe.passage(boundary, peer, outward)
        for number in range(3):
            value, arrived = torch.tensor([100.0 * boundary + 10 * number + outward]), torch.empty(1)
            for sends in (outward, not outward):
                if sends:
                    passage.send(value, forward=outward)
                else:
                    passage.receive(arrived, forward=not outward)
            found.setdefault((boundary, outward), []).append(arrived.item())

    for boundary, (source, target) in enumerate(pairwise(ranks)):
        if source != target and pipe.rank in (source, target):
            outward = pipe.rank == source
            threads.append(threading.Thread(target=both, args=(boundary, target if outward else source, outward)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted([*key, *arrived] for key, arrived in found.items())


PLACED = {
    "rows": ((7, 4), CUT_ROWS),
    "columns": ((3, 5), CUT_COLUMNS),
    "copied": ((6,), COPIED),
    "norm": ((9,), COPIED_ON_SHARDS),
}


def whole_gradient(name: str, dp_rank: int) -> Tensor:
    """What a data-parallel rank's batch gives for the uncut parameter."""
    return contribution(dp_rank, PLACED[name][0], torch.float32, seed=len(name))


def unit_of(placements: dict[nn.Parameter, Placement]) -> Unit:
    """Parameters without operators."""
    nothing = GraphPair.of(Graph("unit", (), (), ()))
    return Unit(label="unit", graphs=nothing, operators={}, placements=placements)


def finish_gradients(tp_size: int, bucket_bytes: int) -> dict[str, Any]:
    """Complete gradients of every kind of parameter, and take their norm."""
    mesh, usual = mesh_of(tp_size), gradients.BUCKET_BYTES
    tp, dp_rank = mesh.tp, dist.get_rank() // tp_size
    placements = {nn.Parameter(torch.empty(2, 2), requires_grad=False): COPIED}  # a frozen one, without a gradient
    for name, (_, placement) in PLACED.items():
        gradient = whole_gradient(name, dp_rank)
        if placement.dim is not None:
            gradient = replace(placement, length=gradient.shape[placement.dim]).cut(gradient, tp.size, tp.rank)
        elif placement.sums_gradient:  # parts that sum to the whole
            gradient = gradient * (tp.rank + 1) / (tp.size * (tp.size + 1) / 2)
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        placements[parameter] = placement
    gradients.BUCKET_BYTES = bucket_bytes
    units = {index: unit_of({parameter: placements[parameter]}) for index, parameter in enumerate(placements)}
    streams = make_streams(mesh.device)
    try:
        gradients.complete_gradients(units, mesh, streams)
    finally:
        gradients.BUCKET_BYTES = usual
        streams.close()
    found = [parameter.grad.numpy().copy() for parameter in placements if parameter.grad is not None]
    norm = gradients.gradient_norm(placements, mesh)
    return {**dict(zip(PLACED, found, strict=True)), "norm of all": norm.item()}


# -- checkpoints -------------------------------------------------------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1}, "[PAD]")), pad_token="[PAD]"
    )


def save_untrained(
    folder: str, tp_size: int, model: dict[str, Any], own_weights: bool = False, with_tokenizer: bool = False
) -> None:
    """Save a model as it was before training. `own_weights`: ranks other than 0 start from other ones."""
    made = tiny(**model)
    if own_weights and dist.get_rank() > 0:
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_()
    options = {"processing_class": tokenizer()} if with_tokenizer else {}
    helix = HelixConfig(tp_size=tp_size)
    HelixTrainer(model=made, args=arguments(folder), helix_config=helix, **options).save_model()


# -- the Trainer's other services --------------------------------------------------------------------------------


def build(folder: str, helix: dict[str, Any] | None, training: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """A HelixTrainer, or a stock one where `helix` is None, with whatever the Trainer takes."""
    common = {"args": arguments(folder, **(training or {})), **options}
    return Trainer(**common) if helix is None else HelixTrainer(**common, helix_config=HelixConfig(**helix))


def predict(folder: str, helix: dict[str, Any] | None, count: int, **data: Any) -> dict[str, Any]:
    """Logits, labels and metrics of a data set, by way of `predict` and of `evaluate`."""
    seen = []

    def metrics(found: Any) -> dict[str, float]:
        logits = torch.from_numpy(found.predictions)
        seen.append(found.label_ids.copy())
        return {"samples": len(logits), "mean": logits[found.label_ids != -100].mean().item()}

    dataset = sequences(count, seed=9, **data)
    trainer = build(folder, helix, model=llama(), eval_dataset=dataset, compute_metrics=metrics)
    output = trainer.predict(dataset)
    evaluated = trainer.evaluate()
    drop = ("runtime", "_per_second", "preparation_time")
    return {
        "predictions": output.predictions,
        "label_ids": output.label_ids,
        "seen": seen,
        "predicted": {name: value for name, value in output.metrics.items() if not name.endswith(drop)},
        "evaluated": {name: value for name, value in evaluated.items() if not name.endswith(drop)},
    }


class Recorder(TrainerCallback):
    """Every event with the step it came in, and what was logged."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda args, state, control, **_: self.events.append((name, state.global_step))


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def train_with(
    folder: str,
    helix: dict[str, Any] | None,
    training: dict[str, Any],
    streamed: bool = False,
    from_init: bool = False,
    data: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train on a list or a stream, with a model or what makes one, and record what callbacks see."""
    rows, recorder = sequences(60, **(data or {})), Recorder()
    model: dict[str, Any] = {"model_init": lambda: llama()} if from_init else {"model": llama()}
    trainer = build(
        folder, helix, training, train_dataset=Stream(rows) if streamed else rows, callbacks=[recorder], **model
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [float(entry["grad_norm"]) for entry in logs],
        "tokens": [entry.get("num_input_tokens_seen") for entry in logs],
        "seen": trainer.state.num_input_tokens_seen,
        "events": recorder.events,
        "counts": Counter(name for name, _ in recorder.events),
    }


def window_memory(folder: str, plan: str, layers: int, num_microbatches: int) -> int:
    """The most bytes of tensors alive in a window of two ranks, parameters and gradients left out."""
    model = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 176}
    helix = {"tp_size": 2, "plan": "sequential"}
    trainer = make_trainer(folder, helix, model=model, data={"lengths": (64,)})
    runner = runner_of(trainer, plan, "w")
    trainer.model.train()
    window = _microbatches(trainer, num_microbatches)
    runner.train_window(window)  # makes the gradients
    kept = [t for p in trainer.model.parameters() for t in (p, p.grad) if t is not None]
    kept += [t for batch in window for t in batch.prepare().values() if isinstance(t, Tensor)]
    with Tally(kept) as counter:
        runner.train_window(window)
    return counter.peak
