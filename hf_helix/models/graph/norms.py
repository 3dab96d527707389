"""RMS norms of Transformers by torch's own kernel, where a device has one.

In:   a norm of a decoder and its argument.
Out:  the output of the module, from the module itself or from `torch.nn.functional.rms_norm`.
Must hold: the kernel replaces only modules known to compute `weight * (x / rms(x))`, not patched, replaced or hooked.
The result has the module's output type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_helix.models.stock_modules import is_untouched
from hf_helix.operators.explicit import in_one_dtype

NAMES = ("LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm")
"""Classes that compute the same. Others differ: that of Gemma multiplies with 1 + weight."""

DEVICES = {"cuda"}
"""Devices for which torch has a fused kernel: 1 forward and 2 backward, where the modules launch 7 and 16. On a CPU it
computes the same steps as the modules, in another order."""


def normed(module: Any, value: Tensor) -> Tensor:
    """Returns `module(value)`, by the fused kernel if equal. `torch.compile` fuses the module itself."""
    if not torch.compiler.is_compiling() and is_fused(module, value):
        return rms_norm(value, module.weight, module.variance_epsilon)
    return module(value)


def is_fused(module: nn.Module, value: Tensor) -> bool:
    """Returns whether torch has a fused kernel for a module on the device of a value."""
    return value.device.type in DEVICES and is_rms_norm(module)


def rms_norm(value: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Returns the RMS norm over the last dimension, computed in fp32. In bf16 it rounds once, the modules twice.

    Args:
        value: [..., hidden].
        weight: [hidden].
    """
    value, weight = in_one_dtype(value, weight)
    return functional.rms_norm(value, weight.shape, weight, epsilon).to(value.dtype)  # autocast may give a higher type


def is_rms_norm(module: nn.Module) -> bool:
    """Returns whether a module computes `rms_norm`, and nothing else."""
    return is_untouched(module, NAMES)
