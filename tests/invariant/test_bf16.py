"""Training in bf16: no further from the exact gradient than the stock model in bf16 is, twice over."""

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from invariant.classes import Case
from invariant.harness import run
from support import jobs
from support.derived_models import HOME
from support.marks import slow
from support.models import tiny
from support.parity import LENGTHS
from support.pipeline_jobs import batches_of, items_in, make, window_of

from hf_helix.operators.communication.transport import Recorder
from hf_helix.runtime.divided import plain_parameters

AUTOCAST: dict[str, Any] = {"bf16": True}
FLOOR = 2.0**-9  # half a unit in the last place
LOSS_FLOOR = 1e-5  # what layouts differ by in fp32
Window = dict[str, Any]

LAYOUTS = [
    ("llama", "tp2", {}),
    ("llama", "cp2", {}),
    ("phimoe", "dp2+ep2", {}),
    *(slow(*case, {}) for case in (("llama", "tp2+pp2"), ("gpt2", "tp2"), ("gpt_neox", "tp2"), ("mixtral", "tp2"))),
    slow("derived gemma3", "tp2", {}),
    slow("derived olmo2", "pp2", {}),  # the error of three losses is a matter of luck; pp2 rounds as the stock model
    slow("phimoe", "dp2+ep2", {"expert_capacity_factor": 4.0}),
    slow("mixtral adapters", "dp2+ep2", {}),
    slow("llama dora", "tp2", {}),
]
MODELS: dict[str, dict[str, Any]] = {
    family: {"family": family.replace("derived ", HOME), "num_hidden_layers": 4}
    for family in ("llama", "gpt2", "gpt_neox", "phimoe", "mixtral", "derived gemma3", "derived olmo2")
}
MODELS["mixtral"]["num_experts_per_tok"] = 4  # all experts: an undecided router has nothing to choose otherwise
MODELS["llama dora"] = {**MODELS["llama"], "lora": {"use_dora": True}}
MODELS["mixtral adapters"] = {**MODELS["mixtral"], "lora": {}}


def distance(result: Any, exact: Any) -> float:
    """The error in parts of the exact value."""
    result, exact = np.asarray(result, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(result - exact) / max(np.linalg.norm(exact), 1e-30))


def joined(window: Window) -> Any:
    """All gradients in one."""
    return np.concatenate([window["gradients"][name].ravel() for name in sorted(window["gradients"])])


@functools.cache
def unsplit(family: str, dtype: str, count: int, autocast: bool = False, exact: bool = False) -> Window:
    """Losses and gradients of a window through the unsplit model, run once.

    Args:
        family: of the model.
        dtype: of its weights.
        count: micro-batches.
        autocast: as the stock Trainer with `bf16=True`.
        exact: in fp64, from the same weights.
    """
    made, batches = tiny(**MODELS[family], dtype=dtype).train(), batches_of(count, lengths=LENGTHS)
    if exact:
        made.set_experts_implementation("eager")  # the grouped GEMMs of torch take no fp64
        for parameter in made.parameters():
            parameter.data = parameter.data.double()
    losses = []
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = made(**batch, num_items_in_batch=items_in(batches), use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    trained = {name: parameter.grad for name, parameter in made.named_parameters() if parameter.requires_grad}
    gradients = {name: gradient.double().numpy().copy() for name, gradient in trained.items()}
    return {"losses": losses, "gradients": gradients}


@pytest.mark.parametrize("autocast", [True, slow(False)], ids=["bf16=True", "model in bf16"])
@pytest.mark.parametrize(("family", "layout", "options"), LAYOUTS, ids=str)
def test_error_is_at_most_twice_that_of_the_stock_model(
    family: str, layout: str, options: dict[str, Any], autocast: bool, cluster_of: Any, tmp_path: Path
) -> None:
    dtype = "float32" if autocast else "bfloat16"
    case = Case(f"bf16 {family}", {**MODELS[family], "dtype": dtype}, layout, "dense", options=options)
    dp = case.sizes["dp"]
    exact = unsplit(family, dtype, case.count * dp, exact=True)
    stock = unsplit(family, dtype, case.count * dp, autocast)
    ranks = run(cluster_of, tmp_path, case, training=AUTOCAST if autocast else {})
    result = ranks[0][0]
    losses = [loss / dp for (rank,) in ranks[:dp] for loss in rank["losses"]]
    assert distance(losses, exact["losses"]) <= 2 * distance(stock["losses"], exact["losses"]) + LOSS_FLOOR
    assert result["gradients"].keys() == exact["gradients"].keys()
    for name, gradient in result["gradients"].items():
        error = distance(stock["gradients"][name], exact["gradients"][name])
        assert distance(gradient, exact["gradients"][name]) <= 2 * error + FLOOR, name
    assert distance(joined(result), joined(exact)) <= 2 * distance(joined(stock), joined(exact))


def test_activations_travel_in_bf16_and_gradients_stay_in_fp32(cluster_of: Any, tmp_path: Path) -> None:
    """The embedding, which the stock model has in fp32, and the statistics of the loss excepted."""
    options = {"folder": str(tmp_path), "helix": {"tp_size": 2, "plan": "sequential"}}
    mixed, whole, half = (
        cluster_of(2).run(
            "invariant.test_bf16:types", model={"num_hidden_layers": 2, **model}, training=training, **options
        )[0]
        for model, training in (({}, AUTOCAST), ({}, {}), ({"dtype": "bfloat16"}, {}))
    )
    everything = whole["moved"]["torch.float32"]
    assert mixed["moved"] == {"torch.float32": 3, "torch.bfloat16": everything - 3}
    assert half["moved"] == {"torch.float32": 1, "torch.bfloat16": everything - 1}
    assert mixed["gradients"] == {"torch.float32"}
    assert half["gradients"] == {"torch.bfloat16"}
    assert len({result["about"]["model"] for result in (mixed, whole, half)}) == 3


@plain_parameters()
def types(folder: str, helix: dict[str, Any], model: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    """The types of what a window moves between tensor-parallel ranks with how often, and of what it leaves."""
    trainer = make(folder, helix, model, training)
    trainer.model.train()
    axis = trainer.helix.mesh.tp
    axis.transport = recorder = Recorder(axis.transport)
    trainer.helix.runner.train_window(window_of(trainer, 1, 2, (9,)), complete=False)
    trainer.helix.runner.executor.streams.synchronize()
    axis.transport = recorder.inner
    trainer.helix.runner.executor.streams.close()
    moved: dict[str, int] = {}
    for move in recorder.moved:
        name = str(move.value[1])
        moved[name] = moved.get(name, 0) + 1
    gradients = {str(parameter.grad.dtype) for parameter in trainer.model.parameters()}
    return {"moved": moved, "gradients": gradients, "about": trainer.helix.session.tuner.fingerprint}


def test_logits_are_handed_out_in_fp32(tmp_path: Path) -> None:
    """As Accelerate does with what was computed under autocast; those of a model in bf16 stay as they are."""
    for dtype, training, expected in (("float32", AUTOCAST, torch.float32), ("bfloat16", {}, torch.bfloat16)):
        trainer = jobs.make_trainer(str(tmp_path), {}, model={"dtype": dtype}, training=training)
        batch = next(iter(trainer.get_eval_dataloader()))
        loss, logits, _ = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
        assert (loss.dtype, logits.dtype) == (torch.float32, expected)
