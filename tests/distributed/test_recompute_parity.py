"""Recompute changes no bit of losses and gradients under the same plan, in any layout, and takes less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.parity import PLANS, check, references
from support.recompute_jobs import MODES, train_and_measure

TWO_STRANDS = [(plan, "w") for plan in ("sequential", "greedy", "dhelix", "round_robin", "intra_batch", "search")]
FEW = [("sequential", "w"), ("greedy", "w")]
DROPOUT = {"attention_dropout": 0.2}
GPT2 = {"family": "gpt2", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
PHIMOE = {"family": "phimoe", "random": True, "output_router_logits": True, "router_aux_loss_coef": 0.1}


@pytest.fixture(scope="module")
def expected() -> Any:
    return references()


def same_bits(
    cluster: Any, folder: Path, helix: dict[str, Any], model: dict[str, Any], cases: Any, **options: Any
) -> None:
    job = {"folder": str(folder), "helix": helix, "model": {"num_hidden_layers": 2, **model}, "cases": cases, **options}
    for rank in cluster.run("support.recompute_jobs:compare", **job):
        assert [row["what"] for row in rank] == [(mode, *case) for mode in MODES for case in cases]
        for row in rank:
            assert row["losses"], row["what"]
            assert row["differing"] == [], row["what"]
            assert row["meters"], row["what"]
            assert row["compared"] > 5
            assert row["read"] == (model.get("family") == "phimoe")


def test_under_every_plan(cluster_of: Any, tmp_path: Path) -> None:
    same_bits(cluster_of(2), tmp_path, {"tp_size": 2}, DROPOUT, TWO_STRANDS, kind="left")


@pytest.mark.parametrize(
    ("helix", "model", "options"),
    [
        ({"tp_size": 2}, GPT2, {}),
        ({"tp_size": 2}, {"family": "gpt_neox", "hidden_dropout": 0.1, "attention_dropout": 0.1}, {}),
        ({"ep_size": 2}, PHIMOE, {}),
        ({"ep_size": 2, "expert_capacity_factor": 1.25}, PHIMOE, {"lengths": (17, 9)}),  # of all ranks
        ({"cp_size": 2}, {}, {"kind": "packed"}),
        ({"tp_size": 2}, {}, {"training": {"bf16": True}}),
    ],
    ids=["gpt2", "neox", "experts", "capacity", "cp", "bf16"],
)
def test_in_every_layout(
    helix: dict[str, Any], model: dict[str, Any], options: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    same_bits(cluster_of(2), tmp_path, helix, model, FEW, count=2, **options)


@pytest.mark.parametrize("schedule", ["w", "dualpipe_v"])
def test_over_a_pipeline(schedule: str, cluster_of: Any, tmp_path: Path) -> None:
    model = {"num_hidden_layers": 4, **DROPOUT}
    cases = [("sequential", schedule), ("greedy", schedule)]
    same_bits(cluster_of(2), tmp_path, {"pp_size": 2}, model, cases, count=4)


@pytest.mark.parametrize("mode", MODES[1:])
def test_equals_the_unsplit_model(mode: str, cluster_of: Any, expected: Any, tmp_path: Path) -> None:
    check(cluster_of(2), tmp_path, expected, (1, 2, 1, 1), "left", ("sequential", "greedy"), recompute=mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((1, 4, 1, 1), {"num_key_value_heads": 4}),
        ((2, 2, 1, 1), {}),
        ((1, 2, 2, 1), {"family": "gpt2"}),
        ((2, 1, 2, 1), {"cp_method": "all_gather"}),
        ((1, 1, 1, 2), {"family": "mixtral", "ep_size": 2}),
        ((1, 2, 1, 2), {"family": "qwen3_moe", "ep_size": 2}),
        ((2, 1, 1, 2), {"family": "phimoe", "ep_size": 2}),
        ((1, 1, 2, 2), {"family": "mixtral", "ep_size": 2, "output_router_logits": True}),
        ((4, 1, 1, 1), {"family": "mistral"}),
    ],
    ids=str,
)
def test_every_layout_equals_the_unsplit_model(
    mode: str, sizes: tuple[int, ...], changes: dict[str, Any], cluster_of: Any, expected: Any, tmp_path: Path
) -> None:
    cp, tp, pp, dp = sizes
    check(cluster_of(cp * tp * pp * dp), tmp_path, expected, sizes, "right", PLANS, recompute=mode, **changes)


# Memory


def test_a_layer_keeps_what_its_mode_says(cluster_of: Any, tmp_path: Path) -> None:
    """In counted bytes of eight layers more: `full` keeps the input, `selective` what linears give, too."""
    hidden, intermediate, length, tp = 64, 176, 64, 2
    shard = hidden / tp * length * 4  # of one value, in bytes
    model = {"hidden_size": hidden, "intermediate_size": intermediate}  # four heads, two of keys and values
    job = {"folder": str(tmp_path), "helix": {"tp_size": tp}, "count": 2, "length": length}
    few, many = (
        cluster_of(2).run("support.recompute_jobs:peaks", model={**model, "num_hidden_layers": n}, plans=plans, **job)
        for n, plans in ((2, ["sequential"]), (10, ["sequential", "greedy"]))
    )
    # The residuals; queries, keys and values; gate and up.
    expected = {"full": shard, "selective": (2 * hidden + 2 * hidden + 2 * intermediate) / hidden * shard}
    for before, after in zip(few, many, strict=True):
        one_strand, two_strands = after["sequential"], after["greedy"]
        layer = {mode: (one_strand[mode] - before["sequential"][mode]) / 8 for mode in MODES}
        for mode, kept in expected.items():  # communication that ends a little later holds a value or two
            assert layer[mode] == pytest.approx(kept, abs=2 * shard / 8)
        assert layer["selective"] < 0.6 * layer["none"]
        assert one_strand["full"] < one_strand["selective"] < one_strand["none"]
        assert two_strands["full"] < two_strands["selective"] < two_strands["none"]
        # A flow may be a layer ahead, and have two layers' worth of what ran again.
        assert all(two_strands[mode] <= one_strand[mode] + 2 * layer["none"] for mode in MODES)


# What users say


def test_training_arguments_of_transformers_mean_full(tmp_path: Path) -> None:
    """The losses of the stock Trainer under the same arguments."""
    training = {"max_steps": 3, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    stock = train_and_measure(str(tmp_path), None, training=training)
    ours = train_and_measure(str(tmp_path), {"cache": False}, training=training)
    assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-4)
    assert ours["again"] == ["layers.0", "layers.1", "layers.2"]
    assert ours["about"]["recompute"] == "full"
    without = train_and_measure(str(tmp_path), {"cache": False}, training={**training, "gradient_checkpointing": False})
    assert without["losses"] == ours["losses"]
    assert without["again"] == []
    assert ours["memory"] < without["memory"]


def test_some_layers_only(tmp_path: Path) -> None:
    training = {"max_steps": 1, "gradient_checkpointing": True}
    training["gradient_checkpointing_kwargs"] = {"every_n_layers": 2, "use_reentrant": False}
    found = train_and_measure(
        str(tmp_path), {"plan": "dhelix"}, training={**training, "gradient_accumulation_steps": 2}
    )
    assert found["again"] == ["layers.0", "layers.2"]
    assert found["about"]["recompute"] == "full x 1, none x 1, full x 1"


def test_switched_on_in_the_model(tmp_path: Path) -> None:
    training = {"max_steps": 1}
    found = train_and_measure(str(tmp_path), {}, marked=True, training=training)
    assert found["about"]["recompute"] == "full"
    found = train_and_measure(str(tmp_path), {"recompute": "selective"}, marked=True, training=training)
    assert found["about"]["recompute"] == "selective"
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


# Plans


def test_what_runs_again_is_measured(cluster_of: Any, tmp_path: Path) -> None:
    """Of every operator a time; gathers that run again move what they moved before."""
    options = {"model": {"num_hidden_layers": 2, **DROPOUT}, "training": {"gradient_checkpointing": True}}
    for rank in cluster_of(2).run("support.tuning_jobs:profile", folder=str(tmp_path), **options):
        assert rank["times"].keys() == rank["kinds"].keys()
        assert rank["like"]["layer", "B.mlp.gather.again"] == rank["like"].get(
            ("layer", "F.mlp.gather"), ("layer", "F.mlp.gather")
        )
        assert any(a[1] == "B.mlp.up.again" for a, _ in rank["pairs"])
        assert rank["about"]["recompute"] == "full"
        assert rank["same_parameters"]
        assert rank["gradients"] == 0


@pytest.mark.slow
def test_auto_measures_every_mode_by_itself(cluster_of: Any, tmp_path: Path) -> None:
    """What was measured is kept by mode; losses are the same whatever is chosen."""
    found = {}
    for mode, forbidden in (("none", False), ("full", False), ("full", True)):
        folder = tmp_path / f"{mode}{forbidden}"
        job = {"folder": str(folder), "cache": str(tmp_path / "cache"), "forbidden": forbidden}
        training = {"gradient_accumulation_steps": 2, "max_steps": 2}
        ranks = cluster_of(2).run(
            "support.pipeline_trainer_jobs:tune", helix={"tp_size": 2, "recompute": mode}, training=training, **job
        )
        found[mode, forbidden] = ranks[0]
    assert [rank["measured"] for rank in found.values()] == [1, 1, 0]
    losses = [rank["losses"] for rank in found.values()]
    if "intra_batch" not in {rank["kept"] for rank in found.values()}:  # tiles round
        assert losses[0] == losses[1] == losses[2]
    again = {entry for _, entry in found["full", False]["profiled"] if entry.endswith(".again")}
    assert "B.mlp.gather.again" in again
