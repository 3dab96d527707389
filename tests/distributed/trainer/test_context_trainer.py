"""The traffic of context parallelism, long sequences, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
from support.jobs import make_trainer
from support.models import llama
from support.pipeline_jobs import make, runner_of, window_of

from hf_helix.measure.overlap import record_moves

MODEL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}

# -- what the ranks run ------------------------------------------------------------------------------------------------


def moved_in_a_window(folder: str, helix: dict[str, Any], length: int, count: int) -> dict[str, Any]:
    """What this rank sends round the ring."""
    trainer = make(folder, helix, MODEL)
    runner = runner_of(trainer, "sequential", "folded_1f1b")
    moved = record_moves(runner, window_of(trainer, count, rows=1, lengths=(length,)))
    trainer.helix.runner.executor.streams.close()
    return {
        "sent": sum(transport.bytes_sent for transport in moved),
        "steps": sorted({move.name for transport in moved for move in transport.moved}),
    }


def long_sequence(folder: str, helix: dict[str, Any], model: dict[str, Any], length: int) -> list[float]:
    """Losses of a few steps on sequences of so many tokens."""
    data = {"count": 4, "lengths": (length,)}
    training = {"max_steps": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer = make_trainer(folder, helix, model=model, data=data, training=training)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# -- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "cp"), [("ring", 4), ("all_gather", 2)])
def test_traffic_is_that_of_the_formula(method: str, cp: int, cluster_of: Any, tmp_path: Path) -> None:
    """Of keys and values, with kv heads only, c-1 steps forward; backward as many again, and as many for gradients."""
    helix = {"cp_size": cp, "cp_method": method, "plan": "sequential"}
    kv = 2 * (256 // cp) * MODEL["num_key_value_heads"] * (64 // 4) * 4  # keys and values of a rank, in bytes
    for rank in cluster_of(cp).run(moved_in_a_window, folder=str(tmp_path), helix=helix, length=256, count=3):
        assert rank["sent"] == 3 * MODEL["num_hidden_layers"] * 3 * (cp - 1) * kv
        expected = ["shift", "shift_back"] if method == "ring" else ["all_gather", "exchange"]
        assert rank["steps"] == expected


def test_a_family_without_shared_attention_is_named() -> None:
    from hf_helix.models.derived.family import Family

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
