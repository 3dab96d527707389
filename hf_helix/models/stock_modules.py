"""Kernels in the place of modules and functions of Transformers.

In:   a submodule of a model and its argument; queries, keys, cosines and sines.
Out:  whether a kernel may run in the place of the module; its output, from the module itself or from the kernel.
Must hold: a kernel replaces only modules known to compute the same, not patched, replaced or hooked. The result has the
module's output type. A rope has the bits of `apply_rotary_pos_emb`, compiled or not.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_helix.operators.attention.rope import Pair, rotated
from hf_helix.operators.explicit import in_one_dtype
from hf_helix.operators.segment import has_hooks

SILU = ("SiLUActivation",)

RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm")
"""Classes that compute the same. Others differ: that of Gemma multiplies with 1 + weight."""

DEVICES = {"cuda"}
"""Devices for which torch has a fused kernel: 1 forward and 2 backward, where the modules launch 7 and 16. On a CPU it
computes the same steps as the modules, in another order."""


def is_silu(module: nn.Module) -> bool:
    """Returns whether a module computes `silu(x)`, and nothing else."""
    return is_untouched(module, SILU)


def is_untouched(module: nn.Module, names: Collection[str]) -> bool:
    """Returns whether a module is an unpatched instance, without hooks, of a named class of Transformers."""
    kind: Any = type(module)
    if kind.__name__ not in names or not _is_of_transformers(kind, kind.forward) or "forward" in vars(module):
        return False
    return not has_hooks(module)


@lru_cache
def _is_of_transformers(kind: Any, forward: Any) -> bool:
    """Returns whether a class is of Transformers, and its present `forward` is the function in the source."""
    written_in = getattr(forward, "__globals__", {}).get("__name__")
    return kind.__module__.startswith("transformers.") and written_in == kind.__module__


def is_rms_norm(module: nn.Module) -> bool:
    """Returns whether a module computes `rms_norm`, and nothing else."""
    return is_untouched(module, RMS_NORMS)


def is_fused(module: nn.Module, value: Tensor) -> bool:
    """Returns whether torch has a fused kernel for a module on the device of a value."""
    return value.device.type in DEVICES and is_rms_norm(module)


def normed(module: Any, value: Tensor) -> Tensor:
    """Returns `module(value)`, by the fused kernel if equal. `torch.compile` fuses the module itself."""
    if not torch.compiler.is_compiling() and is_fused(module, value):
        return rms_norm(value, module.weight, module.variance_epsilon)
    return module(value)


def rms_norm(value: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Returns the RMS norm of a value [..., hidden] with a weight [hidden], computed in fp32. In bf16 it rounds once,
    the modules twice."""
    value, weight = in_one_dtype(value, weight)
    return functional.rms_norm(value, weight.shape, weight, epsilon).to(value.dtype)  # autocast may give a higher type


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Returns `apply_rotary_pos_emb(q, k, cos, sin)`, for cosines and sines without gradient.

    Args:
        q: queries [batch, heads, tokens, head_dim].
        k: keys, likewise.
        cos: cosines [batch, tokens, head_dim].
        sin: sines, likewise.
    """
    if torch.compiler.is_compiling():  # the compiler fuses the plain code
        result: Pair = apply_rotary_pos_emb(q, k, cos, sin)
        return result
    return rotated(q, k, cos, sin)
