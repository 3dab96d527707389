"""Counts a model: the amounts of one rank of a layout, without the machine.

In:   a Transformers configuration, or a model on the meta device; a `HelixConfig`, and the sizes of a micro-batch.
Out:  `Facts`, `Amounts`.
Must hold: the units are declared as for training; one layer of each kind is declared and run, for any number of
layers.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_helix.config import HelixConfig
from hf_helix.doctor.amounts.amounts import META, SimulatedStreams, WindowCounter, of_slices_alone, simulated_mesh
from hf_helix.doctor.amounts.meter import LargestPosition, Meter, meta_as
from hf_helix.doctor.amounts.records import Amounts, Facts, Model, Transfer
from hf_helix.doctor.case import Case
from hf_helix.engine.cut.build import cut_units
from hf_helix.engine.cut.microbatches import LossScale, WindowMaker
from hf_helix.engine.cut.recompute import modes_of
from hf_helix.engine.synthetic import model_on_meta
from hf_helix.models.derived.family import Family
from hf_helix.models.derived.towers import IMAGES
from hf_helix.models.graph.experts import is_experts
from hf_helix.models.registry import family_for, family_of, settled
from hf_helix.models.stock.peft import base_of
from hf_helix.operators.experts.moe import assuming
from hf_helix.operators.parameters.parts import cut_tensor
from hf_helix.operators.units.unit import Unit
from hf_helix.operators.vocabulary.head import whole_logits
from hf_helix.operators.vocabulary.pipeline import slice_buffers
from hf_helix.operators.vocabulary.statistics import LOSS
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.graph.backward import FIRST, NEXT
from hf_helix.planning.rules.registry import baseline_plan
from hf_helix.planning.schedule.placement import FRONT, REAR, split_layers, stage_ranks
from hf_helix.planning.timing.sizes import Sizes
from hf_helix.report.flops import token_flops
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.rank_units import RankUnits, place_units
from hf_helix.runtime.runner import Runner
from hf_helix.tuning.cache import model_digest

TYPES = {"bf16": torch.bfloat16, "fp32": None}
"""Type of matrix products in cluster files -> type of autocast; None without autocast."""


class Counter:
    """Counts the layouts of a model on the meta device; the model is given, or its configuration, or the path of it.

    Args:
        model: the model.
        images_per_row: 0 for rows of text, whose tower is not counted.
    """

    def __init__(self, model: Any, images_per_row: int | None = None) -> None:
        self.model = model if isinstance(model, nn.Module) else model_on_meta(model)
        self.base = base_of(self.model)
        self._images_per_row = images_per_row
        self._kinds: Kinds | None = None
        self._ranks: dict[Hashable, CutRank] = {}
        self._texts: dict[nn.Module, str] = {}  # of layers, see `settled`

    def facts(self) -> Facts:
        """Returns the properties of the model."""
        family, tokens, reason = family_of(self.base), 0, ""
        try:
            tokens = _image_tokens(self.base) if self._images_per_row != 0 else 0
        except ValueError as error:
            reason = str(error)
        weights = [weight for module in self.model.modules() if is_experts(module) for weight in module.parameters()]
        return Facts(
            type(self.base).__name__,
            len(list(family.layers(self.base))),
            max((len(weight) for weight in weights if weight.dim() == 3), default=1),
            family.num_positions(self.base),
            tokens,
            reason,
            model_digest(self.base, with_types=False),
            sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad),
        )

    def amounts(self, case: Case, backend: str, images: int, crossing: Collection[str]) -> Amounts:
        """Returns the amounts of a rank for a micro-batch. Raises ValueError if the model cannot be cut like this.

        Args:
            case: the layout, the micro-batch and the options.
            backend: of the cluster.
            images: in the rows of a micro-batch.
            crossing: the axes between nodes.
        """
        if self._kinds is None:
            family_of(self.base)
        logits = whole_logits() if case.whole_logits else nullcontext()
        with settled(self.base, self._texts), assuming(case.imbalance), logits:
            return self._rank_of(case, backend, crossing).amounts(case.batch, case.length, images)

    def _rank_of(self, case: Case, backend: str, crossing: Collection[str]) -> CutRank:
        """Returns the rank of a case, cut once for micro-batches of all sizes."""
        halved, spread = bool(case.config.layers_per_stage), tuple(case.spread_weights.items())
        key = case.counted, halved, spread, case.dtype, case.whole_logits, case.imbalance, backend, tuple(crossing)
        if key not in self._ranks:
            family_for(self.base, case.sizes.tp)
            run = self.kinds(halved), TYPES[case.dtype], backend, case.sizes.dp, crossing
            self._ranks[key] = CutRank(self.model, case.counted, *run)
        return self._ranks[key]

    def kinds(self, halved: bool = False) -> Kinds:
        """Returns the kinds of layers; with halves of layers only for cases that may cut layers (`halved`)."""
        if self._kinds is None or self._kinds.family is not family_of(self.base):
            self._kinds = kinds_of(self.model)
        return self._kinds if halved else replace(self._kinds, halved=())


@dataclass(frozen=True)
class Kinds:
    """The kinds of equal layers of a model; one layer represents each kind."""

    family: Family
    firsts: Sequence[int]  # the first layer of each kind
    halved: Sequence[int]  # the second layer of each kind, for the amounts of a layer between two stages
    kinds: Sequence[int]  # for every layer, the index of its kind in `firsts`
    model: Model  # the model, without the names of its units


def kinds_of(model: Any) -> Kinds:
    """Returns the kinds of layers of a model, equal in code, options, sizes, types and trained parameters. The full
    model is declared once, as if for one device, so a model that cannot be run is refused here with ValueError."""
    base, config = base_of(model), HelixConfig()
    family = family_of(base)
    layers = list(family.layers(base))
    whole = cut_units(model, config, simulated_mesh({}), modes_of(layers, None, config)).rank_units
    by_data = [unit.label for unit in whole.all_units.values() if unit.by_data]
    if by_data:
        raise ValueError(
            f"{type(base).__name__}: {by_data[0]} has a block whose work depends on the values of a batch, and the "
            "doctor counts without values; measure layouts instead: hf-helix profile, or a short run of each"
        )
    keys = [
        (
            family.layer_key(base, index),
            bool(getattr(layer, "gradient_checkpointing", False)),
            tuple((weight.dtype, weight.requires_grad) for weight in layer.parameters()),
        )
        for index, layer in enumerate(layers)
    ]
    distinct = list(dict.fromkeys(keys))
    tied = any(len({index for index, _ in row}) > 1 for row in whole.layout.shared)
    costs = family.head_cost(base), family.embedding_cost(base, 1.0), family.first_least
    about = Model(type(base).__name__, (), *costs, tied, token_flops(base))
    kinds = [distinct.index(key) for key in keys]
    halved = [kinds.index(kind, kinds.index(kind) + 1) for kind in range(len(distinct)) if kinds.count(kind) > 1]
    named = {unit.name: unit for unit in whole.all_units.values() if unit.graphs.forward.repeats}
    if len(halved) < len(distinct) or any(layer.halves() is None for layer in named.values()):
        halved = []
    return Kinds(family, [keys.index(key) for key in distinct], halved, kinds, about)


class CutRank:
    """A rank of a layout on the meta device, cut once: its micro-batches of any sizes are counted.

    Outside of `amounts` the model is not changed.

    Args:
        model: on the meta device.
        config: the layout.
        kinds: of the model's layers.
        autocast_dtype: the type of autocast; None for none.
        backend: of the cluster.
        dp_size: number of data-parallel ranks.
        inter_node_axes: the axes between nodes; ranks of all other axes are in one node.

    Raises:
        ValueError: the model cannot be cut to these sizes.
    """

    def __init__(
        self,
        model: Any,
        config: HelixConfig,
        kinds: Kinds,
        autocast_dtype: torch.dtype | None = None,
        backend: str = "nccl",
        dp_size: int = 1,
        inter_node_axes: Collection[str] = (),
    ) -> None:
        self._base, self._config, self._backend = base_of(model), config, backend
        self._family, self._dtype, log = kinds.family, autocast_dtype, list[Transfer]()
        spread = Sizes(cp=config.cp_size, dp=dp_size, ep=config.ep_size).spread() if config.shard_parameters else {}
        self._mesh = mesh = _mesh_of(config, backend, spread, inter_node_axes, log)
        self._make_buffers = self._family.empty(self._base, config.tp_size)
        declared = _declared(model, config, mesh, kinds, autocast_dtype)
        names = [unit.name for _, unit in sorted(declared.all_units.items())]
        parts = (FRONT, REAR), (FIRST, NEXT)
        first, *layers, last = [name for name in names if not name.startswith(parts[0]) and not name.endswith(parts[1])]
        about = replace(kinds.model, units=[first, *(layers[kind] for kind in kinds.kinds), last])
        rank_units = _one_of_each(declared)
        self._own: dict[Any, tuple[Tensor, Tensor | None]] = {}  # the rank's part of each parameter, and its gradient
        for parameter, row in rank_units.rows.items():
            axis = mesh.axis_of(row.cut)
            self._own[parameter] = cut_tensor(parameter.data, row.cut, axis.size, axis.rank), None
        with self._cut():
            for flat in rank_units.flat_parameters:
                flat.shard_in_place(META)
            plan = baseline_plan(rank_units.layout, model=type(self._base).__name__, mesh=config.option_sizes)
            types, scheduler = (autocast_dtype, config.fused_kernels), Scheduler(config.schedule, 1)
            runner = Runner(rank_units, plan, mesh, SimulatedStreams(log), scheduler, 0, *types)
        self._counter = WindowCounter(runner, about, spread)

    def amounts(self, batch: int, length: int, images: int = 0) -> Amounts:
        """Returns the amounts for a micro-batch of `batch` sequences, with a number of sample `images` in all
        (`Towers.sample`)."""
        config = self._config
        with self._cut():
            ids = torch.zeros(batch, length, dtype=torch.long, device=META)
            scale = LossScale(torch.ones((), device=META))
            window = WindowMaker(self._base, self._mesh).microbatch({"input_ids": ids, "labels": ids}, scale, (0, 0))
            towers = self._family.towers
            with LargestPosition():
                side = window.prepare()
            side = {**side, **({IMAGES: towers.sample(images)} if towers is not None and images else {})}
            window = replace(window, prepare=lambda: side)
            handed_on = sum(value.nbytes for value in self._make_buffers(side))
            dtype = self._dtype or self._base.dtype
            slices = slice_buffers(self._make_buffers, config.tp_size, len(LOSS), dtype)(config.pp_size // 2)(side)
            with meta_as(self._backend):
                amounts = self._counter.amounts(window, handed_on)
        amounts = replace(amounts, handed_over=sum(value.nbytes for value in slices))
        return of_slices_alone(amounts) if config.spread_vocabulary else amounts

    @contextmanager
    def _cut(self) -> Iterator[None]:
        """Gives the parameters of the model their values and gradients on this rank."""
        whole = {parameter: (parameter.data, parameter.grad) for parameter in self._own}
        try:
            _give(self._own)
            yield
        finally:
            self._own = {parameter: (parameter.data, parameter.grad) for parameter in whole}
            _give(whole)


def _give(values: Mapping[Any, tuple[Tensor, Tensor | None]]) -> None:
    """Gives parameters values and gradients."""
    for parameter, (value, gradient) in values.items():
        parameter.grad = None  # a gradient of another shape would be refused
        parameter.data, parameter.grad = value, gradient


def amounts_of(
    model: Any,
    config: HelixConfig,
    batch: int,
    length: int,
    autocast_dtype: torch.dtype | None = None,
    backend: str = "nccl",
    kinds: Kinds | None = None,
    dp_size: int = 1,
    images: int = 0,
    inter_node_axes: Collection[str] = (),
) -> Amounts:
    """Returns the amounts of a rank for a micro-batch of `batch` sequences; for the arguments see `CutRank`. The model
    is not changed. Raises ValueError if the model cannot be cut to these sizes."""
    kinds = kinds or replace(kinds_of(model), halved=())
    rank = CutRank(model, config, kinds, autocast_dtype, backend, dp_size, inter_node_axes)
    return rank.amounts(batch, length, images)


def _image_tokens(base: Any) -> int:
    """Returns the tokens of a sample image in the text; 0 for a model without a tower. Raises ValueError if the work of
    the tower cannot be counted."""
    towers = family_of(base).towers
    if towers is None:
        return 0
    try:
        with torch.no_grad(), Meter():
            return len(towers.features(towers.sample(1))[0])
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"the tower of {type(base).__name__} is not counted: its code reads values of images ({reason})"
        ) from error


def check_cut(model: Any, kinds: Kinds, config: HelixConfig) -> None:
    """Raises ValueError if a layout does not divide the sizes of a model, with the sizes that do. The model is
    declared on the meta device; nothing is run.

    Args:
        model: on the meta device.
        kinds: of its layers, see `kinds_of`.
        config: the layout.
    """
    split_layers(len(kinds.kinds), stage_ranks(Scheduler(config.schedule, config.pp_size).placement, config.pp_size))

    def reason(tp_size: int) -> ValueError | None:
        try:
            family_for(base_of(model), tp_size)
            tried = replace(config, tp_size=tp_size, pp_size=1)
            _declared(model, tried, _mesh_of(tried), replace(kinds, halved=()), None)
        except ValueError as error:
            return error
        return None

    error = reason(config.tp_size)
    if error is not None:
        fits = [size for size in range(config.tp_size - 1, 0, -1) if reason(size) is None]
        hint = f"; tp_size={fits[0]} works" if fits and "that work" not in str(error) else ""
        raise ValueError(f"{error}{hint}") from error


def _mesh_of(
    config: HelixConfig,
    backend: str = "nccl",
    spread: Mapping[str, int] | None = None,
    inter_node_axes: Collection[str] = (),
    log: list[Transfer] | None = None,
) -> Mesh:
    """Returns the mesh of a layout; for the arguments see `simulated_mesh`."""
    sizes = {"tp": config.tp_size, "cp": config.cp_size, "ep": config.ep_size}
    sizes["vocabulary"] = config.tp_size * config.pp_size
    return simulated_mesh(sizes, inter_node_axes, backend == "nccl", spread, config.streams_weights, log)


def _declared(
    model: Any, config: HelixConfig, mesh: Mesh, kinds: Kinds, autocast_dtype: torch.dtype | None
) -> RankUnits:
    """Returns the embedding, the first layer of each kind, the halves of a second, and the head, uncut; arguments as of
    `amounts_of`."""
    layer_indices = sorted([*kinds.firsts, *kinds.halved])
    modes = modes_of(kinds.family.layers(base_of(model)), None, config)
    modes = [modes[index] for index in layer_indices]
    return cut_units(model, config, mesh, modes, None, layer_indices, kinds.halved, autocast_dtype).rank_units


def _one_of_each(rank_units: RankUnits) -> RankUnits:
    """Returns a rank's units with the first unit of every name: layers of different kinds may have equal operators."""
    units: dict[str, Unit] = {}
    for unit in rank_units.all_units.values():
        units.setdefault(unit.name, unit)
    return place_units(list(units.values()))
