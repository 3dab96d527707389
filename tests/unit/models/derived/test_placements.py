"""How values and weights are cut: each rule over a small module, and the gradients of two ranks against the whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import small_modules as modules
from support.small_modules import FEATURES, HEAD_DIM, HEADS, KEY_HEADS, Through
from support.small_traces import WIDTH, check_on_two_ranks, inferred, placement_of, styles, traced, unit_of
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_helix.models.placement.inference import infer_placements
from hf_helix.models.placement.value_placement import (
    COLUMN,
    FULL,
    PARTIAL,
    REPLICATED,
    ROW,
    SHARD,
    NeedsInlining,
    ValuePlacement,
)
from hf_helix.models.trace.trace import Underivable
from hf_helix.planning.parameters import COPIED, COPIED_SUMMED


def cuts(module: nn.Module) -> dict[str, Any]:
    """How every parameter is placed on two ranks: the dimension that is cut, or whether its gradient is summed."""
    placements = unit_of(module).placements
    names = {parameter: name for name, parameter in module.named_parameters()}
    return {
        names[parameter]: placed.sums_gradient if placed.dim is None else placed.dim
        for parameter, placed in placements.items()
    }


def test_a_share_goes_through_what_is_computed_element_by_element() -> None:
    module = modules.Mlp()
    result = inferred(module)
    assert styles(result) == {"gate": COLUMN, "up": COLUMN, "down": ROW}
    product = placement_of(result, "mul")
    assert (product.where, product.dim, product.blocks) == (FULL, 2, (FEATURES,))
    assert product.origins == {"gate", "up"}
    assert result.of(result.trace.result).where == PARTIAL
    columns = {"gate.weight": 0, "gate.bias": 0, "up.weight": 0, "up.bias": 0}
    assert cuts(module) == {**columns, "down.weight": 1, "down.bias": False}
    check_on_two_ranks(module)


def test_a_share_becomes_heads() -> None:
    module = modules.Attention()
    result = inferred(module)
    assert styles(result) == {"q": COLUMN, "k": COLUMN, "v": COLUMN, "out": ROW}
    (attention,) = [node for node in result.trace.nodes if "attention" in str(node.target)]
    heads = [result.of(value) for value in attention.args[:3]]
    assert [(placed.dim, placed.blocks) for placed in heads] == [(1, (HEADS,)), (1, (KEY_HEADS,)), (1, (KEY_HEADS,))]
    assert (result.of(attention).dim, result.of(attention).blocks) == (2, (HEADS,))
    check_on_two_ranks(module)


def test_a_norm_over_all_heads_is_traced_through_and_sums_its_squares() -> None:
    module = modules.NormedAttention()
    with pytest.raises(NeedsInlining) as caught:
        infer_placements(traced(module), 2, ValuePlacement(SHARD))
    assert caught.value.path == "q_norm"
    result = inferred(module)
    assert {way for path, way in styles(result).items() if path != "out"} == {COLUMN}
    assert placement_of(result, "mean").is_summand
    assert sorted(result.trace.attributes[node] for node in result.decisions.cut) == ["k_norm.weight", "q_norm.weight"]
    assert cuts(module)["q_norm.weight"] == cuts(module)["k_norm.weight"] == 0
    check_on_two_ranks(module)


def test_a_norm_of_each_head_sees_a_part_of_its_gradient() -> None:
    module = modules.NormedHeads()
    placements = unit_of(module).placements
    assert placements[module.q_norm.weight] == placements[module.k_norm.weight] == COPIED_SUMMED
    assert placements[module.out.bias] == COPIED
    check_on_two_ranks(module)


@pytest.mark.parametrize(
    ("module", "path", "blocks"),
    [
        (modules.FusedMlp(), "gate_up", (FEATURES, FEATURES)),
        (modules.FusedAttention(), "qkv", (HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM)),
    ],
    ids=["mlp", "attention"],
)
def test_matrices_in_one_are_cut_where_the_code_takes_them_apart(
    module: nn.Module, path: str, blocks: tuple[int, ...]
) -> None:
    linear = module.get_submodule(path)
    placements = unit_of(module).placements
    assert placements[linear.weight].blocks == placements[linear.bias].blocks == blocks
    check_on_two_ranks(module)


def test_a_parameter_with_an_entry_for_each_head_is_cut() -> None:
    module = modules.GainOfHeads()
    assert cuts(module)["gain"] == 0
    check_on_two_ranks(module)


def test_latents_stay_on_the_shard_and_one_key_is_repeated_for_the_heads_of_a_rank() -> None:
    module = modules.LatentAttention()
    result = inferred(module)
    assert styles(result) == {"q": COLUMN, "latent": REPLICATED, "unfold": COLUMN, "out": ROW}
    assert {dim for _, dim in result.decisions.shortened} == {1}
    assert unit_of(module).placements[module.norm.weight] == COPIED_SUMMED
    check_on_two_ranks(module)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "softmax": (lambda h: h.softmax(-1), False),
    "sort": (lambda h: h.sort(-1).values, False),
    "flip by halves": (lambda h: torch.cat((h[..., 6:], h[..., :6]), -1), False),
    "sum": (lambda h: h / h.abs().sum(-1, keepdim=True), False),
    "a mean that is read at once": (lambda h: h - h.mean(-1, keepdim=True), True),
    "groups": (lambda h: h.unflatten(-1, (4, 3)).softmax(-1).flatten(-2), True),
    "groups of a view": (lambda h: h.view(*h.shape[:-1], 4, 3).softmax(-1).view(h.shape), True),
    "odd groups": (lambda h: h.unflatten(-1, (3, 4)).softmax(-1).flatten(-2), False),
    "steps": (lambda h: h[..., ::2].repeat_interleave(2, -1), False),
    "power": (lambda h: h.abs().pow(1.5), True),
    "cast": (lambda h: h.float().sigmoid().to(h.dtype), True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_cannot_be_computed_on_a_share_demotes_the_linear_that_it_comes_from(name: str) -> None:
    function, works = FUNCTIONS[name]
    module = Through(function)
    result = inferred(module)
    assert styles(result) == ({"up": COLUMN, "down": ROW} if works else {"up": REPLICATED, "down": REPLICATED})
    assert result.decisions.demoted == (set() if works else {"up", "down"})
    check_on_two_ranks(module)


@pytest.mark.parametrize("over", [LlamaRMSNorm(12), nn.LogSoftmax(-1), nn.LayerNorm(12)], ids=["rms", "log", "norm"])
def test_a_module_over_the_features_of_an_mlp_demotes_its_linear(over: nn.Module) -> None:
    """A norm could be summed over ranks, as that of heads; a linear on the shard costs no communication."""
    module = Through(over)
    assert inferred(module).decisions.demoted == {"up", "down"}
    check_on_two_ranks(module)


def test_a_linear_with_fewer_features_than_ranks_runs_whole() -> None:
    module = Through(lambda gate: gate.sigmoid(), features=1)
    assert styles(inferred(module))["up"] == REPLICATED
    check_on_two_ranks(module)


class Mixing(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(x)


class Plain(nn.Module):
    """Attention by the layer's own code; with rows and heads in one dimension, if `is_flat`."""

    def __init__(self, is_flat: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.is_flat = is_flat

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, HEADS, 3, HEAD_DIM).permute(3, 0, 2, 1, 4)
        q, k, v = (heads[place] for place in range(3))
        if self.is_flat:
            q, k, v = (value.reshape(batch * HEADS, length, HEAD_DIM) for value in (q, k, v))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(mixed.view(batch, HEADS, length, HEAD_DIM).transpose(1, 2).reshape(batch, length, -1))


