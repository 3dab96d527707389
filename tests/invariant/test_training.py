"""HelixTrainer on several processes does what the stock Trainer does: losses, norms, evaluation, weights."""

from typing import Any

import pytest
from invariant.classes import GPTS
from support.derived_models import HOME, HYBRIDS, TEXT_PARTS
from support.marks import slow

Case = dict[str, Any]
CLIPPED = {"max_grad_norm": 0.3}
PADDED_RIGHT = {"lengths": (17, 9, 13), "padding": "right"}

CASES: dict[str, Case] = {
    "gqa, untied, accumulation 1, clipping": {"training": CLIPPED},
    "mha, tied, accumulation 2, padded right": {
        "model": {"num_key_value_heads": 4, "tie_word_embeddings": True},
        "data": PADDED_RIGHT,
        "training": {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 2},
    },
    "gqa, tied, accumulation 3, padded left, last window shorter": {
        "model": {"tie_word_embeddings": True},
        "data": {"count": 14, "lengths": (15, 8, 12), "padding": "left"},
        # 7 micro-batches an epoch: windows of 3, 3 and 1.
        "training": {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2, "max_grad_norm": 0.5},
    },
    "tokens counted per device": {
        "training": {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2}
    },
    "biases, eager attention, no clipping": {
        "model": {"attention_bias": True, "mlp_bias": True, "attn_implementation": "eager"},
        "training": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "optim": "adamw_torch_fused"},
    },
}
CASES |= {
    name: {
        "model": GPTS[name],
        "data": {"lengths": (17, 9, 13), "padding": "left"},
        "training": {"gradient_accumulation_steps": 2, **CLIPPED},
    }
    for name in ("gpt2", "neox", "neox in turn")
}
CASES |= {
    f"derived {name}": {
        "model": {"family": f"{HOME}{name}", "num_hidden_layers": layers},
        "data": {"lengths": (17, 9, 13), "padding": "left"},
        "training": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "max_steps": 4, **CLIPPED},
    }
    for name, layers in {"gemma2": 2, "gemma3": 2, "phi3": 2, "olmo2": 4, "deepseek_v3": 4}.items()  # pipelines need 4
}
CASES |= {
    f"hybrid {name}": {
        "model": {"family": f"{HOME}{name}", "num_hidden_layers": 4},
        "data": {"lengths": (70, 9, 13), "padding": "left"},
        "training": {"gradient_accumulation_steps": 2, "max_steps": 4, **CLIPPED},
    }
    for name in HYBRIDS
}
CASES |= {
    f"text of {name}": {
        "model": {"family": f"{HOME}{name}", "num_hidden_layers": 4},
        "data": {"lengths": (17, 9, 13), "padding": "left"},
        "training": {"gradient_accumulation_steps": 2, "max_steps": 4, **CLIPPED},  # the mean of two means
    }
    for name in TEXT_PARTS
}
ONE, SHORTER = "gqa, untied, accumulation 1, clipping", "gqa, tied, accumulation 3, padded left, last window shorter"
MEASURED = {"cache": False, "tuning_share": 1.0}


def runs() -> list[Any]:
    """Case, processes, and options."""
    result = [
        (ONE, 2, {"tp_size": 2}, True),
        (SHORTER, 2, {"tp_size": 2}, False),
        (ONE, 1, {"tp_size": 1}, False),
        (SHORTER, 1, {"tp_size": 1}, True),
        *((case, 2, {"tp_size": 2}, True) for case in list(CASES)[1:5] if case != SHORTER),
        ("derived gemma2", 2, {"tp_size": 2, "plan": "greedy"}, False),
        ("derived olmo2", 2, {"pp_size": 2, "plan": "greedy"}, True),
        *((f"derived {name}", 2, {"tp_size": 2, "plan": "auto"}, True) for name in ("gemma3", "phi3", "olmo2")),
        ("derived deepseek_v3", 4, {"tp_size": 2, "pp_size": 2, "plan": "greedy"}, True),
    ]
    for case in [*(f"hybrid {name}" for name in HYBRIDS), *(f"text of {name}" for name in TEXT_PARTS)]:
        result += [(case, 2, {axis: 2, "plan": "greedy"}, True) for axis in ("tp_size", "pp_size")]
    result += [(f"hybrid {name}", 2, {"cp_size": 2, "plan": "greedy"}, True) for name in ("qwen3_5", "nemotron_h")]
    for plan in ("greedy", "intra_batch", "auto"):
        result += [(name, 2, {"tp_size": 2, "plan": plan, **MEASURED}, True) for name in list(CASES)[5:8]]
    return [slow(*run, when=is_slow, id=f"{run[0]}-{run[2]}") for *run, is_slow in result]


@pytest.mark.parametrize(("case", "ranks", "helix"), runs())
def test_training_equals_the_stock_trainer(case: str, ranks: int, helix: dict[str, Any], like_stock: Any) -> None:
    like_stock(ranks, helix, **CASES[case])


@pytest.mark.parametrize(("ranks", "tp_size"), [(2, 1), slow(4, 2)])
def test_data_parallel_ranks_share_the_batch(ranks: int, tp_size: int, like_stock: Any) -> None:
    """Against the stock Trainer on two processes (DDP), which evaluates an odd number of samples, too."""
    data = {"count": 60, "lengths": (17, 9), "padding": "right"}
    training = {"gradient_accumulation_steps": 2, **CLIPPED, "per_device_eval_batch_size": 1}
    like_stock(ranks, {"tp_size": tp_size, "plan": "greedy"}, data=data, training=training)
