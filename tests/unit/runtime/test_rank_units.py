"""Stages: every rank describes the same layout, each unit is on one rank, and nothing of another rank's is kept."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import llama

from hf_helix.models.families.llama import Llama
from hf_helix.models.graph.context import ParallelContext
from hf_helix.operators.base import OperatorContext
from hf_helix.operators.communication.collectives import PipelineTransfer
from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.operators.vocabulary.pipeline import slice_buffers, spread_units
from hf_helix.planning.graph.backward import RECEIVE, SEND
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.schedule.placement import FOLD, LINEAR, SPREAD
from hf_helix.runtime.distributed.pipe import Pipe
from hf_helix.runtime.rank_units import RankUnits, cut_layers, place_units


class FakePipe(Pipe):
    """A rank of a pipeline without processes; `ways` is what it was asked for."""

    def __init__(self, rank: int, size: int) -> None:
        self.ranks, self.size, self.rank = list(range(size)), size, rank
        self.ways: list[tuple[int, int, bool]] = []

    def channel(self, boundary: int, peer: int, outward: bool, number: int = 0) -> Any:
        self.ways.append((boundary, peer, outward))
        return SimpleNamespace(boundary=boundary)


def placed(
    rank: int, size: int, placement: str = FOLD, model: Any = None, **options: Any
) -> tuple[RankUnits, FakePipe]:
    pipe = FakePipe(rank, size)
    model = model or llama(num_hidden_layers=7)
    axis = options.pop("axis", Axis.single())
    return place_units(Llama().units(model, ParallelContext(axis)), pipe, torch.empty_like, placement, **options), pipe


def labels(rank_units: RankUnits) -> list[str]:
    return [unit.label for unit in rank_units.units.values()]


def test_the_fold_of_two_ranks_by_hand() -> None:
    model = llama(num_hidden_layers=4)
    of_ranks = [placed(rank, 2, model=model)[0] for rank in range(2)]
    assert labels(of_ranks[0]) == ["embedding", "layers.0", "send.0", "receive.2", "layers.3", "head"]
    assert labels(of_ranks[1]) == ["receive.0", "layers.1", "layers.2", "send.2"]
    assert of_ranks[0].layout.describe().splitlines() == [
        "stage 0 on rank 0: embedding layer send",
        "stage 1 on rank 1: receive layer",
        "stage 2 on rank 1: layer send",
        "stage 3 on rank 0: receive layer head",
    ]
    # One rank holds everything and no ends.
    rank_units = place_units(Llama().units(llama(), ParallelContext()))
    assert labels(rank_units) == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    assert rank_units.ends == {}
    assert rank_units.units == rank_units.all_units
    assert not {SEND, RECEIVE} & rank_units.layout.graphs.keys()
    assert rank_units.units[rank_units.head].name == "head"


@pytest.mark.parametrize("tied", [False, True])
def test_slices_of_the_vocabulary_are_stages(tied: bool) -> None:
    """Every rank describes the same layout, and has one slice of the embedding and one of the head."""
    of_ranks = []
    for rank in range(3):
        model = llama(num_hidden_layers=6, tie_word_embeddings=tied)
        axis = Axis(SilentTransport(3, rank))
        units = Llama().units(model, ParallelContext(vocabulary=axis))
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        sliced = spread_units(units, table, head, torch.float32, rank, 3)
        buffers = slice_buffers(torch.empty_like, 1, 3, torch.float32)
        of_ranks.append(place_units(sliced, FakePipe(rank, 3), torch.empty_like, SPREAD, of_slice=buffers))
        assert [p for p in of_ranks[-1].own_rows if p is table or p is head] == ([head] if tied else [table, head])
        assert len(of_ranks[-1].model_rows) == len(list(model.parameters()))
    assert labels(of_ranks[0])[:2] == ["receive.1", "embedding.0"]
    assert labels(of_ranks[0])[-2:] == ["head.0", "send.slices.7"]
    assert labels(of_ranks[2])[:2] == ["embedding.2", "send.0"]
    assert labels(of_ranks[2])[-2:] == ["receive.slices.8", "head.2"]
    assert len({repr(rank_units.layout.shared) for rank_units in of_ranks}) == 1
    assert len(of_ranks[0].layout.shared) == 3 * tied
    assert of_ranks[0].layout.describe().splitlines() == [
        "stage 0 on rank 2: embedding.first send",
        "stage 1 on rank 1: receive embedding.next send",
        "stage 2 on rank 0: receive embedding layer send",
        "stage 3 on rank 1: receive layer send",
        "stage 4 on rank 2: receive layer",
        "stage 5 on rank 2: layer send",
        "stage 6 on rank 1: receive layer send",
        "stage 7 on rank 0: receive layer head.first send.slices",
        "stage 8 on rank 1: receive.slices head.next send.slices",
        "stage 9 on rank 2: receive.slices head",
    ]


def test_a_layer_between_two_ranks_is_two_units() -> None:
    units = Llama().units(llama(num_hidden_layers=6), ParallelContext())
    cut, modes, counts = cut_layers(units, ["none"] * 5 + ["full"], (0, 1, 1, 0), layers_per_stage=[1, 2, 1.5, 1.5])
    of_ranks = [place_units(cut, FakePipe(rank, 2), torch.empty_like, layers_per_stage=counts) for rank in range(2)]
    assert labels(of_ranks[0])[-4:] == ["receive.2", "layers.4.rear", "layers.5", "head"]
    assert labels(of_ranks[1])[-3:] == ["layers.3", "layers.4.front", "send.2"]
    assert modes == ["none"] * 6 + ["full"]
    front, rear = (next(unit for unit in cut if unit.name == f"{name}_layer") for name in ("front", "rear"))
    whole = units[5]
    assert [*front.placements, *rear.placements] == list(whole.placements)
    assert [op.name for half in (front, rear) for op in half.graphs.forward.operators] == [
        op.name for op in whole.graphs.forward.operators
    ]
    assert front.graphs.forward.outputs == rear.graphs.forward.inputs
    assert cut_layers(units, ["none"] * 6, (0, 1, 1, 0), layers_per_stage=[1, 2, 2, 1])[0] == units


def test_layers_of_stages() -> None:
    rank_units, _ = placed(1, 2, layers_per_stage=[1, 4, 1, 1])
    assert labels(rank_units) == ["receive.0", *(f"layers.{layer}" for layer in (1, 2, 3, 4, 5)), "send.2"]
    with pytest.raises(ValueError, match=r"layers_per_stage=\[7\]"):
        placed(0, 2, layers_per_stage=[7])
    # One that costs three layers leaves its rank fewer of them.
    light, heavy = (placed(0, 2, head_cost=cost)[0] for cost in (0.0, 3.0))
    assert sum(label.startswith("layers") for label in labels(light)) >= 3
    assert sum(label.startswith("layers") for label in labels(heavy)) == 2


def test_a_tied_weight_stays_on_one_rank_or_is_refused() -> None:
    tied = llama(num_hidden_layers=4, tie_word_embeddings=True)
    rank_units, _ = placed(0, 2, FOLD, tied)
    (adders,) = rank_units.layout.shared
    found = [(rank_units.layout.units[unit], name) for unit, name in adders]
    assert found == [("head", "loss.statistics"), ("head", "head.W"), ("embedding", "lookup")]
    assert placed(1, 2, FOLD, tied)[0].layout.shared == rank_units.layout.shared
    for rank in range(2):
        with pytest.raises(
            ValueError, match=r"embedding shares a weight .*tied.*schedule='auto'.*tie_word_embeddings=False"
        ):
            placed(rank, 2, LINEAR, tied)


def test_features_that_a_first_stage_leaves_over_are_refused() -> None:
    """Images add features behind more layers than the stage has, and the next stage expects none."""
    transfer = PipelineTransfer(None, 0, lambda side: (torch.empty(4, 1, 8), torch.empty(0, 1, 8)))  # type: ignore[arg-type]
    ctx = OperatorContext({}, 0, True)
    transfer.prepare(ctx, Part.F, torch.ones(4, 1, 8), torch.ones(0, 1, 8))
    with pytest.raises(ValueError, match=r"fewer layers than images add features behind.*layers_per_stage"):
        transfer.prepare(ctx, Part.F, torch.ones(4, 1, 8), torch.ones(4, 1, 8))
