"""The units of a rank, over all its virtual pipeline stages.

In:   every unit of the model in forward order, the layers of each virtual stage, and the rank's position in the
      pipeline.
Out:  the rank's units, by their index in a layout that all ranks share.
Must hold: one copy of the parameters serves both strands; every rank describes the same layout.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from torch import nn

from hf_helix.operators.communication.collectives import MakeBuffers, PipelineTransfer
from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.parameters.host_shard import HostShard
from hf_helix.operators.units.rows import Rows, parameter_rows, shared_gradients
from hf_helix.operators.units.unit import Unit
from hf_helix.operators.vocabulary.pipeline import Elsewhere
from hf_helix.planning.graph.backward import OF_SLICES, SEND, GraphPair
from hf_helix.planning.parameters import Parameter, Part, Place
from hf_helix.planning.schedule.placement import (
    FOLD,
    count_layers,
    layer_ranks,
    ranges_of,
    split_layers,
    stage_ranks,
)
from hf_helix.planning.window.layout import Layout, staged_layout
from hf_helix.runtime.distributed.pipe import Pipe

SINGLE = Pipe([0])


@dataclass(frozen=True)
class RankUnits:
    """The units of a rank of the pipeline, over all its virtual stages.

    Attributes:
        layout: the units of all ranks, by name, for planning.
        rank: in the pipeline.
        all_units: the units of the whole model, by index in the layout.
        ends: this rank's ends of the P2P links to other ranks, by index.
        rows: every parameter of `all_units` with its row, in their order.
    """

    layout: Layout
    rank: int
    all_units: Mapping[int, Unit]
    ends: Mapping[int, Unit]
    rows: Mapping[nn.Parameter, Parameter]

    @property
    def units(self) -> dict[int, Unit]:
        """The units of this rank, in forward order."""
        return {index: self.all_units.get(index) or self.ends[index] for index in self.layout.units_of(self.rank)}

    @cached_property
    def model_rows(self) -> Rows:
        """The parameters of the model, without stand-ins for slices of other ranks."""
        return {parameter: row for parameter, row in self.rows.items() if not isinstance(parameter, Elsewhere)}

    @cached_property
    def own_rows(self) -> Rows:
        """The parameters of this rank, in the order of its units."""
        return {parameter: row for parameter, row in self.rows.items() if row.owner == self.rank}

    @property
    def flat_parameters(self) -> list[FlatParameter]:
        """The flat parameters of this rank; empty without ZeRO."""
        return list(dict.fromkeys(flat for unit in self.units.values() for flat in unit.flat_parameters.values()))

    @property
    def shards(self) -> dict[nn.Parameter, nn.Parameter]:
        """This rank's parts of sharded parameters, by parameter."""
        return {parameter: shard for flat in self.flat_parameters for parameter, shard in flat.shards.items()}

    @property
    def host_shards(self) -> list[HostShard]:
        """The shards of this rank on the host."""
        return [flat.host for flat in self.flat_parameters if flat.host is not None]

    def mark_weights_stale(self) -> None:
        """Reports a possible step of an optimizer, after which ZeRO-1 weights are gathered again."""
        for flat in self.flat_parameters:
            flat.mark_stale()

    @property
    def stepped(self) -> list[nn.Parameter]:
        """The parameters for an optimizer, with complete gradients after a window: this rank's parameters, and in place
        of sharded ones their parts on this rank."""
        shards = self.shards
        return [shards.get(parameter, parameter) for parameter in self.own_rows]

    def parts(self, place: Place) -> dict[nn.Parameter, Part]:
        """Returns the parts of this rank as they are now, by the parameter that an optimizer steps: freezing a
        parameter after the cut freezes only the parameter of the model.

        Args:
            place: of this rank.
        """
        shards = self.shards
        return {
            shards.get(parameter, parameter): Part(
                replace(row, trained=parameter.requires_grad, shape=row.cut.full_shape(parameter.shape)), place
            )
            for parameter, row in self.own_rows.items()
        }

    def transfers(self) -> list[tuple[int, PipelineTransfer]]:
        """This rank's ends of the P2P links to other ranks, with their indices in the layout."""
        ends = ((index, unit.operators["transfer"]) for index, unit in self.ends.items())
        return [(index, operator) for index, operator in ends if isinstance(operator, PipelineTransfer)]

    @property
    def head(self) -> int:
        """The index of the unit that computes the loss."""
        return len(self.layout.units) - 1

    @property
    def slice(self) -> int:
        """The index of the unit with this rank's slice of the logits; of the head if a single rank has one."""
        return next((index for index, unit in self.units.items() if unit.logits), self.head)


