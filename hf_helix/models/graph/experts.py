"""The experts of a layer: tokens to the ranks with their chosen experts, through the experts, and back.

In:   tokens, weights and choices of a router, and a Transformers module of fused experts.
Out:  the operators of `hf_helix.operators.experts.moe`, in order; the name of the weighted sums.
Must hold: with one rank nothing communicates; with a capacity nothing depends on the number of rows. The module's own
`forward` proves the form of its experts, on a copy with few experts and small random weights: code with any other
computation, patched code included, is refused. The module is never touched.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import GEMM, TRANSFER, ParallelContext
from hf_helix.models.stock.batch_inputs import SequenceCut
from hf_helix.models.stock.peft import adapters_of_parameters, unwrapped
from hf_helix.operators.base import TensorOperator
from hf_helix.operators.experts.grouped_linear import GroupedLinear
from hf_helix.operators.experts.moe import (
    COUNTED,
    SHARD_TOKENS,
    AllToAll,
    ExchangeCounts,
    Permute,
    PermuteToCapacity,
    RouterMeter,
    RowCounts,
    SortByExpert,
    Unpermute,
    UnpermuteFromCapacity,
)
from hf_helix.planning.parameters import CUT_EXPERTS

GATED, PLAIN, DOWN, NORM = "gate_up_proj", "up_proj", "down_proj", "post_expert_norm"

EXPERTS, FEATURES, TOKENS, CHOICES = 3, 12, 8, 2
"""The sizes of the copy that proves a form."""

SCALE = 8.0
"""The size of what comes out of its first linear: large enough for the clamps of activations to take part."""

TOLERANCE = 1e-4
"""The largest difference from the module's own output, relative to the size of that."""


@dataclass(frozen=True)
class ExpertForm:
    """The computation of fused experts for a token and a chosen expert:

        weight * norm(down(activation(up(token) + bias)) + bias)

    Attributes:
        up: the name of the first weight [experts, features, hidden].
        down: the name of the second weight [experts, hidden, intermediate].
        up_bias: the name of the bias [experts, features] of the first linear; None for no bias.
        down_bias: the name of the bias [experts, hidden] of the second linear; None for no bias.
        is_transposed: whether weights are [experts, features in, features out] instead.
        is_gated: whether the activation is `_apply_gate`, with half the number of output features; otherwise `act_fn`.
        norm: the name of the norm of an expert's output; None for no norm.
    """

    up: str
    down: str
    up_bias: str | None = None
    down_bias: str | None = None
    is_transposed: bool = False
    is_gated: bool = True
    norm: str | None = None

    def activation(self, module: Any) -> Callable[[Tensor], Tensor]:
        """Returns the function between the two linears of a module of this form."""
        function: Callable[[Tensor], Tensor] = module._apply_gate if self.is_gated else module.act_fn
        return function

    def parameter(self, module: nn.Module, name: str | None) -> nn.Parameter | None:
        """Returns the module's parameter with a name of the form."""
        return None if name is None else getattr(module, name)


