"""Placements: the virtual stages of a rank, and the layers of a stage.

In:   a placement and the number of pipeline ranks; the number of layers, the costs of embedding and head, and the share
      of a layer before its middle (attention).
Out:  the rank of every virtual stage, and the layers of every virtual stage, in halves of layers.
Must hold: stages are consecutive, disjoint and cover every layer; the embedding goes with the first stage and the head
with the last. On the fold, rank r holds stages r and 2P-1-r, so both are on rank 0 and tied weights stay single (paper,
section 4.1 and figure 7). No other split has a lighter heaviest rank.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

FRONT, REAR = "front", "rear"
"""The halves of a layer between two stages; see `half_name`."""

WORTH_A_CUT = 0.005
"""The least part of the heaviest rank's time for which layers are cut in the middle."""

FOLD = "fold"
LINEAR = "linear"
SPREAD = "spread"
"""The fold, with slices of the embedding before and slices of the head after: a virtual stage for each rank but the
first, whose slices lie in the stages of its layers."""


def half_name(half: str, layer: str) -> str:
    """Returns the name of the unit of a half of a layer, which begins with `FRONT` or `REAR`."""
    return f"{half}_{layer}"


def stage_ranks(placement: str, num_ranks: int) -> tuple[int, ...]:
    """The pipeline rank of every virtual stage. A rank folded on itself (`num_ranks=1`) holds two stages."""
    down = tuple(range(num_ranks))
    fold = down + down[::-1]
    return {FOLD: fold, LINEAR: down, SPREAD: down[:0:-1] + fold + down[1:]}[placement]


def layer_ranks(placement: str, num_ranks: int) -> tuple[int, ...]:
    """The pipeline rank of every virtual stage with layers."""
    return stage_ranks(FOLD if placement == SPREAD else placement, num_ranks)


