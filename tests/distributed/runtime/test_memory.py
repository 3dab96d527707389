"""Two strands keep at most the activations of one strand and of one more layer."""

from __future__ import annotations

from typing import Any

import pytest

LAYERS = 5


@pytest.fixture(scope="module")
def peak(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Bytes alive at most in a window of three micro-batches, by plan and number of layers; the larger rank's."""
    folder, known = str(tmp_path_factory.mktemp("memory")), {}

    def of(plan: str, layers: int = LAYERS) -> int:
        if (plan, layers) not in known:
            job = {"folder": folder, "plan": plan, "layers": layers, "num_microbatches": 3}
            known[plan, layers] = max(cluster_of(2).run("support.more_jobs:window_memory", **job))
        return known[plan, layers]

    return of


@pytest.mark.parametrize("layers", [LAYERS, pytest.param(LAYERS - 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", ["greedy", "round_robin", "dhelix"])
def test_two_strands_keep_at_most_one_layer_more(plan: str, layers: int, peak: Any) -> None:
    layer = (peak("sequential") - peak("sequential", LAYERS - 2)) / 2
    assert layer > 0.05 * peak("sequential")
    assert peak(plan, layers) <= peak("sequential", layers) + layer
