"""Tiled stages over real process groups: the whole stage's losses and gradients, the same bits under every plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

RULES = ("sequential", "round_robin")
BIASED = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(
    ("ranks", "tiles", "lengths", "model"),
    [
        (2, 2, (16, 16, 16), {}),
        (2, 2, (17, 9, 12), BIASED),  # shards of 9, 5 and 6 rows
        (2, 4, (17, 3, 5), {}),  # shards of 9, 2 and 3 rows: the last tiles are empty
        pytest.param(
            4, 4, (16, 23, 7, 16), {"num_key_value_heads": 4}, marks=pytest.mark.slow
        ),  # shards of 4, 6, 2 and 4
    ],
    ids=["even", "uneven, biases", "empty tiles", "four ranks"],
)
def test_tiles_change_nothing_but_rounding(
    ranks: int, tiles: int, lengths: tuple[int, ...], model: dict[str, Any], cluster_of: Any
) -> None:
    tilings = [(1, "sequential"), *((tiles, rule) for rule in RULES)]
    results = cluster_of(ranks).run("support.tiling_jobs:windows", tilings=tilings, lengths=lengths, model=model)
    for whole, tiled, *others in results:
        np.testing.assert_allclose(tiled["losses"], whole["losses"], rtol=0, atol=1e-6)
        assert tiled["evaluated"] == tiled["losses"][0]
        for other in others:
            assert other["losses"] == tiled["losses"]
            assert other["evaluated"] == tiled["evaluated"]
    whole, tiled, *others = (result["gradients"] for result in results[0])
    for name, gradient in whole.items():
        distance = np.linalg.norm(tiled[name] - gradient)
        assert distance <= 1e-6 * np.linalg.norm(gradient), name
        for rule, other in zip(RULES[1:], others, strict=True):
            assert np.array_equal(other[name], tiled[name]), f"{name} under {rule}"
