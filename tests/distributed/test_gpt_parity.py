"""GPT-2 and GPT-NeoX on several ranks do what the unsplit models do, dropout aside; with dropout, they repeat."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.comparisons import assert_same, compare_runs, compare_weights, stored
from support.models import tiny
from support.parity import KINDS, PLANS, check, references
from transformers import AutoModelForCausalLM

from hf_helix.models.builder import Sharing
from hf_helix.models.registry import family_of
from hf_helix.models.sequence_sharding import SequenceCut
from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.planning.graph.operator import Kind

ALMOST_NONE = 1e-30  # dropout that is declared and drops nothing
GPT2: dict[str, Any] = {"family": "gpt2"}
NEOX: dict[str, Any] = {"family": "gpt_neox"}
IN_TURN = {**NEOX, "use_parallel_residual": False}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2 eager": {**GPT2, "attn_implementation": "eager", "tie_word_embeddings": False, "scale_attn_weights": False},
    "gpt2 upcast": {
        **GPT2,
        "attn_implementation": "eager",
        "reorder_and_upcast_attn": True,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "gpt2 with dropout modules": {**GPT2, "resid_pdrop": ALMOST_NONE, "embd_pdrop": ALMOST_NONE},
    "neox": NEOX,
    "neox eager": {**NEOX, "attn_implementation": "eager", "attention_bias": False},
    "neox with dropout modules": {**NEOX, "hidden_dropout": ALMOST_NONE},
    "neox in turn": {**IN_TURN, "tie_word_embeddings": True},
}
DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT2, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1},
    "neox": {**NEOX, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "neox in turn": {**IN_TURN, "hidden_dropout": 0.1},
}


@pytest.fixture(scope="module")
def expected() -> Any:
    return references()


USUAL = ("gpt2", "gpt2 eager", "neox", "neox in turn")


@pytest.mark.parametrize("model", [pytest.param(m, marks=[pytest.mark.slow] * (m not in USUAL)) for m in MODELS])
def test_tensor_parallel(model: str, cluster_of: Any, expected: Any, tmp_path: Any) -> None:
    check(cluster_of(2), tmp_path, expected, (1, 2, 1, 1), "left", PLANS, **MODELS[model])


@pytest.mark.parametrize(
    ("model", "sizes", "kind"),
    [
        ("gpt2", (1, 1, 2, 1), "dense"),
        ("gpt2", (2, 1, 1, 1), "packed"),
        ("neox", (1, 1, 2, 1), "right"),
        ("neox", (2, 1, 1, 1), "left"),
    ],
)
def test_two_ranks(
    model: str, sizes: tuple[int, ...], kind: str, cluster_of: Any, expected: Any, tmp_path: Any
) -> None:
    check(cluster_of(2), tmp_path, expected, sizes, kind, ("sequential", "greedy"), **MODELS[model])


@pytest.mark.parametrize(("model", "sizes"), [("gpt2", (2, 2, 1, 1)), ("neox", (1, 2, 2, 1))], ids=str)
def test_four_ranks(model: str, sizes: tuple[int, ...], cluster_of: Any, expected: Any, tmp_path: Any) -> None:
    check(cluster_of(4), tmp_path, expected, sizes, "dense", ("sequential", "greedy"), **MODELS[model])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (1, 4, 1, 1), (1, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout(
    model: str, sizes: tuple[int, ...], kind: str, cluster_of: Any, expected: Any, tmp_path: Any
) -> None:
    check(cluster_of(math.prod(sizes)), tmp_path, expected, sizes, kind, PLANS, **MODELS[model])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(2, 2, 1, 1), (2, 1, 2, 1)], ids=str)
def test_every_layout_that_shares_sequences(
    sizes: tuple[int, ...], model: str, kind: str, cluster_of: Any, expected: Any, tmp_path: Any
) -> None:
    check(cluster_of(4), tmp_path, expected, sizes, kind, PLANS, **MODELS[model])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_gather(model: str, kind: str, cluster_of: Any, expected: Any, tmp_path: Any) -> None:
    check(cluster_of(2), tmp_path, expected, (2, 1, 1, 1), kind, PLANS, cp_method="all_gather", **MODELS[model])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["greedy", "intra_batch", "auto"])
@pytest.mark.parametrize("model", ["gpt2", "neox", "neox in turn"])
def test_training_equals_the_stock_trainer(model: str, plan: str, cluster_of: Any, tmp_path: Any) -> None:
    data = {"lengths": (17, 9, 13), "padding": "left"}
    training = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    case = {"model": MODELS[model], "data": data, "training": training}
    expected = jobs.train(str(tmp_path / "stock"), None, **case)
    folder, helix = str(tmp_path / "helix"), {"tp_size": 2, "plan": plan, "cache": False, "tuning_share": 1.0}
    for result in cluster_of(2).run("train", folder=folder, helix=helix, **case):
        compare_runs(result, expected)
    compare_weights(folder, str(tmp_path / "stock"))


@pytest.mark.parametrize("model", DROPOUT)
def test_dropout_depends_on_the_seed_alone(model: str, cluster_of: Any, tmp_path: Any) -> None:
    cluster = cluster_of(2)

    def run(plan: str = "greedy", seed: int = 3) -> dict[str, Any]:
        case = {"model": DROPOUT[model], "training": {"seed": seed, "data_seed": 1}, "num_microbatches": 2}
        helix = {"tp_size": 2, "plan": plan}
        return cluster.run("window_gradients", folder=str(tmp_path), helix=helix, **case)[0]

    first = run()
    for other in (run(), run("sequential"), run("round_robin")):
        assert other["losses"] == first["losses"]
        for name, gradient in first["gradients"].items():
            np.testing.assert_array_equal(other["gradients"][name], gradient, err_msg=name)
    assert run(seed=4)["losses"] != first["losses"]


@pytest.mark.parametrize("model", ["gpt2", "neox"])
def test_evaluation_drops_nothing(model: str, cluster_of: Any, tmp_path: Any) -> None:
    training = {"max_steps": 1, "learning_rate": 0.0}
    cases = [MODELS[model], DROPOUT[model]]
    plain, dropped = (
        cluster_of(2).run("train", folder=str(tmp_path), helix={"tp_size": 2}, model=case, training=training)[0]
        for case in cases
    )
    assert dropped["losses"] != plain["losses"]
    # With dropout the branches of a layer are scattered each by itself.
    assert dropped["eval"] == pytest.approx(plain["eval"], abs=1e-6)


@pytest.mark.parametrize("model", ["gpt2", "neox", "neox in turn"])
def test_what_is_saved_is_the_stock_checkpoint(model: str, cluster_of: Any, tmp_path: Any) -> None:
    options = {"folder": str(tmp_path), "tp_size": 2, "model": MODELS[model]}
    cluster_of(2).run("support.more_jobs:save_untrained", **options)
    original = tiny(**MODELS[model]).eval()
    original.save_pretrained(tmp_path / "stock")
    assert_same(stored(tmp_path), stored(tmp_path / "stock"))
    loaded, how = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(how[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(1, 18).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, original(ids).logits)


def test_layers_have_equal_graphs_and_parallel_residuals_communicate_once() -> None:
    def collectives(**model: Any) -> int:
        made, sharing = tiny(**model), Sharing(Axis(SilentTransport(2, 0)))
        layers = [unit.graphs.forward for unit in family_of(made).units(made, sharing) if unit.name == "layer"]
        assert all(one.describe() == other.describe() for one, other in itertools.pairwise(layers))
        return sum(op.kind is Kind.LOCAL for op in layers[0].operators)

    scaled = {"scale_attn_by_inverse_layer_idx": True}
    assert [collectives(**model) for model in ({**GPT2, **scaled}, IN_TURN, NEOX, DROPOUT["neox"])] == [4, 4, 2, 3]


REFUSED: list[tuple[dict[str, Any], int, list[str]]] = [
    (GPT2, 3, ["tp_size=3", "4 attention heads", "n_head", "1, 2, 4"]),
    ({**GPT2, "n_inner": 1}, 2, ["tp_size=2", "n_inner=1", "tp_size=1"]),
    ({**GPT2, "n_inner": None, "vocab_size": 3, "pad_token_id": None}, 4, ["vocab_size=3", "n_inner=128", "tp_size=3"]),
    ({**GPT2, "add_cross_attention": True}, 1, ["add_cross_attention=True", "add_cross_attention=False"]),
    (NEOX, 3, ["tp_size=3", "4 attention heads", "1, 2, 4"]),
    ({**NEOX, "intermediate_size": 1}, 2, ["intermediate_size=1", "tp_size=1"]),
]


@pytest.mark.parametrize(("model", "tp_size", "words"), REFUSED, ids=str)
def test_what_cannot_be_cut(model: dict[str, Any], tp_size: int, words: list[str]) -> None:
    made = tiny(**model)
    with pytest.raises(ValueError, match=words[0]) as caught:
        family_of(made).check(made.config, tp_size)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("model", "option"), [(GPT2, "attn_pdrop"), (NEOX, "attention_dropout")])
def test_dropout_of_attention_over_a_shared_sequence(model: dict[str, Any], option: str) -> None:
    made = tiny(**model, **{option: 0.1})
    with pytest.raises(ValueError, match=rf"{option}=0\.1.*{option}=0\.0"):
        family_of(made).check_context(made)


def test_token_types() -> None:
    made, ids = tiny(**GPT2), torch.ones(1, 4, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "token_type_ids": ids}
    with pytest.raises(ValueError, match=r"token_type_ids.*return_token_type_ids=False"):
        family_of(made).side_inputs(made, batch, SequenceCut(), torch.ones(()))
