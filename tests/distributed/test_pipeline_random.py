"""Random small pipelines against the unsplit model; none hangs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.pipeline_jobs import batches_of, reference

SECONDS = 120
"""That a configuration may take, with the start of its processes."""

SCHEDULES = ("w", "dualpipe_v", "1f1b", "auto")
PLANS = ("sequential", "greedy", "round_robin", "dhelix")


def configuration(seed: int, most_ranks: int) -> dict[str, Any]:
    """Everything about a window: layout, model, schedule, plan, batches. Mostly pipelines."""
    draw = random.Random(seed)
    sizes = [(tp, pp, dp) for tp in (1, 2) for pp in (1, 2, 2, 4) for dp in (1, 2) if tp * pp * dp <= most_ranks]
    tp, pp, dp = draw.choice(sizes)
    schedule = draw.choice(SCHEDULES)
    stages = pp if schedule == "1f1b" else 2 * pp
    layers = stages + draw.randint(0, 3)
    counts = None
    if draw.random() < 0.3 and (pp > 1 or schedule != "1f1b"):
        cuts = sorted(draw.sample(range(1, layers), stages - 1))
        counts = [after - before for before, after in zip([0, *cuts], [*cuts, layers], strict=True)]
    kv_heads = tp * draw.choice([1, 2])
    heads = kv_heads * draw.choice([1, 1, 2])
    return {
        "sizes": (tp, pp, dp),
        "helix": {"tp_size": tp, "pp_size": pp, "schedule": schedule, "layers_per_stage": counts},
        "model": {
            "vocab_size": draw.randint(131, 180),
            "hidden_size": heads * 2 * draw.randint(1, 4),
            "intermediate_size": draw.randint(tp, 50),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "tie_word_embeddings": draw.random() < 0.5 and not (schedule == "1f1b" and pp > 1),
        },
        "case": (draw.choice(PLANS), schedule, draw.randint(1, 3 * pp)),
        "rows": draw.randint(1, 3),
        "lengths": [draw.randint(3, 15) for _ in range(draw.randint(1, 4))],
    }


def check(found: dict[str, Any], cluster_of: Any, folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.cluster.JOB_TIMEOUT", SECONDS)
    tp, pp, dp = found.pop("sizes")
    count = found["case"][2]
    ranks = cluster_of(tp * pp * dp).run("support.pipeline_more_jobs:window", folder=str(folder), **found)
    wanted = reference(found["model"], batches_of(count * dp, found["rows"], lengths=found["lengths"]))
    for rank, of in enumerate(ranks):
        first = rank // (tp * pp) * count
        mine = dp * np.array(wanted["losses"][first : first + count])
        np.testing.assert_allclose(of["losses"], mine, rtol=0, atol=1e-5 * dp, err_msg=f"rank {rank}: {found}")
    whole = np.sqrt(sum(np.sum(gradient.astype(np.float64) ** 2) for gradient in wanted["gradients"].values()))
    gradients = ranks[0]["gradients"]
    assert gradients.keys() == wanted["gradients"].keys()
    for name, gradient in wanted["gradients"].items():
        distance = np.linalg.norm(gradients[name].astype(np.float64) - gradient)
        # Some gradients nearly cancel out; their rounding is that of the whole gradient's size.
        assert distance <= 1e-4 * np.linalg.norm(gradient) + 1e-7 * whole, f"{name}: {found}"


@pytest.mark.parametrize("seed", range(6))
def test_random_pipeline(seed: int, cluster_of: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check(configuration(seed, most_ranks=4), cluster_of, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_random_pipelines(seed: int, cluster_of: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check(configuration(seed, most_ranks=8), cluster_of, tmp_path, monkeypatch)
