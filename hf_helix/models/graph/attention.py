"""Attention of all families: masks, the attention interface of Transformers, a sequence shared by ranks.

In:   queries, keys and values [tokens, batch, heads * head_dim] of this rank's heads; masks and positions of a batch.
Out:  the output of attention in the same layout, over the full sequence.
Must hold: equal to the attention module's own `forward`, for every attention implementation. A sliding window of n
tokens covers a token and the n - 1 tokens before, padding counted.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import eager_attention_forward as gpt2_eager
from transformers.models.gpt_neox.modeling_gpt_neox import eager_attention_forward as gpt_neox_eager
from transformers.models.llama.modeling_llama import eager_attention_forward

from hf_helix.models.graph.builder import Builder, Used, UsedCut
from hf_helix.models.graph.context import ATTENTION, RING, TRANSFER
from hf_helix.models.stock.alike import same_code
from hf_helix.models.stock.four_bit import value_dtype
from hf_helix.operators.attention.kernels import kernel_for
from hf_helix.operators.attention.partial import AttentionKernel, AttentionMask, Exact
from hf_helix.operators.attention.ring_attention import (
    PADDING,
    GatheredBlocks,
    JoinBlocks,
    RingBlock,
    RingStep,
    visible_pairs,
)
from hf_helix.operators.attention.sinks import attend
from hf_helix.operators.communication.collectives import AllGather
from hf_helix.planning.parameters import CUT_DIM_0

SlidingWindow = int | None
"""The number of tokens that a token attends to, itself included; None for all before it."""


def causal_masks(
    model: Any, sliding_windows: Iterable[SlidingWindow], ids: Tensor, mask: Tensor | None, documents: Tensor | None
) -> dict[SlidingWindow, Any]:
    """Returns the mask of Transformers for each window: a tensor, None, or the implementation's own form; of a model
    with sinks an `AttentionMask`, unless the batch brings masks of its own (of four dimensions).

    Transformers is given neither positions nor a mask without hidden tokens: reading the values would wait for the
    device.

    Args:
        model: the Transformers model.
        sliding_windows: the windows of the layers.
        ids: the tokens [batch, sequence].
        mask: see `Family.attention_inputs`.
        documents: see `Family.attention_inputs`.
    """
    if _runs_sinks(model) and (mask is None or mask.dim() == 2):
        hiding = documents if mask is None else torch.where(mask != 0, 0, PADDING)
        return {window: _seen(window, ids, hiding) for window in set(sliding_windows)}
    embeddings = like_embeddings(model, ids)
    apart = None if documents is None else _within(documents.expand(len(ids), -1))
    masks = {}
    for window in set(sliding_windows):
        create = create_causal_mask if window is None else create_sliding_window_causal_mask
        masks[window] = create(
            model.config.get_text_config(),
            embeddings,
            mask,
            None,  # the cache, whose name Transformers 5.24 has changed
            and_mask_function=apart,
            allow_is_causal_skip=mask is None,
        )
    return masks


def _runs_sinks(model: Any) -> bool:
    """Returns whether a model's attention is the eager attention of its file, with sinks."""
    eager = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    implementation = model.config.get_text_config()._attn_implementation
    return implementation == "eager" and eager is not None and _has_sinks(eager)


def _seen(window: SlidingWindow, ids: Tensor, documents: Tensor | None) -> AttentionMask:
    """Returns the keys that the queries of a batch see; `documents` are those of every token [batch or 1, sequence], or
    `PADDING`."""
    length = ids.shape[1]
    window = window if window is not None and window < length else None
    if documents is None:
        return AttentionMask(causal=True, window=window)
    places = torch.arange(length, device=ids.device)
    return AttentionMask(mask=visible_pairs(documents.expand(len(ids), -1), places, places, window, unpads=False))


def _within(documents: Tensor) -> Callable[[Any, Any, Any, Any], Any]:
    """Returns the mask function of Transformers that limits attention to a token's own document."""
    return lambda row, head, query, key: documents[row, query] == documents[row, key]


def like_embeddings(model: Any, ids: Tensor) -> Tensor:
    """Returns a tensor in the place of embeddings [batch, sequence, 1]: only its shape, type and device are read."""
    return model.get_input_embeddings().weight.new_empty(()).expand(*ids.shape, 1)


