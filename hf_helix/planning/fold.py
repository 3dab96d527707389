"""The fold: which layers a rank holds.

In:   the number of layers and of pipeline ranks.
Out:  the layers of each of the 2P virtual stages; rank r holds stages r and 2P-1-r, its two chunks.
Must hold: stages are consecutive, disjoint and cover every layer; the embedding goes with stage 0 and the head with
stage 2P-1, so both are on rank 0 and tied weights stay single (paper, section 4.1 and figure 7).
"""

from __future__ import annotations

from itertools import pairwise


def fold_layers(num_layers: int, num_ranks: int) -> list[range]:
    """The layers of each virtual stage. A rank folded on itself (`num_ranks=1`) holds two stages.

    Raises:
        ValueError: there are no layers, or fewer than two per rank when there are several ranks.
    """
    num_stages = 2 * num_ranks
    if num_layers < 1:
        raise ValueError(f"the model has {num_layers} layers; it needs at least one")
    if num_ranks > 1 and num_layers < num_stages:
        raise ValueError(
            f"the model has {num_layers} layers and pp_size={num_ranks} needs at least {num_stages}; "
            f"the largest pp_size that fits is {max(1, num_layers // 2)}"
        )
    bounds = [(stage * num_layers + num_stages - 1) // num_stages for stage in range(num_stages + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def chunks_of_rank(rank: int, num_ranks: int) -> tuple[int, int]:
    """The virtual stages of a rank: the one on the way down, the one on the way up."""
    return rank, 2 * num_ranks - 1 - rank
