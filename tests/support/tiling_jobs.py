"""Windows of tiled stages, for a `Cluster`. Named "support.tiling_jobs:function" there."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from support.graphs import ORDER_BLOCK
from support.models import arguments, llama, sequences

from hf_helix.checkpoint.shard import cut_parameters, whole_parameter
from hf_helix.models.builder import Sharing
from hf_helix.models.registry import family_of
from hf_helix.models.sequence_sharding import SequenceCut
from hf_helix.planning.pipeline.scheduler import Scheduler
from hf_helix.planning.plans.baselines.intra_batch import IntraBatchPlan
from hf_helix.planning.plans.plan import Plan
from hf_helix.planning.plans.registry import make_plan
from hf_helix.planning.profile import rough_profile
from hf_helix.runtime.distributed.mesh import Mesh, build_mesh
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.stage import Stage, place_units
from hf_helix.runtime.streams import make_streams


@functools.cache
def mesh_of_all() -> Mesh:
    """Every rank on the tensor-parallel axis, once training arguments have made the process group."""
    return build_mesh(arguments("unused").world_size, "cpu")


def windows(
    tilings: Sequence[tuple[int, str]], lengths: Sequence[int], model: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """A window of a micro-batch of each length by each (tiles, rule): losses, evaluated loss, gradients (on rank 0)."""
    mesh = mesh_of_all()
    made = llama(**(model or {})).train()
    family = family_of(made)
    stage = place_units(family.units(made, Sharing(mesh.tp)))
    cut_parameters(stage, mesh)
    batches = [_microbatch(family, made, mesh, length, place) for place, length in enumerate(lengths)]
    streams = make_streams(mesh.device)
    found = []
    for tiles, rule in tilings:
        runner = Runner(stage, _plan(stage, tiles, rule, mesh), mesh, streams, Scheduler("w", 1), 0)
        losses = [loss.item() for loss in runner.train_window(batches)]
        gradients = {}
        for name, parameter in made.named_parameters():
            whole = whole_parameter(parameter.grad, stage.placements[parameter], mesh)
            gradients[name] = None if whole is None else whole.numpy().copy()
            parameter.grad = None
        loss, _ = runner.evaluate([batches[0]])
        found.append({"losses": losses, "evaluated": loss.item(), "gradients": gradients})
    streams.close()
    return found


def _plan(stage: Stage, tiles: int, rule: str, mesh: Mesh) -> Plan:
    profile, about = rough_profile(stage.layout), {"model": "tiny", "mesh": {"tp_size": mesh.tp.size}}
    if tiles == 1:
        return make_plan(rule, profile, **about)
    return IntraBatchPlan.of_tiles(rule, ORDER_BLOCK[rule], profile, **about, tiles=tiles)


def _microbatch(family: Any, model: Any, mesh: Mesh, length: int, place: int) -> MicroBatch:
    rows = sequences(2, lengths=(length,), seed=place)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    scale = torch.tensor(1.0 / batch["input_ids"].numel())
    return MicroBatch(functools.partial(family.side_inputs, model, batch, SequenceCut(mesh.tp.size), scale), (0, place))
