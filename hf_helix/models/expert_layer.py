"""The experts of a layer: tokens to the ranks that hold the experts chosen for them, through these, and back.

In:   tokens, weights and choices of a router, and a Transformers module of experts with 3-D weights.
Out:  the operators of `hf_helix.operators.moe.dispatch`, in order; the name of the weighted sums.
Must hold: with one rank nothing communicates; with a capacity nothing depends on the number of rows.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_helix.models.builder import GEMM, LIGHT, TRANSFER, Builder
from hf_helix.operators.linears.grouped_linear import GroupedLinear
from hf_helix.operators.moe.dispatch import AllToAll, ExchangeCounts, RouterMeter, SortByExpert
from hf_helix.operators.moe.permutation import Permute, PermuteToCapacity, Unpermute, UnpermuteFromCapacity
from hf_helix.operators.moe.row_counts import RowCounts
from hf_helix.operators.unit import CUT_EXPERTS
from hf_helix.planning.graph.operator import Kind, Operator

Names = tuple[str, ...]


def declare_experts(b: Builder, h: str, weights: str, chosen: str, module: Any, meter: RouterMeter) -> str:
    """Adds the way of tokens through the experts that were chosen for them.

    Args:
        b: the builder of the layer.
        h: this rank's tokens [n, batch, hidden].
        weights: the weights of every token's choices [n * batch, k].
        chosen: the experts [n * batch, k].
        module: has `gate_up_proj` [experts, 2 * intermediate, hidden], `down_proj` and `_apply_gate`.
        meter: counts what the router does.

    Returns:
        The weighted sums of the experts' outputs [n, batch, hidden].
    """
    row_counts, num_experts = RowCounts(), len(module.gate_up_proj)
    rows, places, counts = _permute(b, h, chosen, num_experts, meter)
    rows, sizes, counts = _dispatch(b, rows, counts, num_experts, row_counts)
    rows = _grouped_linear(b, "experts.up", module.gate_up_proj, rows, sizes, row_counts)
    rows = b.segment("experts.act", module._apply_gate, rows, uses=(module.act_fn,))
    rows = _grouped_linear(b, "experts.down", module.down_proj, rows, sizes, row_counts)
    rows = _combine(b, rows, counts, num_experts, row_counts)
    collect = (Unpermute if b.sharing.capacity_factor is None else UnpermuteFromCapacity)(module.down_proj.dtype)
    unpermute = _light("experts.unpermute", (rows, weights, places), ("experts.out",))
    return b.declare(unpermute, collect)[0]


def _permute(b: Builder, h: str, chosen: str, num_experts: int, meter: RouterMeter) -> tuple[str, str, Names]:
    """Adds the sorting of rows by expert; gives also the places they came from and, without a capacity, the number of
    rows of each expert.
    """
    factor = b.sharing.capacity_factor
    function = Permute(num_experts) if factor is None else PermuteToCapacity(num_experts, factor, meter)
    plain = ("experts.places", "experts.counts")[: 2 if factor is None else 1]
    permute = _light("experts.permute", (h, chosen), ("experts.rows", *plain), plain=plain)
    rows, places, *counts = b.declare(permute, function)
    return rows, places, tuple(counts)


def _dispatch(
    b: Builder, rows: str, counts: Names, num_experts: int, row_counts: RowCounts
) -> tuple[str, Names, Names]:
    """Adds the way of rows to their experts; gives also the number of rows of each expert here, and the numbers that
    went and came, for the way back.
    """
    axis = b.sharing.experts
    if axis.size == 1:
        return rows, counts, counts
    if counts:
        arriving = ("experts.arriving",)
        announce = Operator(
            name="experts.announce",
            kind=axis.kind,
            reads=counts,
            writes=arriving,
            non_differentiable=arriving,
            relative_cost=LIGHT,
        )
        counts += b.declare(announce, ExchangeCounts(axis, row_counts))
    rows = _exchange(b, "experts.dispatch", rows, counts, "experts.there", AllToAll(axis, row_counts=row_counts))
    plain = ("experts.sizes",) if counts else ()
    group = _light("experts.group", (rows, *counts[1:]), ("experts.sorted", *plain), plain=plain)
    rows, *sizes = b.declare(group, SortByExpert(axis.size, num_experts // axis.size))
    return rows, tuple(sizes), counts


def _combine(b: Builder, rows: str, counts: Names, num_experts: int, row_counts: RowCounts) -> str:
    """Adds the way of rows back to where they came from."""
    axis = b.sharing.experts
    if axis.size == 1:
        return rows
    ungroup = _light("experts.ungroup", (rows, *counts[1:]), ("experts.parted",))
    (rows,) = b.declare(ungroup, SortByExpert(axis.size, num_experts // axis.size, back=True))
    exchange = AllToAll(axis, back=True, row_counts=row_counts)
    return _exchange(b, "experts.combine", rows, counts, "experts.back", exchange)


def _exchange(b: Builder, name: str, rows: str, counts: Names, out: str, exchange: AllToAll) -> str:
    """Adds an all-to-all of rows."""
    operator = Operator(
        name=name,
        kind=exchange.axis.kind,
        reads=(rows, *counts),
        writes=(out,),
        saved_for_backward=counts,
        host_read_sizes=counts,
        relative_cost=TRANSFER,
    )
    return b.declare(operator, exchange)[0]


def _grouped_linear(b: Builder, name: str, weight: nn.Parameter, rows: str, sizes: Names, row_counts: RowCounts) -> str:
    """Adds the linears of all experts of this rank."""
    b.place([weight], CUT_EXPERTS)
    operator = Operator(
        name=name,
        kind=Kind.COMPUTE,
        reads=(rows, *sizes),
        writes=(name,),
        splits_dgrad_wgrad=True,
        saved_for_backward=sizes,
        relative_cost=GEMM,
    )
    return b.declare(operator, GroupedLinear(weight, row_counts))[0]


def _light(name: str, reads: Names, writes: Names, plain: Names = ()) -> Operator:
    """Returns a light computation."""
    return Operator(
        name=name, kind=Kind.COMPUTE, reads=reads, writes=writes, non_differentiable=plain, relative_cost=LIGHT
    )
