"""Runners: a full model is cut in place, and this rank's part of it runs under a first plan.

In:   a full model, the options of `HelixConfig` and of the run, and a mesh.
Out:  a runner, with this rank's part of the weights in the parameters of the model.
Must hold: a model that cannot be cut is refused before any of its weights change; training and measuring build their
runners here, so that measurements are of the trained model.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_helix.checkpoint.cut_parameters import cut_parameters
from hf_helix.checkpoint.load import initialize_parameters, load_parameters
from hf_helix.config import AUTO, EVERY_MICROBATCH, HelixConfig
from hf_helix.engine.checks import check_placements
from hf_helix.engine.float8 import use_float8
from hf_helix.engine.recompute import recompute_units
from hf_helix.models.family import number_distinct_graphs
from hf_helix.models.graph.context import LossTweaks, ParallelContext
from hf_helix.models.model_code import check_forwards
from hf_helix.models.peft import base_of
from hf_helix.models.registry import family_of
from hf_helix.operators.fused import kernels
from hf_helix.operators.vocab_pipeline import slice_buffers, spread_units
from hf_helix.operators.zero.zero1 import apply_zero1
from hf_helix.operators.zero.zero3 import apply_zero3
from hf_helix.planning.graph.recompute import NONE
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.registry import baseline_plan
from hf_helix.planning.schedule.placement import layer_ranks
from hf_helix.planning.schedule.scheduler import Scheduler, scheduler_of
from hf_helix.planning.timing.sizes import FULL_GRADIENTS
from hf_helix.planning.window.layout import Layout
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.gradients.buckets import layout_with_reductions
from hf_helix.runtime.local_parameters import layout_with_gathers
from hf_helix.runtime.rank_units import RankUnits, cut_layers, in_halves, place_units
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams import make_streams

ChoosePlan = Callable[[Layout], tuple[Plan, Scheduler]]
"""Returns the first plan of a run and its scheduler, for a layout of units over ranks."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run apart from its `HelixConfig`.

    Attributes:
        seed: the seed of all randomness of the run.
        num_microbatches: the micro-batches of a usual window, whose schedule the ranks compare.
        autocast_dtype: the type of matrix products under autocast, such as `torch.bfloat16`; None for no autocast.
        loss_tweaks: the changes of the loss by training arguments.
        checkpointing: options of activation checkpointing, if the training arguments ask for it.
        weights: a checkpoint folder for a model on the meta device; without a folder, the model starts at random.
    """

    seed: int = 0
    num_microbatches: int = 1
    autocast_dtype: torch.dtype | None = None
    loss_tweaks: LossTweaks = field(default_factory=LossTweaks)
    checkpointing: Mapping[str, Any] | None = None
    weights: str | Path | None = None


class Declared(NamedTuple):
    """The cut of a model.

    Attributes:
        rank_units: the units of the model, with this rank's part of them.
        modules_run_as_is: the modules whose forwards run as operators or before them, see `check_forwards`.
    """

    rank_units: RankUnits
    modules_run_as_is: Sequence[nn.Module]


def declare(
    model: Any,
    config: HelixConfig,
    mesh: Mesh,
    modes: Sequence[str],
    loss_tweaks: LossTweaks | None = None,
    layer_indices: Sequence[int] | None = None,
    halved: Collection[int] = (),
    autocast_dtype: torch.dtype | None = None,
) -> Declared:
    """Returns the cut of a model, on this rank alone. Nothing is communicated. The model is not changed, but for
    parameters that only indices depend on: those of a derived layer are frozen.

    Args:
        model: a full model, perhaps a `PeftModel`, with weights or on the meta device.
        config: the options of the cut.
        mesh: the mesh of ranks, of the sizes in `config`.
        modes: the recompute mode of every declared layer, see `hf_helix.engine.recompute`.
        loss_tweaks: the changes of the loss by training arguments.
        layer_indices: the indices of the declared layers; None for all. Other layers are not checked either.
        halved: those that are declared as halves; of all layers, the layers between stages are.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.

    Raises:
        ValueError: the model cannot be cut like this.
    """
    base = base_of(model)
    family = family_of(base)
    loss_tweaks = loss_tweaks or LossTweaks()
    ways = config.cp_method, config.expert_capacity_factor
    spread = mesh.vocabulary if config.spread_vocabulary else None
    kernels.use(config.fused_kernels)
    again = any(mode != NONE for mode in modes)
    sharing = ParallelContext(
        mesh.tp, mesh.cp, mesh.experts, *ways, mesh.device, config.compile, spread, config.cp_recurrence, again
    )
    units, counts = family.units(base, sharing, loss_tweaks, layer_indices), None
    if config.float8:
        use_float8(units, config.float8_recipe, getattr(base.get_output_embeddings(), "weight", None))
    placement = scheduler_of(config).placement
    if layer_indices is not None:
        units, modes = in_halves(units, modes, [layer_indices.index(each) for each in halved])
    elif config.layers_per_stage is not None:
        units, modes, counts = cut_layers(units, modes, layer_ranks(placement, mesh.pipe.size), config.layers_per_stage)
    units = recompute_units(units, modes, mesh)
    placements = {p: placed for unit in units for p, placed in unit.placements.items()}
    make_buffers, of_slice = family.empty(base, mesh.tp.size, loss_tweaks.ends_at_decoder), None
    if config.spread_vocabulary:
        table, head = _ends_of(base, loss_tweaks)
        dtype = autocast_dtype or head.dtype
        units = spread_units(
            units, table, head, dtype, mesh.pipe.rank if layer_indices is None else None, config.pp_size
        )
        of_slice = slice_buffers(make_buffers, mesh.tp.size, loss_tweaks.figures, dtype)
    host_link = mesh.host_link if config.offload else None
    if config.shard_parameters or config.streams_weights:
        units = number_distinct_graphs(apply_zero3(units, mesh.shard_axes, autocast_dtype, host_link))
    if config.shard_optimizer or host_link is not None:
        units = apply_zero1(units, mesh.shard_axes, autocast_dtype, host_link)
    modules_run_as_is = [*family.side_modules(base), *(module for unit in units for module in unit.modules_run_as_is)]
    if layer_indices is None:
        check_forwards(model, base, family, modules_run_as_is, loss_tweaks.ends_at_decoder)
        check_placements(model, placements)
    rank_units = place_units(
        units,
        mesh.pipe,
        make_buffers,
        placement,
        family.head_cost(base),
        counts,
        of_slice,
        family.embedding_cost(base, config.image_share),
        family.first_least,
    )
    layout = layout_with_gathers(_with_reductions(rank_units, config, mesh), rank_units.all_units, mesh)
    return Declared(replace(rank_units, layout=replace(layout, on_host=host_link is not None)), modules_run_as_is)


def _with_reductions(rank_units: RankUnits, config: HelixConfig, mesh: Mesh) -> Layout:
    """Returns the layout of a rank's units with gradient reductions, see `HelixConfig.reduce_gradients`."""
    made = partial(layout_with_reductions, rank_units.layout, rank_units.all_units, mesh)
    if not config.shard_parameters or config.reduce_gradients != AUTO:
        return made(often=config.reduce_gradients == EVERY_MICROBATCH)
    once = made()
    ranks = range(once.num_ranks)
    full = max(sum(once.reductions[number].bytes for number in once.reductions_of(rank)) for rank in ranks)
    memory = 1e9 * config.memory_gb if config.memory_gb is not None else math.inf
    if mesh.device.type == "cuda" and config.memory_gb is None:
        memory = torch.cuda.get_device_properties(mesh.device).total_memory
    return made(often=True) if full > FULL_GRADIENTS * memory else once


