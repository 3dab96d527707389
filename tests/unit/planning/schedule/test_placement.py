"""Placements: stages cover the layers once and in order, no split is better, and ranks hold what the paper says."""

import itertools
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import pytest

from hf_helix.planning.schedule.placement import (
    FOLD,
    LINEAR,
    WORTH_A_CUT,
    count_layers,
    ranges_of,
    split_layers,
    stage_ranks,
    stages_of_rank,
)

PLACEMENTS = [FOLD, LINEAR]
SIZES = [(layers, ranks) for ranks in range(1, 6) for layers in range(1, 24) if ranks == 1 or layers >= 2 * ranks]


def held(stages: Sequence[range], ranks: Sequence[int]) -> list[tuple[list[int], ...]]:
    """The layers of each rank's stages."""
    return [tuple(list(stages[s]) for s in stages_of_rank(rank, ranks)) for rank in range(max(ranks) + 1)]


def sizes(stages: Sequence[range]) -> list[int]:
    return [len(stage) for stage in stages]


# Placements


def test_the_stages_of_the_paper_and_of_megatron():
    assert stage_ranks(FOLD, 4) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert stage_ranks(FOLD, 1) == (0, 0)
    assert stage_ranks(LINEAR, 4) == (0, 1, 2, 3)
    assert stage_ranks(LINEAR, 1) == (0,)


# Layers


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stages_cover_every_layer_once_in_order_and_evenly(placement: str):
    for num_layers, num_ranks in SIZES:
        ranks = stage_ranks(placement, num_ranks)
        assert sorted(stage for rank in range(num_ranks) for stage in stages_of_rank(rank, ranks)) == [
            *range(len(ranks))
        ]
        stages = split_layers(num_layers, ranks)
        assert len(stages) == len(ranks)
        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
        assert max(sizes(stages)) - min(sizes(stages)) <= 1
        assert num_ranks == 1 or min(sizes(stages)) >= 1


def test_a_head_as_heavy_as_layers_takes_their_place():
    """A 128k vocabulary: rank 0 gets two layers fewer than the others, both from the end that holds the head. One rank
    is split in the middle whatever things cost."""
    assert sizes(split_layers(30, stage_ranks(FOLD, 4), head_cost=2.0)) == [4, 4, 4, 4, 4, 4, 4, 2]
    assert sizes(split_layers(14, stage_ranks(LINEAR, 4), head_cost=2.0)) == [4, 4, 4, 2]
    assert sizes(split_layers(8, stage_ranks(FOLD, 2), head_cost=100.0)) == [1, 3, 3, 1], "one layer a stage at least"
    assert split_layers(5, (0, 0), head_cost=100.0) == [range(3), range(3, 5)]
    assert split_layers(5, (0,), head_cost=100.0) == [range(5)]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as so many counts of at least one."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *rest) for rest in compositions(total - first, parts - 1))


def loads(counts: Sequence[int], ranks: Sequence[int], head: float) -> tuple[float, list[float]]:
    """The heaviest rank's, and those of every rank's heaviest stage."""
    stages = [float(count) for count in counts]
    stages[-1] += head
    of_ranks = [[stages[s] for s in stages_of_rank(rank, ranks)] for rank in range(max(ranks) + 1)]
    return max(map(sum, of_ranks)), [max(result) for result in of_ranks]


@pytest.mark.parametrize("seed", range(40))
def test_no_split_is_better(seed: int):
    """Against every other one: no lighter heaviest rank; no more even stages of a rank with as many layers."""
    dice = random.Random(seed)
    placement = dice.choice(PLACEMENTS)
    num_ranks = dice.randint(2, 3 if placement == FOLD else 5)
    ranks = stage_ranks(placement, num_ranks)
    num_layers = len(ranks) + dice.randint(0, 7)
    head = dice.choice([0.0, 0.25, 1.0, dice.uniform(0, 6)])
    result = split_layers(num_layers, ranks, head_cost=head)
    heaviest, stages = loads(sizes(result), ranks, head)
    of_ranks = [sum(map(len, chunks)) for chunks in held(result, ranks)]
    for counts in compositions(num_layers, len(ranks)):
        other_heaviest, other_stages = loads(counts, ranks, head)
        assert heaviest <= other_heaviest + 1e-9, counts
        for rank in range(num_ranks):
            if sum(counts[s] for s in stages_of_rank(rank, ranks)) == of_ranks[rank]:
                assert stages[rank] <= other_stages[rank] + 1e-9, counts


# What the user asks for


