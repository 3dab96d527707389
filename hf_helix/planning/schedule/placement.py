"""Placements: the virtual stages of a rank, and the layers of a stage.

In:   a placement and the number of pipeline ranks; the number of layers, and the cost of the head.
Out:  the rank of every virtual stage, and the layers of every virtual stage.
Must hold: stages are consecutive, disjoint and cover every layer; the embedding goes with the first stage and the head
with the last. On the fold, rank r holds stages r and 2P-1-r, so both are on rank 0 and tied weights stay single (paper,
section 4.1 and figure 7). No other split has a lighter heaviest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

FOLD = "fold"
LINEAR = "linear"


def stage_ranks(placement: str, num_ranks: int) -> tuple[int, ...]:
    """The pipeline rank of every virtual stage. A rank folded on itself (`num_ranks=1`) holds two stages."""
    down = tuple(range(num_ranks))
    return down + down[::-1] if placement == FOLD else down


def stages_of_rank(rank: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """The virtual stages of a rank, its chunks, in forward order; `ranks` as `stage_ranks` gives them."""
    return tuple(stage for stage, home in enumerate(ranks) if home == rank)


def split_layers(
    num_layers: int,
    ranks: Sequence[int],
    *,
    head_cost: float = 0.0,
    layers_per_stage: Sequence[int] | None = None,
) -> list[range]:
    """The layers of each virtual stage: the heaviest rank as light as can be, then the stages of every rank even.

    Args:
        num_layers: of the model.
        ranks: the rank of each virtual stage, as `stage_ranks` gives them.
        head_cost: how many layers' time the head and the loss take, on the last stage.
        layers_per_stage: how many layers each virtual stage gets, instead.

    Raises:
        ValueError: there are no layers, or fewer than virtual stages on several ranks; or `layers_per_stage` is not
            one count per stage, each at least one, that add up to `num_layers`.
    """
    num_ranks, num_stages = max(ranks) + 1, len(ranks)
    if num_layers < 1:
        raise ValueError(f"the model has {num_layers} layers; it needs at least one")
    if num_ranks > 1 and num_layers < num_stages:
        raise ValueError(
            f"the model has {num_layers} layers and pp_size={num_ranks} needs at least {num_stages}; "
            f"the largest pp_size that fits is {max(1, num_layers * num_ranks // num_stages)}"
        )
    if num_ranks == 1:  # stages of one rank may be empty, and cost what they cost on any split
        counts = [(num_layers + num_stages - 1 - stage) // num_stages for stage in range(num_stages)]
    else:
        counts = _lightest(num_layers, ranks, head_cost)
    if layers_per_stage is not None:
        _check_counts(layers_per_stage, num_layers, counts)
        counts = list(layers_per_stage)
    return [range(first, last) for first, last in pairwise(accumulate(counts, initial=0))]


def _lightest(num_layers: int, ranks: Sequence[int], head_cost: float) -> list[int]:
    """How many layers each stage gets.

    Layers are alike, so only the counts of the ranks matter to their loads, and giving each layer to the rank that is
    lightest is optimal; the same goes for the stages of a rank.
    """
    extra = [*[0.0] * (len(ranks) - 1), head_cost]
    held = [stages_of_rank(rank, ranks) for rank in range(max(ranks) + 1)]
    of_ranks = _filled(num_layers, [len(stages) for stages in held], [sum(extra[s] for s in stages) for stages in held])
    counts = [0] * len(ranks)
    for stages, total in zip(held, of_ranks, strict=True):
        for stage, count in zip(stages, _filled(total, [1] * len(stages), [extra[s] for s in stages]), strict=True):
            counts[stage] = count
    return counts


def _filled(total: int, least: Sequence[int], extra: Sequence[float]) -> list[int]:
    """Counts that add up to `total`: at least `least`, then one by one to where count and extra are lightest.

    Of equals the last gets it: on the linear placement later ranks hold fewer activations.
    """
    counts = list(least)
    for _ in range(total - sum(least)):
        place = min(range(len(counts)), key=lambda i: (counts[i] + extra[i], -i))
        counts[place] += 1
    return counts


def _check_counts(given: Sequence[int], num_layers: int, counts: Sequence[int]) -> None:
    if len(given) == len(counts) and min(given) >= 1 and sum(given) == num_layers:
        return
    works = list(counts) if min(counts) >= 1 else None
    raise ValueError(
        f"layers_per_stage={list(given)} has {len(given)} counts that add up to {sum(given)}; it needs {len(counts)}, "
        f"one for each virtual stage, each at least 1, that add up to the model's {num_layers} layers, such as "
        f"layers_per_stage={works}"
    )