def place_units(
    units: Sequence[Unit],
    pipe: Pipe = SINGLE,
    make_buffers: MakeBuffers | None = None,
    placement: str = FOLD,
    head_cost: float = 0.0,
    layers_per_stage: Sequence[int] | None = None,
    of_slice: Callable[[int], MakeBuffers] | None = None,
    embedding_cost: float = 0.0,
    first_least: int = 0,
    names: Mapping[nn.Parameter, str] | None = None,
) -> RankUnits:
    """Returns the units of a rank: the embedding goes with the first layers, the head with the last.

    Args:
        units: of the whole model: the embedding, the layers, the head; on the placement `spread` with slices of the
            embedding and of the head, see `hf_helix.operators.vocabulary.pipeline`.
        pipe: the ranks of the pipeline; by default a single rank.
        make_buffers: allocates the buffers for receives from other ranks.
        placement: `fold`, `linear` or `spread`, see `hf_helix.planning.schedule.placement`.
        head_cost, layers_per_stage, embedding_cost, first_least: see `split_layers`.
        of_slice: from a slice of the head to the buffers of its outputs.
        names: of the parameters in the model; None if nobody asks.

    Raises:
        ValueError: too few layers, wrong `layers_per_stage`, or a weight in units of two ranks.
    """
    ranks, folded = stage_ranks(placement, pipe.size), layer_ranks(placement, pipe.size)
    ends_of_slices = len(ranks) - len(folded)  # of the embedding and of the head, after one of each
    ranges = split_layers(
        len(units) - 2 - ends_of_slices,
        folded,
        embedding_cost=embedding_cost,
        head_cost=0.0 if ends_of_slices else head_cost,
        layers_per_stage=layers_per_stage,
        first_least=first_least,
    )
    graphs = {unit.name: unit.graphs for unit in units}
    assert all(unit.graphs.forward == graphs[unit.name].forward for unit in units), (
        "units of one name have equal graphs"
    )
    layout = staged_layout([unit.name for unit in units], graphs, ranks, ranges)
    model: dict[int, Unit] = {}
    ends: dict[int, Unit] = {}
    following = iter(units)
    for stage, index in ((stage, index) for stage, chunk in layout.chunks.items() for index in chunk):
        if not layout.transfers(index):
            model[index] = next(following)
        elif ranks[stage] == pipe.rank:
            assert make_buffers is not None, "several ranks need buffers for transfers between them"
            ends[index] = _end(layout.units[index], layout.graphs, pipe, stage, ranks, make_buffers, of_slice)
    rows = parameter_rows(model, layout.rank_of, names)
    layout = replace(layout, shared=shared_gradients(rows.values()))
    return RankUnits(layout, pipe.rank, model, ends, rows)


def cut_layers(
    units: Sequence[Unit],
    modes: Sequence[str],
    ranks: Sequence[int],
    layers_per_stage: Sequence[float],
) -> tuple[list[Unit], list[str], list[int]]:
    """Returns the units of a model with every layer that two stages share as two units, the modes of all layers and
    halves, and how many of these each virtual stage has.

    Args:
        units: of the whole model: the embedding, the layers, the head.
        modes: the recompute mode of every layer.
        ranks: the rank of each virtual stage.
        layers_per_stage: see `count_layers`.

    Raises:
        ValueError: too few layers, wrong `layers_per_stage`, or halves of layers that cannot be cut.
    """
    counts = count_layers(len(units) - 2, ranks, layers_per_stage=layers_per_stage)
    cut, ranges = ranges_of(counts)
    return *in_halves(units, modes, cut), list(map(len, ranges))


def in_halves(units: Sequence[Unit], modes: Sequence[str], cut: Collection[int]) -> tuple[list[Unit], list[str]]:
    """Returns units, and a mode for each layer, with some layers as two units; for the arguments see `cut_layers`."""
    embedding, *layers, head = units
    parts: list[Sequence[Unit]] = [(layer,) for layer in layers]
    for place in cut:
        halves = layers[place].halves()
        if halves is None:
            raise ValueError(
                f"layers_per_stage cuts {layers[place].label} in the middle, and this layer has no place between "
                "attention and MLP where the residual stream is all that crosses; use whole numbers"
            )
        parts[place] = halves
    modes = [mode for mode, made in zip(modes, parts, strict=True) for _ in made]
    return [embedding, *chain.from_iterable(parts), head], modes


def _end(
    name: str,
    graphs: Mapping[str, GraphPair],
    pipe: Pipe,
    stage: int,
    ranks: Sequence[int],
    make_buffers: MakeBuffers,
    of_slice: Callable[[int], MakeBuffers] | None,
) -> Unit:
    """Returns this rank's end of the P2P link out of a stage, or into it."""
    outward = name.startswith(SEND)
    boundary, peer = (stage, ranks[stage + 1]) if outward else (stage - 1, ranks[stage - 1])
    first = len(ranks) - pipe.size  # the boundary after the first slice of the head
    if name.endswith(OF_SLICES):
        assert of_slice is not None, "slices of the head need buffers"
        make_buffers = of_slice(boundary - first)
    is_of_slices = SEND + OF_SLICES in graphs and not pipe.size - 1 <= boundary < first
    channel = pipe.channel(boundary, peer, outward, int(is_of_slices))
    transfer = PipelineTransfer(channel, boundary, make_buffers)
    return Unit(label=f"{name}.{boundary}", graphs=graphs[name], operators={"transfer": transfer}, placements={})
