"""Random small models in random layouts, with random batches and orders, equal their unsplit models; none hangs."""

import random
from pathlib import Path
from typing import Any

import pytest
from invariant.classes import AXES, Case, sizes_of
from invariant.harness import run
from support.marks import slow
from support.parity import KINDS, compare_window, unsplit

SECONDS = 120
"""That a configuration may take, with the start of its processes."""

SCHEDULES = ("folded_1f1b", "dualpipe_v", "1f1b", "auto")


def random_layout(draw: random.Random, most_ranks: int) -> str:
    """Mostly pipelines; a sequence is shared by few."""
    choices = [
        "+".join(f"{axis}{size}" for axis, size in zip(AXES, (tp, pp, cp, dp), strict=False) if size > 1)
        for tp in (1, 2, 4)
        for pp in (1, 2, 2, 4)
        for cp in (1, 1, 1, 2)
        for dp in (1, 2)
        if tp * pp * cp * dp <= most_ranks
    ]
    return draw.choice(choices)


def random_case(seed: int, most_ranks: int) -> Case:
    """Everything about a window."""
    draw = random.Random(seed)
    layout = random_layout(draw, most_ranks)
    pp, schedule = sizes_of(layout)["pp"], draw.choice(SCHEDULES)
    stages = pp if schedule == "1f1b" else 2 * pp
    layers = stages + draw.randint(0, 3)
    counts = None
    if draw.random() < 0.3 and (pp > 1 or schedule != "1f1b"):
        cuts = sorted(draw.sample(range(1, layers), stages - 1))
        counts = [after - before for before, after in zip([0, *cuts], [*cuts, layers], strict=True)]
        for stage in range(stages - 1):  # ends in the middle of a layer; that of the fold's last rank is a whole number
            if stage != pp - 1 and counts[stage + 1] > 1 and draw.random() < 0.5:
                counts[stage : stage + 2] = counts[stage] + 0.5, counts[stage + 1] - 0.5
    return Case(
        f"random {seed}",
        random_model(draw, layers, sizes_of(layout)["tp"], may_tie=schedule != "1f1b" or pp == 1),
        layout,
        draw.choice(KINDS),
        count=draw.randint(1, max(5, 3 * pp)),
        rows=draw.randint(1, 3),
        lengths=[draw.randint(3, 40) for _ in range(draw.randint(1, 4))],
        schedules=(schedule,),
        options={"schedule": schedule, "layers_per_stage": counts},
    )


def random_model(draw: random.Random, layers: int, tp: int, may_tie: bool) -> dict[str, Any]:
    kv_heads = tp * draw.choice([1, 2])
    heads = kv_heads * draw.choice([1, 1, 2])
    return {
        "vocab_size": draw.randint(131, 200),
        "hidden_size": heads * 2 * draw.randint(1, 4),
        "intermediate_size": draw.randint(tp, 60),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": may_tie and draw.random() < 0.5,
        "attention_bias": draw.random() < 0.3,
        "mlp_bias": draw.random() < 0.3,
        "attn_implementation": draw.choice(["sdpa", "eager"]),
    }


SLOW = (4, 5, *range(100, 136))


@pytest.mark.parametrize("seed", [*range(4), *(slow(seed) for seed in SLOW)])
def test_random_case(seed: int, cluster_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.cluster.JOB_TIMEOUT", SECONDS)
    case = random_case(seed, most_ranks=4 if seed < 100 else 8)
    print(case)  # shown where the test fails
    dp = case.sizes["dp"]
    ranks = [rank[0] for rank in run(cluster_of, tmp_path, case)]
    expected = unsplit(case.model, case.count * dp, case.kind, case.lengths, case.rows)
    # Some gradients nearly cancel out; their rounding is that of the whole gradient's size.
    compare_window(ranks, expected, dp, floor=1e-7)
