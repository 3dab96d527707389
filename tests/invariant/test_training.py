"""HelixTrainer on several processes does what the stock Trainer does: losses, norms, rates, evaluation, weights."""

from typing import Any

import pytest
from invariant.classes import BALANCED, BALANCED_PHIMOE, GPTS, TIED
from support.derived_models import HOME, TEXT_PARTS
from support.marks import slow

Case = dict[str, Any]
CLIPPED = {"max_grad_norm": 0.3}
TWO = {"gradient_accumulation_steps": 2, **CLIPPED}
FIVE, FOUR = {"num_hidden_layers": 5}, {"num_hidden_layers": 4}  # of four virtual stages, one may hold two layers
PADDED_LEFT = {"lengths": (17, 9, 13), "padding": "left"}
LONG = {"lengths": (70, 9, 13), "padding": "left"}
ROUTED = {"data": {"lengths": (17, 9), "padding": "right"}, "training": {**TWO, "per_device_eval_batch_size": 1}}

CASES: dict[str, Case] = {
    "fewer micro-batches than ranks": {"model": FIVE},
    "clipping": {"model": FIVE, "training": CLIPPED},
    "three micro-batches": {"model": FIVE, "training": {"gradient_accumulation_steps": 3, **CLIPPED}},
    "mha, tied, padded right": {
        "model": {**FIVE, **TIED, "num_key_value_heads": 4},
        "data": {"count": 120, "lengths": (17, 9, 13), "padding": "right"},
        "training": {"gradient_accumulation_steps": 6, "lr_scheduler_type": "cosine", "warmup_steps": 2},
    },
    "tied, padded left, last window shorter": {
        "model": {**FIVE, **TIED},
        "data": {"count": 22, "lengths": (15, 8, 12), "padding": "left"},
        # 11 micro-batches an epoch: windows of 5, 5 and 1.
        "training": {"gradient_accumulation_steps": 5, "max_steps": -1, "num_train_epochs": 2, "max_grad_norm": 0.5},
    },
    "tokens counted per device": {
        "model": FIVE,
        "training": {"average_tokens_across_devices": False, "gradient_accumulation_steps": 4},
    },
    "biases, eager attention, no clipping": {
        "model": {**FIVE, "attention_bias": True, "mlp_bias": True, "attn_implementation": "eager"},
        "training": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.0, "optim": "adamw_torch_fused"},
    },
    "an odd number of samples": {  # which two ranks evaluate, too
        "data": {"lengths": (17, 9), "padding": "right"},
        "training": {**TWO, "per_device_eval_batch_size": 1},
    },
    "smoothed labels": {"model": FIVE, "training": {"label_smoothing_factor": 0.1}},
    "slices between others": {"model": {"num_hidden_layers": 9, **TIED}, "training": TWO},
    "frozen": {"freeze": ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]},
    "routers": {**ROUTED, "model": {**BALANCED_PHIMOE, **FOUR}},
    "routers of qwen2_moe": {**ROUTED, "model": {"family": f"{HOME}qwen2_moe", "mlp_only_layers": [1], **BALANCED}},
    "routers of gpt_oss": {**ROUTED, "model": {"family": f"{HOME}gpt_oss", **FOUR, **BALANCED}},
    # DeepSeek-V3 records what its routers say, and adds nothing to its loss.
    "routers of deepseek_v3": {**ROUTED, "model": {"family": f"{HOME}deepseek_v3", "output_router_logits": True}},
}
CASES |= {
    name: {"model": GPTS[name], "data": PADDED_LEFT, "training": TWO} for name in ("gpt2", "neox", "neox in turn")
}
CASES |= {
    f"derived {name}": {
        "model": {"family": f"{HOME}{name}", "num_hidden_layers": layers},
        "data": PADDED_LEFT,
        "training": {**TWO, "gradient_checkpointing": True},
    }
    for name, layers in {"gemma2": 2, "gemma3": 2, "phi3": 2, "olmo2": 4, "deepseek_v3": 4}.items()
}
CASES |= {
    f"derived {name}": {"model": {"family": f"{HOME}{name}", **FOUR}, "data": LONG, "training": TWO}
    for name in ("qwen3_5", "nemotron_h", "lfm2", *TEXT_PARTS)
}
SHORTER, FEWER, THREE = (
    "tied, padded left, last window shorter",
    "fewer micro-batches than ranks",
    "three micro-batches",
)
THREE, BIASED = "three micro-batches", "biases, eager attention, no clipping"
COUNTED, RIGHT = "tokens counted per device", "mha, tied, padded right"

