"""Runners: a full model is cut in place, and this rank's part of it runs under a first plan.

In:   a full model, the options of `HelixConfig` and of the run, and a mesh.
Out:  a runner, with this rank's part of the weights in the parameters of the model.
Must hold: a model that cannot be cut is refused before any of its weights change; training and measuring build their
runners here, so that measurements are of the trained model.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_helix.checkpoint.cut_parameters import align_buffers, cut_parameters
from hf_helix.checkpoint.load import initialize_parameters, load_parameters
from hf_helix.config import AUTO, EVERY_MICROBATCH, HelixConfig
from hf_helix.engine.cut.checks import check_placements
from hf_helix.engine.cut.float8 import use_float8
from hf_helix.engine.cut.recompute import recompute_units
from hf_helix.models.derived.family import Family, number_distinct_graphs
from hf_helix.models.derived.model_code import check_forwards
from hf_helix.models.graph.context import LossTweaks, ParallelContext
from hf_helix.models.registry import family_of
from hf_helix.models.stock.peft import base_of
from hf_helix.operators.communication.collectives import MakeBuffers
from hf_helix.operators.units.unit import Unit
from hf_helix.operators.vocabulary.pipeline import slice_buffers, spread_units
from hf_helix.operators.zero.zero1 import apply_zero1
from hf_helix.operators.zero.zero3 import apply_zero3
from hf_helix.planning.choice.scheduler import Scheduler, scheduler_of
from hf_helix.planning.parameters import COPIED
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.rules.registry import baseline_plan
from hf_helix.planning.schedule.placement import layer_ranks
from hf_helix.planning.timing.recompute import NONE
from hf_helix.planning.timing.sizes import FULL_GRADIENTS
from hf_helix.planning.traffic import Bucket, flat_weights
from hf_helix.planning.window.layout import Layout, with_traffic
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.gradients.buckets import planned_buckets
from hf_helix.runtime.rank_units import RankUnits, cut_layers, in_halves, place_units
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams.streams import make_streams

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


class CutUnits(NamedTuple):
    """The cut of a model.

    Attributes:
        rank_units: the units of the model, with this rank's part of them.
        modules_run_as_is: the modules whose forwards run as operators or before them, see `check_forwards`.
    """

    rank_units: RankUnits
    modules_run_as_is: Sequence[nn.Module]


def cut_units(
    model: Any,
    config: HelixConfig,
    mesh: Mesh,
    modes: Sequence[str],
    loss_tweaks: LossTweaks | None = None,
    layer_indices: Sequence[int] | None = None,
    halved: Collection[int] = (),
    autocast_dtype: torch.dtype | None = None,
    between_layers: torch.dtype | None = None,
) -> CutUnits:
    """Returns the cut of a model, on this rank. Nothing is communicated. The model is not changed, but for parameters
    of a derived layer that only indices depend on: they are frozen.

    The passes over the units stand here in their order; `_Cut` describes each.

    Args:
        model: a full model, perhaps a `PeftModel`, with weights or on the meta device.
        config: the options of the cut.
        mesh: the mesh of ranks, of the sizes in `config`.
        modes: the recompute mode of every declared layer, see `hf_helix.engine.cut.recompute`.
        loss_tweaks: the changes of the loss by training arguments.
        layer_indices: the indices of the declared layers; None for all. Other layers are not checked.
        halved: the layers declared as halves; with all layers, the layers between stages are halved.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.
        between_layers: the type of the values between layers; None for the type of the embedding.

    Raises:
        ValueError: the model cannot be cut like this.
    """
    tweaks, types = loss_tweaks or LossTweaks(), (autocast_dtype, between_layers)
    cut = _Cut(model, config, mesh, list(modes), tweaks, layer_indices, halved, *types)
    units = cut.operators()
    passes = (
        cut.unread,
        cut.float8,
        cut.halves,
        cut.recompute,
        cut.vocabulary,
        cut.shard_parameters,
        cut.shard_optimizer,
    )
    for apply in passes:
        units = apply(units)
    modules_run_as_is = cut.check(units)
    rank_units = cut.place(units)
    return CutUnits(replace(rank_units, layout=cut.traffic(rank_units)), modules_run_as_is)


@dataclass
class _Cut:
    """The passes that cut a model, in the order of the methods; each takes the units of the model and returns them.

    Attributes:
        model, config, mesh, modes, loss_tweaks, layer_indices, halved, autocast_dtype, between_layers: see
            `cut_units`.
        layers_per_stage: the layers of each virtual stage, if the options give them.
        slice_buffers: from a slice of the head to the buffers of its outputs, with slices of the vocabulary.
    """

    model: Any
    config: HelixConfig
    mesh: Mesh
    modes: list[str]
    loss_tweaks: LossTweaks
    layer_indices: Sequence[int] | None
    halved: Collection[int]
    autocast_dtype: torch.dtype | None
    between_layers: torch.dtype | None
    layers_per_stage: Sequence[int] | None = field(init=False, default=None)
    slice_buffers: Callable[[int], MakeBuffers] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.base = base_of(self.model)
        self.family = family_of(self.base)
        self.placement = scheduler_of(self.config).placement
        self.host_link = self.mesh.host_link if self.config.offload else None

    @cached_property
    def make_buffers(self) -> MakeBuffers:
        """Makes the buffers of a transfer between stages."""
        return self.family.empty(self.base, self.mesh.tp.size, self.loss_tweaks.ends_at_decoder, self.between_layers)

    def operators(self) -> list[Unit]:
        """The units as operators, cut over tensor, context and expert parallelism."""
        config, mesh = self.config, self.mesh
        context = ParallelContext(
            mesh.tp,
            mesh.cp,
            mesh.experts,
            config.cp_method,
            config.expert_capacity_factor,
            mesh.device,
            config.compile,
            mesh.vocabulary if config.spread_vocabulary else None,
            config.cp_recurrence,
            any(mode != NONE for mode in self.modes),
        )
        return self.family.units(self.base, context, self.loss_tweaks, self.layer_indices)

    def unread(self, units: list[Unit]) -> list[Unit]:
        """Units keep the parameters that the model's code never reads; other parameters without a unit are refused."""
        if self.layer_indices is not None:
            return units
        units = _with_unread(self.model, self.family, units)
        check_placements(self.model, {parameter for unit in units for parameter in unit.placements})
        return units

    def float8(self, units: list[Unit]) -> list[Unit]:
        """Linears multiply in fp8."""
        if self.config.float8:
            head = getattr(self.base.get_output_embeddings(), "weight", None)
            use_float8(units, self.config.float8_recipe, head)
        return units

    def halves(self, units: list[Unit]) -> list[Unit]:
        """Layers between stages become two units."""
        if self.layer_indices is not None:
            places = [self.layer_indices.index(layer) for layer in self.halved]
            units, self.modes = in_halves(units, self.modes, places)
        elif self.config.layers_per_stage is not None:
            ranks = layer_ranks(self.placement, self.mesh.pipe.size)
            units, self.modes, self.layers_per_stage = cut_layers(
                units, self.modes, ranks, self.config.layers_per_stage
            )
        return units

    def recompute(self, units: list[Unit]) -> list[Unit]:
        """Layers keep less for backward, and compute the rest again."""
        return recompute_units(units, self.modes, self.mesh)

    def vocabulary(self, units: list[Unit]) -> list[Unit]:
        """Every pipeline rank gets slices of the embedding and of the head."""
        if not self.config.spread_vocabulary:
            return units
        table, head = _ends_of(self.base, self.loss_tweaks)
        dtype, count = self.autocast_dtype or head.dtype, 1 + max(self.loss_tweaks.wanted)
        self.slice_buffers = slice_buffers(self.make_buffers, self.mesh.tp.size, count, dtype)
        rank = self.mesh.pipe.rank if self.layer_indices is None else None
        return spread_units(units, table, head, dtype, rank, self.config.pp_size)

    def shard_parameters(self, units: list[Unit]) -> list[Unit]:
        """ZeRO-3, and weights on the host: operators gather, or copy, the weights before their readers."""
        if not (self.config.shard_parameters or self.config.streams_weights):
            return units
        units = apply_zero3(units, self.mesh.shard_axes, self.autocast_dtype, self.host_link)
        return number_distinct_graphs(units)

    def shard_optimizer(self, units: list[Unit]) -> list[Unit]:
        """ZeRO-1, and states on the host: a rank steps a shard of the remaining weights."""
        if not self.config.shard_optimizer and self.host_link is None:
            return units
        return apply_zero1(units, self.mesh.shard_axes, self.autocast_dtype, self.host_link)

    def check(self, units: Sequence[Unit]) -> list[nn.Module]:
        """Refuses a model whose code is not cut; returns the modules that run as they are."""
        as_is = [*self.family.side_modules(self.base), *(each for unit in units for each in unit.modules_run_as_is)]
        if self.loss_tweaks.ends_at_decoder:
            self._check_end(units)
        if self.layer_indices is None:
            check_forwards(self.model, self.base, self.family, as_is, self.loss_tweaks.ends_at_decoder)
        return as_is

    def _check_end(self, units: Sequence[Unit]) -> None:
        """Refuses a decoder with weights that it reads after its last hidden states, such as those of a pooler."""
        read = {parameter for unit in units for parameter in unit.placements.keys() - {*unit.above}}
        read |= {*self.family.unread_parameters(self.base)}
        decoder = self.family.decoder(self.base)
        if beyond := [name for name, parameter in decoder.named_parameters() if parameter not in read]:
            raise ValueError(
                f"{type(self.base).__name__} computes with {beyond[0]} after its last hidden states, and calls return "
                "these only; use a model without it, or the stock Trainer"
            )

    def place(self, units: Sequence[Unit]) -> RankUnits:
        """Places units on the ranks of the pipeline."""
        return place_units(
            units,
            self.mesh.pipe,
            self.make_buffers,
            self.placement,
            self.family.head_cost(self.base),
            self.layers_per_stage,
            self.slice_buffers,
            self.family.embedding_cost(self.base, self.config.image_share),
            self.family.first_least,
            {parameter: name for name, parameter in self.model.named_parameters()},
        )

    def traffic(self, rank_units: RankUnits) -> Layout:
        """The layout with the traffic of its parameters: reductions, gathers, copies to the host and back."""
        layout, rows, place = rank_units.layout, rank_units.rows, self.mesh.place
        buckets = planned_buckets(rows, rank_units.all_units, layout, place)
        weights = flat_weights(rows.values(), place)
        often = _reduces_often(layout, buckets, self.config, self.mesh)
        return with_traffic(layout, buckets, weights, self.host_link is not None, often)