def stages_of_rank(rank: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """The virtual stages of a rank, its chunks, in forward order; `ranks` as `stage_ranks` gives them."""
    return tuple(stage for stage, home in enumerate(ranks) if home == rank)


def count_layers(
    num_layers: int,
    ranks: Sequence[int],
    *,
    embedding_cost: float = 0.0,
    head_cost: float = 0.0,
    layers_per_stage: Sequence[float] | None = None,
    first_half: float | None = None,
    first_least: int = 0,
) -> list[float]:
    """Returns how many layers each virtual stage gets: the heaviest rank as light as can be, then the stages of every
    rank even. With `first_half`, layers are cut in the middle if the heaviest rank gets lighter by `WORTH_A_CUT`.

    Args:
        num_layers: of the model.
        ranks: the rank of each virtual stage, as `stage_ranks` gives them.
        embedding_cost: how many layers' time the embedding takes, on the first stage. One rank holds everything, so
            there it does not matter.
        head_cost: the same of the head and the loss, on the last stage.
        layers_per_stage: how many layers each virtual stage gets, instead.
        first_half: the share of a layer's time before the middle; None to keep layers whole.
        first_least: the fewest layers of the first stage, if the model has enough: the layers that add features of
            images.

    Raises:
        ValueError: there are no layers, or fewer than virtual stages on several ranks; or `layers_per_stage` is not
            one count per stage, each a multiple of 0.5 and at least 0.5, that add up to `num_layers`.
    """
    num_ranks, num_stages = max(ranks) + 1, len(ranks)
    if num_layers < 1:
        raise ValueError(f"the model has {num_layers} layers; it needs at least one")
    if layers_per_stage is None and num_ranks > 1 and num_layers < num_stages:
        raise ValueError(
            f"the model has {num_layers} layers and pp_size={num_ranks} needs at least {num_stages}; "
            f"the largest pp_size that fits is {max(1, num_layers * num_ranks // num_stages)}"
            + (f"; with schedule='1f1b' it needs {num_ranks}" if num_ranks <= num_layers else "")
        )
    counts: Sequence[float]
    if num_ranks == 1:  # stages of one rank may be empty, and every split costs the same
        counts = [(num_layers + num_stages - 1 - stage) // num_stages for stage in range(num_stages)]
    elif num_layers < num_stages:
        counts = [(2 * num_layers + num_stages - 1 - stage) // num_stages / 2 for stage in range(num_stages)]
    else:
        extra = [0.0] * num_stages
        extra[0] += embedding_cost
        extra[-1] += head_cost
        first_least = min(first_least, num_layers - num_stages + 1)
        counts = _lightest(num_layers, ranks, extra, max(1, first_least))
        if first_half is not None and layers_per_stage is None:
            counts = _in_halves(counts, ranks, extra, first_half, first_least)
    if layers_per_stage is not None:
        _check_counts(layers_per_stage, num_layers, counts)
        counts = layers_per_stage
    return list(counts)


def split_layers(num_layers: int, ranks: Sequence[int], **options: Any) -> list[range]:
    """Returns the layers of each virtual stage, by `count_layers` with its options; of `ranges_of` the ranges."""
    return ranges_of(count_layers(num_layers, ranks, **options))[1]


def ranges_of(counts: Sequence[float]) -> tuple[list[int], list[range]]:
    """Returns the layers that are cut in the middle, and the units of each stage if such a layer is two units."""
    ends = list(accumulate(counts, initial=0.0))
    cut = [int(end) for end in ends if end % 1]
    units = [math.ceil(end) + sum(layer < int(end) for layer in cut) for end in ends]
    return cut, [range(first, last) for first, last in pairwise(units)]


def _lightest(num_layers: int, ranks: Sequence[int], extra: Sequence[float], first_least: int) -> list[int]:
    """How many layers each stage gets, without cuts of layers.

    Layers are alike, so only the counts of the ranks matter to their loads, and giving each layer to the rank that is
    lightest is optimal; the same goes for the stages of a rank.
    """
    held = [stages_of_rank(rank, ranks) for rank in range(max(ranks) + 1)]
    least = [[1 if stage else first_least for stage in stages] for stages in held]
    of_ranks = _filled(num_layers, list(map(sum, least)), [sum(extra[s] for s in stages) for stages in held])
    counts = [0] * len(ranks)
    for stages, total, fewest in zip(held, of_ranks, least, strict=True):
        for stage, count in zip(stages, _filled(total, fewest, [extra[s] for s in stages]), strict=True):
            counts[stage] = count
    return counts


def _in_halves(
    whole: Sequence[int], ranks: Sequence[int], extra: Sequence[float], first_half: float, first_least: int
) -> Sequence[float]:
    """Returns counts in halves of layers if they make the heaviest rank lighter, else the whole counts.

    On the fold, ranks 0 to r hold the layers down to an end on the way down, and those from an end on the way up. Each
    end may move by up to a layer and a half. Rank by rank, the best is kept for every pair of ends.
    """
    num_layers, num_ranks = sum(whole), max(ranks) + 1
    held = [stages_of_rank(rank, ranks) for rank in range(num_ranks)]
    ends = list(accumulate(whole, initial=0))

    def cost(end: float) -> float:
        return math.floor(end) + first_half * (end % 1 > 0)

    def choices(rank: int, halves: Sequence[float]) -> Iterator[tuple[float, float]]:
        down, is_folded = ends[rank + 1], len(held[rank]) > 1
        if rank == num_ranks - 1:
            yield from ((down + step, down + step) for step in (halves if is_folded else [0]) if step % 1 == 0)
        elif is_folded:
            yield from ((down + step, ends[-2 - rank] + other) for step in halves for other in halves)
        else:
            yield from ((down + step, num_layers) for step in halves)

    def best(halves: Sequence[float]) -> tuple[float, int, float, tuple[tuple[float, float], ...]]:
        """The heaviest rank, the number of cut layers, the sum of squares of stages, and the pairs of ends."""
        known = {(0.0, float(num_layers)): (0.0, 0, 0.0, ())}
        for rank, stages in enumerate(held):
            found: dict[Any, Any] = {}
            for before, (heaviest, cuts, squares, path) in known.items():
                for after in choices(rank, halves):
                    spans = [(before[0], after[0]), (after[1], before[1])][: len(stages)]
                    if any(end <= begin for begin, end in spans) or (rank == 0 and after[0] < first_least):
                        continue
                    loads = [cost(end) - cost(begin) + extra[s] for s, (begin, end) in zip(stages, spans, strict=True)]
                    cuts_here = cuts + sum(end % 1 > 0 for end in after)
                    key = max(heaviest, sum(loads)), cuts_here, squares + sum(n * n for n in loads), (*path, after)
                    if after not in found or key < found[after]:
                        found[after] = key
            known = found
        return min(known.values())

    usual, (heaviest, _, _, path) = best([0]), best([step / 2 for step in range(-3, 4)])
    if heaviest > (1 - WORTH_A_CUT) * usual[0]:
        return whole
    down, up = [pair[0] for pair in path], [pair[1] for pair in path[-2::-1]] if len(held[0]) > 1 else []
    return [end - begin for begin, end in pairwise([0.0, *down, *up, *([float(num_layers)] if up else [])])]


def _filled(total: int, least: Sequence[int], extra: Sequence[float]) -> list[int]:
    """Counts that add up to `total`: at least `least`, then one by one to the stage with the smallest sum of count and
    extra.

    Of equals the last gets it: on the linear placement later ranks hold fewer activations.
    """
    counts = list(least)
    for _ in range(total - sum(least)):
        place = min(range(len(counts)), key=lambda i: (counts[i] + extra[i], -i))
        counts[place] += 1
    return counts


def _check_counts(given: Sequence[float], num_layers: int, counts: Sequence[float]) -> None:
    in_halves = all(count % 0.5 == 0 for count in given)
    if len(given) == len(counts) and min(given) > 0 and sum(given) == num_layers and in_halves:
        return
    works = list(counts) if min(counts) > 0 else None
    raise ValueError(
        f"layers_per_stage={list(given)} has {len(given)} counts that add up to {sum(given)}; it needs {len(counts)}, "
        f"one for each virtual stage, each at least 0.5 and a multiple of 0.5, that add up to the model's {num_layers} "
        f"layers, such as layers_per_stage={works}"
    )
