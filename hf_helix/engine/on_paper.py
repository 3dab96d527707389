"""Layouts of a model on paper: what one of their ranks computes, moves and keeps, without the machine.

In:   a Transformers configuration, or a model on the meta device; a `HelixConfig`, and the sizes of a micro-batch.
Out:  its `Amounts`.
Must hold: the units are declared as for training; one layer of each kind is declared and runs, whatever the number of
layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_helix.config import HelixConfig
from hf_helix.engine.build import declare
from hf_helix.engine.microbatches import LossScale, WindowMaker
from hf_helix.engine.recompute import modes_of
from hf_helix.engine.synthetic import model_on_meta
from hf_helix.models.peft import base_of
from hf_helix.models.registry import family_of
from hf_helix.operators.moe.row_counts import assuming
from hf_helix.operators.unit import Unit
from hf_helix.planning.pipeline.scheduler import Scheduler
from hf_helix.planning.plans.registry import make_plan
from hf_helix.planning.profile import rough_profile
from hf_helix.report.flops import token_flops
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.stage import Stage, place_units
from hf_helix.simulation.amounts import Amounts, Model, PaperStreams, count_amounts
from hf_helix.simulation.cluster import Cluster
from hf_helix.simulation.estimate import inter_node_axes
from hf_helix.simulation.mesh import META, PaperMesh, paper_mesh
from hf_helix.simulation.meter import meta_as
from hf_helix.simulation.sizes import Sizes
from hf_helix.simulation.step import Case

TYPES = {"bf16": torch.bfloat16, "fp32": None}
"""The types of matrix products, as clusters name them, and what autocast is told."""


class OnPaper:
    """A model whose layouts are counted, each once.

    Args:
        model: a Transformers model on the meta device, perhaps a `PeftModel`; a configuration, or the path of one.
        cluster: what it runs on: which axes leave a node decides what kind of communication they are.
    """

    def __init__(self, model: Any, cluster: Cluster) -> None:
        self.model = model if isinstance(model, nn.Module) else model_on_meta(model)
        self.cluster = cluster
        self._found: dict[object, Amounts | ValueError] = {}
        self._kinds: Kinds | None = None

    @property
    def name(self) -> str:
        """Returns the class of the model."""
        return type(base_of(self.model)).__name__

    @property
    def layers(self) -> int:
        """Returns the number of decoder layers."""
        base = base_of(self.model)
        return len(list(family_of(base).layers(base)))

    @property
    def experts(self) -> int:
        """Returns the number of experts of a layer; 1 for a dense model."""
        shapes = [weight.shape for weight in self.model.parameters() if weight.dim() == 3]
        return max((shape[0] for shape in shapes), default=1)

    def amounts(self, case: Case) -> Amounts:
        """Returns what a rank does for a micro-batch of a case.

        Raises:
            ValueError: the model cannot be cut like this.
        """
        sizes, spread = case.sizes, case.spread_weights
        crossing = tuple(inter_node_axes(self.cluster, sizes, bool(spread)))
        shape = case.batch, case.length, case.recompute, case.dtype, case.imbalance
        key = sizes.tp, sizes.cp, sizes.ep, crossing, shape, tuple(spread)
        if key not in self._found:  # over how many ranks weights are spread changes their gathers alone
            self._found[key] = self._counted(case, crossing)
        found = self._found[key]
        if isinstance(found, ValueError):
            raise found
        return found.over(spread)

    def _counted(self, case: Case, crossing: Collection[str]) -> Amounts | ValueError:
        sizes, dtype = case.sizes, TYPES[case.dtype]
        config = HelixConfig(
            tp_size=sizes.tp,
            cp_size=sizes.cp,
            ep_size=sizes.ep,
            recompute=case.recompute,
            shard_parameters=bool(case.spread_weights),
        )
        try:
            family_of(base_of(self.model)).check(base_of(self.model).config, sizes.tp)
            self._kinds = self._kinds or kinds_of(self.model)
            with assuming(case.imbalance):
                return amounts_of(
                    self.model,
                    config,
                    case.batch,
                    case.length,
                    dtype,
                    crossing,
                    self.cluster.backend,
                    self._kinds,
                    sizes.dp,
                )
        except ValueError as error:
            return error


@dataclass(frozen=True)
class Kinds:
    """Which layers of a model are alike, so that one of them stands for all.

    Attributes:
        places: the first layer of each kind.
        kinds: of every layer, its kind, as a place in `places`.
        tied: whether units of the model share weights.
    """

    places: Sequence[int]
    kinds: Sequence[int]
    tied: bool


def kinds_of(model: Any) -> Kinds:
    """Returns which layers of a model are alike: in code, options, sizes, types, and in what of them is trained.

    The whole model is declared here once, as if for one device, so that what cannot be run is refused.

    Args:
        model: a Transformers model, perhaps a `PeftModel`.

    Raises:
        ValueError: the model cannot be run.
    """
    base, config = base_of(model), HelixConfig()
    family = family_of(base)
    layers = list(family.layers(base))
    whole = declare(model, config, paper_mesh({}).mesh, modes_of(layers, None, config)).stage
    keys = [
        (
            family.layer_key(base, place),
            bool(getattr(layer, "gradient_checkpointing", False)),
            tuple((weight.dtype, weight.requires_grad) for weight in layer.parameters()),
        )
        for place, layer in enumerate(layers)
    ]
    distinct = list(dict.fromkeys(keys))
    tied = any(len({index for index, _ in row}) > 1 for row in whole.layout.shared)
    return Kinds([keys.index(key) for key in distinct], [distinct.index(key) for key in keys], tied)


def amounts_of(
    model: Any,
    config: HelixConfig,
    batch: int,
    length: int,
    autocast_dtype: torch.dtype | None = None,
    inter_node_axes: Collection[str] = (),
    backend: str = "nccl",
    kinds: Kinds | None = None,
    dp_size: int = 1,
) -> Amounts:
    """Returns what a rank does for a micro-batch. The model is not changed, and must be on the meta device.

    Args:
        model: a Transformers model, perhaps a `PeftModel`.
        config: the sizes of the mesh, and how the model is cut.
        batch: sequences in a micro-batch.
        length: tokens in a sequence.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.
        inter_node_axes: the axes that communicate between nodes.
        backend: "nccl", which adds up what it reduces, and operators take the ways of a GPU; or "gloo", those of a CPU.
        kinds: which layers are alike; None to find out.
        dp_size: data-parallel ranks, over which `config.shard_parameters` spreads weights.

    Raises:
        ValueError: the model cannot be cut like this.
    """
    base = base_of(model)
    family = family_of(base)
    sizes = {"tp": config.tp_size, "cp": config.cp_size, "ep": config.ep_size}
    ranks = Sizes(cp=config.cp_size, dp=dp_size, ep=config.ep_size)
    spread = ranks.spread() if config.shard_parameters else {}
    paper = paper_mesh(sizes, inter_node_axes, backend == "nccl", spread)
    kinds = kinds or kinds_of(model)
    make_buffers = family.empty(base, config.tp_size)
    modes = modes_of(family.layers(base), None, config)
    modes, places = [modes[place] for place in kinds.places], kinds.places
    declared = declare(model, config, paper.mesh, modes, places=places, autocast_dtype=autocast_dtype).stage
    about = _about(base, declared, kinds)
    stage = _one_of_each(declared)
    whole = {parameter: parameter.data for parameter in stage.all_placements}
    try:
        _cut(stage, paper)
        plan = make_plan("sequential", rough_profile(stage.layout), model=type(base).__name__, mesh=sizes)
        streams = PaperStreams(paper.log)
        runner = Runner(stage, plan, paper.mesh, streams, Scheduler(config.schedule, 1), 0, autocast_dtype)
        ids = torch.zeros(batch, length, dtype=torch.long, device=META)
        scale = LossScale(torch.ones((), device=META))
        window = WindowMaker(base, paper.mesh).microbatch({"input_ids": ids, "labels": ids}, scale, (0, 0))
        handed_on = sum(value.nbytes for value in make_buffers(window.prepare()))
        with meta_as(backend):
            return count_amounts(runner, window, handed_on, about, spread)
    finally:
        for parameter, value in whole.items():
            parameter.data, parameter.grad = value, None


def _about(base: Any, stage: Stage, kinds: Kinds) -> Model:
    """Returns what a layout needs to know of the whole model, of which the stage has one layer of each kind."""
    flops, head_cost = token_flops(base), family_of(base).head_cost(base)
    first, *layers, last = [unit.name for _, unit in sorted(stage.model.items())]
    units = [first, *(layers[kind] for kind in kinds.kinds), last]
    return Model(type(base).__name__, units, head_cost, kinds.tied, flops.linear, flops.attention_per_length)


def _one_of_each(stage: Stage) -> Stage:
    """Returns a stage with the first unit of every name: layers that differ may have equal operators."""
    units: dict[str, Unit] = {}
    for unit in stage.model.values():
        units.setdefault(unit.name, unit)
    return place_units(list(units.values()))


def _cut(stage: Stage, paper: PaperMesh) -> None:
    for parameter, placement in stage.all_placements.items():
        axis = paper.mesh.axis_of(placement)
        parameter.grad = None
        parameter.data = placement.cut(parameter.data, axis.size, axis.rank)
    for flat in stage.flats:
        flat.spread(META)
