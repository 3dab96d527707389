"""`benchmarks/kernel_count.py`, for tests: `count_layer(tiny("llama")).total()`."""

from __future__ import annotations

import importlib.util
import sys

from support.paths import ROOT

SCRIPT = ROOT / "benchmarks" / "kernel_count.py"
spec = importlib.util.spec_from_file_location("kernel_count", SCRIPT)
assert spec is not None
assert spec.loader is not None
script = importlib.util.module_from_spec(spec)
sys.modules["kernel_count"] = script
spec.loader.exec_module(script)

Kernels = script.Kernels
count_layer = script.count_layer
FUSED = script.FUSED
