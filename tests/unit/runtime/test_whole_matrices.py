"""The assignment of whole parameters to ranks, and their rounds."""

import itertools
from math import prod

import pytest

from hf_helix.runtime.whole_matrices import MOST_ELEMENTS, Holding, Whole, assign, cost_of, rounds_of

Rows = dict[str, list[Holding | None]]


def held(shape: tuple[int, ...], rank: int, size: int, counts: bool = True) -> Holding:
    """A slice of the rows of a matrix."""
    rows = shape[0] // size
    box = ((rank * rows, *[0] * (len(shape) - 1)), (rows, *shape[1:]))
    return Holding(shape, (box,), counts, size == 1)


def over_tp_and_dp(shapes: list[tuple[int, ...]]) -> Rows:
    """Matrices on four ranks: two slices, each on two replicas."""
    return {
        str(number): [held(shape, rank % 2, 2, counts=rank < 2) for rank in range(4)]
        for number, shape in enumerate(shapes)
    }


SHAPES: list[tuple[int, ...]] = [(64, 16), (32, 32), (8, 8), (64, 64), (16, 64), (64, 16), (32, 32), (64, 64)]


def test_costs_are_even() -> None:
    shapes = SHAPES[:6]
    wholes = list(assign(over_tp_and_dp(shapes), {}).values())
    loads = [sum(cost_of(each.shape) for each in wholes if each.rank == rank) for rank in range(4)]
    best = min(
        max(
            sum(cost_of(shape) for shape, rank in zip(shapes, ranks, strict=True) if rank == number)
            for number in range(4)
        )
        for ranks in itertools.product(range(4), repeat=len(shapes))
    )
    assert max(loads) <= 4 / 3 * best, "the bound of costliest-first lists"


def test_every_element_comes_from_one_rank_nearest_to_the_one_that_steps_it() -> None:
    for whole in assign(over_tp_and_dp(SHAPES), {}).values():
        assert whole.rank in whole.sources
        boxes = [box for source in whole.sources for box in whole.boxes[source]]
        assert sum(prod(shape) for _, shape in boxes) == prod(whole.shape)
        assert len(set(boxes)) == len(boxes)
        assert {source // 2 for source in whole.sources} == {whole.rank // 2}, "of its own replica"


def test_parameters_stay_where_they_are_and_new_ones_join() -> None:
    before = assign(over_tp_and_dp(SHAPES[:4]), {})
    after = assign(over_tp_and_dp(SHAPES), before)
    assert list(after) == list(map(str, range(len(SHAPES))))
    assert before.items() <= after.items()


def test_parameters_of_a_pipeline_rank_stay_with_it() -> None:
    rows: Rows = {"first": [held((8, 8), 0, 1), None], "last": [None, held((64, 64), 0, 1)], "of none": [None, None]}
    assert {name: whole.rank for name, whole in assign(rows, {}).items()} == {"first": 0, "last": 1}


@pytest.mark.parametrize("count", [1, 3, 40])
def test_rounds_hold_every_parameter_once_and_few_elements_of_a_rank(count: int) -> None:
    shapes: list[tuple[int, ...]] = [(64, 16 + number % 5) for number in range(count)]
    wholes = list(assign(over_tp_and_dp(shapes), {}).values())
    rounds = rounds_of(enumerate(wholes))
    assert sorted(itertools.chain(*rounds)) == list(range(count))
    assert len(rounds) <= 8
    largest = max(prod(shape) for shape in shapes)
    for rank in range(4):
        total = sum(prod(each.shape) for each in wholes if each.rank == rank)
        for numbers in rounds:
            elements = sum(prod(wholes[number].shape) for number in numbers if wholes[number].rank == rank)
            assert elements <= -(-total // min(8, len(rounds))) + 2 * largest


def test_a_round_of_several_large_parameters_is_bounded() -> None:
    shape = (4096, MOST_ELEMENTS // 4096 // 2)
    wholes = [Whole(shape, (((), ()),), 0, (0,)) for _ in range(64)]
    assert {len(numbers) for numbers in rounds_of(enumerate(wholes))} == {2}
    assert rounds_of([]) == []
