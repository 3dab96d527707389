"""Adapters where data-parallel ranks share parameters or the optimizer: as the stock Trainer with FSDP2, or DDP."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.comparisons import compare_adapters, compare_runs
from support.models import tiny
from support.versions import since

STEPS = {"max_steps": 4, "gradient_accumulation_steps": 2}
CLIPPED = {**STEPS, "max_grad_norm": 0.3}
BY_GRADIENTS = {**STEPS, "optim": "sgd", "learning_rate": 0.5, "weight_decay": 0.0}
"""Of a run whose weights move by the gradients themselves."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LLAMA = {"lora": {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}}
GPT2 = {"family": "gpt2", "lora": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}}
IN_FP32 = "llama by gradients"
SHARED: dict[str, dict[str, Any]] = {
    IN_FP32: {"model": LLAMA, "training": BY_GRADIENTS},
    "llama bf16 by gradients": {"model": LLAMA, "training": {**BY_GRADIENTS, "bf16": True}},
    "llama": {"model": LLAMA, "training": CLIPPED},
    "gpt2": {"model": GPT2, "training": CLIPPED},
    "mixtral": {"model": {"family": "mixtral", "lora": {"target_modules": ATTENTION}}, "training": CLIPPED},
}


@pytest.fixture(scope="module")
def stock_on_two(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The stock Trainer on two processes, with FSDP2 or DDP, run once a case; what it saved, and what it began with."""

    @functools.cache
    def get(case: str, way: str) -> tuple[dict[str, Any], Path, Path]:
        options, folder = SHARED[case], tmp_path_factory.mktemp("stock")
        tiny(**options["model"]).save_pretrained(folder / "adapters")
        job = {"folder": str(folder / "end"), "training": options["training"]}
        if way == "DDP":
            found = cluster_of(2).run("train", helix=None, model=options["model"], **job)[0]
        else:
            model = dict(options["model"])
            lora = model.pop("lora")
            tiny(**model).save_pretrained(folder / "start")
            found = cluster_of(2).run("train_with_fsdp2", weights=str(folder / "start"), lora=lora, **job)[0]
        return found, folder / "end", folder / "adapters"

    return get


SUMMING = since("5.23", "a Trainer that sums the gradients of adapters on a model spread with FSDP2")
WAYS = {"shard_parameters": ("FSDP2", [SUMMING]), "shard_optimizer": ("DDP", [])}


@pytest.mark.parametrize(
    ("option", "way", "case", "tp"),
    [
        pytest.param(
            option, way, case, tp, marks=[*marks, *[pytest.mark.slow] * (place + tp > 1)], id=f"{option}-{case}-{tp}"
        )
        for option, (way, marks) in WAYS.items()
        for place, case in enumerate(SHARED)
        for tp in (1, 2)
    ],
)
def test_training_with_shared_adapters_equals_the_stock_trainer(
    option: str, way: str, case: str, tp: int, cluster_of: Any, stock_on_two: Any, tmp_path: Path
) -> None:
    """Losses, norms, rates and evaluation are the stock Trainer's, and so are the adapters and how they have moved."""
    expected, theirs, start = stock_on_two(case, way)
    helix = {option: True, "tp_size": tp, "plan": "greedy"}
    found = cluster_of(2 * tp).run("train", folder=str(tmp_path), helix=helix, **SHARED[case])
    if SHARED[case]["training"].get("bf16"):
        exact, exactly, _ = stock_on_two(IN_FP32, way)
        first = np.array([run["losses"][0] for run in (expected, *found)]) - exact["losses"][0]
        assert np.abs(first[1:]).max() <= 2 * abs(first[0]), "later losses depend on how rounding has moved the weights"
        wanted, stocks, ours = (movements(start, path) for path in (exactly, theirs, tmp_path))
        assert distance(ours, wanted) <= 2 * distance(stocks, wanted)
        return
    for result in found:
        compare_runs(result, expected, steps=4)
    compare_adapters(tmp_path, theirs)
    if case == IN_FP32:
        ours, stocks = movements(start, tmp_path), movements(start, theirs)
        for name, moved in stocks.items():
            assert torch.linalg.vector_norm(ours[name] - moved) <= 1e-3 * torch.linalg.vector_norm(moved) > 0, name


def movements(start: Path, end: Path) -> dict[str, torch.Tensor]:
    """What has been added to each tensor of the adapters: by SGD, all gradients of its steps."""
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (start, end))
    return {name: value.double() - before[name].double() for name, value in after.items()}


def distance(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The 2-norm of all differences."""
    return float(sum((ones[name] - value).square().sum() for name, value in others.items())) ** 0.5