Heads = tuple[Tensor, ...]
"""Queries, keys and values [batch, heads, tokens, head_dim], perhaps followed by a mask."""

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")

PLAIN = (eager_attention_forward, gpt2_eager, gpt_neox_eager)
"""Eager attention that is softmax(q k * scaling + mask) v and nothing else."""


class Attention:
    """Attention between the projections of a layer, as one function over this rank's heads.

    The padding for a sequence that does not divide is removed before attention: in some implementations, a row without
    visible keys (padding on the left) averages over all keys.

    Args:
        module: the attention module of Transformers.
        heads: maps the outputs of the projections (queries, keys and values, or all in one) and, for a rope, cosines
            and sines of the positions, to `Heads`.
        sliding_window: the window of the layer; side input `masks` has the window's mask.
        eager: the eager attention of the module's own file.
        dropout: the module's dropout; None for its `attention_dropout`.
        options: further arguments of the attention interface; None for the module's `scaling` and the window.
        tensors: parameters among the arguments, of which a rank has the part of its heads (sinks).
        has_mask: whether a mask is passed.
        value_dim: the length of values if shorter than keys.
        is_plain: whether `eager` is exactly softmax(q k * scaling + mask) v, so that attention over a shared sequence
            may replace it; None to compare `eager` with the functions in `PLAIN`.
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
        value_dim: int | None = None,
    ) -> None:
        self.value_dim = value_dim
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
        given = [value[:length] if padded > length else value for value in values]
        q, k, v, *made = self.heads(*given, **rope)
        mask = masks[self.sliding_window] if self.has_mask else next(iter(made), None)
        out = self._attended(q, k, v, mask, positions, ends)
        out = out.flatten(2).transpose(0, 1)
        return functional.pad(out, (0, 0, 0, 0, 0, padded - length)) if padded > length else out.contiguous()

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, positions: Tensor, ends: Mapping[str, Any]
    ) -> Tensor:
        """Returns attention [batch, tokens, heads, size of values]: by a fused kernel where the mask is one of a model
        with sinks, else by the attention interface of Transformers."""
        dropout = self.dropout if self.module.training else 0.0
        if isinstance(mask, AttentionMask) and not dropout and self._is_fused:
            sinks = self.tensors.get(SINKS)
            # With a sink, a query without visible keys gets zeros, as of `sdpa`; without, the mean, as of `eager`.
            averages = sinks is None and mask.mask is not None
            kernel = kernel_for("eager" if averages else "sdpa", q.device)
            return attend(kernel, q, k, v, mask, self.options["scaling"], sinks)
        mask = as_bias(mask, q, k) if isinstance(mask, AttentionMask) else mask
        implementation = self.module.config._attn_implementation
        # Flash attention would look for documents in the positions, in every layer, and wait for the device.
        documents = ends if implementation in FLASH else {"position_ids": positions}
        out, _ = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, self.eager)(
            self.module,
            q,
            k,
            v,
            mask,
            dropout=dropout,
            **self.options,
            **self.tensors,
            **documents,
        )
        return out

    @functools.cached_property
    def _is_fused(self) -> bool:
        """Whether the eager attention has sinks, and nothing else that a fused kernel would leave out."""
        return _has_sinks(self.eager) and not (unknown_options(self.options) or self.tensors.keys() - {SINKS})


def as_bias(seen: AttentionMask, q: Tensor, k: Tensor) -> Tensor | None:
    """Returns a mask as eager attention adds it to the products of queries and keys [batch or 1, 1, queries, keys]."""
    hidden = seen.hides(q.shape[2], k.shape[2], q.device)
    if hidden is None:
        return None
    bias = q.new_zeros(hidden.numel() // (q.shape[2] * k.shape[2]), 1, q.shape[2], k.shape[2])
    return bias.masked_fill_(hidden.view_as(bias), torch.finfo(q.dtype).min)


class WithGroups:
    """An attention module on a rank with one key-value head, for some of the head's queries (`groups`)."""

    def __init__(self, module: Any, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


CAPPED = ("gemma2",)
"""The models whose eager attention bounds the products of queries and keys by `softcap`, and is plain otherwise."""

WITH_SINKS = ("gpt_oss", "granite_swa", "flint", "mimo_v2_flash")
"""The models whose eager attention has one more logit for each head, a parameter, and is plain otherwise."""

KNOWN = ("scaling", "sliding_window", "softcap", "use_cache", "output_attentions", "position_ids")
"""The options of the attention interface that attention over a shared sequence honours, or that change nothing."""

SINKS = "s_aux"
"""What the attention interface of Transformers calls the sinks."""

ROPE = ("cos", "sin")
"""The side inputs of a rope."""


def is_plain_attention(eager: Callable[..., Any]) -> bool:
    """Returns whether eager attention is a function in `PLAIN`, or a copy in the file of another model."""
    return any(same_code(eager, known) for known in PLAIN)


def declare_attention(
    b: Builder,
    attention: Attention,
    *values: str,
    side: Sequence[str] = ROPE,
    uses: Sequence[Used] = (),
    cut: Sequence[UsedCut] = (),
    name: str = "attention",
) -> str:
    """Adds the attention of a layer, over a full or a shared sequence.

    Args:
        b: the builder of the layer.
        attention: the function over this rank's heads.
        values: the outputs of the projections.
        side: the side inputs of `attention.heads`.
        uses: the submodules with parameters read by `attention.heads`, and single parameters.
        cut: parameters of which a rank holds the part of its heads.
        name: the name of the operator.

    Returns:
        The output of this rank's heads [tokens, batch, heads * head_dim].
    """
    module = attention.module
    if b.cp.size == 1:
        # by autocast, one kernel later
        is_lowered = module.config._attn_implementation == "sdpa" or _has_sinks(attention.eager)
        attention.heads = b.compiled(_in_type_of_values(attention.heads) if is_lowered else attention.heads)
        return b.autograd(
            name,
            attention,
            *values,
            side=(*side, "masks", "positions", "ends"),
            uses=uses,
            cut=[*cut, *attention.tensors.values()],
            on_shard=True,
            draws=lambda: module.training and attention.dropout > 0,
            compiles=False,
            relative_cost=ATTENTION,
            frees_inputs=True,
        )

    kernel, sinks = _shared_form(attention, b.cp.size, b.sharing.device)

    def rotate(*values: Tensor, **rope: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = attention.heads(*values, **rope)
        if attention.value_dim is not None:
            v = functional.pad(v, (0, k.shape[-1] - v.shape[-1]))
        # A rope may leave a higher precision; attention would cast back.
        return q.to(v.dtype).contiguous(), torch.stack((k.to(v.dtype), v))

    outputs = (f"{name}.q", f"{name}.kv")
    read: Any = {"side": side, "uses": uses, "cut": cut}
    q, kv = b.autograd_outputs(f"{name}.rotate", rotate, outputs, *values, **read, on_shard=True, frees_inputs=True)
    return _shared_attention(b, q, kv, kernel, attention, sinks)


def _shared_attention(
    b: Builder, q: str, kv: str, kernel: AttentionKernel, attention: Attention, sinks: nn.Parameter | None
) -> str:
    """Adds causal attention over a sequence shared by context-parallel ranks, see
    `hf_helix.operators.attention.ring_attention`: of queries [batch, heads, tokens of this rank, head_dim] to keys and
    values [2, batch, key-value heads, tokens of this rank, head_dim], shorter values are filled up with zeros.
    `sinks` is one more logit for each of this rank's heads. Returns [tokens of this rank, batch, heads * length of
    values]."""
    name = b.unused("attention", "join")  # a layer may attend twice
    outputs = (f"{name}.out", f"{name}.lse")
    size, scale, window = b.cp.size, attention.options["scaling"], attention.sliding_window
    value: tuple[str, ...] = ()
    if b.sharing.cp_method == RING:  # attention to the keys of one rank, while the next keys travel round the ring
        for distance in range(size):
            here = kv
            if distance + 1 < size:
                kv = _move_keys(b, f"{name}.ring{distance + 1}", RingStep(b.cp), kv, TRANSFER)
            value = b.declare(
                f"{name}.block{distance}",
                RingBlock(kernel, b.cp, distance, scale, window),
                (q, here, *value),
                (f"{name}.part{distance}",),
                saved_for_backward=(q, here, *outputs),
                relative_cost=ATTENTION / size,
            )
    else:  # attention to the gathered keys of all ranks
        kv = _move_keys(b, f"{name}.gather", AllGather(b.cp), kv, TRANSFER * (size - 1))
        value = b.declare(
            f"{name}.blocks",
            GatheredBlocks(kernel, b.cp, scale, window),
            (q, kv),
            (f"{name}.whole",),
            saved_for_backward=(q, kv, *outputs),
            relative_cost=ATTENTION,
        )
    b.record_cut([sinks], CUT_DIM_0)
    join = JoinBlocks(value_dtype(attention.module), attention.value_dim, sinks)
    saved = () if sinks is None else outputs
    return b.declare(f"{name}.join", join, value, outputs, saved_for_backward=saved)[0]


def _move_keys(b: Builder, name: str, tensor_operator: RingStep | AllGather, kv: str, cost: float) -> str:
    """Adds communication over the context-parallel ranks. Backward runs it again instead of keeping the output."""
    writes = (f"{name}.kv",)
    return b.declare(name, tensor_operator, (kv,), writes, kind=b.cp.kind, recomputed=True, relative_cost=cost)[0]


def _shared_form(
    attention: Attention, cp_size: int, device: torch.device
) -> tuple[AttentionKernel, nn.Parameter | None]:
    """Returns the kernel of an attention over a sequence shared by ranks, and its sinks, if any; refuses others."""
    module, eager, cap = attention.module, attention.eager, attention.options.get("softcap")
    implementation, tensors = module.config._attn_implementation, set(attention.tensors)
    if attention.dropout > 0:
        option = "attn_pdrop" if hasattr(module.config, "attn_pdrop") else "attention_dropout"
        raise ValueError(
            f"{option}={attention.dropout}: {type(module).__name__} drops out {attention.dropout} of its attention, "
            "which is not built for a sequence that ranks share; with cp_size above 1 load the model with "
            f"{option}=0.0"
        )
    if implementation == "eager" and attention.is_plain:
        return kernel_for(implementation, device), None
    if implementation == "eager" and _is_one_of(eager, CAPPED) and not tensors:
        return Exact(averages=True, cap=cap), None
    if implementation == "eager" and _has_sinks(eager) and tensors <= {SINKS}:
        # With a sink, a query without visible keys gets zeros, as of `sdpa`; without, the mean, as of other `eager`.
        return kernel_for("sdpa" if tensors else "eager", device), attention.tensors.get(SINKS)
    unknown = unknown_options(attention.options)
    special = [*sorted(tensors), *unknown, *(["softcap"] if cap is not None and implementation in FLASH else [])]
    if implementation == "eager" or special:
        raise ValueError(
            f"cp_size={cp_size} with attn_implementation={implementation!r}: attention of {type(module).__name__} "
            f"({eager.__module__}.{eager.__qualname__}{''.join(f', {name}' for name in special)}) is not built over a "
            "sequence that ranks share; use cp_size=1 with tp_size or pp_size, or another attn_implementation if the "
            "model may do without what is special in it"
        )
    return kernel_for(implementation, device), None


def unknown_options(options: Mapping[str, Any]) -> list[str]:
    """Returns the options of the attention interface that a kernel with log-sum-exp would leave out."""
    return sorted(name for name, value in options.items() if name not in KNOWN and value is not None)


@functools.cache
def _has_sinks(eager: Callable[..., Any]) -> bool:
    """Returns whether eager attention has sinks, and is plain otherwise."""
    return _is_one_of(eager, WITH_SINKS)


def _is_one_of(eager: Callable[..., Any], homes: Sequence[str]) -> bool:
    """Returns whether eager attention is the function of a listed module, or a copy."""
    for home in homes:
        try:
            known = import_module(f"transformers.models.{home}.modeling_{home}").eager_attention_forward
        except (ImportError, AttributeError):  # another version of Transformers, without this model
            continue
        if same_code(eager, known):
            return True
    return False


def _in_type_of_values(heads: Callable[..., Heads]) -> Callable[..., Heads]:
    """Returns `heads` with queries and keys in the type of the values: a rope may leave a higher precision."""

    def alike(*values: Tensor, **rope: Tensor) -> Heads:
        q, k, v, *made = heads(*values, **rope)
        return (q.to(v.dtype), k.to(v.dtype), v, *made)

    return alike


def by_heads(value: Tensor, head_dim: int) -> Tensor:
    """Returns a value [tokens, batch, heads * head_dim] as [batch, heads, tokens, head_dim]."""
    return value.unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3)
