"""How the builder's methods say that parameters are cut."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import LossTweaks, ParallelContext
from hf_helix.planning.parameters import COPIED, COPIED_SUMMED, Cut


class Block(nn.Module):
    """One linear."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear: Any = linear


def builder(**changes: float) -> Builder:
    return Builder("layer", "layers.0", ParallelContext(), loss_tweaks=LossTweaks(**changes))


def builder_of_layer() -> Builder:
    b = builder()
    b.input("x")
    return b


def placements_of(b: Builder, model: nn.Module, *outputs: str) -> dict[str, Cut]:
    placements = b.build(*outputs).placements
    return {name: placements[parameter] for name, parameter in model.named_parameters()}


def with_lora(linear: nn.Module) -> Any:
    config = LoraConfig(r=2, target_modules=["linear"], bias="lora_only", lora_bias=True)
    return get_peft_model(Block(linear), config)


def test_blocks_cut_the_bias_and_the_adapters_as_the_weight() -> None:
    model = with_lora(nn.Linear(6, 10))
    b = builder_of_layer()
    b.column_parallel("up", {"fused": model.base_model.model.linear}, "x", blocks=[4, 3, 3])
    blocks = Cut(0, 10, blocks=(4, 3, 3))
    prefix = "base_model.model.linear."
    assert placements_of(b, model, "up.fused") == {
        f"{prefix}base_layer.weight": blocks,
        f"{prefix}base_layer.bias": blocks,
        f"{prefix}lora_A.default.weight": COPIED_SUMMED,
        f"{prefix}lora_B.default.weight": blocks,
        f"{prefix}lora_B.default.bias": blocks,
    }


def test_blocks_of_a_transposed_weight_are_columns() -> None:
    model, b = Block(Conv1D(10, 6)), builder_of_layer()
    b.column_parallel("up", {"fused": model.linear}, "x", blocks=(4, 6))
    result = placements_of(b, model, "up.fused")
    assert result == {"linear.weight": Cut(1, 10, blocks=(4, 6)), "linear.bias": Cut(0, 10, blocks=(4, 6))}


def test_blocks_are_as_long_as_the_linear() -> None:
    with pytest.raises(ValueError, match=r"layers.0: blocks=\(4, 4\) are 8 together.*has 10 \(shape \[10, 6\]\)"):
        builder().column_parallel("up", {"fused": nn.Linear(6, 10)}, "x", blocks=(4, 4))


def test_replicated_linears_sum_their_gradients() -> None:
    model, b = with_lora(nn.Linear(6, 10)), builder_of_layer()
    assert b.replicated_linear("up", {"a": model.base_model.model.linear}, "x") == ("up.a",)
    assert set(placements_of(b, model, "up.a").values()) == {COPIED_SUMMED}
    assert b.build("up.a").graphs.forward["up"].splits_dgrad_wgrad


def test_parameters_of_segments_are_copied_or_cut() -> None:
    sinks, gain = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(3))
    norm, others = nn.LayerNorm(8), nn.Linear(2, 3)
    b = builder_of_layer()
    b.autograd("a", lambda x: x, "x", uses=(gain,), cut=(sinks,), on_shard=True)
    b.autograd("b", norm, "a", cut=(norm,))
    unit = b.build(
        *b.autograd_outputs("c", lambda x: (x,), ("c.x",), "b", uses=(others,), cut=(sinks, others.bias), on_shard=True)
    )
    rows = Cut(0, 8)
    assert unit.placements == {
        others.weight: COPIED_SUMMED,
        others.bias: Cut(0, 3),
        gain: COPIED_SUMMED,
        sinks: Cut(0, 4),
        norm.weight: rows,
        norm.bias: rows,
    }
    assert unit.modules_run_as_is == (norm, others)
    assert [len(unit.operators[name].parameters) for name in "abc"] == [2, 2, 3]
    c = builder_of_layer()
    assert c.build(c.autograd("d", lambda x: x, "x", uses=(gain,))).placements == {gain: COPIED}


def test_a_parameter_is_placed_in_one_way() -> None:
    """Its gradient would be summed over the ranks for one operator, and not for the other."""
    norm, b = nn.LayerNorm(8), builder_of_layer()
    b.norm("a", norm, "x")
    b.norm("b", norm, "a")
    with pytest.raises(ValueError, match=r"layers.0: a parameter of shape \[8\] is declared as .* and as .*on_shard="):
        b.autograd("c", norm, "b")


def test_one_rank_has_the_whole_sum() -> None:
    b = builder_of_layer()
    assert b.sum_over_ranks("sum", "x") == "x"
    assert not b.build("x").operators


# -- embeddings ----------------------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    """An embedding that does more than look up."""

    def forward(self, ids: Tensor) -> Tensor:
        return 3.0 * super().forward(ids)


def test_an_embedding_of_a_subclass_is_a_lookup_where_the_caller_says_so() -> None:
    table = Scaled(7, 3)
    with pytest.raises(ValueError, match=r"layers.0: the embedding is a test_builder.Scaled.*plain=True"):
        builder().lookup("lookup", table)
    b = builder()
    b.lookup("lookup", table, plain=True)
    assert b.build("lookup").placements == {table.weight: Cut(0, 7)}


@pytest.mark.parametrize("changes", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_an_embedding_that_changes_its_table_is_refused(changes: dict[str, Any]) -> None:
    name, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match=rf"layers.0: the embedding has .*{name}={value}.*embedding.max_norm = None"):
        builder().lookup("lookup", nn.Embedding(7, 3, **changes))


def test_noise_is_not_scaled() -> None:
    builder(neftune_alpha=5.0).lookup("lookup", nn.Embedding(7, 3), plain=True)
    with pytest.raises(ValueError, match=r"neftune_noise_alpha=5.0 .* Scaled: .*neftune_noise_alpha=None"):
        builder(neftune_alpha=5.0).lookup("lookup", Scaled(7, 3), plain=True)


def test_other_linears_are_refused() -> None:
    class Mine(nn.Linear):
        """A linear that may do anything."""

    with pytest.raises(ValueError, match=r"a projection is a .*Mine, and this version cuts plain torch.nn.Linear"):
        builder().replicated_linear("up", {"a": Mine(2, 3)}, "x")
