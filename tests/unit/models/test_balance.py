"""The load-balancing loss of any mixture is that of its own file in Transformers."""

from typing import Any

import pytest
import torch
from support.versions import since
from transformers import AutoConfig, AutoModelForCausalLM

from hf_helix.models.graph.balance import Balance, balance_of, routers_of

LAYERS, LENGTH, BATCH, EXPERTS, CHOICES = 3, 5, 2, 6, 2


def model_of(kind: str, **changes: Any) -> Any:
    """A model of some layers without memory for its weights."""
    config = AutoConfig.for_model(kind, num_hidden_layers=LAYERS, output_router_logits=True, **changes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "router", "num_routers", "changes"),
    [
        ("mixtral", "MixtralTopKRouter", LAYERS, {}),
        ("minimax_m2", "MiniMaxM2TopKRouter", LAYERS, {}),
        ("olmoe", "OlmoeTopKRouter", LAYERS, {}),
        ("gpt_oss", "GptOssTopKRouter", LAYERS, {}),
        pytest.param(
            "granitemoe", "GraniteMoeTopKRouter", LAYERS, {}, marks=since("5.18", "a record of Granite's routers")
        ),
        ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", LAYERS - 1, {"moe_layer_start_index": 1}),
        ("qwen2_moe", "Qwen2MoeTopKRouter", LAYERS - 1, {"mlp_only_layers": [1]}),
    ],
)
def test_the_model_says_what_its_loss_reads(kind: str, router: str, num_routers: int, changes: Any) -> None:
    model = model_of(kind, **changes)
    routers, balance = routers_of(model), balance_of(model)
    assert [(type(each.module).__name__, each.index) for each in routers] == [(router, 0)] * num_routers
    assert all(model.get_submodule(each.path) is each.module for each in routers)
    assert balance == Balance(
        model.num_experts, model.num_experts_per_tok, num_routers, coefficient=model.config.router_aux_loss_coef
    )


@since("5.19", "a record of the routers of DeepSeek-V3")
def test_routers_that_no_loss_reads_are_found() -> None:
    """DeepSeek-V3 records what its routers say, and its loss does not read it."""
    model = model_of("deepseek_v3", first_k_dense_replace=1)
    assert balance_of(model) is None
    assert len(routers_of(model)) == LAYERS - 1


def test_models_without_such_a_loss_have_none() -> None:
    assert balance_of(model_of("deepseek_v3")) is None
    model = model_of("mixtral")
    model.config.output_router_logits = False
    assert balance_of(model) is None


def test_another_loss_is_refused() -> None:
    """That of Doge takes the scores of two halves of keys."""
    words = r"loss of DogeForCausalLM is not that of Mixtral.*use model\.config\.output_router_logits = False"
    with pytest.raises(ValueError, match=words):
        balance_of(model_of("doge", is_moe=True))


def test_a_loss_without_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of Granite MoE in Transformers 5.17, where the unsplit model's own forward fails."""
    model = model_of("mixtral")
    for module in (model, model.model):
        monkeypatch.setattr(type(module), "_can_record_outputs", {})
    words = r"MixtralForCausalLM of Transformers \S+ adds .* records no router_logits.*output_router_logits = False"
    with pytest.raises(ValueError, match=words):
        balance_of(model)