def is_experts(module: nn.Module) -> bool:
    """Returns whether a module looks like fused experts: weights of three dimensions, called with tokens, chosen
    experts, and the weights of the choices.
    """
    weight = getattr(module, DOWN, None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 3 and len(forward_arguments(module)) == 3


def experts_form(module: nn.Module) -> ExpertForm:
    """Returns the form of a module of fused experts, whose `forward` takes tokens [tokens, hidden], the experts chosen
    [tokens, k] and weights [tokens, k].

    Raises:
        ValueError: the module has no such form, or another computation; names the difference.
    """
    form = _declared_form(module)
    _check_shapes(module, form)
    _check_forward(module, form)
    return form


def _declared_form(module: nn.Module) -> ExpertForm:
    """Returns the form stated by the names of the parameters and by Transformers' own description of the module."""
    arguments = forward_arguments(module)
    if len(arguments) != 3:
        given = ", ".join(arguments)
        raise _refusal(module, f"its forward takes {given}, not tokens, chosen experts and their weights")
    names = [name for name, _ in module.named_parameters(recurse=False)]
    up = next((name for name in (GATED, PLAIN) if name in names), None)
    if up is None or DOWN not in names:
        raise _refusal(module, f"it has no {GATED} (or {PLAIN}) and {DOWN} that hold the weights of all experts")
    up_bias, down_bias = (name if name in names else None for name in (f"{up}_bias", f"{DOWN}_bias"))
    left = [name for name in names if name not in (up, DOWN, up_bias, down_bias)]
    if left:
        raise _refusal(module, f"it has further parameters, {', '.join(left)}")
    return ExpertForm(
        up,
        DOWN,
        up_bias,
        down_bias,
        is_transposed=bool(getattr(module, "is_transposed", False)),
        is_gated=up == GATED,
        norm=NORM if getattr(module, "has_post_expert_norm", False) else None,
    )


def _check_shapes(module: Any, form: ExpertForm) -> None:
    """Raises ValueError unless all experts have all weights, in the layout of the form."""
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters(recurse=False)}
    if {len(shapes[form.up]), len(shapes[form.down])} != {3}:
        raise _refusal(module, f"its weights have the shapes {shapes}, not three dimensions")
    counts = {name: shape[0] for name, shape in shapes.items()}
    if len(set(counts.values())) > 1:
        raise _refusal(
            module,
            f"its parameters hold different numbers of experts ({counts}): some experts compute nothing, and those are "
            "not built",
        )
    needed = "_apply_gate" if form.is_gated else "act_fn"
    if not callable(getattr(module, needed, None)):
        raise _refusal(module, f"it has no {needed} that says what stands between its two linears")


def _check_forward(module: nn.Module, form: ExpertForm) -> None:
    """Raises ValueError unless the module's own forward computes the form's result, on small random weights."""
    generator = torch.Generator().manual_seed(0)
    tiny = _tiny(module, form, generator)
    hidden = torch.randn(TOKENS, getattr(tiny, form.up).shape[1 if form.is_transposed else 2], generator=generator)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, CHOICES, generator=generator)
    with torch.no_grad():
        expected = _by_form(tiny, form, hidden, chosen, weights)
        try:
            computed = type(module).forward(tiny, hidden, chosen, weights)
        except Exception as error:
            raise _refusal(
                module, f"its forward does not run on other weights of its form: {type(error).__name__}: {error}"
            ) from error
    if computed.shape != expected.shape or not (computed - expected).abs().max() <= TOLERANCE * expected.abs().max():
        raise _refusal(module, f"its forward computes something else than its weights and flags say ({form})")


def _tiny(module: nn.Module, form: ExpertForm, generator: torch.Generator) -> Any:
    """Returns a copy of a module on the CPU in fp32, with random weights; the weights of experts are small."""
    hidden = getattr(module, form.up).shape[1 if form.is_transposed else 2]
    inner = FEATURES // 2 if form.is_gated else FEATURES
    of_experts = {
        form.up: torch.randn(EXPERTS, FEATURES, hidden, generator=generator) * SCALE * hidden**-0.5,
        form.down: torch.randn(EXPERTS, hidden, inner, generator=generator),
        form.up_bias: torch.randn(EXPERTS, FEATURES, generator=generator) * SCALE,
        form.down_bias: torch.randn(EXPERTS, hidden, generator=generator) * SCALE,
    }
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        value = of_experts[name] if name in of_experts else torch.rand(parameter.shape, generator=generator) + 0.5
        is_swapped = form.is_transposed and name in (form.up, form.down)
        value = value.transpose(1, 2).contiguous() if is_swapped else value
        memo[id(parameter)] = nn.Parameter(value, requires_grad=False)
    for buffer in module.buffers():  # of activations; meta tensors have no values to copy
        memo[id(buffer)] = (torch.rand(buffer.shape, generator=generator) + 0.5).to(buffer.dtype)
    tiny: Any = copy.deepcopy(module, memo)
    if hasattr(tiny, "config"):
        tiny.config._experts_implementation = "eager"  # other implementations read all experts
    return tiny


