"""Context parallelism through the Trainer, its memory and its traffic, and what is refused."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
from support.jobs import make_trainer
from support.marks import slow
from support.models import llama
from support.pipeline_jobs import make, runner_of, window_of
from support.pipeline_trainer_jobs import PADDED, train

from hf_helix.measure.memory import peak_bytes
from hf_helix.measure.overlap import record_moves

# -- what the ranks run ------------------------------------------------------------------------------------------------


def measure_window(
    folder: str, helix: dict[str, Any], model: dict[str, Any], length: int, count: int
) -> dict[str, Any]:
    """The most bytes of activations alive on this rank, and what it sends round the ring, in a window."""
    trainer = make(folder, helix, model)
    runner = runner_of(trainer, "sequential", "folded_1f1b")
    window = window_of(trainer, count, rows=1, lengths=(length,))
    moved = record_moves(runner, window)
    result = {
        "peak": peak_bytes(runner, window),
        "sent": sum(transport.bytes_sent for transport in moved),
        "steps": sorted({move.name for transport in moved for move in transport.moved}),
    }
    trainer.helix.runner.executor.streams.close()
    return result


def long_sequence(folder: str, helix: dict[str, Any], model: dict[str, Any], length: int) -> list[float]:
    """Losses of a few steps on sequences of so many tokens."""
    data = {"count": 4, "lengths": (length,)}
    training = {"max_steps": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer = make_trainer(folder, helix, model=model, data=data, training=training)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# -- the tests --------------------------------------------------------------------------------------------------------

MODEL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("ranks", "helix"),
    [
        (2, {"cp_size": 2}),
        slow(2, {"cp_size": 2, "cp_method": "all_gather"}),
        slow(4, {"cp_size": 2, "tp_size": 2}),
        slow(4, {"cp_size": 2, "pp_size": 2}),
    ],
    ids=str,
)
def test_training_equals_the_stock_trainer(ranks: int, helix: dict[str, Any], like_stock: Any) -> None:
    like_stock(ranks, {**helix, "cache": False}, train, **PADDED)


@pytest.mark.slow
def test_data_parallel_ranks_beside_it(like_stock: Any) -> None:
    """Against the stock Trainer on two processes (DDP)."""
    training = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3, "per_device_eval_batch_size": 1}
    like_stock(4, {"cp_size": 2, "plan": "greedy", "shard_optimizer": True}, training=training)


@pytest.fixture(scope="module")
def measured(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("measured"))

    @functools.cache
    def of(cp: int, method: str) -> list[dict[str, Any]]:
        helix = {"cp_size": cp, "cp_method": method, "plan": "sequential"}
        job = {"folder": folder, "helix": helix, "model": MODEL, "length": 512, "count": 3}
        return cluster_of(cp).run(measure_window, **job)

    return of


@pytest.mark.slow
def test_activations_shrink_with_the_number_of_ranks(measured: Any) -> None:
    whole, half, quarter = (max(rank["peak"] for rank in measured(cp, "ring")) for cp in (1, 2, 4))
    assert half < 0.6 * whole
    assert quarter < 0.6 * half


@pytest.mark.parametrize(
    ("method", "cp"),
    [("ring", 4), ("all_gather", 2), *(slow(*case) for case in (("ring", 2), ("all_gather", 4)))],
)
def test_traffic_is_that_of_the_formula(method: str, cp: int, measured: Any) -> None:
    """Of keys and values, with kv heads only, c-1 steps forward; backward as many again, and as many for gradients."""
    kv = 2 * (512 // cp) * MODEL["num_key_value_heads"] * (64 // 4) * 4  # keys and values of a rank, in bytes
    for rank in measured(cp, method):
        assert rank["sent"] == 3 * MODEL["num_hidden_layers"] * 3 * (cp - 1) * kv
        expected = ["shift", "shift_back"] if method == "ring" else ["all_gather", "exchange"]
        assert rank["steps"] == expected


def test_a_family_without_shared_attention_is_named() -> None:
    from hf_helix.models.family import Family

    class Plain(Family):
        def layer(self, b: Any, layer: Any) -> Any:
            raise AssertionError

        def attention_inputs(self, model: Any, ids: Any, mask: Any, positions: Any, documents: Any) -> Any:
            raise AssertionError

    with pytest.raises(ValueError, match=r"cp_size above 1 is not built for LlamaForCausalLM.*use cp_size=1"):
        Plain().check_context(llama())


@pytest.mark.slow
def test_a_sequence_of_32k_tokens(cluster_of: Any, tmp_path: Path) -> None:
    model = {"num_hidden_layers": 1, "max_position_embeddings": 32768}
    helix = {"cp_size": 2, "plan": "greedy"}  # measuring pairs of such blocks takes minutes
    job = {"folder": str(tmp_path), "helix": helix, "model": model, "length": 32768}
    for losses in cluster_of(2).run(long_sequence, **job):
        assert len(losses) == 2
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[1] < losses[0]
