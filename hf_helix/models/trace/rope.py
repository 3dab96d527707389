"""Ropes as single operations of a trace, with half as many kernels as the code of the model.

In:   a skeleton whose code calls copies of Llama's `apply_rotary_pos_emb`.
Out:  a trace with a custom operator for each call, and the function that runs for the operator.
Must hold: result and gradients have the bits of the model's own function. Other forms of the call (heads behind the
tokens, parts of heads beside full cosines) are traced as the code of the model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from hf_helix.models.alike import same_code
from hf_helix.models.graph.rope import Pair, apply_rotary_pos_emb, rotate
from hf_helix.models.trace.opaque_calls import OPS

_library = torch.library.Library("hf_helix", "FRAGMENT")
_library.define("rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)")


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    dtype = torch.promote_types(q.dtype, cos.dtype)
    return torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype)


torch.library.register_fake("hf_helix::rope", _rope, lib=_library)


def function_of(node: Node, given: Container[Node]) -> Callable[..., Pair]:
    """Returns the function that runs for the operator.

    Args:
        given: the nodes of the tensors of a micro-batch. Only these tensors surely need no gradient, and `rotate` gives
            cosines and sines no gradient.
    """
    return rotate if all(value in given for value in node.args[2:]) else apply_rotary_pos_emb


@contextlib.contextmanager
def ropes_as_operators(skeleton: nn.Module) -> Iterator[None]:
    """Returns the context of a trace in which copies of `apply_rotary_pos_emb` are calls of the custom operator."""
    ropes = list(_ropes(skeleton))
    functions = [space[name] for space, name in ropes]
    for (space, name), function in zip(ropes, functions, strict=True):
        space[name] = _as_operator(function)
    try:
        yield
    finally:
        for (space, name), function in zip(ropes, functions, strict=True):
            space[name] = function


def _ropes(skeleton: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the copies of `apply_rotary_pos_emb` in the modules of a skeleton's classes, as namespace and name."""
    homes = {base.__module__ for module in skeleton.modules() for base in type(module).__mro__}
    for home in sorted(homes & sys.modules.keys()):
        space = vars(sys.modules[home])
        for name in [name for name, value in space.items() if same_code(value, apply_rotary_pos_emb)]:
            yield space, name


def _as_operator(function: Callable[..., Pair]) -> Callable[..., Pair]:
    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Pair:
        has_heads_first = not args and not kwargs and q.dim() == k.dim() == 4 and cos.dim() == sin.dim() == 3
        if not has_heads_first or {value.shape[-1] for value in (q, k, cos, sin)} != {q.shape[-1]}:
            return function(q, k, cos, sin, *args, **kwargs)
        pair: Pair = OPS.rope(q, k, cos, sin)
        return pair

    return run
