"""RMS norms of Transformers by torch's own kernel, where a device has one.

In:   a norm of a decoder and what it is called with.
Out:  its value: what the module itself computes, or the same mathematics by `torch.nn.functional.rms_norm`.
Must hold: only a module that is known to compute `weight * (x / rms(x))`, and that nobody has patched, replaced or
hooked, is left uncalled. The result has the type that the module would give it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NAMES = ("LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm")
"""Classes that are alike. Others of the name differ: that of Gemma multiplies with 1 + weight."""

DEVICES = {"cuda"}
"""Where torch has a kernel, one forward and two backward, for what the modules do in 7 and 16. On a CPU it computes the
same steps as the modules, in another order."""


def normed(module: Any, value: Tensor) -> Tensor:
    """`module(value)`, fused where that is the same. `torch.compile` fuses what the module itself does."""
    if value.device.type in DEVICES and not torch.compiler.is_compiling() and is_rms_norm(module):
        return rms_norm(value, module.weight, module.variance_epsilon)
    return module(value)


def rms_norm(value: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last dimension, computed in fp32. It rounds once, where the modules round twice in bf16."""
    dtype = value.dtype if value.dtype is weight.dtype else torch.promote_types(value.dtype, weight.dtype)
    # The kernel takes one type. Autocast may give back a higher one.
    return functional.rms_norm(value.to(dtype), weight.shape, weight.to(dtype), epsilon).to(dtype)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module computes what `rms_norm` does, and nothing else."""
    kind: Any = type(module)
    if not _is_known(kind, kind.forward) or "forward" in vars(module):
        return False
    return not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


@lru_cache
def _is_known(kind: Any, forward: Any) -> bool:
    """Of a class and its present `forward`."""
    written_in = getattr(forward, "__globals__", {}).get("__name__")
    return (
        kind.__name__ in NAMES and kind.__module__.startswith("transformers.models.") and written_in == kind.__module__
    )
