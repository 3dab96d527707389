"""Kernels in the place of modules and functions of Transformers.

In:   a submodule of a model and its argument; queries, keys, cosines and sines.
Out:  whether a kernel may run in the place of the module; its output, from the module itself or from the kernel.
Must hold: a kernel replaces only modules known to compute the same, not patched, replaced or hooked. The result has the
module's output type. For a rope see `hf_helix.operators.attention.rope`.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hf_helix.models.stock.alike import same_code
from hf_helix.operators.attention.rope import Pair, rotated
from hf_helix.operators.autograd_operator import has_hooks

SILU = (SiLUActivation.forward, nn.SiLU.forward)

RMS_NORM = LlamaRMSNorm.forward
"""The function that many classes copy. Others differ: Gemma's multiplies with 1 + weight."""

DEVICES = {"cuda"}
"""Devices for which torch has a fused kernel: 1 forward and 2 backward; the modules launch 7 and 16. On a CPU it
computes the same steps as the modules, in another order."""


def is_silu(module: nn.Module) -> bool:
    """Returns whether a module computes `silu(x)`, and nothing else."""
    return any(_runs(module, forward) for forward in SILU)


def is_rms_norm(module: nn.Module) -> bool:
    """Returns whether a module computes `rms_norm`, and nothing else."""
    return _runs(module, RMS_NORM)


def _runs(module: nn.Module, stock: Any) -> bool:
    """Returns whether a module, unpatched and without hooks, runs a stock function or a copy of its code."""
    return "forward" not in vars(module) and not has_hooks(module) and _is_copy(type(module).forward, stock)


@cache
def _is_copy(forward: Any, stock: Any) -> bool:
    is_stock = stock.__module__.startswith(("transformers.", "torch."))  # not patched before this import
    return is_stock and same_code(forward, stock)


def normed(module: Any, value: Tensor) -> Tensor:
    """Returns `module(value)`, by the fused kernel if equal. `torch.compile` fuses the module itself."""
    if not torch.compiler.is_compiling() and value.device.type in DEVICES and is_rms_norm(module):
        return rms_norm(value, module.weight, module.variance_epsilon)
    return module(value)


def rms_norm(value: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Returns the RMS norm of a value [..., hidden] with a weight [hidden], computed in fp32. In bf16 it rounds once,
    the modules twice."""
    dtype = torch.promote_types(value.dtype, weight.dtype)  # the kernels ask for one type; autocast may give a higher
    return functional.rms_norm(value.to(dtype), weight.shape, weight.to(dtype), epsilon).to(dtype)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Returns `apply_rotary_pos_emb(q, k, cos, sin)`, for cosines and sines without gradient.

    Args:
        q: queries [batch, heads, tokens, head_dim].
        k: keys, of the same layout.
        cos: cosines [batch, tokens, head_dim].
        sin: sines, of the same layout.
    """
    if torch.compiler.is_compiling():  # the compiler fuses the plain code
        result: Pair = apply_rotary_pos_emb(q, k, cos, sin)
        return result
    return rotated(q, k, cos, sin)
