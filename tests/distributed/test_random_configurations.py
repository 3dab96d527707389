"""Random small configurations against the unsplit model; none hangs. Slow: a fixed budget of forty."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support import jobs


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_configuration(seed: int, cluster_of: Any, tmp_path: Any) -> None:
    draw = random.Random(seed)
    tp_size, dp_size = draw.choice([(1, 1), (2, 1), (2, 1), (2, 2), (4, 1)])
    kv_heads = tp_size * draw.choice([1, 2])
    heads = kv_heads * draw.choice([1, 2])
    case: dict[str, Any] = {
        "model": {
            "vocab_size": draw.randint(131, 200),
            "hidden_size": heads * 2 * draw.randint(1, 4),
            "intermediate_size": draw.randint(tp_size, 60),
            "num_hidden_layers": draw.randint(1, 5),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "tie_word_embeddings": draw.random() < 0.5,
            "attention_bias": draw.random() < 0.3,
            "mlp_bias": draw.random() < 0.3,
            "attn_implementation": draw.choice(["sdpa", "eager"]),
        },
        "data": {
            "lengths": tuple(draw.randint(2, 40) for _ in range(3)),
            "padding": draw.choice(["left", "right"]),
        },
        "training": {"per_device_train_batch_size": draw.randint(1, 3)},
    }
    num_microbatches, plan = draw.randint(1, 5), draw.choice(["sequential", "round_robin", "greedy"])
    expected = jobs.reference_gradients(str(tmp_path), num_microbatches * dp_size, **case)
    found = cluster_of(tp_size * dp_size).run(
        "window_gradients",
        folder=str(tmp_path),
        helix={"tp_size": tp_size, "plan": plan},
        num_microbatches=num_microbatches,
        **case,
    )
    # Accelerate deals batches out in turn.
    losses = [result["losses"] for result in found[::tp_size]]
    ours = [loss / dp_size for batch in zip(*losses, strict=True) for loss in batch]
    np.testing.assert_allclose(ours, expected["losses"], rtol=0, atol=1e-5)
    whole = np.sqrt(sum(np.sum(gradient.astype(np.float64) ** 2) for gradient in expected["gradients"].values()))
    for name, gradient in expected["gradients"].items():
        distance = np.linalg.norm(found[0]["gradients"][name].astype(np.float64) - gradient)
        # Some gradients nearly cancel out; their rounding is that of the whole gradient's size.
        assert distance <= 1e-4 * np.linalg.norm(gradient) + 1e-7 * whole, name
