"""The form of a module of fused experts: which weights it has, and what it does with them.

In:   a submodule of a Transformers model, on any device.
Out:  an `ExpertForm`, or an error that says why the module is none.
Must hold: the module's own `forward` proves the form, on a copy with few experts and small random weights. So code that
does anything else, patched code included, is refused instead of being left out. The module is never touched.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

GATED, PLAIN, DOWN, NORM = "gate_up_proj", "up_proj", "down_proj", "post_expert_norm"

EXPERTS, FEATURES, TOKENS, CHOICES = 3, 12, 8, 2
"""The sizes of the copy that proves a form."""

SCALE = 8.0
"""The size of what comes out of its first linear: large enough for the clamps of activations to take part."""

TOLERANCE = 1e-4
"""The largest difference from the module's own output, relative to the size of that."""


@dataclass(frozen=True)
class ExpertForm:
    """What a module of fused experts computes for a token and an expert that it chose:

        weight * norm(down(activation(up(token) + bias)) + bias)

    Attributes:
        up: the name of the first weight [experts, features, hidden].
        down: the name of the second weight [experts, hidden, intermediate].
        up_bias: the name of the bias [experts, features] of the first linear; None where there is none.
        down_bias: the name of the bias [experts, hidden] of the second linear.
        is_transposed: whether weights are [experts, features in, features out] instead.
        is_gated: whether the activation is `_apply_gate`, which halves the features; otherwise it is `act_fn`.
        norm: the name of the norm of what an expert gives; None where there is none.
    """

    up: str
    down: str
    up_bias: str | None = None
    down_bias: str | None = None
    is_transposed: bool = False
    is_gated: bool = True
    norm: str | None = None

    def activation(self, module: Any) -> Callable[[Tensor], Tensor]:
        """Returns what stands between the two linears of a module of this form."""
        function: Callable[[Tensor], Tensor] = module._apply_gate if self.is_gated else module.act_fn
        return function

    def parameter(self, module: nn.Module, name: str | None) -> nn.Parameter | None:
        """Returns the parameter of a module of this form that has a name of the form."""
        return None if name is None else getattr(module, name)


def is_experts(module: nn.Module) -> bool:
    """Returns whether a module looks like fused experts: weights of three dimensions, called with tokens, the experts
    that these chose, and the weights of the choices.
    """
    weight = getattr(module, DOWN, None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 3 and len(forward_arguments(module)) == 3


def experts_form(module: nn.Module) -> ExpertForm:
    """Returns the form of a module of fused experts.

    Args:
        module: its `forward` takes tokens [tokens, hidden], the experts chosen [tokens, k] and weights [tokens, k].

    Raises:
        ValueError: the module is none of these, or does something else; says what.
    """
    form = _declared_form(module)
    _check_shapes(module, form)
    _check_forward(module, form)
    return form


def _declared_form(module: nn.Module) -> ExpertForm:
    """Returns the form that the names of the parameters and Transformers' own description of the module say."""
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
    """Raises ValueError unless the module's own forward computes what its form says, on small random weights."""
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
    """Returns a copy of a module on the CPU in fp32, with random weights, of which those of experts are small."""
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
        tiny.config._experts_implementation = "eager"  # any other one reads all experts
    return tiny


def _by_form(module: Any, form: ExpertForm, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Returns what a form says, choice by choice.

    Args:
        module: a module of the form.
        form: its form.
        hidden: the tokens [tokens, hidden].
        chosen: the experts [tokens, k].
        weights: [tokens, k].
    """

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
    """Returns the names of what a module's forward takes."""
    names = list(inspect.signature(type(module).forward).parameters)
    return names[1:]


def _refusal(module: nn.Module, why: str) -> ValueError:
    kind = type(module)
    return ValueError(
        f"the experts {kind.__module__}.{kind.__qualname__} cannot be spread over ranks: {why}; what is built are "
        f"experts with {GATED} (or {PLAIN}) and {DOWN}, with biases or without, as Mixtral's, Nemotron-H's and gpt-oss'"
    )
