"""Attention with sinks equals the eager attention of its model, without the products of queries and keys."""

from typing import Any

import pytest
import torch
from support.derived_models import gpt_oss
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from hf_helix.models.graph.attention import SINKS, Attention, as_bias, causal_masks

LENGTH, HEADS, SIZE = 160, 4, 8


class Largest(TorchDispatchMode):
    """Notes the most elements of a result."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        leaves = result if isinstance(result, tuple | list) else [result]
        self.elements = max(self.elements, *(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)), 0)
        return result


def masks_of(model: Any, kind: str) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The mask [batch, sequence], the documents, and the mask that stock Transformers makes, for a batch of two."""
    mask, documents = None, None
    if kind == "left":
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, :30] = 0
    elif kind == "packed":
        documents = (torch.arange(LENGTH) >= 50).long().expand(2, -1)
    return mask, documents, torch.zeros(2, LENGTH, 1)


@pytest.mark.parametrize("kind", ["plain", "left", "packed"])
@pytest.mark.parametrize("window", [None, 7])
def test_sinks_run_by_kernels(window: int | None, kind: str) -> None:
    model = gpt_oss(num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=2, sliding_window=7)
    module = model.model.layers[0].self_attn
    mask, documents, like = masks_of(model, kind)
    create = create_causal_mask if window is None else create_sliding_window_causal_mask
    apart = None if documents is None else lambda row, head, q, k: documents[row, q] == documents[row, k]
    theirs = create(model.config, like, mask, None, and_mask_function=apart)
    values = [torch.randn(2, heads, LENGTH, SIZE, requires_grad=True) for heads in (HEADS, 2, 2)]
    real = torch.ones(2, LENGTH, 1, 1) if mask is None else mask[..., None, None].float()
    gradient = torch.randn(2, LENGTH, HEADS, SIZE) * real
    leaves = [*values, module.sinks]
    out, _ = eager_attention_forward(module, *values, theirs, scaling=0.3)
    expected = [(out * real).detach(), *torch.autograd.grad(out, leaves, gradient)]

    attention = Attention(
        module, lambda *each: each, window, eager_attention_forward, 0.0,
        options={"scaling": 0.3, "sliding_window": window}, tensors={SINKS: module.sinks},
    )  # fmt: skip
    masks = causal_masks(model, [window], torch.zeros(2, LENGTH, dtype=torch.long), mask, documents)
    with Largest() as largest:
        out = attention._attended(*values, masks[window], torch.arange(LENGTH)[None], {})
        result = [(out * real).detach(), *torch.autograd.grad(out, leaves, gradient)]
    for mine, other in zip(result, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
    assert largest.elements < 2 * HEADS * LENGTH * LENGTH, "all products of queries and keys"
    # With dropout of attention it stays the model's own, under the same mask.
    with Largest() as largest:
        out, _ = eager_attention_forward(module, *values, as_bias(masks[window], *values[:2]), scaling=0.3)
    torch.testing.assert_close(out * real, expected[0], atol=1e-5, rtol=1e-4)
    assert largest.elements > 2 * HEADS * LENGTH * LENGTH