@pytest.mark.parametrize("is_flat", [False, True])
def test_attention_in_the_code_of_a_layer_is_cut_by_heads(is_flat: bool) -> None:
    module = Plain(is_flat)
    result = inferred(module)
    assert styles(result) == {"qkv": COLUMN, "out": ROW}
    assert placement_of(result, "softmax").dim == (0 if is_flat else 1)
    assert {str(node.target) for node in result.mixing} == {"aten.matmul.default", "aten.softmax.int"}
    check_on_two_ranks(module)


def test_the_order_of_a_norm_is_no_dimension() -> None:
    module = Mixing(lambda x: x / (1 + torch.norm(x, 1, dim=-1, keepdim=True)))
    assert placement_of(inferred(module), "norm").where == SHARD
    check_on_two_ranks(module)


class Biased(Plain):
    """Attention by torch's function, with a mask that has an entry of its own for each head."""

    def __init__(self) -> None:
        super().__init__(is_flat=False)
        self.register_buffer("slopes", torch.linspace(0.1, 1.0, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, HEADS, 3, HEAD_DIM).permute(3, 0, 2, 1, 4).unbind(0)
        places = torch.arange(length, device=x.device)
        mask = (places[:, None] - places).abs() * -self.slopes.view(1, HEADS, 1, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Twice(nn.Module):
    """A linear that is called twice on one value."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.up(x).sigmoid())


@pytest.mark.parametrize("module", [Biased(), Twice()], ids=["a mask for each head", "a linear called twice"])
def test_ranks_compute_the_layer(module: nn.Module) -> None:
    check_on_two_ranks(module)


class Apart(modules.Attention):
    """Heads that no projection gives in order."""

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.sort(-1).values for value in super().projected(x))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Mixing(lambda x: x.flip(1)), "flip in the layer mixes tokens outside of attention"),
        (Apart(), "no projection of its attention can be cut by heads"),
    ],
    ids=["flip", "heads"],
)
def test_what_cannot_be_cut_is_refused(module: nn.Module, words: str) -> None:
    with pytest.raises(Underivable, match=words):
        inferred(module)