def _ends_of(base: Any, loss_tweaks: LossTweaks) -> tuple[nn.Parameter, nn.Parameter]:
    """Returns the weights of the embedding and of the head, for slices of the vocabulary.

    Raises:
        ValueError: the run has no loss of logits over a vocabulary.
    """
    head = base.get_output_embeddings()
    if head is None or loss_tweaks.ends_at_decoder:
        why = "its loss is computed by code of the caller" if head is not None else "it has no head over the vocabulary"
        raise ValueError(
            f"spread_vocabulary=True with {type(base).__name__}: {why}, and the slices compute the built-in loss; use "
            "spread_vocabulary=False"
        )
    return base.get_input_embeddings().weight, head.weight


def start_runner(
    model: Any,
    rank_units: RankUnits,
    config: HelixConfig,
    mesh: Mesh,
    options: RunOptions,
    choose_plan: ChoosePlan | None = None,
) -> Runner:
    """Cuts a model as declared and returns its runner. Collective.

    Args:
        model, config, mesh: see `declare`.
        rank_units: the cut of the model, as declared.
        options: the options of the run.
        choose_plan: chooses the first plan, the same on every rank; None for `sequential`.
    """
    with watched():
        if choose_plan is None:  # `sequential` is equal on every rank and needs no measurement
            plan = baseline_plan(rank_units.layout, model=type(base_of(model)).__name__, mesh=config.option_sizes)
            scheduler = scheduler_of(config)
        else:
            plan, scheduler = choose_plan(rank_units.layout)
        _fill_parameters(model, rank_units, mesh, options)
    streams = make_streams(mesh.device)
    return Runner(rank_units, plan, mesh, streams, scheduler, options.seed, options.autocast_dtype)


def _fill_parameters(model: Any, rank_units: RankUnits, mesh: Mesh, options: RunOptions) -> None:
    """Cuts this rank's part out of the weights, reads the part from a folder, or draws it at random. Collective."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        cut_parameters(rank_units, mesh)
    elif options.weights is not None:
        load_parameters(model, rank_units, mesh, options.weights)
    else:
        base = base_of(model)
        initialize_parameters(model, family_of(base).layers(base), rank_units, mesh, options.seed)
    for flat in rank_units.flat_parameters:
        if not flat.is_sharded:
            flat.shard_in_place(mesh.device)
