"""`benchmarks.kernel_count`, for tests: `count_layer(tiny("llama")).total()`."""

from __future__ import annotations

from benchmarks import kernel_count as script
from benchmarks.kernel_count import FUSED, Kernels, count_layer

__all__ = ["FUSED", "Kernels", "count_layer", "script"]
