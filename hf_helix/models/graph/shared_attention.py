"""Attention over a sequence that context-parallel ranks share, as operators.

In:   the values with queries, and with keys and values, of this rank's tokens.
Out:  the value with the output of attention [tokens of this rank, batch, heads * head_dim].
Must hold: it computes what attention over the whole sequence computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import ATTENTION, LIGHT, RING, TRANSFER
from hf_helix.models.graph.masks import SlidingWindow
from hf_helix.operators.attention.partial import AttentionKernel
from hf_helix.operators.attention.ring_attention import GatheredBlocks, JoinBlocks, RingBlock, RingStep
from hf_helix.operators.communication.collectives import AllGather
from hf_helix.operators.param_shard import CUT_ROWS
from hf_helix.planning.graph.operator import Kind, Operator


def shared_attention(
    b: Builder,
    q: str,
    kv: str,
    kernel: AttentionKernel,
    scale: float,
    sliding_window: SlidingWindow = None,
    dtype: torch.dtype = torch.float32,
    value_dim: int | None = None,
    sinks: nn.Parameter | None = None,
) -> str:
    """Adds causal attention over a sequence that context-parallel ranks share.

    See `hf_helix.operators.attention.ring_attention`.

    Args:
        b: the builder of the layer.
        q: queries [batch, heads, tokens of this rank, head_dim].
        kv: keys and values [2, batch, key-value heads, tokens of this rank, head_dim]; values that are shorter are
            filled up with zeros.
        kernel: computes attention to some of the keys, and its log-sum-exp.
        scale: the factor of queries times keys.
        sliding_window: the window of the layer.
        dtype: the type of the model.
        value_dim: the length of values; None for that of keys.
        sinks: one more logit for each of this rank's heads, or None.

    Returns:
        [tokens of this rank, batch, heads * value_dim].
    """
    outputs = ("attention.out", "attention.lse")
    blocks = _ring_blocks if b.sharing.cp_method == RING else _gathered_blocks
    value = blocks(b, q, kv, outputs, kernel, scale, sliding_window)
    b.place([sinks], CUT_ROWS)
    join = Operator(
        name="attention.join",
        kind=Kind.COMPUTE,
        reads=(value,),
        writes=outputs,
        saved_for_backward=() if sinks is None else outputs,
        relative_cost=LIGHT,
    )
    return b.declare(join, JoinBlocks(dtype, value_dim, sinks))[0]


def _ring_blocks(
    b: Builder,
    q: str,
    kv: str,
    outputs: tuple[str, str],
    kernel: AttentionKernel,
    scale: float,
    sliding_window: SlidingWindow,
) -> str:
    """Adds attention to one rank's keys after the other, while the next ones travel round the ring."""
    size = b.cp.size
    so_far: tuple[str, ...] = ()
    for distance in range(size):
        here = kv
        if distance + 1 < size:
            kv = _move_keys(b, f"attention.ring{distance + 1}", RingStep(b.cp), kv, TRANSFER)
        block = Operator(
            name=f"attention.block{distance}",
            kind=Kind.COMPUTE,
            reads=(q, here, *so_far),
            writes=(f"attention.part{distance}",),
            saved_for_backward=(q, here, *outputs),
            relative_cost=ATTENTION / size,
        )
        so_far = b.declare(block, RingBlock(kernel, b.cp, distance, scale, sliding_window))
    return so_far[0]


def _gathered_blocks(
    b: Builder,
    q: str,
    kv: str,
    outputs: tuple[str, str],
    kernel: AttentionKernel,
    scale: float,
    sliding_window: SlidingWindow,
) -> str:
    """Adds the all-gather of the keys of all ranks, and attention to them."""
    kv = _move_keys(b, "attention.gather", AllGather(b.cp), kv, TRANSFER * (b.cp.size - 1))
    blocks = Operator(
        name="attention.blocks",
        kind=Kind.COMPUTE,
        reads=(q, kv),
        writes=("attention.whole",),
        saved_for_backward=(q, kv, *outputs),
        relative_cost=ATTENTION,
    )
    return b.declare(blocks, GatheredBlocks(kernel, b.cp, scale, sliding_window))[0]


def _move_keys(b: Builder, name: str, tensor_operator: RingStep | AllGather, kv: str, relative_cost: float) -> str:
    """Adds communication over the context-parallel ranks. Backward runs it again, so that its output is not kept."""
    operator = Operator(
        name=name, kind=b.cp.kind, reads=(kv,), writes=(f"{name}.kv",), recomputed=True, relative_cost=relative_cost
    )
    return b.declare(operator, tensor_operator)[0]


def check_shared(model: Any, option: str = "attention_dropout") -> None:
    """Raises ValueError if attention cannot run over a sequence that ranks share.

    Args:
        model: the Transformers model.
        option: the model's name for the dropout of attention.
    """
    dropout = getattr(model.config, option)
    if dropout > 0:
        raise ValueError(
            f"{option}={dropout} is not built for a sequence that ranks share; "
            f"with cp_size above 1 load the model with {option}=0.0"
        )
