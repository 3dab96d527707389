"""The plans that users name give the same bits; the paper's tiles change nothing but rounding."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from invariant.classes import BIASED, CASES, EAGER, GPT2, MHA, NEOX, TIED, Case
from invariant.harness import NAMED, OWN, RANDOM, USUAL, Result, check, run
from support.comparisons import assert_same_bits
from support.derived_models import HOME
from support.marks import slow
from support.parity import compare_window, unsplit
from support.pipeline_jobs import events_of_window

ODD = (17, 9, 13)


QUICK = (
    "llama six layers-tp2-left",  # blocks of two layers follow each other, and operators run a block late
    "llama pipeline-pp2-dense-M3",
)
SLOW = ("phimoe balanced-dp2+ep2-left", "llama-cp2-packed", "gpt2-tp2-left", "llama tied pipeline-pp2-dense-M5")


@pytest.mark.parametrize("name", [*QUICK, *map(slow, SLOW)])
def test_every_plan_gives_the_same_bits(name: str, cluster_of: Any, tmp_path: Path) -> None:
    check(cluster_of, tmp_path, CASES[name], (*NAMED, RANDOM))


def test_a_plan_from_a_file_gives_the_same_bits(cluster_of: Any, tmp_path: Path) -> None:
    case, file = CASES["llama six layers-tp2-left"], str(tmp_path / "plan.json")
    job = {"folder": str(tmp_path), "helix": {"tp_size": 2, "plan": "search"}}
    cluster_of(2).run("save_plan", path=file, **job)
    check(cluster_of, tmp_path, replace(case, options={"plan": file}), ("sequential", OWN))


# -- tiles ---------------------------------------------------------------------------------------------------------

LAYERS = {"num_hidden_layers": 2}
TILED = [
    (Case("uneven tiles, biases", {**LAYERS, **BIASED}, "tp2", "left", lengths=(17, 9, 12)), 2),  # of 9, 5 and 6 rows
    (Case("one micro-batch", LAYERS, "tp2", "left", count=1, lengths=ODD), 2),
    (Case("empty tiles", LAYERS, "tp2", "dense", lengths=(17, 3, 5), slow=True), 4),  # of shards of 9, 2 and 3 rows
    (Case("tied", {**LAYERS, **TIED, **MHA, **EAGER}, "tp2", "right", lengths=(15, 7), slow=True), 2),
    (Case("four ranks", {**LAYERS, **MHA}, "tp4", "left", count=4, lengths=(16, 23, 7, 16), slow=True), 4),
]


@pytest.mark.parametrize(("case", "tiles"), [slow(*each, when=each[0].slow, id=each[0].name) for each in TILED])
def test_tiles_change_nothing_but_rounding(case: Case, tiles: int, cluster_of: Any, tmp_path: Path) -> None:
    rules = ("sequential", "round_robin", "dhelix", RANDOM) if tiles > case.sizes["tp"] else ("sequential", RANDOM)
    orders = [f"{rule}/{tiles}" for rule in rules]
    whole, tiled = (run(cluster_of, tmp_path, case, each)[0][0] for each in (("sequential",), orders))
    compare_window([tiled], unsplit(case.model, case.count, case.kind, case.lengths), 1)
    assert tiled["evaluated"] == tiled["losses"][0]
    assert_nearly_same(tiled, whole)


def test_dropout_does_not_depend_on_tiles(cluster_of: Any, tmp_path: Path) -> None:
    case = Case("llama dropout", {**LAYERS, "attention_dropout": 0.2}, "tp2", "left", count=2, lengths=ODD)
    whole = run(cluster_of, tmp_path, case, ("sequential",))[0][0]
    assert_nearly_same(run(cluster_of, tmp_path, case, ("sequential/2",))[0][0], whole)


def assert_nearly_same(result: Result, other: Result) -> None:
    np.testing.assert_allclose(result["losses"], other["losses"], rtol=0, atol=1e-6)
    for name, gradient in other["gradients"].items():
        distance = np.linalg.norm((result["gradients"][name] - gradient).astype(np.float64))
        assert distance <= 1e-6 * np.linalg.norm(gradient), name


# -- dropout -------------------------------------------------------------------------------------------------------

DRY: dict[str, dict[str, Any]] = {"gpt2": GPT2, "neox": NEOX, "phi3": {"family": f"{HOME}phi3", **LAYERS}}
DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1},
    "neox": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "phi3": {"resid_pdrop": 0.1, "attention_dropout": 0.1},
}


@pytest.mark.parametrize("model", [slow(name, when=name != "gpt2") for name in DRY])
def test_dropout_depends_on_the_seed_alone(model: str, cluster_of: Any, tmp_path: Path) -> None:
    """No order of operators changes what is drawn."""

    def window(seed: int, orders: Sequence[str] = USUAL) -> Any:
        wet = Case(f"{model} dropout", {**DRY[model], **DROPOUT[model]}, "tp2", "dense")
        return run(cluster_of, tmp_path, wet, orders, {"seed": seed})[0][0]

    result = window(3)
    assert result["losses"] != window(4, ("greedy",))["losses"]
    assert_same_bits(window(3), result)


@pytest.mark.parametrize("model", [slow(name, when=name != "gpt2") for name in DRY])
def test_evaluation_drops_nothing(model: str, cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "helix": {"tp_size": 2}, "training": {"max_steps": 1, "learning_rate": 0.0}}
    dry, wet = (
        cluster_of(2).run("train", model={**DRY[model], **changes}, **job)[0] for changes in ({}, DROPOUT[model])
    )
    assert wet["losses"] != dry["losses"]
    # With dropout the branches of a layer are scattered each by itself.
    assert wet["eval"] == pytest.approx(dry["eval"], abs=1e-6)


# -- ablations -----------------------------------------------------------------------------------------------------


@pytest.fixture
def events_of(cluster_of: Any, tmp_path: Path) -> Callable[..., list[tuple[str, str]]]:
    """What a window without some overlap issues and waits for."""

    def events(*without: str) -> list[tuple[str, str]]:
        job = {"folder": str(tmp_path), "helix": {"tp_size": 2, "plan": "greedy"}, "without": without}
        return cluster_of(2).run(events_of_window, num_microbatches=2, **job)[0]

    return events


def test_without_local_everything_runs_on_the_compute_stream(events_of: Any) -> None:
    events = events_of("intra_node")
    assert {verb for verb, _ in events} == {"run"}
    assert sum(label.endswith(".mlp.gather") for _, label in events) == 2 * 2 * 3
    usual = events_of("inter_node")  # of which there is none
    assert {verb for verb, _ in usual} == {"run", "issue", "wait"}
    assert sorted(label for verb, label in usual if verb != "wait") == sorted(label for _, label in events)


def test_without_wgrad_weight_gradients_stay_where_they_are(events_of: Any) -> None:
    """By themselves they wait till the end of the chain."""
    for without, stays in ((("wgrad",), True), ((), False)):
        order = [label for verb, label in events_of(*without) if verb in ("run", "issue")]
        for layer in range(3):
            place = f"B0.layers.{layer}."
            assert (order.index(f"{place}mlp.down.W") < order.index(f"{place}mlp.act")) == stays
            assert (order.index(f"{place}attn.out.W") < order.index(f"{place}attention")) == stays
