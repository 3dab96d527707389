"""Attention as families share it: heads apart, the masks of Transformers, its attention interface.

In:   queries, keys and values [tokens, batch, heads * head_dim] of this rank's heads; masks and positions of a batch.
Out:  the output of attention in the same layout.
Must hold: what the attention module's own `forward` computes, for every attention implementation; a window reaches
from a token over as many tokens up to itself, padding counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import eager_attention_forward as gpt2_eager
from transformers.models.gpt_neox.modeling_gpt_neox import eager_attention_forward as gpt_neox_eager
from transformers.models.llama.modeling_llama import eager_attention_forward

from hf_helix.models.builder import ATTENTION, Builder
from hf_helix.operators.attention.kernels import kernel_for

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values [batch, heads, tokens, head_dim]."""

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")

PLAIN = (eager_attention_forward, gpt2_eager, gpt_neox_eager)
"""Eager attention that is softmax(q k * scaling + mask) v and nothing else."""

Window = int | None
"""How many tokens a layer looks back on, itself included; None for all."""


class Attention:
    """What lies between the projections of an attention layer, as one function over this rank's heads.

    Attention itself never sees the padding that makes the sequence divide: a row that may attend to nothing (padding
    on the left) averages over all keys in some implementations.

    Args:
        module: the attention module of Transformers.
        heads: from what the projections give (queries, keys and values, or all in one) and, where there is a rope,
            cosines and sines of the positions, to what meets in attention.
        window: of the layer; side input `masks` has a mask for it.
        eager: what the module falls back on.
        dropout: of the module.
        is_plain: whether `eager` is softmax(q k * scaling + mask) v and nothing else, so that attention over a shared
            sequence may take its place; None for whether it is one of those that are known to be.
    """

    def __init__(
        self,
        module: Any,
        heads: Callable[..., Heads],
        window: Window = None,
        eager: Callable[..., Any] = eager_attention_forward,
        dropout: float | None = None,
        is_plain: bool | None = None,
    ) -> None:
        self.is_plain = eager in PLAIN if is_plain is None else is_plain
        self.module = module
        self.heads = heads
        self.window = window
        self.eager = eager
        self.dropout = module.attention_dropout if dropout is None else dropout

    def __call__(
        self, *values: Tensor, masks: dict[Window, Any], positions: Tensor, ends: Mapping[str, Any], **rope: Tensor
    ) -> Tensor:
        padded, length = values[0].shape[0], positions.shape[-1]
        heads = self.heads(*(value[:length] if padded > length else value for value in values), **rope)
        dropout = self.dropout if self.module.training else 0.0
        of_batch = masks[self.window], positions, ends
        out = attend(self.module, *heads, *of_batch, window=self.window, eager=self.eager, dropout=dropout)
        return functional.pad(out, (0, 0, 0, 0, 0, padded - length)) if padded > length else out.contiguous()


def declare(b: Builder, attention: Attention, *values: str, rope: bool = True, uses: Sequence[nn.Module] = ()) -> str:
    """Declare attention of a layer, over a sequence that this rank has for itself or shares.

    Args:
        values: what the projections give.
        rope: whether `attention.heads` takes side inputs `cos` and `sin`.
        uses: the submodules whose parameters `attention.heads` reads.
    """
    module, side = attention.module, ("cos", "sin") if rope else ()
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
        return b.local(
            "attention",
            attention,
            *values,
            side=(*side, "masks", "positions", "ends"),
            uses=uses,
            on_shard=True,
            draws=lambda: module.training and attention.dropout > 0,
            compiles=False,
            effort=ATTENTION,
        )

    def rotate(*values: Tensor, **rope: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = attention.heads(*values, **rope)
        # A rope may leave a higher precision, which attention would take back.
        return q.to(v.dtype).contiguous(), torch.stack((k.to(v.dtype), v))

    made = ("attention.q", "attention.kv")
    q, kv = b.local_outputs("attention.rotate", rotate, made, *values, side=side, uses=uses, on_shard=True)
    kernel = kernel_for(module.config._attn_implementation, b.sharing.device)
    dtype = next(module.parameters()).dtype
    return b.shared_attention("attention", q, kv, kernel, module.scaling, attention.window, dtype)


def _lowered(heads: Callable[..., Heads]) -> Callable[..., Heads]:
    """Queries and keys in the type of the values: a rope may leave a higher precision, which attention takes back."""

    def alike(*values: Tensor, **rope: Tensor) -> Heads:
        q, k, v = heads(*values, **rope)
        return q.to(v.dtype), k.to(v.dtype), v

    return alike


def check_shared(model: Any, option: str = "attention_dropout") -> None:
    """Raise ValueError if attention cannot run over a sequence that ranks share.

    Args:
        option: the model's name for dropout of attention.
    """
    dropout = getattr(model.config, option)
    if dropout > 0:
        raise ValueError(
            f"{option}={dropout} is not built for a sequence that ranks share; "
            f"with cp_size above 1 load the model with {option}=0.0"
        )


def attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    positions: Tensor,
    ends: Mapping[str, Any],
    *,
    window: Window = None,
    eager: Callable[..., Any] = eager_attention_forward,
    dropout: float = 0.0,
) -> Tensor:
    """The attention interface of Transformers: [batch, heads, tokens, head_dim] to [tokens, batch, heads * head_dim].

    Args:
        module: the attention module; its configuration names the implementation.
        ends: see `hf_helix.models.batch_form.document_ends`; empty where a row is one document.
        eager: what that module falls back on.
    """
    implementation = module.config._attn_implementation
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    # Flash attention would look for documents in the positions, in every layer, and wait for the device.
    about = ends if implementation in FLASH else {"position_ids": positions}
    out, _ = interface(
        module,
        q,
        k,
        v,
        mask,
        dropout=dropout,
        scaling=module.scaling,
        sliding_window=window,
        **about,
    )
    return out.flatten(2).transpose(0, 1)


def causal_masks(
    model: Any, windows: Iterable[Window], ids: Tensor, mask: Tensor | None, documents: Tensor | None
) -> dict[Window, Any]:
    """For each window the mask that Transformers would make: a tensor, None, or what the implementation takes.

    Args:
        mask, documents: see `Family.attention_inputs`. Given positions, or a mask that may hide nothing, Transformers
            would look at their values, and wait for the device.
    """
    embeddings = like_embeddings(model, ids)
    apart = None if documents is None else _within(documents.expand(len(ids), -1))
    made = {}
    for window in set(windows):
        create = create_causal_mask if window is None else create_sliding_window_causal_mask
        made[window] = create(
            config=model.config,
            inputs_embeds=embeddings,
            attention_mask=mask,
            past_key_values=None,
            and_mask_function=apart,
            allow_is_causal_skip=mask is None,
        )
    return made


def _within(documents: Tensor) -> Callable[[Any, Any, Any, Any], Any]:
    """The mask function of Transformers by which tokens see those of their own document."""
    return lambda row, head, query, key: documents[row, query] == documents[row, key]


def by_heads(value: Tensor, head_dim: int) -> Tensor:
    """[tokens, batch, heads * head_dim] to [batch, heads, tokens, head_dim]."""
    return value.unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3)


def like_embeddings(model: Any, ids: Tensor) -> Tensor:
    """A tensor of which only shape, type and device are read."""
    return model.get_input_embeddings().weight.new_empty(()).expand(*ids.shape, 1)
