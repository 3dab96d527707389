"""The fold: stages cover the layers once and in order, evenly, and ranks hold what the paper's example says."""

from __future__ import annotations

import pytest

from hf_helix.planning.fold import chunks_of_rank, fold_layers

SIZES = [(layers, ranks) for ranks in range(1, 6) for layers in range(1, 24) if ranks == 1 or layers >= 2 * ranks]


@pytest.mark.parametrize(("num_layers", "num_ranks"), SIZES)
def test_stages_cover_every_layer_once_in_order_and_evenly(num_layers: int, num_ranks: int):
    stages = fold_layers(num_layers, num_ranks)
    assert len(stages) == 2 * num_ranks
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert num_ranks == 1 or min(sizes) >= 1


@pytest.mark.parametrize("num_ranks", range(1, 6))
def test_every_stage_is_a_chunk_of_one_rank(num_ranks: int):
    chunks = [chunk for rank in range(num_ranks) for chunk in chunks_of_rank(rank, num_ranks)]
    assert sorted(chunks) == list(range(2 * num_ranks))
    assert chunks_of_rank(0, num_ranks) == (0, 2 * num_ranks - 1), "embedding and head are on rank 0"


@pytest.mark.parametrize("num_ranks", range(2, 6))
def test_neighbouring_stages_are_on_neighbouring_ranks(num_ranks: int):
    home = {chunk: rank for rank in range(num_ranks) for chunk in chunks_of_rank(rank, num_ranks)}
    steps = [abs(home[stage + 1] - home[stage]) for stage in range(2 * num_ranks - 1)]
    assert steps == [1] * (num_ranks - 1) + [0] + [1] * (num_ranks - 1)


def test_the_paper_example_of_32_layers_on_4_ranks():
    stages = fold_layers(32, 4)
    held = [tuple(list(stages[chunk]) for chunk in chunks_of_rank(rank, 4)) for rank in range(4)]
    assert held == [
        ([0, 1, 2, 3], [28, 29, 30, 31]),
        ([4, 5, 6, 7], [24, 25, 26, 27]),
        ([8, 9, 10, 11], [20, 21, 22, 23]),
        ([12, 13, 14, 15], [16, 17, 18, 19]),
    ]


@pytest.mark.parametrize(("num_layers", "num_ranks", "fits"), [(3, 2, 1), (7, 4, 3), (1, 2, 1)])
def test_too_few_layers_are_refused_with_a_size_that_fits(num_layers: int, num_ranks: int, fits: int):
    message = rf"{num_layers} layers and pp_size={num_ranks} needs at least {2 * num_ranks}; .* that fits is {fits}$"
    with pytest.raises(ValueError, match=message):
        fold_layers(num_layers, num_ranks)
    assert len(fold_layers(num_layers, fits)) == 2 * fits


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="has 0 layers"):
        fold_layers(0, 1)
