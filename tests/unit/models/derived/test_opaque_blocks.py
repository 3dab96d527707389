"""Blocks: which submodule becomes one, what is known of its results, and whether it works token by token."""

from typing import Any

import pytest
import torch
from support.block_models import LoopedExperts, LoopedForCausalLM, branching, looped
from support.derived_models import small
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_helix.doctor.counting import Counter
from hf_helix.models.derived.derived import DerivedFamily
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.lowering.blocks import works_by_token
from hf_helix.models.placement.value_placement import features_of
from hf_helix.models.trace.blocks import runnable_copy
from hf_helix.operators.units.unit import Unit


def units_of(model: Any) -> list[Unit]:
    return DerivedFamily(model).units(model, ParallelContext())


def test_the_block_is_the_module_with_the_code() -> None:
    """Not the expert that the loop calls, nor the layer around it; layers without a block have none."""
    family = DerivedFamily(looped())
    assert [(number, block.path) for number, block in family.plans.blocks()] == [(n, "mlp.block") for n in range(3)]
    blocks = DerivedFamily(branching()).plans.blocks()
    assert [(number, block.path) for number, block in blocks] == [(1, "mlp"), (2, "mlp")]


@pytest.mark.parametrize(
    ("name", "paths", "reason"),
    [
        ("GPTBigCodeForCausalLM", {"attn"}, "gives several values"),  # queries, and a key and value for all heads
        ("FalconForCausalLM", {"self_attention"}, "makes a tensor of constants"),
        pytest.param("MiniMaxForCausalLM", {"self_attn"}, "for rows of more than", marks=pytest.mark.slow),
        pytest.param("Phi4MultimodalForCausalLM", set(), "", marks=pytest.mark.slow),  # torch traces stand-ins of it
        pytest.param("HYV4ForCausalLM", set(), "", marks=pytest.mark.slow),  # streams, a norm that returns a scale
    ],
)
def test_classes_of_transformers(name: str, paths: set[str], reason: str) -> None:
    family = DerivedFamily(small(name, num_hidden_layers=2))
    assert {block.path for _, block in family.plans.blocks()} == paths
    assert all(reason in block.reason for _, block in family.plans.blocks())


def test_only_the_block_is_opaque() -> None:
    unit = units_of(looped())[1]
    blocks = [name for name, operator in unit.operators.items() if operator.by_data]
    assert blocks == ["mlp.block"]
    parameters = unit.operators["mlp.block"].parameters
    assert len(parameters) == 2 + 3 * 8  # of the router and of eight experts
    assert {"self_attn.o_proj", "input_layernorm"} <= unit.operators.keys()


def test_a_line_says_what_and_why_and_the_cost() -> None:
    model = looped()
    (line,) = DerivedFamily(model).notices(model, 2)
    for words in (
        "mlp.block (3 of 3 layers, ",
        "one operator, since torch.export cannot trace it: ",
        "each of 2 tensor-p",
    ):
        assert words in line
    plain = LlamaForCausalLM(model.config)
    assert DerivedFamily(plain).notices(plain, 2) == []


def branch_in_the_layer(model: Any) -> Any:
    """A branch in the forward of the layers themselves."""
    kind = type(model.model.layers[0])

    class Branching(kind):  # type: ignore[valid-type, misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            hidden_states = super().forward(hidden_states, *args, **kwargs)
            return hidden_states.clamp(-1, 1) if hidden_states.abs().max() > 1 else hidden_states

    for layer in model.model.layers:
        layer.__class__ = Branching
    return model


def test_a_layer_can_be_a_block() -> None:
    """It is given its masks as tensors."""
    model = branch_in_the_layer(looped(num_hidden_layers=2))
    family = DerivedFamily(model)
    assert [block.path for _, block in family.plans.blocks()] == ["", ""]
    assert family.calls._makes_masks
    (unit,) = family.units(model, ParallelContext())[1:2]
    assert {*unit.placements} == {*model.model.layers[0].parameters()}


class Counting(LlamaMLP):
    """A block that writes to a buffer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if x.sum() > 0 else x


def test_a_block_that_writes_to_a_buffer_is_refused() -> None:
    model = looped()
    model.model.layers[1].mlp = Counting(model.config)
    with pytest.raises(ValueError, match="writes to the buffer calls of a block, which is not built"):
        DerivedFamily(model)


def test_code_that_does_not_run_is_refused_with_its_own_reason() -> None:
    class Broken(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("this code never runs")

    model = looped()
    model.model.layers[1].mlp = Broken(model.config)
    with pytest.raises(ValueError, match=r"cannot be derived: torch\.export cannot trace it: .*this code never runs"):
        DerivedFamily(model)


def test_shapes_of_results() -> None:
    """Of the batch, the sequence, their product, and constants; no weight takes memory."""
    block = LoopedExperts(looped().config, 0)
    copied = runnable_copy(block)
    assert all(parameter.untyped_storage().nbytes() < parameter.nbytes for parameter in copied.experts.parameters())
    with torch.no_grad():
        result, logits = copied(torch.randn(2, 6, 32, dtype=torch.bfloat16))
    assert (result.shape, logits.shape) == ((2, 6, 32), (12, 8))
    assert result.isfinite().all()
    assert result.std() > 0


@pytest.mark.parametrize(("make", "is_by_token"), [(looped, True), (branching, False)])
def test_token_by_token(make: Any, is_by_token: bool) -> None:
    model = make(num_hidden_layers=2)
    family = DerivedFamily(model)
    family.units(model, ParallelContext())
    plan = family.plans.of_layer(1, 1, 0)
    (node,) = [node for node in plan.trace.nodes if node in plan.needed and "block" in str(node.target)]
    segment, inputs = plan.segment([node])
    layer = model.model.layers[1]
    assert works_by_token(segment, layer, [features_of(plan.trace, value) for value in inputs]) is is_by_token


def test_the_doctor_refuses_to_count_a_block() -> None:
    """On the meta device there are no values that its work depends on; its shapes are known there as well."""
    with torch.device("meta"):
        model = LoopedForCausalLM(looped().config)
    assert len(DerivedFamily(model).plans.blocks()) == 3
    with pytest.raises(ValueError, match=r"layers\.0 has a block whose work depends on the values of a batch"):
        Counter(model).kinds()
