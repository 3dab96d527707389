"""Training in bf16: no further from the exact gradient than the stock model in bf16 is, twice over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import jobs
from support.bf16_jobs import Window, unsplit
from support.parity import LENGTHS
from support.pipeline_jobs import batches_of
from transformers import AutoConfig

AUTOCAST: dict[str, Any] = {"bf16": True}
FLOOR = 2.0**-9  # half a unit in the last place
LOSS_FLOOR = 1e-5  # what layouts differ by in fp32
COUNT = 3

LAYOUTS = [
    ("llama", {"tp_size": 2}),
    ("llama", {"pp_size": 2}),
    ("llama", {"cp_size": 2}),
    ("gpt2", {"tp_size": 2}),
    ("phimoe", {"ep_size": 2}),
    pytest.param("gpt_neox", {"tp_size": 2}, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", {"ep_size": 2}, marks=pytest.mark.slow),
    pytest.param("mixtral", {"tp_size": 2}, marks=pytest.mark.slow),
    pytest.param("llama", {"tp_size": 2, "pp_size": 2}, marks=pytest.mark.slow),
    pytest.param("phimoe", {"ep_size": 2, "expert_capacity_factor": 4.0}, marks=pytest.mark.slow),
]


def distance(found: Any, exact: Any) -> float:
    """The error in parts of the exact value."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(found - exact) / max(np.linalg.norm(exact), 1e-30))


def joined(window: Window) -> Any:
    """All gradients in one."""
    return np.concatenate([window["gradients"][name].ravel() for name in sorted(window["gradients"])])


def saved_types(folder: Path) -> dict[str, torch.dtype]:
    """Of every tensor in a checkpoint."""
    return {name: value.dtype for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def references() -> Any:
    """The exact window and the stock one in bf16, each run once."""
    known: dict[Any, tuple[Window, Window]] = {}

    def get(model: dict[str, Any], count: int, autocast: bool) -> tuple[Window, Window]:
        key = (str(sorted(model.items())), count, autocast)
        if key not in known:
            batches = batches_of(count, lengths=LENGTHS)
            known[key] = unsplit(model, batches, exact=True), unsplit(model, batches, autocast=autocast)
        return known[key]

    return get


@pytest.mark.parametrize(
    "autocast", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["bf16=True", "model in bf16"]
)
@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_error_is_at_most_twice_that_of_the_stock_model(
    family: str, layout: dict[str, Any], autocast: bool, cluster_of: Any, references: Any, tmp_path: Any
) -> None:
    model = {"family": family, "num_hidden_layers": 4, "dtype": "float32" if autocast else "bfloat16"}
    if family == "gpt2":
        model = {"family": family, "n_layer": 4, "dtype": model["dtype"]}
    if family == "mixtral":
        model["num_experts_per_tok"] = 4  # all: an undecided router has nothing to choose otherwise
    dp = 2 if "ep_size" in layout else 1
    exact, stock = references(model, COUNT * dp, autocast)
    ranks = cluster_of(math.prod(size for name, size in layout.items() if name.endswith("_size"))).run(
        "support.pipeline_jobs:windows",
        folder=str(tmp_path),
        helix={"plan": "sequential", **layout},
        model=model,
        cases=[(plan, "w", COUNT) for plan in ("sequential", "greedy")],
        lengths=LENGTHS,
        training=AUTOCAST if autocast else {},
    )
    found, other = ranks[0]
    losses = [loss / dp for rank in ranks[:dp] for loss in rank[0]["losses"]]
    assert distance(losses, exact["losses"]) <= 2 * distance(stock["losses"], exact["losses"]) + LOSS_FLOOR
    assert found["gradients"].keys() == exact["gradients"].keys()
    for name, gradient in found["gradients"].items():
        np.testing.assert_array_equal(gradient, other["gradients"][name], err_msg=name)
        error = distance(stock["gradients"][name], exact["gradients"][name])
        assert distance(gradient, exact["gradients"][name]) <= 2 * error + FLOOR, name
    assert found["losses"] == other["losses"]
    assert distance(joined(found), joined(exact)) <= 2 * distance(joined(stock), joined(exact))


def test_activations_travel_in_bf16_and_gradients_stay_in_fp32(cluster_of: Any, tmp_path: Any) -> None:
    """The embedding, which the stock model has in fp32, and the statistics of the loss excepted."""
    options = {"folder": str(tmp_path), "helix": {"tp_size": 2, "plan": "sequential"}}
    layers = {"num_hidden_layers": 2}
    mixed, *_ = cluster_of(2).run("support.bf16_jobs:types", model=layers, training=AUTOCAST, **options)
    whole, *_ = cluster_of(2).run("support.bf16_jobs:types", model=layers, training={}, **options)
    half, *_ = cluster_of(2).run(
        "support.bf16_jobs:types", model={**layers, "dtype": "bfloat16"}, training={}, **options
    )
    everything = whole["moved"]["torch.float32"]
    assert mixed["moved"] == {"torch.float32": 3, "torch.bfloat16": everything - 3}
    assert half["moved"] == {"torch.float32": 1, "torch.bfloat16": everything - 1}
    assert mixed["gradients"] == {"torch.float32"}
    assert half["gradients"] == {"torch.bfloat16"}
    assert len({found["about"]["model"] for found in (mixed, whole, half)}) == 3


def test_logits_are_handed_out_in_fp32(tmp_path: Path) -> None:
    """As Accelerate does with what was computed under autocast; those of a model in bf16 stay as they are."""
    for dtype, training, expected in (("float32", AUTOCAST, torch.float32), ("bfloat16", {}, torch.bfloat16)):
        trainer = jobs.make_trainer(str(tmp_path), {}, model={"dtype": dtype}, training=training)
        batch = next(iter(trainer.get_eval_dataloader()))
        loss, logits, _ = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
        assert (loss.dtype, logits.dtype) == (torch.float32, expected)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [True, False], ids=["bf16=True", "model in bf16"])
def test_training_follows_the_stock_trainer(autocast: bool, cluster_of: Any, tmp_path: Any) -> None:
    """As near to it as fp32 is, or nearer; what is saved has the same types."""
    case: dict[str, Any] = {
        "model": {"dtype": "float32" if autocast else "bfloat16"},
        "training": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3, **(AUTOCAST if autocast else {})},
    }
    expected = jobs.train(str(tmp_path / "stock"), None, **case)
    in_fp32 = jobs.train(str(tmp_path / "fp32"), None, training={**case["training"], "bf16": False})
    folder = str(tmp_path / "helix")
    for result in cluster_of(2).run("train", folder=folder, helix={"tp_size": 2}, **case):
        assert result["steps"] == expected["steps"]
        for name in ("losses", "norms"):
            near = distance(in_fp32[name], expected[name])
            assert distance(result[name], expected[name]) <= 2 * near + FLOOR, name
        assert result["eval"] == pytest.approx(expected["eval"], rel=FLOOR * 2)
    assert saved_types(tmp_path / "helix") == saved_types(tmp_path / "stock")
    assert AutoConfig.from_pretrained(folder).dtype == AutoConfig.from_pretrained(tmp_path / "stock").dtype
