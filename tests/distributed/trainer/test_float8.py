"""fp8 linears: emulated on the CPU, against fp8 written out in the stock Transformers model, in several layouts."""

import contextlib
import io
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.jobs import train
from support.marks import slow
from support.pipeline_jobs import batches_of, reference, windows
from torch import Tensor, nn

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
RECIPES = ("tensorwise", "rowwise")
COUNT = 3
LAYOUTS = {"tp2": {"tp_size": 2}, "pp2": {"pp_size": 2}}
GATHERED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""The linears whose input comes from other ranks."""


def rounded(matrix: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """What fp8 keeps of a matrix, with a scale for all of it or for each slice along a dimension."""
    largest = matrix.abs().amax() if dim is None else matrix.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / largest.clamp(min=1e-20))))
    return (matrix * scale).to(dtype).float() / scale


class InFloat8(torch.autograd.Function):
    """A linear in fp8, whose weight gradient is not."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.recipe, dim = recipe, -1 if recipe == "rowwise" else None
        return (
            rounded(value.flatten(0, -2), torch.float8_e4m3fn, dim).view_as(value)
            @ rounded(weight, torch.float8_e4m3fn, dim).t()
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        value, weight = ctx.saved_tensors
        rows, rowwise = gradient.flatten(0, -2), ctx.recipe == "rowwise"
        kind = torch.float8_e4m3fn if rowwise else torch.float8_e5m2
        of_value = rounded(rows, kind, -1 if rowwise else None) @ rounded(
            weight, torch.float8_e4m3fn, 0 if rowwise else None
        )
        return of_value.view_as(value), rows.t() @ value.flatten(0, -2), None


def expected(recipe: str) -> dict[str, Any]:
    """Losses and gradients of the stock model whose linears, but for the head, are in fp8."""

    def prepare(model: Any) -> None:
        for linear in model.model.modules():
            if isinstance(linear, nn.Linear):
                linear.forward = lambda value, linear=linear: InFloat8.apply(value, linear.weight, recipe)

    return reference(MODEL, batches_of(COUNT), prepare)


def window(folder: str, **given: Any) -> tuple[dict[str, Any], str]:
    """A window, and what is said before it."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        (found,) = windows(folder, model=MODEL, cases=[("greedy", "folded_1f1b", COUNT)], **given)
    return found, said.getvalue()


def run(cluster: Any, folder: Path, **helix: Any) -> tuple[dict[str, Any], str]:
    return cluster.run(window, folder=str(folder), helix={"plan": "sequential", **helix})[0]


def distance(found: dict[str, Any], wanted: dict[str, Any], without: Collection[str] = ()) -> float:
    """The largest distance of a gradient, relative to its norm."""
    return max(
        float(np.linalg.norm(found["gradients"][name] - gradient) / np.linalg.norm(gradient))
        for name, gradient in wanted["gradients"].items()
        if not any(each in name for each in without)
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_rank_is_the_stock_model_in_fp8(cluster_of: Any, tmp_path: Path, recipe: str) -> None:
    (found, said), wanted = run(cluster_of(1), tmp_path, float8=recipe), expected(recipe)
    plain, _ = run(cluster_of(1), tmp_path)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
    assert distance(found, wanted) < 1e-5
    assert 0.02 < distance(plain, wanted) < 0.3, "fp8 is not fp32"
    (error,) = re.findall(
        rf"on a small model, float8={recipe} in place of bf16 changes the loss by (\S+) and gradients by (\S+) of", said
    )
    assert 1e-5 < float(error[0]) < 0.02
    assert 0.01 < float(error[1]) < 0.3
    assert f"float8={recipe}: 28 linears of this rank multiply in fp8" in said
    assert "not in fp8: 1 (the head or a router); emulated on this CPU" in said


@pytest.mark.parametrize(("layout", "recipe"), [("tp2", "tensorwise"), slow("pp2", "rowwise")])
def test_two_ranks_are_one(cluster_of: Any, tmp_path: Path, layout: str, recipe: str) -> None:
    (found, _), wanted = run(cluster_of(2), tmp_path, float8=recipe, **LAYOUTS[layout]), expected(recipe)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
    assert distance(found, wanted, without=GATHERED if layout == "tp2" else ()) < 1e-4
    assert distance(found, wanted) < 0.05, "gathers round what weight gradients read"


def test_sharded_weights_are_cast_as_full_ones(cluster_of: Any, tmp_path: Path) -> None:
    training = {"max_steps": 2, "bf16": True, "learning_rate": 1e-2, "per_device_train_batch_size": 4}
    given = {
        "folder": str(tmp_path),
        "model": {**MODEL, "num_hidden_layers": 2},
        "data": {"count": 8},
        "training": training,
    }
    helix = {"plan": "greedy", "float8": "rowwise", "recompute": "selective"}
    full, *sharded = (
        cluster_of(2).run(train, helix={**helix, **option}, **given)[0]
        for option in ({}, {"shard_parameters": True}, {"shard_optimizer": True})
    )
    for found in sharded:
        for name in ("losses", "norms"):
            np.testing.assert_allclose(found[name], full[name], rtol=1e-4)
