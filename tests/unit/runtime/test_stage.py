"""Stages: every rank describes the same layout, each unit is on one rank, and nothing of another rank's is kept."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import llama

from hf_helix.checkpoint.shard import cut_parameters
from hf_helix.models.families.llama import Llama
from hf_helix.models.graph.context import ParallelContext
from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.planning.graph.backward import RECEIVE, SEND
from hf_helix.planning.schedule.placement import FOLD, LINEAR, stage_ranks
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.distributed.pipe import Pipe
from hf_helix.runtime.intra_batch import tile_stage
from hf_helix.runtime.stage import Stage, place_units

SIZES = [(placement, size) for placement in (FOLD, LINEAR) for size in (2, 3)]


class FakePipe(Pipe):
    """A rank of a pipeline without processes; `ways` is what it was asked for."""

    def __init__(self, rank: int, size: int) -> None:
        self.ranks, self.size, self.rank = list(range(size)), size, rank
        self.ways: list[tuple[int, int, bool]] = []

    def channel(self, boundary: int, peer: int, outward: bool) -> Any:
        self.ways.append((boundary, peer, outward))
        return SimpleNamespace(boundary=boundary)


def placed(rank: int, size: int, placement: str = FOLD, model: Any = None, **options: Any) -> tuple[Stage, FakePipe]:
    pipe = FakePipe(rank, size)
    model = model or llama(num_hidden_layers=7)
    axis = options.pop("axis", Axis.single())
    return place_units(Llama().units(model, ParallelContext(axis)), pipe, torch.empty_like, placement, **options), pipe


def labels(stage: Stage) -> list[str]:
    return [unit.label for unit in stage.units.values()]


def test_the_fold_of_two_ranks_by_hand() -> None:
    model = llama(num_hidden_layers=4)
    stages = [placed(rank, 2, model=model)[0] for rank in range(2)]
    assert labels(stages[0]) == ["embedding", "layers.0", "send.0", "receive.2", "layers.3", "head"]
    assert labels(stages[1]) == ["receive.0", "layers.1", "layers.2", "send.2"]
    assert stages[0].layout.describe().splitlines() == [
        "stage 0 on rank 0: embedding layer send",
        "stage 1 on rank 1: receive layer",
        "stage 2 on rank 1: layer send",
        "stage 3 on rank 0: receive layer head",
    ]


def test_one_rank_holds_everything_and_no_ends() -> None:
    stage = place_units(Llama().units(llama(), ParallelContext()))
    assert labels(stage) == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    assert stage.ends == {}
    assert stage.units == stage.model
    assert not {SEND, RECEIVE} & stage.layout.graphs.keys()
    assert stage.units[stage.head].name == "head"


@pytest.mark.parametrize(("placement", "size"), SIZES)
def test_every_rank_describes_the_same_layout(placement: str, size: int) -> None:
    first, *others = (placed(rank, size, placement)[0] for rank in range(size))
    assert first.layout.ranks == stage_ranks(placement, size)
    for other in others:
        assert other.layout == first.layout
        assert other.layout.describe() == first.layout.describe()
        assert other.head == first.head


@pytest.mark.parametrize(("placement", "size"), SIZES)
def test_every_unit_is_on_one_rank_in_forward_order(placement: str, size: int) -> None:
    result = [placed(rank, size, placement)[0] for rank in range(size)]
    indices = [index for stage in result for index in stage.units]
    assert sorted(indices) == list(range(len(result[0].layout.units)))
    for stage in result:
        assert list(stage.units) == sorted(stage.units)
        for index, unit in stage.units.items():
            assert unit.name == stage.layout.units[index]
            assert stage.layout.rank_of(index) == stage.rank
    in_order = {index: unit.label for stage in result for index, unit in stage.units.items() if index in stage.model}
    model = ["embedding", *(f"layers.{layer}" for layer in range(7)), "head"]
    assert [in_order[index] for index in sorted(in_order)] == model


@pytest.mark.parametrize(("placement", "size"), SIZES)
def test_every_parameter_has_one_owner(placement: str, size: int) -> None:
    model = llama(num_hidden_layers=7)
    held: Counter[torch.nn.Parameter] = Counter()
    for rank in range(size):
        stage, _ = placed(rank, size, placement, model)
        held.update(stage.placements.keys())
        assert {parameter for parameter, owner in stage.owners.items() if owner == rank} == set(stage.placements)
        assert stage.owners.keys() == set(model.parameters())
    assert held == Counter(model.parameters())


@pytest.mark.parametrize(("placement", "size"), SIZES)
def test_every_way_has_an_end_on_each_side(placement: str, size: int) -> None:
    ranks = stage_ranks(placement, size)
    crossing = {boundary for boundary in range(len(ranks) - 1) if ranks[boundary] != ranks[boundary + 1]}
    result = set()
    for rank in range(size):
        stage, pipe = placed(rank, size, placement)
        result |= {(boundary, rank, peer, outward) for boundary, peer, outward in pipe.ways}
        for index, transfer in stage.transfers():
            assert stage.layout.units[index] in (SEND, RECEIVE)
            assert transfer.channel.boundary == transfer.boundary  # type: ignore[attr-defined]
    ends = {(b, ranks[b], ranks[b + 1], True) for b in crossing} | {
        (b, ranks[b + 1], ranks[b], False) for b in crossing
    }
    assert result == ends


def test_layers_may_be_given_by_stage() -> None:
    stage, _ = placed(1, 2, layers_per_stage=[1, 4, 1, 1])
    assert labels(stage) == ["receive.0", *(f"layers.{layer}" for layer in (1, 2, 3, 4, 5)), "send.2"]
    with pytest.raises(ValueError, match=r"layers_per_stage=\[7\]"):
        placed(0, 2, layers_per_stage=[7])


def test_the_head_is_counted_as_layers() -> None:
    """One that costs three layers leaves its rank fewer of them."""
    light, heavy = (placed(0, 2, head_cost=cost)[0] for cost in (0.0, 3.0))
    assert sum(label.startswith("layers") for label in labels(light)) >= 3
    assert sum(label.startswith("layers") for label in labels(heavy)) == 2


def test_a_tied_weight_stays_on_one_rank_or_is_refused() -> None:
    tied = llama(num_hidden_layers=4, tie_word_embeddings=True)
    stage, _ = placed(0, 2, FOLD, tied)
    ((head, embedding),) = stage.layout.shared
    assert (stage.layout.units[head[0]], stage.layout.units[embedding[0]]) == ("head", "embedding")
    assert placed(1, 2, FOLD, tied)[0].layout.shared == stage.layout.shared
    for rank in range(2):
        with pytest.raises(
            ValueError, match=r"embedding shares a weight .*tied.*schedule='auto'.*tie_word_embeddings=False"
        ):
            placed(rank, 2, LINEAR, tied)


def test_tiles_leave_the_ways_between_ranks() -> None:
    stage, _ = placed(1, 2, axis=Axis(SilentTransport(2, 0)))
    tiled = tile_stage(stage, 2)
    assert tiled.ends == stage.ends
    assert list(tiled.units) == list(stage.units)
    assert tiled.layout.describe() == stage.layout.describe()
    assert tiled.layout.graphs[SEND] == stage.layout.graphs[SEND]
    assert tiled.layout.graphs["layer"] != stage.layout.graphs["layer"]


# Cutting


def mesh_of(pipe: Pipe, axis: Axis) -> Mesh:
    sizes = {"dp": 1, "pp": pipe.size, "cp": 1, "tp": axis.size, "ep": 1}
    return Mesh(sizes, torch.device("cpu"), None, axis, Axis.single(), axis, pipe, None, None, None, None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_rank_keeps_its_slices_and_nothing_of_the_others(rank: int, tp_size: int) -> None:
    axis = Axis(SilentTransport(tp_size, tp_size - 1)) if tp_size > 1 else Axis.single()
    model, whole = llama(num_hidden_layers=4), llama(num_hidden_layers=4).state_dict()
    stage, pipe = placed(rank, 2, model=model, axis=axis)
    frozen = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    frozen.requires_grad_(False)
    cut_parameters(stage, mesh_of(pipe, axis))
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert names.keys() == stage.owners.keys(), "the same names and parameters as before"
    for parameter, owner in stage.owners.items():
        if owner != rank:
            assert parameter.numel() == 0
            assert not parameter.requires_grad
            continue
        assert parameter.requires_grad == (parameter is not frozen)
        expected, placement = whole[names[parameter]], stage.placements[parameter]
        assert torch.equal(parameter, placement.cut(expected, axis.size, axis.rank))
    assert any(owner != rank for owner in stage.owners.values())
