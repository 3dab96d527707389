"""Experts, declared: tokens to the ranks that hold the experts chosen for them, through these, and back.

In:   tokens, weights and choices of a router, and a Transformers module of experts with 3-D weights.
Out:  the operators of `hf_helix.operators.moe.dispatch`, in order; the name of the weighted sums.
Must hold: with one rank nothing communicates; with a capacity nothing depends on how many rows there are.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_helix.models.builder import GEMM, LIGHT, TRANSFER, Builder
from hf_helix.operators.linears.grouped_linear import GroupedLinear
from hf_helix.operators.moe.dispatch import Announce, Exchange, Group, RouterMeter
from hf_helix.operators.moe.permutation import Collect, Fill, Permute, Unpermute
from hf_helix.operators.moe.row_counts import RowCounts
from hf_helix.operators.unit import CUT_EXPERTS

Names = tuple[str, ...]


def declare_experts(b: Builder, h: str, weights: str, chosen: str, module: Any, meter: RouterMeter) -> str:
    """Tokens through the experts that were chosen for them.

    Args:
        h: this rank's tokens [n, batch, hidden].
        weights: of every token's choices [n * batch, k].
        chosen: the experts [n * batch, k].
        module: has `gate_up_proj` [experts, 2 * intermediate, hidden], `down_proj` and `_apply_gate`.
    """
    row_counts = RowCounts()
    rows, places, counts = _spread(b, h, chosen, len(module.gate_up_proj), meter)
    rows, sizes, counts = _dispatch(b, rows, counts, len(module.gate_up_proj), row_counts)
    rows = _grouped(b, "experts.up", module.gate_up_proj, rows, sizes, row_counts)
    rows = b.local("experts.act", module._apply_gate, rows, uses=(module.act_fn,))
    rows = _grouped(b, "experts.down", module.down_proj, rows, sizes, row_counts)
    rows = _combine(b, rows, counts, len(module.gate_up_proj), row_counts)
    collect = (Unpermute if b.sharing.capacity_factor is None else Collect)(module.down_proj.dtype)
    return b.declare("experts.unpermute", collect, (rows, weights, places), ("experts.out",), effort=LIGHT)[0]


def _spread(b: Builder, h: str, chosen: str, num_experts: int, meter: RouterMeter) -> tuple[str, str, Names]:
    """Rows by expert, the places they came from, and without a capacity how many each expert gets."""
    factor = b.sharing.capacity_factor
    spread = Permute(num_experts) if factor is None else Fill(num_experts, factor, meter)
    plain = ("experts.places", "experts.counts")[: 2 if factor is None else 1]
    rows, places, *counts = b.declare(
        "experts.permute", spread, (h, chosen), ("experts.rows", *plain), plain=plain, effort=LIGHT
    )
    return rows, places, tuple(counts)


def _dispatch(
    b: Builder, rows: str, counts: Names, num_experts: int, row_counts: RowCounts
) -> tuple[str, Names, Names]:
    """Rows at their experts; how many each has; and how many went and came, for the way back."""
    axis = b.sharing.experts
    if axis.size == 1:
        return rows, counts, counts
    if counts:
        arriving = ("experts.arriving",)
        announce = Announce(axis, row_counts)
        counts += b.declare(
            "experts.announce", announce, counts, arriving, kind=axis.kind, plain=arriving, effort=LIGHT
        )
    (rows,) = _exchange(b, "experts.dispatch", rows, counts, "experts.there", Exchange(axis, row_counts=row_counts))
    plain = ("experts.sizes",) if counts else ()
    group = Group(axis.size, num_experts // axis.size)
    rows, *sizes = b.declare(
        "experts.group", group, (rows, *counts[1:]), ("experts.sorted", *plain), plain=plain, effort=LIGHT
    )
    return rows, tuple(sizes), counts


def _combine(b: Builder, rows: str, counts: Names, num_experts: int, row_counts: RowCounts) -> str:
    """Rows where they came from."""
    axis = b.sharing.experts
    if axis.size == 1:
        return rows
    group = Group(axis.size, num_experts // axis.size, back=True)
    (rows,) = b.declare("experts.ungroup", group, (rows, *counts[1:]), ("experts.parted",), effort=LIGHT)
    return _exchange(
        b, "experts.combine", rows, counts, "experts.back", Exchange(axis, back=True, row_counts=row_counts)
    )[0]


def _exchange(b: Builder, name: str, rows: str, counts: Names, out: str, exchange: Exchange) -> Names:
    return b.declare(
        name,
        exchange,
        (rows, *counts),
        (out,),
        kind=exchange.axis.kind,
        keeps=counts,
        sizes=counts,
        effort=TRANSFER,
    )


def _grouped(b: Builder, name: str, weight: nn.Parameter, rows: str, sizes: Names, row_counts: RowCounts) -> str:
    b.place([weight], CUT_EXPERTS)
    linear = GroupedLinear(weight, row_counts)
    return b.declare(name, linear, (rows, *sizes), (name,), split=True, keeps=sizes, effort=GEMM)[0]
