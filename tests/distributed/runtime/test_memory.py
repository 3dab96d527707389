"""Two strands keep at most the activations of one strand and of one more layer."""

from __future__ import annotations

from typing import Any

import pytest
from support.jobs import _microbatches, make_trainer
from support.pipeline_jobs import runner_of
from torch import Tensor

from hf_helix.measure.memory import LiveBytes
from hf_helix.runtime.divided import plain_parameters

LAYERS = 5


@plain_parameters()
def window_memory(folder: str, plan: str, layers: int, num_microbatches: int) -> int:
    """The most bytes of tensors alive in a window of two ranks, parameters and gradients left out."""
    model = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 176}
    helix = {"tp_size": 2, "plan": "sequential"}
    trainer = make_trainer(folder, helix, model=model, data={"lengths": (64,)})
    runner = runner_of(trainer, plan, "folded_1f1b")
    trainer.model.train()
    window = _microbatches(trainer, num_microbatches)
    runner.train_window(window)  # makes the gradients
    kept = [t for p in trainer.model.parameters() for t in (p, p.grad) if t is not None]
    kept += [t for batch in window for t in batch.prepare().values() if isinstance(t, Tensor)]
    with LiveBytes(kept) as counter:
        runner.train_window(window)
    return counter.peak


@pytest.fixture(scope="module")
def peak(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Bytes alive at most in a window of three micro-batches, by plan and number of layers; the larger rank's."""
    folder, known = str(tmp_path_factory.mktemp("memory")), {}

    def of(plan: str, layers: int = LAYERS) -> int:
        if (plan, layers) not in known:
            job = {"folder": folder, "plan": plan, "layers": layers, "num_microbatches": 3}
            known[plan, layers] = max(cluster_of(2).run(window_memory, **job))
        return known[plan, layers]

    return of


@pytest.mark.parametrize("layers", [LAYERS, pytest.param(LAYERS - 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "plan", ["greedy", *(pytest.param(p, marks=pytest.mark.slow) for p in ("round_robin", "dhelix"))]
)
def test_two_strands_keep_at_most_one_layer_more(plan: str, layers: int, peak: Any) -> None:
    layer = (peak("sequential") - peak("sequential", LAYERS - 2)) / 2
    assert layer > 0.05 * peak("sequential")
    assert peak(plan, layers) <= peak("sequential", layers) + layer