def _by_form(module: Any, form: ExpertForm, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Returns the result of a form, choice by choice: for tokens [tokens, hidden], experts chosen and weights
    [tokens, k]."""

    def linear(rows: Tensor, weight: str, bias: str | None) -> Tensor:
        matrices = getattr(module, weight)[chosen]
        matrices = matrices if form.is_transposed else matrices.transpose(-1, -2)
        out = (rows.unsqueeze(-2) @ matrices).squeeze(-2)
        return out if bias is None else out + getattr(module, bias)[chosen]

    rows = linear(hidden.unsqueeze(1).expand(-1, chosen.shape[1], -1), form.up, form.up_bias)
    rows = linear(form.activation(module)(rows), form.down, form.down_bias)
    if form.norm is not None:
        rows = getattr(module, form.norm)(rows)
    return (rows * weights.unsqueeze(-1)).sum(1)


def forward_arguments(module: nn.Module) -> list[str]:
    """Returns the names of the arguments of a module's forward."""
    names = list(inspect.signature(type(module).forward).parameters)
    return names[1:]


def _refusal(module: nn.Module, why: str) -> ValueError:
    kind = type(module)
    return ValueError(
        f"the experts {kind.__module__}.{kind.__qualname__} cannot be spread over ranks: {why}; what is built are "
        f"experts with {GATED} (or {PLAIN}) and {DOWN}, with biases or without, as Mixtral's, Nemotron-H's and gpt-oss'"
    )


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
) -> str:
    """Adds the operators of experts: tokens to the chosen experts, the experts, and the way back.

    Args:
        b: the builder of the layer.
        h: this rank's tokens [n, batch, hidden].
        weights: the weights of every token's choices [n * batch, k].
        chosen: the experts [n * batch, k], each below the number of experts.
        module: fused experts, see `experts_form`, perhaps with PEFT's adapters of their weights.
        meter: counts the router's choices; None for no counts.
        name: the beginning of the operators' names.

    Returns:
        The weighted sums of the experts' outputs [n, batch, hidden].

    Raises:
        ValueError: the module's computation differs from fused experts.
    """
    adapted, module = adapters_of_parameters(module), unwrapped(module).module
    form, axis, factor, row_counts = experts_form(module), b.sharing.experts, b.sharing.capacity_factor, RowCounts()
    up, down = getattr(module, form.up), getattr(module, form.down)

    def add(key: str, operator: TensorOperator, reads: Names, *writes: str, plain: int = 0, **fields: Any) -> Names:
        """Adds an operator; the last `plain` outputs have no gradient."""
        names = tuple(f"{name}.{each}" for each in writes)
        plain_names = names[len(names) - plain :]
        return b.declare(f"{name}.{key}", operator, reads, names, non_differentiable=plain_names, **fields)

    def exchange(key: str, operator: AllToAll, rows: str, out: str) -> str:
        """Adds an all-to-all of rows; without a capacity the host reads how many go and come."""
        fields: dict[str, Any] = {"kind": axis.kind, "saved_for_backward": counts, "host_read_sizes": counts}
        return add(key, operator, (rows, *counts), out, relative_cost=TRANSFER, **fields)[0]

    def linear(key: str, weight: str, bias: str | None, rows: str) -> str:
        """Adds the linears of all experts of this rank, by the names of their parameters."""
        matrices, biases, adapters = getattr(module, weight), form.parameter(module, bias), adapted.get(weight)
        b.record_cut([matrices, biases], CUT_EXPERTS)
        for adapter in () if adapters is None else adapters.all_adapters():
            b.record_cut([adapter.down], CUT_EXPERTS)
            b.record_cut([adapter.up], replace(CUT_EXPERTS, dim=1, blocks=(len(matrices),) * adapter.rank))
        operator = GroupedLinear(matrices, row_counts, biases, form.is_transposed, adapters)
        fields: dict[str, Any] = {"splits_dgrad_wgrad": True, "saved_for_backward": sizes, "relative_cost": GEMM}
        return add(key, operator, (rows, *sizes), key, **fields)[0]

    counts: Names = ()  # of rows for each expert, sent and received; none with a capacity
    if factor is None:
        rows, places, count = add("permute", Permute(len(up)), (h, chosen), "rows", "places", "counts", plain=2)
        counts = (count,)
    else:
        to_capacity = PermuteToCapacity(len(up), factor, b.tp, meter)
        rows, places = add("permute", to_capacity, (h, chosen), "rows", "places", plain=1)
    sizes = counts  # of rows for each expert of this rank
    if axis.size > 1:
        if counts:
            announce = ExchangeCounts(axis, row_counts)
            counts += add("announce", announce, counts, "arriving", plain=1, kind=axis.kind)
        rows = exchange("dispatch", AllToAll(axis, row_counts=row_counts), rows, "there")
        group, writes = SortByExpert(axis.size, len(up) // axis.size), ("sorted", "sizes") if counts else ("sorted",)
        made = add("group", group, (rows, *counts[1:]), *writes, plain=len(writes) - 1)
        rows, sizes = made[0], made[1:]

    rows = linear("up", form.up, form.up_bias, rows)
    # Every rank has its own experts' rows, so gradients of parameters shared by all experts are summed.
    children = [child for key, child in module.named_children() if key != form.norm]
    rows = b.autograd(f"{name}.act", form.activation(module), rows, uses=children, on_shard=True)
    rows = linear("down", form.down, form.down_bias, rows)
    if form.norm is not None:
        rows = b.autograd(f"{name}.norm", getattr(module, form.norm), rows, on_shard=True)

    if axis.size > 1:
        ungroup = SortByExpert(axis.size, len(up) // axis.size, back=True)
        (rows,) = add("ungroup", ungroup, (rows, *counts[1:]), "parted")
        rows = exchange("combine", AllToAll(axis, back=True, row_counts=row_counts), rows, "back")
    collect = (Unpermute if factor is None else UnpermuteFromCapacity)(down.dtype)
    return add("unpermute", collect, (rows, weights, places), "out")[0]


def check_expert_count(count: int, sharing: ParallelContext) -> None:
    """Raises ValueError unless the ranks that share the experts of a layer get equal numbers of experts."""
    ranks = sharing.experts.size
    if count % ranks:
        works = [size for size in range(1, count // sharing.tp.size + 1) if count % (size * sharing.tp.size) == 0]
        hint = f"with tp_size={sharing.tp.size}, values that work for ep_size: {', '.join(map(str, works))}"
        raise ValueError(
            f"ep_size={sharing.ep_size} and tp_size={sharing.tp.size} share the {count} experts among {ranks} "
            f"ranks, which must divide them; {hint if works else f'use a tp_size that divides {count}'}"
        )


def counted_in(batch: Mapping[str, Any]) -> Tensor:
    """Returns 1 for the tokens of a batch that are no padding, else 0 [batch, sequence]."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    return torch.ones_like(ids) if mask is None else mask


def expert_side_inputs(batch: Mapping[str, Any], cut: SequenceCut) -> dict[str, Any]:
    """Returns the side inputs of a micro-batch for the operators of experts. Where ranks share experts with a capacity,
    the batch has the longest batch of the ranks."""
    mine = cut.take(counted_in(batch), 1).t().contiguous()
    return {COUNTED: mine, SHARD_TOKENS: batch.get(SHARD_TOKENS, mine.numel() // cut.tp_size)}
