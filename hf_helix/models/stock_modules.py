"""Modules with exactly the computation of their class in Transformers.

In:   a submodule of a model, and names of classes of Transformers.
Out:  whether its kernels may be called in the place of the module.
Must hold: a patched, replaced or hooked module is called itself.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

from torch import nn

from hf_helix.operators.segment import has_hooks

SILU = frozenset({"SiLUActivation"})


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