TP, PP, CP, EP = ({f"{axis}_size": 2} for axis in ("tp", "pp", "cp", "ep"))
SPREAD = {**PP, "schedule": "auto", "spread_vocabulary": True}
MEASURED = {"plan": "auto", "cache": False, "tuning_share": 1.0}
HALVES = {"layers_per_stage": (1.5, 1, 1.5, 1)}
V = {"schedule": "dualpipe_v"}
ONCE, KEPT = {"shard_parameters": True}, {"shard_optimizer": True}

QUICK: list[tuple[str, int, dict[str, Any]]] = [
    (SHORTER, 1, {}),
    (SHORTER, 2, TP),
    (SHORTER, 2, {**PP, "schedule": "folded_1f1b"}),
    (FEWER, 2, {**PP, "schedule": "1f1b"}),
    (SHORTER, 2, CP),
    (SHORTER, 4, {**SPREAD, **ONCE, "recompute": "selective"}),
    ("an odd number of samples", 2, {}),
    ("routers", 2, {**EP, "plan": "auto", "cache": False}),
    ("frozen", 2, TP),
    ("derived gemma2", 2, TP),
]
SLOW: list[tuple[str, int, dict[str, Any]]] = [
    *((case, 2, TP) for case in ("clipping", RIGHT, COUNTED, BIASED)),
    *((case, 2, {**TP, "plan": "greedy"}) for case in ("gpt2", "neox")),
    ("neox in turn", 2, {**TP, **MEASURED}),
    # Pipelines
    *((THREE, ranks, {**PP, "schedule": "folded_1f1b", **more}) for ranks, more in ((2, {}), (4, TP), (4, {}))),
    *((RIGHT, ranks, {**PP, **V, **more}) for ranks, more in ((2, {}), (4, {}), (8, TP))),
    *((BIASED, ranks, {**PP, "schedule": "1f1b", **more}) for ranks, more in ((2, {}), (4, TP))),
    *((COUNTED, ranks, {**PP, "schedule": "auto", **HALVES}) for ranks in (2, 4)),
    *((case, 2, SPREAD) for case in (SHORTER, THREE, "smoothed labels")),
    (THREE, 4, {**SPREAD, **TP}),
    (SHORTER, 4, {**SPREAD, **KEPT}),
    (FEWER, 2, {**SPREAD, **HALVES}),
    (FEWER, 2, {**SPREAD, "offload": "optimizer"}),
    ("slices between others", 4, {**SPREAD, "pp_size": 4}),
    ("slices between others", 4, {**SPREAD, "pp_size": 4, "layers_per_stage": (1, 1, 1.5, 1.5, 1, 1, 1, 1)}),
    # Shared sequences, shared batches, experts
    (SHORTER, 2, {**CP, "cp_method": "all_gather"}),
    *((SHORTER, 4, {**CP, **more}) for more in (TP, PP)),
    *(("an odd number of samples", 4, more) for more in ({**CP, **KEPT}, TP)),
    *(("routers", 4, {**EP, **more}) for more in (TP, PP)),
    *(("routers of qwen2_moe", 2, layout) for layout in (EP, TP)),
    *(("routers of gpt_oss", ranks, layout) for ranks, layout in ((2, EP), (4, {**TP, **PP}))),
    ("routers of deepseek_v3", 2, TP),
    # Derived classes
    *((f"derived {name}", 2, {**TP, **MEASURED}) for name in ("gemma3", "phi3", "olmo2", "qwen3_5")),
    *((f"derived {name}", 2, PP) for name in ("olmo2", "nemotron_h", "lfm2", *TEXT_PARTS)),
    *((f"derived {name}", 2, TP) for name in ("nemotron_h", "lfm2", *TEXT_PARTS)),
    *((f"derived {name}", 2, CP) for name in ("qwen3_5", "nemotron_h")),
    ("derived deepseek_v3", 4, {**TP, **PP}),
]


@pytest.mark.parametrize(("case", "ranks", "helix"), [*QUICK, *(slow(*run) for run in SLOW)], ids=str)
def test_training_equals_the_stock_trainer(case: str, ranks: int, helix: dict[str, Any], like_stock: Any) -> None:
    """On as many processes (DDP) as there are data-parallel ranks. The logs of routers tell how even the loads are."""
    for result in like_stock(ranks, {"plan": "greedy", **helix}, **CASES[case]):
        for entry in result["logs"] if case.startswith("routers") else ():
            assert entry["helix/router_z"] > 0
            assert entry["helix/expert_imbalance"] >= 1
            assert "helix/dropped_tokens" not in entry
