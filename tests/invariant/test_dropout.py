"""Dropout depends on the seed alone: no order of operators changes what is drawn, and evaluation draws nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from invariant.classes import GPT2, NEOX, Case
from invariant.harness import USUAL, run
from support.comparisons import assert_same_bits
from support.derived_models import HOME
from support.marks import slow

DRY: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3},
    "gpt2": GPT2,
    "neox": NEOX,
    "neox in turn": {**NEOX, "use_parallel_residual": False},
    "derived phi3": {"family": f"{HOME}phi3", "num_hidden_layers": 2},
}
DROPOUT: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.2},
    "gpt2": {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1},
    "neox": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "neox in turn": {"hidden_dropout": 0.1},
    "derived phi3": {"resid_pdrop": 0.1, "attention_dropout": 0.1},
}


@pytest.mark.parametrize("model", [slow(n, when=n != "gpt2") for n in DRY])
def test_dropout_depends_on_the_seed_alone(model: str, cluster_of: Any, tmp_path: Path) -> None:
    dry = Case(f"{model} dry", DRY[model], "tp2", "dense")
    wet = Case(f"{model} dropout", {**DRY[model], **DROPOUT[model]}, "tp2", "dense")

    def window(case: Case, seed: int, orders: Sequence[str] = USUAL) -> Any:
        return run(cluster_of, tmp_path, case, orders, {"seed": seed})[0][0]

    result = window(wet, 3)
    assert result["losses"] != window(wet, 4, ("greedy",))["losses"]
    assert_same_bits(window(wet, 3), result)
    if model == "gpt2":
        assert result["losses"] != window(dry, 3)["losses"] == window(dry, 4, ("greedy",))["losses"]


@pytest.mark.parametrize("model", ["gpt2", *(slow(name) for name in ("neox", "derived phi3"))])
def test_evaluation_drops_nothing(model: str, cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "helix": {"tp_size": 2}, "training": {"max_steps": 1, "learning_rate": 0.0}}
    dry, wet = (
        cluster_of(2).run("train", model={**DRY[model], **changes}, **job)[0] for changes in ({}, DROPOUT[model])
    )
    assert wet["losses"] != dry["losses"]
    # With dropout the branches of a layer are scattered each by itself.
    assert wet["eval"] == pytest.approx(dry["eval"], abs=1e-6)
