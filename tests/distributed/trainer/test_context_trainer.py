"""Context parallelism through the Trainer, its memory and its traffic, and what is refused."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import jobs
from support.comparisons import compare_runs, compare_weights
from support.jobs import predict
from support.models import llama
from support.pipeline_trainer_jobs import PADDED, train

MODEL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "helix"),
    [
        (2, {"cp_size": 2}),
        pytest.param(2, {"cp_size": 2, "cp_method": "all_gather"}, marks=SLOW),
        pytest.param(4, {"cp_size": 2, "tp_size": 2}, marks=SLOW),
        pytest.param(4, {"cp_size": 2, "pp_size": 2}, marks=SLOW),
    ],
    ids=str,
)
def test_training_equals_the_stock_trainer(
    ranks: int, helix: dict[str, Any], cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    expected, expected_folder = stock(train, **PADDED)
    for result in cluster_of(ranks).run(train, folder=str(tmp_path), helix={**helix, "cache": False}, **PADDED):
        compare_runs(result, expected)
    compare_weights(tmp_path, expected_folder)


@SLOW
def test_data_parallel_ranks_beside_it(cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    """Against the stock Trainer on two processes (DDP)."""
    case = {"training": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3, "per_device_eval_batch_size": 1}}
    expected, expected_folder = stock(jobs.train, 2, **case)
    helix = {"cp_size": 2, "plan": "greedy", "shard_optimizer": True}
    for result in cluster_of(4).run(jobs.train, folder=str(tmp_path), helix=helix, **case):
        compare_runs(result, expected)
    compare_weights(tmp_path, expected_folder)


@pytest.mark.parametrize("data", [{"count": 5}, {"count": 7, "lengths": (17, 17, 8, 8, 13, 13)}], ids=str)
@pytest.mark.parametrize(
    ("ranks", "helix"), [(2, {"cp_size": 2}), pytest.param(4, {"cp_size": 2, "tp_size": 2}, marks=SLOW)], ids=str
)
def test_predictions(ranks: int, helix: dict[str, Any], data: dict[str, Any], cluster_of: Any, tmp_path: Any) -> None:
    expected = predict(str(tmp_path), None, **data)
    for result in cluster_of(ranks).run("support.jobs:predict", folder=str(tmp_path), helix=helix, **data):
        np.testing.assert_array_equal(result["label_ids"], expected["label_ids"])
        np.testing.assert_allclose(result["predictions"], expected["predictions"], rtol=0, atol=1e-5)
        assert result["evaluated"]["eval_loss"] == pytest.approx(expected["evaluated"]["eval_loss"], abs=1e-5)


@pytest.fixture(scope="module")
def measured(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("measured"))

    @functools.cache
    def of(cp: int, method: str) -> list[dict[str, Any]]:
        helix = {"cp_size": cp, "cp_method": method, "plan": "sequential"}
        job = {"folder": folder, "helix": helix, "model": MODEL, "length": 512, "count": 3}
        return cluster_of(cp).run("support.context_jobs:measured", **job)

    return of


def test_activations_shrink_with_the_number_of_ranks(measured: Any) -> None:
    whole, half, quarter = (max(rank["peak"] for rank in measured(cp, "ring")) for cp in (1, 2, 4))
    assert half < 0.6 * whole
    assert quarter < 0.6 * half


@pytest.mark.parametrize(
    ("method", "cp"),
    [("ring", 4), ("all_gather", 2), *(pytest.param(*case, marks=SLOW) for case in (("ring", 2), ("all_gather", 4)))],
)
def test_traffic_is_that_of_the_formula(method: str, cp: int, measured: Any) -> None:
    """Of keys and values, with kv heads only, c-1 steps forward; backward as many again, and as many for gradients."""
    kv = 2 * (512 // cp) * MODEL["num_key_value_heads"] * (64 // 4) * 4  # keys and values of a rank, in bytes
    for rank in measured(cp, method):
        assert rank["sent"] == 3 * MODEL["num_hidden_layers"] * 3 * (cp - 1) * kv
        expected = ["shift", "shift_back"] if method == "ring" else ["all_gather", "exchange"]
        assert rank["steps"] == expected


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"attention_dropout": 0.1}, ["attention_dropout=0.1", "attention_dropout=0.0"]),
        ({"attn_implementation": "flex_attention"}, ["flex_attention", "log-sum-exp", "sdpa"]),
    ],
    ids=str,
)
def test_attention_that_cannot_be_cut(model: dict[str, Any], words: list[str], cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "helix": {"cp_size": 2}, "model": model}
    for failure in cluster_of(2).errors("train", **job):
        assert failure.kind == "ValueError"
        for word in words:
            assert word in failure.message


def test_more_ranks_than_processes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cp_size=2 must divide the world size, 1 process; values that work: 1"):
        jobs.make_trainer(str(tmp_path), {"cp_size": 2})


def test_a_family_without_shared_attention_is_named() -> None:
    from hf_helix.models.family import Family

    class Plain(Family):
        def layer(self, b: Any, layer: Any) -> Any:
            raise AssertionError

        def attention_inputs(self, model: Any, ids: Any, mask: Any, positions: Any, documents: Any) -> Any:
            raise AssertionError

    with pytest.raises(ValueError, match=r"cp_size above 1 is not built for LlamaForCausalLM.*use cp_size=1"):
        Plain().check_context(llama())


@SLOW
def test_a_sequence_of_32k_tokens(cluster_of: Any, tmp_path: Path) -> None:
    model = {"num_hidden_layers": 1, "max_position_embeddings": 32768}
    helix = {"cp_size": 2, "plan": "greedy"}  # measuring pairs of such blocks takes minutes
    job = {"folder": str(tmp_path), "helix": helix, "model": model, "length": 32768}
    for losses in cluster_of(2).run("support.context_jobs:long_sequence", **job):
        assert len(losses) == 2
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[1] < losses[0]
