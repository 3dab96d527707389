"""Attention as the families share it: heads, and the attention interface of Transformers.

In:   queries, keys and values [tokens, batch, heads * head_dim] of this rank's heads; masks and positions of a batch.
Out:  the output of attention in the same layout.
Must hold: it computes what the attention module's own `forward` computes, for every attention implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import eager_attention_forward as gpt2_eager
from transformers.models.gpt_neox.modeling_gpt_neox import eager_attention_forward as gpt_neox_eager
from transformers.models.llama.modeling_llama import eager_attention_forward

from hf_helix.models.graph.builder import Builder, Used
from hf_helix.models.graph.context import ATTENTION
from hf_helix.models.graph.masks import SlidingWindow
from hf_helix.models.graph.shared_attention import shared_attention
from hf_helix.models.model_code import same_code
from hf_helix.operators.attention.kernels import kernel_for

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values [batch, heads, tokens, head_dim]."""

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")

PLAIN = (eager_attention_forward, gpt2_eager, gpt_neox_eager)
"""Eager attention that is softmax(q k * scaling + mask) v and nothing else."""


class Attention:
    """Attention between the projections of a layer, as one function over this rank's heads.

    Attention itself never sees the padding that makes the sequence divide: a row that may attend to nothing (padding
    on the left) averages over all keys in some implementations.

    Args:
        module: the attention module of Transformers.
        heads: turns what the projections give (queries, keys and values, or all in one) and, where there is a rope,
            cosines and sines of the positions, into `Heads`.
        sliding_window: the window of the layer; side input `masks` has a mask for it.
        eager: the eager attention of the module's own file.
        dropout: the module's dropout; None for its `attention_dropout`.
        is_plain: whether `eager` is softmax(q k * scaling + mask) v and nothing else, so that attention over a shared
            sequence may take its place; None for whether it is a copy of one in `PLAIN`.
    """

    def __init__(
        self,
        module: Any,
        heads: Callable[..., Heads],
        sliding_window: SlidingWindow = None,
        eager: Callable[..., Any] = eager_attention_forward,
        dropout: float | None = None,
        is_plain: bool | None = None,
        options: Mapping[str, Any] | None = None,
        tensors: Mapping[str, nn.Parameter] | None = None,
        has_mask: bool = True,
    ) -> None:
        self.tensors = dict(tensors or {})
        self.has_mask = has_mask
        self.options: dict[str, Any] = {"sliding_window": sliding_window} if options is None else dict(options)
        if "scaling" not in self.options:
            self.options["scaling"] = module.scaling
        self.is_plain = is_plain_attention(eager) if is_plain is None else is_plain
        self.module = module
        self.heads = heads
        self.sliding_window = sliding_window
        self.eager = eager
        self.dropout = module.attention_dropout if dropout is None else dropout

    def __call__(
        self,
        *values: Tensor,
        masks: dict[SlidingWindow, Any],
        positions: Tensor,
        ends: Mapping[str, Any],
        **rope: Tensor,
    ) -> Tensor:
        padded, length = values[0].shape[0], positions.shape[-1]
        heads = self.heads(*(value[:length] if padded > length else value for value in values), **rope)
        dropout = self.dropout if self.module.training else 0.0
        out = attend(
            self.module,
            *heads,
            masks[self.sliding_window] if self.has_mask else None,
            positions,
            ends,
            eager=self.eager,
            dropout=dropout,
            options={**self.options, **self.tensors},
        )
        return functional.pad(out, (0, 0, 0, 0, 0, padded - length)) if padded > length else out.contiguous()


ROPE = ("cos", "sin")
"""The side inputs of a rope."""


def is_plain_attention(eager: Callable[..., Any]) -> bool:
    """Returns whether eager attention is one in `PLAIN`, or a copy of one in the file of another model."""
    return any(same_code(eager, known) for known in PLAIN)


