"""The experts of a layer: tokens to the ranks that hold the experts chosen for them, through these, and back.

In:   tokens, weights and choices of a router, and a Transformers module of fused experts (`expert_form`).
Out:  the operators of `hf_helix.operators.moe.dispatch`, in order; the name of the weighted sums.
Must hold: with one rank nothing communicates; with a capacity nothing depends on the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_helix.models.batch_inputs import SequenceCut
from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import GEMM, LIGHT, TRANSFER, ParallelContext
from hf_helix.models.graph.expert_form import experts_form
from hf_helix.operators.linears.grouped_linear import GroupedLinear
from hf_helix.operators.moe.dispatch import (
    COUNTED,
    SHARD_TOKENS,
    AllToAll,
    ExchangeCounts,
    Permute,
    PermuteToCapacity,
    RouterMeter,
    SortByExpert,
    Unpermute,
    UnpermuteFromCapacity,
)
from hf_helix.operators.moe.row_counts import RowCounts
from hf_helix.operators.param_shard import CUT_EXPERTS
from hf_helix.planning.graph.operator import Kind, Operator

Names = tuple[str, ...]


def declare_experts(
    b: Builder,
    h: str,
    weights: str,
    chosen: str,
    module: Any,
    meter: RouterMeter | None = None,
    *,
    name: str = "experts",
    flat: bool = False,
) -> str:
    """Adds the way of tokens through the experts that were chosen for them.

    Args:
        b: the builder of the layer.
        h: this rank's tokens [n, batch, hidden].
        weights: the weights of every token's choices [n * batch, k].
        chosen: the experts [n * batch, k], each below the number of experts.
        module: fused experts, see `experts_form`.
        meter: counts what the router does; None where nobody asks.
        name: what the names of the operators begin with.
        flat: whether the tokens and the sums are [n * batch, hidden].

    Returns:
        The weighted sums of the experts' outputs [n, batch, hidden].

    Raises:
        ValueError: the module computes something else than fused experts do.
    """
    form = experts_form(module)
    up, down = getattr(module, form.up), getattr(module, form.down)
    way = _Way(b, name, len(up))
    rows, places, counts = way.permute(h, chosen, meter)
    rows, sizes, counts = way.dispatch(rows, counts)
    rows = way.linear("up", up, form.parameter(module, form.up_bias), form.is_transposed, rows, sizes)
    # Every rank has its own experts' rows, so the gradients of what all experts share are summed.
    children = [child for key, child in module.named_children() if key != form.norm]
    rows = b.segment(f"{name}.act", form.activation(module), rows, uses=children, on_shard=True)
    rows = way.linear("down", down, form.parameter(module, form.down_bias), form.is_transposed, rows, sizes)
    if form.norm is not None:
        rows = b.segment(f"{name}.norm", getattr(module, form.norm), rows, on_shard=True)
    rows = way.combine(rows, counts)
    collect = (Unpermute if b.sharing.capacity_factor is None else UnpermuteFromCapacity)(down.dtype, flat)
    return b.declare(way.light("unpermute", (rows, weights, places), ("out",)), collect)[0]


def check_expert_count(count: int, sharing: ParallelContext) -> None:
    """Raises ValueError unless the ranks that share the experts of a layer get equally many.

    Args:
        count: the number of experts.
        sharing: the axes that the model is cut over.
    """
    ranks = sharing.experts.size
    if count % ranks:
        works = [size for size in range(1, count // sharing.tp.size + 1) if count % (size * sharing.tp.size) == 0]
        hint = f"with tp_size={sharing.tp.size}, values that work for ep_size: {', '.join(map(str, works))}"
        raise ValueError(
            f"ep_size={sharing.ep_size} and tp_size={sharing.tp.size} share the {count} experts among {ranks} "
            f"ranks, which must divide them; {hint if works else f'use a tp_size that divides {count}'}"
        )


def counted_in(batch: Mapping[str, Any]) -> Tensor:
    """Returns which tokens of a batch are no padding [batch, sequence], as 0 and 1."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    return torch.ones_like(ids) if mask is None else mask


