"""The load-balancing loss of any mixture is that of its own file in Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.units import run_unit
from support.versions import since
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hf_helix.models.batch_inputs import SequenceCut
from hf_helix.models.graph.balance import Balance, add_part, balance_of, balance_side_inputs, part_of, routers_of
from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.graph.experts import expert_side_inputs
from hf_helix.operators.moe.dispatch import COUNTED

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


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dense_between", [False, True])
def test_operators_add_what_transformers_adds(padded: bool, dense_between: bool) -> None:
    """The loss, and the gradients of what the routers say."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 3:] = 1 - padded
    logits = [torch.randn(LENGTH, BATCH, EXPERTS) for _ in range(LAYERS)]
    leaves = [each.transpose(0, 1).flatten(0, 1).requires_grad_() for each in logits]
    expected = 0.3 * load_balancing_loss_func(tuple(leaves), EXPERTS, CHOICES, mask)
    assert isinstance(expected, Tensor)
    expected.backward()

    balance = Balance(EXPERTS, CHOICES, LAYERS, coefficient=0.3)
    b = Builder("all", "all", ParallelContext())
    loss, sums = b.input("tokens"), balance.start(b)

    def part(logits: Tensor, counted: Tensor) -> Tensor:
        return part_of(logits.flatten(0, -2), counted.flatten(), CHOICES)

    for number in range(LAYERS):
        says = b.segment(f"part.{number}", part, b.input(f"logits.{number}"), side=(COUNTED,))
        sums = b.add(f"sums.{number}", sums, says)
    if dense_between:
        sums = add_part(b, sums, None)
    unit = b.build(balance.add_loss(b, loss, sums))

    batch = {"input_ids": torch.zeros_like(mask), "attention_mask": mask}
    side = expert_side_inputs(batch, SequenceCut(1, 1)) | balance_side_inputs(batch, 1.0)
    inputs = {"tokens": torch.zeros(()), **{f"logits.{number}": value for number, value in enumerate(logits)}}
    outputs, gradients = run_unit(unit, inputs, side, {"loss.balanced": torch.ones(())})
    torch.testing.assert_close(outputs["loss.balanced"], expected.detach())
    for number, leaf in enumerate(leaves):
        assert leaf.grad is not None
        result = gradients[f"logits.{number}"].transpose(0, 1).flatten(0, 1)
        torch.testing.assert_close(result, leaf.grad)
