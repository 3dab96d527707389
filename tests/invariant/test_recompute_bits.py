"""Recompute changes no bit of losses and gradients under the same plan, in any layout, and takes less memory."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from invariant.classes import Case
from invariant.harness import RANDOM, USUAL, run
from support.comparisons import assert_same_bits
from support.jobs import build
from support.marks import slow
from support.models import sequences, tiny

from hf_helix.measure.overlap import trace_window

MODES = ("none", "selective", "full")
PIPELINE = {"num_hidden_layers": 4, "attention_dropout": 0.2}
LLAMA = {"num_hidden_layers": 2}
GPT2 = {"family": "gpt2", "n_layer": 2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
NEOX = {"family": "gpt_neox", **LLAMA, "hidden_dropout": 0.1, "attention_dropout": 0.1}
PHIMOE = {"family": "phimoe", **LLAMA, "random": True, "output_router_logits": True, "router_aux_loss_coef": 0.1}
ODD = (17, 9, 13)

CASES = {
    "neox": Case("neox", NEOX, "tp2", "dense", count=2, lengths=ODD),
    "experts": Case("phimoe", PHIMOE, "dp2+ep2", "dense", count=2, lengths=ODD),
    "capacity": Case(  # of all ranks
        "capacity", PHIMOE, "dp2+ep2", "dense", count=2, lengths=(17, 9), options={"expert_capacity_factor": 1.25}
    ),
    "cp": Case("llama", LLAMA, "cp2", "packed", count=2, lengths=ODD),
    "bf16": Case("llama", LLAMA, "tp2", "dense", count=2, lengths=ODD),
    "pp": Case("llama", PIPELINE, "pp2", "dense", count=3, lengths=ODD),
    "dualpipe_v": Case("llama", PIPELINE, "pp2", "dense", count=4, lengths=ODD, schedules=("dualpipe_v",)),
}


def same_bits(
    cluster_of: Any, folder: Path, case: Case, orders: Sequence[str] = USUAL, training: dict[str, Any] | None = None
) -> None:
    """Under every mode, also of what routers counted."""
    usual, *others = (
        run(cluster_of, folder, replace(case, options={**case.options, "recompute": mode}), orders, training)
        for mode in MODES
    )
    for other in others:
        for rank, expected in zip(other, usual, strict=True):
            for result, wanted in zip(rank, expected, strict=True):
                assert_same_bits(result, wanted)
                assert result["meters"] == wanted["meters"]
                assert any(map(sum, result["meters"])) == (case.model.get("family") == "phimoe")


@pytest.mark.parametrize(
    "orders", [("sequential", "greedy", "dhelix", RANDOM), ("sequential/2",)], ids=["whole", "tiled"]
)
def test_under_every_plan(orders: Sequence[str], cluster_of: Any, tmp_path: Path) -> None:
    same_bits(cluster_of, tmp_path, Case("gpt2", GPT2, "tp2", "left", count=2, lengths=ODD), orders)


SLOW = ("neox", "capacity", "bf16", "dualpipe_v")  # relatives of others


@pytest.mark.parametrize("name", [slow(name, when=name in SLOW) for name in CASES])
def test_in_every_layout(name: str, cluster_of: Any, tmp_path: Path) -> None:
    same_bits(cluster_of, tmp_path, CASES[name], training={"bf16": True} if name == "bf16" else {})


# -- what users say ------------------------------------------------------------------------------------------------


def test_training_arguments_of_transformers_mean_full(tmp_path: Path) -> None:
    """The losses of the stock Trainer under the same arguments."""
    training = {"max_steps": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    stock = train_and_measure(str(tmp_path), None, training=training)
    ours = train_and_measure(str(tmp_path), {"cache": False}, training=training)
    assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-4)
    assert ours["again"] == ["layers.0", "layers.1", "layers.2"]
    assert ours["about"]["recompute"] == "full"
    training["gradient_checkpointing"] = False
    without, selective = (
        train_and_measure(str(tmp_path), {"cache": False, "recompute": mode}, training=training)
        for mode in ("none", "selective")
    )
    assert without["losses"] == selective["losses"] == ours["losses"]
    assert without["again"] == []
    assert ours["memory"] < selective["memory"] < without["memory"]


def test_some_layers_only(tmp_path: Path) -> None:
    training = {"max_steps": 1, "gradient_checkpointing": True}
    training["gradient_checkpointing_kwargs"] = {"every_n_layers": 2, "use_reentrant": False}
    result = train_and_measure(
        str(tmp_path), {"plan": "dhelix"}, training={**training, "gradient_accumulation_steps": 2}
    )
    assert result["again"] == ["layers.0", "layers.2"]
    assert result["about"]["recompute"] == "full x 1, none x 1, full x 1"


def test_switched_on_in_the_model(tmp_path: Path) -> None:
    training = {"max_steps": 1}
    result = train_and_measure(str(tmp_path), {}, marked=True, training=training)
    assert result["about"]["recompute"] == "full"
    result = train_and_measure(str(tmp_path), {"recompute": "selective"}, marked=True, training=training)
    assert result["about"]["recompute"] == "selective"
    with pytest.raises(
        ValueError, match=r"gradient_checkpointing_enable.*recompute='none' contradicts.*recompute=None"
    ):
        train_and_measure(str(tmp_path), {"recompute": "none"}, marked=True, training=training)


@pytest.mark.parametrize(
    ("kwargs", "config", "words"),
    [
        ({}, {"recompute": "none"}, ["recompute='none'", "checkpointing=False"]),
        ({"offload": True}, {}, ["offload=True is not built", "checkpointing_kwargs=None"]),
        ({"preserve_rng_state": False}, {}, ["preserve_rng_state=False", "same random numbers"]),
        ({"every_n_layers": 0}, {"recompute": "selective"}, ["every_n_layers must be", "got 0"]),
    ],
    ids=str,
)
def test_what_contradicts_or_is_not_built_is_refused(
    kwargs: dict[str, Any], config: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    training = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    with pytest.raises(ValueError, match="cannot honour") as caught:
        train_and_measure(str(tmp_path), config, training=training)
    for word in words:
        assert word in str(caught.value)


# -- plans ---------------------------------------------------------------------------------------------------------


def test_what_runs_again_is_measured(cluster_of: Any, tmp_path: Path) -> None:
    """Of every operator a time; gathers that run again move what they moved before."""
    options = {"model": {**LLAMA, "attention_dropout": 0.2}, "training": {"gradient_checkpointing": True}}
    for rank in cluster_of(2).run("support.tuning_jobs:profile", folder=str(tmp_path), **options):
        assert rank["times"].keys() == rank["kinds"].keys()
        assert rank["like"]["layer", "B.mlp.gather.again"] == rank["like"].get(
            ("layer", "F.mlp.gather"), ("layer", "F.mlp.gather")
        )
        times, again = rank["times"], ("layer", "B.mlp.up.again")
        paired = [times[name] for name, _ in rank["pairs"] if name in rank["computing"]]
        # What is short beside communication is left out, on a busy machine perhaps this.
        assert any(name == again for name, _ in rank["pairs"]) or times[again] <= min(paired, default=math.inf)
        assert rank["about"]["recompute"] == "full"
        assert rank["same_parameters"]
        assert rank["gradients"] == 0


# -- in the processes of a cluster ---------------------------------------------------------------------------------


def train_and_measure(
    folder: str, helix: dict[str, Any] | None, marked: bool = False, training: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train a little: losses, which operators ran again in which layer, and the most bytes alive.

    Args:
        helix: options of `HelixConfig`; None for the stock Trainer.
        marked: switch checkpointing on in the model, as a user may.
        training: training arguments.
    """
    model = tiny()
    if marked:
        model.gradient_checkpointing_enable()
    trainer: Any = build(folder, helix, training, model=model, train_dataset=sequences(60))
    trainer.train()
    result = {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
    if helix is None:
        return result
    spans = trace_window(trainer.helix.runner, trainer.helix.session.last_window).spans
    again = [span.label.split(".", 1)[1] for span in spans if span.label.endswith(".again")]
    return result | {
        "again": sorted({".".join(label.split(".")[:2]) for label in again}),
        "memory": trainer.measure_memory(),
        "about": dict(trainer.helix.session.tuner.fingerprint),
    }
