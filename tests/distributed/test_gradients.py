"""One window: gradients by name against the unsplit model, and the same bits under every plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import jobs

PADDED = {"lengths": (17, 9, 13), "padding": "left"}
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "one layer, biases": {"num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True},
    # Its rows without any key average over all keys, so padding of ours must not be among them.
    "eager": {"attn_implementation": "eager"},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_microbatches", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
@pytest.mark.parametrize(("ranks", "tp_size"), [(2, 2), (1, 1), (4, 4)])
def test_gradients_equal_the_unsplit_models(
    model: str, num_microbatches: int, ranks: int, tp_size: int, cluster_of: Any, tmp_path: Any
) -> None:
    changes = {**MODELS[model], **({"num_key_value_heads": 4} if tp_size == 4 else {})}
    case = {"model": changes, "data": PADDED}
    folder = str(tmp_path)
    expected = jobs.reference_gradients(folder, num_microbatches, **case)
    found = cluster_of(ranks).run(
        "window_gradients", folder=folder, helix={"tp_size": tp_size}, num_microbatches=num_microbatches, **case
    )
    for result in found:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
    compare(found[0]["gradients"], expected["gradients"])


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_every_plan_gives_the_same_bits(dropout: float, cluster_of: Any, tmp_path: Any) -> None:
    cluster = cluster_of(2)
    # Six layers, so that blocks of two layers follow each other and operators run a block late.
    model = {"attention_dropout": dropout, "num_hidden_layers": 6}
    case = {"model": model, "data": PADDED, "num_microbatches": 3, "folder": str(tmp_path)}
    file = str(tmp_path / "plan.json")
    cluster.run("save_plan", folder=str(tmp_path), helix={"tp_size": 2, "plan": "search"}, path=file)
    plans = ["sequential", "round_robin", "greedy", "greedy", file]
    runs = [cluster.run("window_gradients", helix={"tp_size": 2, "plan": plan}, **case) for plan in plans]
    for run in runs[1:]:
        for rank in range(2):
            assert run[rank]["losses"] == runs[0][rank]["losses"]
        for name, gradient in runs[0][0]["gradients"].items():
            assert np.array_equal(run[0]["gradients"][name], gradient), name


def test_dropout_is_on_and_follows_the_seed(cluster_of: Any, tmp_path: Any) -> None:
    cluster = cluster_of(2)

    def losses(dropout: float, seed: int) -> list[float]:
        case = {"model": {"attention_dropout": dropout}, "training": {"seed": seed, "data_seed": 1}}
        run = cluster.run("window_gradients", folder=str(tmp_path), helix={"tp_size": 2}, num_microbatches=2, **case)
        return run[0]["losses"]

    assert losses(0.0, 3) == losses(0.0, 4)
    assert losses(0.2, 3) != losses(0.0, 3)
    assert losses(0.2, 3) != losses(0.2, 4)
    assert losses(0.2, 3) == losses(0.2, 3)


def test_packed_sequences_stay_apart(cluster_of: Any, tmp_path: Any) -> None:
    """Position ids that restart mean several documents in a row, also where the length is padded to a multiple."""
    case = {"data": {"documents": (6, 4, 7)}}
    expected = jobs.reference_gradients(str(tmp_path), 2, **case)
    alone = jobs.reference_gradients(str(tmp_path), 2)
    assert expected["losses"] != alone["losses"]
    found = cluster_of(2).run(
        "window_gradients", folder=str(tmp_path), helix={"tp_size": 2}, num_microbatches=2, **case
    )
    np.testing.assert_allclose(found[0]["losses"], expected["losses"], rtol=0, atol=1e-5)
    compare(found[0]["gradients"], expected["gradients"])


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        distance = np.linalg.norm(found[name].astype(np.float64) - gradient)
        assert distance <= 1e-4 * np.linalg.norm(gradient), name