def declare_attention(
    b: Builder,
    attention: Attention,
    *values: str,
    side: Sequence[str] = ROPE,
    uses: Sequence[Used] = (),
    cut: Sequence[Used] = (),
    name: str = "attention",
) -> str:
    """Adds the attention of a layer, over a sequence that this rank has for itself or shares.

    Args:
        b: the builder of the layer.
        attention: the function over this rank's heads.
        values: the values that the projections give.
        side: the side inputs that `attention.heads` takes.
        uses: the submodules whose parameters `attention.heads` reads, and single parameters.
        cut: the same, of which a rank holds the part of its heads.
        name: the name of the operator.

    Returns:
        The output of this rank's heads [tokens, batch, heads * head_dim].
    """
    module = attention.module
    if b.cp.size > 1 and module.config._attn_implementation == "eager" and not attention.is_plain:
        raise ValueError(
            f"cp_size={b.cp.size} with attn_implementation='eager': eager attention of {type(module).__name__} is "
            f"{attention.eager.__module__}.{attention.eager.__qualname__}, which is not built over a sequence that "
            "ranks share; use cp_size=1 with tp_size or pp_size, or another attn_implementation if the model may do "
            "without what is special in it"
        )
    if b.cp.size == 1:
        is_lowered = module.config._attn_implementation == "sdpa"  # by autocast, one kernel later
        attention.heads = b.compiled(_lowered(attention.heads) if is_lowered else attention.heads)
        return b.segment(
            name,
            attention,
            *values,
            side=(*side, "masks", "positions", "ends"),
            uses=uses,
            cut=[*cut, *attention.tensors.values()],
            on_shard=True,
            draws=lambda: module.training and attention.dropout > 0,
            compiles=False,
            effort=ATTENTION,
        )

    def rotate(*values: Tensor, **rope: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = attention.heads(*values, **rope)
        # A rope may leave a higher precision, which attention would take back.
        return q.to(v.dtype).contiguous(), torch.stack((k.to(v.dtype), v))

    outputs = (f"{name}.q", f"{name}.kv")
    q, kv = b.segment_outputs(f"{name}.rotate", rotate, outputs, *values, side=side, uses=uses, cut=cut, on_shard=True)
    kernel = kernel_for(module.config._attn_implementation, b.sharing.device)
    dtype, scale = next(module.parameters()).dtype, attention.options["scaling"]
    return shared_attention(b, q, kv, kernel, scale, attention.sliding_window, dtype)


def _lowered(heads: Callable[..., Heads]) -> Callable[..., Heads]:
    """Returns `heads` with queries and keys in the type of the values: a rope may leave a higher precision."""

    def alike(*values: Tensor, **rope: Tensor) -> Heads:
        q, k, v = heads(*values, **rope)
        return q.to(v.dtype), k.to(v.dtype), v

    return alike


def attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    positions: Tensor,
    ends: Mapping[str, Any],
    *,
    eager: Callable[..., Any] = eager_attention_forward,
    dropout: float = 0.0,
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Calls the attention interface of Transformers.

    Args:
        module: the attention module; its configuration names the implementation.
        q: queries [batch, heads, tokens, head_dim].
        k: keys [batch, key-value heads, tokens, head_dim].
        v: values, as the keys.
        mask: the mask in the form that the implementation takes.
        positions: the positions of the tokens [batch or 1, tokens].
        ends: see `hf_helix.models.batch_form.document_ends`; empty where a row is one document.
        eager: the eager attention of the module's own file.
        dropout: the dropout of this call; 0 in evaluation.
        options: what else the interface is called with, its `scaling` among it; None for the module's alone.

    Returns:
        [tokens, batch, heads * head_dim].
    """
    implementation = module.config._attn_implementation
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    # Flash attention would look for documents in the positions, in every layer, and wait for the device.
    documents = ends if implementation in FLASH else {"position_ids": positions}
    out, _ = interface(
        module,
        q,
        k,
        v,
        mask,
        dropout=dropout,
        **({"scaling": module.scaling} if options is None else options),
        **documents,
    )
    return out.flatten(2).transpose(0, 1)


def by_heads(value: Tensor, head_dim: int) -> Tensor:
    """Returns a value [tokens, batch, heads * head_dim] as [batch, heads, tokens, head_dim]."""
    return value.unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3)
