"""`shard_optimizer=True`: the run is that of stock data parallelism, under every plan; optimizers step shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs, sharding_jobs
from support.derived_models import HOME
from support.sharding_checks import (
    FEW_PLANS,
    PLANS,
    TrainingCase,
    WindowCase,
    check_bits_in_bf16,
    check_training,
    check_windows,
)
from transformers import AutoModelForCausalLM

SHARDED = {"shard_optimizer": True, "cache": False}
CLIPPED = {"max_grad_norm": 0.3, "gradient_accumulation_steps": 2}
BF16 = {"bf16": True}
TIED = {"tie_word_embeddings": True}
BIASED = {"attention_bias": True, "mlp_bias": True}
SCHEDULE_FREE = {**CLIPPED, "optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "save_strategy": "epoch"}
SLOW = pytest.mark.slow

WINDOWS: dict[str, WindowCase] = {
    "llama": (2, {}, {}, {}),
    "llama bf16": (2, {}, {}, BF16),
    "llama bf16, tied, with biases": (2, {}, {**TIED, **BIASED}, BF16),
    "llama bf16, recomputed": (2, {"recompute": "full"}, {}, BF16),
    "llama with adapters": (2, {}, {"lora": {}}, {}),
    "llama bf16 with adapters": (2, {}, {"lora": {}}, BF16),
    "llama, some of a layer frozen": (2, {}, {"freeze": ["model.layers.1.mlp.up_proj.weight"]}, {}),
    "llama bf16, some of a layer frozen": (2, {}, {"freeze": ["model.layers.1.mlp.up_proj.weight"]}, BF16),
    "llama tp2": (4, {"tp_size": 2}, TIED, {}),
    "llama bf16 tp2": (4, {"tp_size": 2}, TIED, BF16),
    "mixtral bf16": (2, {}, {"family": "mixtral"}, BF16),
    "mixtral ep2 without copies of experts": (2, {"ep_size": 2}, {"family": "mixtral"}, {}),
    "mixtral ep2": (4, {"ep_size": 2}, {"family": "mixtral"}, {}),
    "mixtral bf16 ep2": (4, {"ep_size": 2}, {"family": "mixtral"}, BF16),
    "mixtral bf16 ep2 tp2": (4, {"ep_size": 2, "tp_size": 2}, {"family": "mixtral"}, BF16),
    "gpt2 bf16, selective": (2, {"recompute": "selective"}, {"family": "gpt2"}, BF16),
    "llama cp2": (2, {"cp_size": 2}, {}, {}),
    "llama pp2": (4, {"pp_size": 2}, {"num_hidden_layers": 4}, {}),
    "llama bf16 pp2": (4, {"pp_size": 2}, {"num_hidden_layers": 4}, BF16),
    "llama dp4": (4, {}, {}, {}),
    "gemma3 bf16": (2, {}, {"family": f"{HOME}gemma3"}, BF16),
    "bf16 weights": (2, {}, {"dtype": "bfloat16"}, {}),
    "qwen3_moe bf16": (2, {}, {"family": "qwen3_moe"}, BF16),
    "llama with dropout": (2, {}, {"attention_dropout": 0.3}, {}),
    "llama bf16, compiled": (2, {"compile": True}, {}, BF16),
}
QUICK = (
    "llama",
    "llama bf16, tied, with biases",
    "llama bf16, some of a layer frozen",
    "llama bf16 tp2",
    "mixtral ep2 without copies of experts",
)


@pytest.mark.parametrize("case", [pytest.param(name, marks=[SLOW] * (name not in QUICK)) for name in WINDOWS])
def test_windows_are_those_of_whole_gradients(case: str, cluster_of: Any, tmp_path: Path) -> None:
    """The bits of all plans are the same; over two ranks they are those of the all-reduce of whole gradients, with
    weights in bfloat16 where products alone read them, too."""
    check_windows(cluster_of, tmp_path, SHARDED, WINDOWS[case], PLANS if case == "llama" else FEW_PLANS)


TRAININGS: dict[str, TrainingCase] = {
    "llama": (2, {}, {"training": CLIPPED}),
    "llama, other weights in evaluation": (2, {}, {"training": SCHEDULE_FREE}),
    "llama tied, decayed": (2, {}, {"model": TIED, "training": {**CLIPPED, "weight_decay": 0.1}}),
    "llama tp2": (4, {"tp_size": 2}, {"training": CLIPPED}),
    "llama tp2, in tiles": (4, {"tp_size": 2, "plan": "intra_batch"}, {"training": CLIPPED}),
    "llama pp2": (4, {"pp_size": 2}, {"model": {"num_hidden_layers": 4}, "training": CLIPPED}),
    "mixtral ep2": (2, {"ep_size": 2}, {"model": {"family": "mixtral"}, "training": CLIPPED}),
    "llama dp4": (4, {}, {"training": CLIPPED}),
    "llama, recomputed": (2, {}, {"training": {**CLIPPED, "gradient_checkpointing": True}}),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=[SLOW] * (name != "llama")) for name in TRAININGS])
def test_training_equals_stock_data_parallelism(case: str, cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    """Losses, norms, rates, evaluation and saved weights are those of the stock Trainer with DDP."""
    check_training(cluster_of, stock, tmp_path, SHARDED, TRAININGS[case])


@pytest.mark.parametrize("helix", [{}, pytest.param({"tp_size": 2}, marks=SLOW)], ids=str)
def test_training_in_bf16_is_that_without_sharding(helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    check_bits_in_bf16(cluster_of, tmp_path, SHARDED, helix)


@pytest.mark.parametrize("training", [{}, pytest.param(BF16, marks=SLOW)], ids=str)
def test_gathers_are_measured(training: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    """Each has a time, and the bytes that a rank sends of its part; nothing else changes."""
    job = {"folder": str(tmp_path), "sharded": SHARDED, "training": training}
    for result in cluster_of(2).run(sharding_jobs.profiled, **job):
        assert len(result["seconds"]) == len(result["sent"]) > 1
        assert min(result["seconds"]) > 0
        assert result["sent"] == result["expected"]
        assert not result["changed"]
        assert not result["left"]


@pytest.mark.slow
def test_plans_are_made_of_measured_gathers(cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    """What `auto` does by itself: gathers are timed, plans are compared, and training and evaluation go on."""
    expected, _ = stock(jobs.train, dp=2, training=CLIPPED)
    job = {"folder": str(tmp_path), "training": CLIPPED, "sharded": {**SHARDED, "tp_size": 2}}
    for result in cluster_of(4).run(sharding_jobs.tuned, **job):
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
        assert result["eval"] == pytest.approx(expected["eval"], abs=1e-5)
        assert len(result["plans"]) > 2, result["verdict"]
        assert result["gathers"]
        assert result["communication"] > 0
        assert min(result["memory"]) > 0
        assert not result["changed"]
        assert not result["left"]


@pytest.mark.parametrize("training", [{}, BF16], ids=str)
def test_evaluation_has_the_weights_that_were_stepped(
    training: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    """At any moment, and they are gathered once behind every step or window."""
    plain, sharded = (
        cluster_of(2).run(sharding_jobs.evaluated, folder=str(tmp_path), helix=helix, training=training)
        for helix in ({"cache": False}, SHARDED)
    )
    for mine, theirs in zip(sharded, plain, strict=True):
        np.testing.assert_allclose(mine["losses"], theirs["losses"], rtol=0, atol=1e-6)
        assert mine["gathers"] == [1, 0, 1] * 3


@pytest.mark.parametrize(("option", "training"), [("shard_optimizer", {}), ("shard_parameters", BF16)])
def test_the_model_can_be_used_with_all_weights_in_it(
    option: str, training: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    helix = {option: True, "cache": False}
    job = {"folder": str(tmp_path), "helix": helix, "training": {"max_steps": 4, **training}}
    ranks = cluster_of(2).run(sharding_jobs.generated, **job)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    text = saved.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
    for result in ranks:
        assert len(result["refused"]) == 4
        assert "within trainer.helix.full_weights()" in result["refused"][0]
        assert all("leave full_weights() before" in message for message in result["refused"][1:])
        assert result["eval"] == ranks[0]["eval"]
        assert result["text"] == text
        for name, value in saved.named_parameters():
            assert torch.equal(result["weights"][name], value), name
        assert result["left"] == []


def test_slices_are_no_whole_weights(cluster_of: Any, tmp_path: Path) -> None:
    helix = {**SHARDED, "tp_size": 2}
    for error in cluster_of(4).errors(sharding_jobs.whole_weights_of_a_part, folder=str(tmp_path), helix=helix):
        assert error.kind == "ValueError"
        assert "tp_size=2: every rank has slices" in error.message


@pytest.mark.parametrize(
    ("ranks", "helix", "training"),
    [
        (2, {}, {}),
        (2, {}, BF16),
        pytest.param(4, {}, BF16, marks=SLOW),
        pytest.param(4, {"tp_size": 2}, BF16, marks=SLOW),
    ],
    ids=str,
)
def test_a_rank_keeps_weights_and_its_part_of_the_rest(
    ranks: int, helix: dict[str, Any], training: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    """A piece takes 4 bytes an element and has the rank's part in it, or 2 in bfloat16, and 4 more an element of the
    part; gradients behind a window take 4 an element of the part, the averages of AdamW 8, without padding."""
    job = {"folder": str(tmp_path), "sharded": SHARDED, "helix": helix, "model": {}, "training": training}
    for rank in cluster_of(ranks).run(sharding_jobs.held, **job):
        over = ranks // helix.get("tp_size", 1)
        assert all(size == over for _, size in rank["flats"])
        assert (2 in rank["pieces"]) == bool(training)
        lengths = [length for length, _ in rank["flats"]]
        weights = sum(size * length for size, length in zip(rank["pieces"], lengths, strict=True))
        masters = sum(4 * length // over for size, length in zip(rank["pieces"], lengths, strict=True) if size == 2)
        stand_ins = 4 * len(lengths)
        start, after, stepped = rank["bytes"]
        assert start == weights + masters + stand_ins
        assert after == start + sum(4 * length // over for length in lengths)
        assert stepped == start + 8 * rank["elements"]
        assert rank["spared"] == 12 * sum(lengths) - (weights + masters + sum(8 * length // over for length in lengths))


@pytest.mark.parametrize("training", [pytest.param({}, marks=SLOW), BF16], ids=str)
def test_the_memory_of_a_window(training: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    """Beside what a window takes that keeps its gradients all the time: the gradients, those that are being summed once
    more, and the summed parts. With bf16, products need no copies of the weights."""
    job = {"folder": str(tmp_path), "model": {"num_hidden_layers": 12}, "training": training}
    whole = cluster_of(2).run(sharding_jobs.peaks, helix={}, **job)
    for mine, other in zip(cluster_of(2).run(sharding_jobs.peaks, helix=SHARDED, **job), whole, strict=True):
        everything, largest = 4 * sum(mine["flats"]), 4 * max(mine["flats"])
        halves = sum(2 * length for size, length in zip(mine["sizes"], mine["flats"], strict=True) if size == 2)
        assert bool(halves) == bool(training)
        assert mine["forward"] <= other["forward"] - 0.9 * halves
        assert mine["window"] <= other["window"] + everything * 3 / 2 + 2 * largest - 0.9 * halves


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("training", [{}, BF16], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_what_a_window_sends(ranks: int, training: dict[str, Any], count: int, cluster_of: Any, tmp_path: Path) -> None:
    """However many micro-batches it has: every gradient to the rank that steps it, and every weight from there."""
    job = {"folder": str(tmp_path), "sharded": SHARDED, "training": training, "count": count}
    for result in cluster_of(ranks).run(sharding_jobs.sent, **job):
        d = result["ranks"]
        assert d == ranks
        assert result["summed"] == sum(4 * length * (d - 1) // d for _, length, _ in result["flats"])
        assert result["sent"] == sum((4 + size) * length * (d - 1) // d for _, length, size in result["flats"])
        assert [name for name, _ in result["moved"]] == ["all_gather"] * len(result["flats"]) + ["exchange"] * len(
            result["flats"]
        )