def _with_unread(model: Any, family: Family, units: Sequence[Unit]) -> list[Unit]:
    """Returns units that keep the parameters of a model that its code never reads, each in its layer or in the first
    layer."""
    units, layers = list(units), list(family.layers(base_of(model)))
    placed = {parameter for unit in units for parameter in unit.placements}
    stray = [parameter for parameter in model.parameters() if parameter not in placed]
    known = family.unread_parameters(base_of(model)) if stray else ()
    place_of = {parameter: place for place, layer in enumerate(layers) for parameter in layer.parameters()}
    for parameter in stray:
        if parameter in known:
            place = 1 + place_of.get(parameter, 0)
            unit = units[place]
            placements = {**unit.placements, parameter: COPIED}
            units[place] = replace(unit, placements=placements, unread={*unit.unread, parameter})
    return units


def _reduces_often(layout: Layout, buckets: Sequence[Bucket], config: HelixConfig, mesh: Mesh) -> bool:
    """Returns whether sharded gradients are reduced for every micro-batch, see `HelixConfig.reduce_gradients`."""
    if not config.shard_parameters or config.reduce_gradients != AUTO:
        return config.reduce_gradients == EVERY_MICROBATCH
    full = [0] * layout.num_ranks
    for bucket in buckets:
        full[layout.rank_of(bucket.adders[0][0])] += bucket.bytes
    memory = 1e9 * config.memory_gb if config.memory_gb is not None else math.inf
    if mesh.device.type == "cuda" and config.memory_gb is None:
        memory = torch.cuda.get_device_properties(mesh.device).total_memory
    return max(full) > FULL_GRADIENTS * memory


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
    """Cuts the parameters of a model and returns its runner. Collective.

    Args:
        model, config, mesh: see `cut_units`.
        rank_units: the cut units of the model.
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
    fused = config.fused_kernels
    return Runner(rank_units, plan, mesh, streams, scheduler, options.seed, options.autocast_dtype, fused)


def _fill_parameters(model: Any, rank_units: RankUnits, mesh: Mesh, options: RunOptions) -> None:
    """Cuts this rank's part out of the weights, reads the part from a folder, or draws it at random. Collective."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        cut_parameters(rank_units, mesh)
    elif options.weights is not None:
        load_parameters(model, rank_units, mesh, options.weights)
    else:
        base = base_of(model)
        initialize_parameters(model, family_of(base).layers(base), rank_units, mesh, options.seed)
    align_buffers(model, mesh.device)
    for flat in rank_units.flat_parameters:
        if not flat.is_sharded:
            flat.shard_in_place(mesh.device)