def test_layers_per_stage_is_followed():
    counts = [1, 4, 2, 3]
    assert sizes(split_layers(10, (0, 1, 1, 0), layers_per_stage=counts, head_cost=9.0)) == counts
    assert split_layers(3, (0, 0), layers_per_stage=(1, 2)) == [range(1), range(1, 3)]
    assert split_layers(3, (0,), layers_per_stage=[3]) == [range(3)]
    halves = [0.5, 1, 1, 0.5]  # of fewer layers than stages
    assert count_layers(3, (0, 1, 1, 0), layers_per_stage=halves) == halves
    with pytest.raises(ValueError, match=r"such as layers_per_stage=\[1\.0, 1\.0, 0\.5, 0\.5\]"):
        count_layers(3, (0, 1, 1, 0), layers_per_stage=[1, 1, 1, 1])


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([], r"has 0 counts that add up to 0; it needs 4"),
        ([1, 2, 3, 3], r"has 4 counts that add up to 9; it needs 4, .* up to the model's 10 layers"),
        ([0, 4, 3, 3], r"each at least 0"),
    ],
)
def test_layers_per_stage_that_do_not_fit_are_refused_with_some_that_do(counts: list[int], said: str):
    with pytest.raises(ValueError, match=said) as error:
        split_layers(10, (0, 1, 1, 0), layers_per_stage=counts)
    works = str(error.value).rpartition("layers_per_stage=")[2]
    assert f"layers_per_stage={counts}" in str(error.value)
    assert sizes(split_layers(10, (0, 1, 1, 0), layers_per_stage=[int(n) for n in works.strip("[]").split(",")]))


def test_too_few_layers_are_refused_with_a_size_that_fits():
    with pytest.raises(ValueError, match="such as layers_per_stage=None"):
        split_layers(1, (0, 0), layers_per_stage=[1, 0])
    for placement, num_layers, num_ranks, needed, fits in (
        (FOLD, 3, 2, "4", "1; with schedule='1f1b' it needs 2"),
        (FOLD, 7, 4, "8", "3; with schedule='1f1b' it needs 4"),
        (FOLD, 1, 2, "4", "1"),
        (LINEAR, 3, 4, "4", "3"),
    ):
        said = rf"{num_layers} layers and pp_size={num_ranks} needs at least {needed}; .* that fits is {fits}$"
        with pytest.raises(ValueError, match=said):
            split_layers(num_layers, stage_ranks(placement, num_ranks))
        assert sum(sizes(split_layers(num_layers, stage_ranks(placement, int(fits[0]))))) == num_layers
    with pytest.raises(ValueError, match="has 0 layers"):
        split_layers(0, (0, 0))


@pytest.mark.parametrize(("head", "first_half"), [(0.0, 0.5), (0.4, 0.2), (1.3, 0.5), (2.5, 0.2)])
@pytest.mark.parametrize(
    ("num_layers", "ranks"), [(7, stage_ranks(FOLD, 2)), (8, stage_ranks(FOLD, 3)), (6, (0, 1, 2))]
)
def test_halves_of_layers_are_as_even_as_any(
    num_layers: int, ranks: Sequence[int], head: float, first_half: float
) -> None:
    """Every cut in halves of layers is tried."""

    def heaviest(counts: Sequence[float]) -> float:
        ends = [int(end) + first_half * (end % 1 > 0) for end in accumulate(counts, initial=0.0)]
        times = [last - first for first, last in pairwise(ends)]
        times[-1] += head
        return max(sum(times[stage] for stage in stages_of_rank(rank, ranks)) for rank in range(max(ranks) + 1))

    ends = itertools.combinations(range(1, 2 * num_layers), len(ranks) - 1)
    every = ([(last - first) / 2 for first, last in pairwise((0, *each, 2 * num_layers))] for each in ends)
    best = min(map(heaviest, every))
    result = count_layers(num_layers, ranks, head_cost=head, first_half=first_half)
    assert sum(result) == num_layers
    assert heaviest(result) <= best / (1 - WORTH_A_CUT) + 1e-9
    assert all(count % 1 == 0 for count in count_layers(num_layers, ranks, head_cost=head))


def test_a_cut_layer_is_two_units() -> None:
    assert ranges_of([1, 2, 1.5, 1.5]) == ([4], [range(1), range(1, 3), range(3, 5), range(5, 7)])
    assert ranges_of([1.5, 1.5]) == ([1], [range(2), range(2, 4)])
    with pytest.raises(ValueError, match=r"a multiple of 0\.5"):
        count_layers(4, (0, 1), layers_per_stage=[1.25, 2.75])
