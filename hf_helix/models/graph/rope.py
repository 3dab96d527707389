"""The rope of Llama, and of all models with copies of its code.

In:   queries and keys [batch, heads, tokens, head_dim], cosines and sines [batch, tokens, head_dim].
Out:  rotated queries and keys.
Must hold: the bits of `apply_rotary_pos_emb`, compiled or not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_helix.operators.attention.rope import Pair, rotated

__all__ = ["Pair", "apply_rotary_pos_emb", "rotate"]


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Returns `apply_rotary_pos_emb(q, k, cos, sin)`, for cosines and sines without gradient.

    Args:
        q: queries, [batch, heads, tokens, head_dim].
        k: keys, likewise.
        cos: cosines, [batch, tokens, head_dim].
        sin: sines, likewise.
    """
    if torch.compiler.is_compiling():  # the compiler fuses the plain code
        result: Pair = apply_rotary_pos_emb(q, k, cos, sin)
        return result
    return rotated(q, k, cos, sin)