def expert_side_inputs(batch: Mapping[str, Any], cut: SequenceCut) -> dict[str, Any]:
    """Returns the side inputs of a micro-batch that the operators of experts read.

    Args:
        batch: what the data collator made; where ranks share experts with a capacity, with the longest batch of these.
        cut: which tokens are this rank's.
    """
    mine = cut.take(counted_in(batch), 1).t().contiguous()
    return {COUNTED: mine, SHARD_TOKENS: batch.get(SHARD_TOKENS, mine.numel() // cut.tp_size)}


@dataclass(frozen=True)
class _Way:
    """Adds the operators of one module of experts.

    Attributes:
        b: the builder of the layer.
        name: what the names of the operators and of their values begin with.
        num_experts: of the module.
        row_counts: what the host knows of the layer's rows.
    """

    b: Builder
    name: str
    num_experts: int
    row_counts: RowCounts = field(default_factory=RowCounts)

    def permute(self, h: str, chosen: str, meter: RouterMeter | None) -> tuple[str, str, Names]:
        """Adds the sorting of rows by expert; gives also the places they came from and, without a capacity, the number
        of rows of each expert.
        """
        factor = self.b.sharing.capacity_factor
        if factor is None:
            permute = self.light("permute", (h, chosen), ("rows", "places", "counts"), num_plain=2)
            rows, places, counts = self.b.declare(permute, Permute(self.num_experts))
            return rows, places, (counts,)
        permute = self.light("permute", (h, chosen), ("rows", "places"), num_plain=1)
        rows, places = self.b.declare(permute, PermuteToCapacity(self.num_experts, factor, self.b.tp, meter))
        return rows, places, ()

    def dispatch(self, rows: str, counts: Names) -> tuple[str, Names, Names]:
        """Adds the way of rows to their experts; gives also the number of rows of each expert here, and the numbers
        that went and came, for the way back.
        """
        axis = self.b.sharing.experts
        if axis.size == 1:
            return rows, counts, counts
        if counts:
            arriving = (f"{self.name}.arriving",)
            announce = Operator(
                name=f"{self.name}.announce",
                kind=axis.kind,
                reads=counts,
                writes=arriving,
                non_differentiable=arriving,
                relative_cost=LIGHT,
            )
            counts += self.b.declare(announce, ExchangeCounts(axis, self.row_counts))
        rows = self._exchange("dispatch", rows, counts, "there", AllToAll(axis, row_counts=self.row_counts))
        writes = ("sorted", "sizes") if counts else ("sorted",)
        group = self.light("group", (rows, *counts[1:]), writes, num_plain=len(writes) - 1)
        rows, *sizes = self.b.declare(group, SortByExpert(axis.size, self.num_experts // axis.size))
        return rows, tuple(sizes), counts

    def combine(self, rows: str, counts: Names) -> str:
        """Adds the way of rows back to where they came from."""
        axis = self.b.sharing.experts
        if axis.size == 1:
            return rows
        ungroup = self.light("ungroup", (rows, *counts[1:]), ("parted",))
        (rows,) = self.b.declare(ungroup, SortByExpert(axis.size, self.num_experts // axis.size, back=True))
        exchange = AllToAll(axis, back=True, row_counts=self.row_counts)
        return self._exchange("combine", rows, counts, "back", exchange)

    def linear(
        self, key: str, weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool, rows: str, sizes: Names
    ) -> str:
        """Adds the linears of all experts of this rank.

        Args:
            key: names the operator and its value.
            weight: [experts, features out, features in].
            bias: [experts, features out], or None.
            transposed: whether the weight is [experts, features in, features out].
            rows: what they take.
            sizes: the number of rows of each expert, without a capacity.
        """
        self.b.place([weight, bias], CUT_EXPERTS)
        operator = Operator(
            name=f"{self.name}.{key}",
            kind=Kind.COMPUTE,
            reads=(rows, *sizes),
            writes=(f"{self.name}.{key}",),
            splits_dgrad_wgrad=True,
            saved_for_backward=sizes,
            relative_cost=GEMM,
        )
        return self.b.declare(operator, GroupedLinear(weight, self.row_counts, bias, transposed))[0]

    def light(self, key: str, reads: Names, writes: Names, num_plain: int = 0) -> Operator:
        """Returns a light computation.

        Args:
            key: names the operator.
            reads: the values that it takes.
            writes: the last parts of the names of its outputs.
            num_plain: how many of these, the last ones, have no gradient.
        """
        names = tuple(f"{self.name}.{key}" for key in writes)
        return Operator(
            name=f"{self.name}.{key}",
            kind=Kind.COMPUTE,
            reads=reads,
            writes=names,
            non_differentiable=names[len(names) - num_plain :],
            relative_cost=LIGHT,
        )

    def _exchange(self, key: str, rows: str, counts: Names, out: str, exchange: AllToAll) -> str:
        """Adds an all-to-all of rows.

        Args:
            key: names the operator.
            rows: the rows.
            counts: how many go and come, without a capacity.
            out: names what comes.
            exchange: what it does to tensors.
        """
        operator = Operator(
            name=f"{self.name}.{key}",
            kind=exchange.axis.kind,
            reads=(rows, *counts),
            writes=(f"{self.name}.{out}",),
            saved_for_backward=counts,
            host_read_sizes=counts,
            relative_cost=TRANSFER,
        )
        return self.b.declare(operator, exchange)[0]
