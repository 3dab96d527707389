"""HelixTrainer over a pipeline does what the stock Trainer does: losses, norms, rates, evaluation, weights, metrics."""

from typing import Any

import pytest
from support import pipeline_trainer_jobs as jobs
from support.marks import slow

GREEDY = {"plan": "greedy"}

# What the pipeline runs, and what both trainers run.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "w, untied, clipping, M=3": (
        {"schedule": "folded_1f1b"},
        {"training": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.3}},
    ),
    "w, tied, padded left, last window shorter": ({"schedule": "folded_1f1b"}, jobs.PADDED),
    "dualpipe_v, tied, padded right, M=6": (
        {"schedule": "dualpipe_v"},
        {
            "model": {"tie_word_embeddings": True, "num_key_value_heads": 4},
            "data": {"count": 120, "lengths": (17, 9, 13), "padding": "right"},
            "training": {"gradient_accumulation_steps": 6, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        },
    ),
    "dualpipe_v, untied, fewer micro-batches than ranks": ({"schedule": "dualpipe_v"}, {}),
    "1f1b, untied, eager, biases, no clipping": (
        {"schedule": "1f1b"},
        {
            "model": {"attention_bias": True, "mlp_bias": True, "attn_implementation": "eager"},
            "training": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.0, "optim": "adamw_torch_fused"},
        },
    ),
    "auto, untied, layers by hand, in halves": (
        {"schedule": "auto", "layers_per_stage": (1.5, 1, 1.5, 1)},
        {"training": {"gradient_accumulation_steps": 4, "average_tokens_across_devices": False}},
    ),
}
SPREAD = {"schedule": "auto", "spread_vocabulary": True}
CASES |= {
    "vocabulary spread, tied, padded left": (SPREAD, jobs.PADDED),
    "vocabulary spread, untied": (SPREAD, {"training": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.3}}),
}
SOME = ("w, tied, padded left, last window shorter", "dualpipe_v, untied, fewer micro-batches than ranks")


@pytest.mark.parametrize(
    ("case", "tp", "dp"),
    [
        *(slow(case, 1, 1, when=case not in SOME) for case in CASES),
        *(slow(case, tp, dp) for case in CASES for tp, dp in ((2, 1), (1, 2))),
        *(slow(case, 2, 2) for case in CASES if "by hand" not in case),
    ],
)
def test_pipelines_equal_the_stock_trainer(case: str, tp: int, dp: int, like_stock: Any) -> None:
    """Beside tensor parallelism, too; with dp, against DDP, which evaluates an odd number of samples on two ranks."""
    options, given = CASES[case]
    like_stock(2 * tp * dp, {"tp_size": tp, "pp_size": 2, **GREEDY, **options}, jobs.train, **given)


TIED = {"num_hidden_layers": 8, "tie_word_embeddings": True}
HALVES = (1, 1, 1.5, 1.5, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("ranks", "options", "case"),
    [
        slow(4, {"pp_size": 4}, {"model": TIED, "training": {"gradient_accumulation_steps": 5}}),
        slow(4, {"pp_size": 4}, {"model": {"num_hidden_layers": 8}}),
        slow(4, {"pp_size": 4, "layers_per_stage": HALVES}, {"model": {"num_hidden_layers": 9}}),
        slow(2, {"layers_per_stage": (1.5, 1, 1.5, 1)}, {"model": {"num_hidden_layers": 5}}),
        slow(4, {"shard_optimizer": True}, jobs.PADDED),
        (4, {"shard_parameters": True, "recompute": "selective"}, {"model": {"tie_word_embeddings": True}}),
        slow(2, {"offload": "optimizer"}, {}),
        slow(2, {}, {"training": {"label_smoothing_factor": 0.1}}),
    ],
    ids=str,
)
def test_a_spread_vocabulary_equals_the_stock_trainer(
    ranks: int, options: dict[str, Any], case: dict[str, Any], like_stock: Any
) -> None:
    """Over four ranks, where slices lie between others, and with options that keep weights in other ways."""
    like_stock(ranks, {"pp_size": 2, **GREEDY, **SPREAD, **options}, jobs.train, **case)
