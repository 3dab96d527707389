"""Peak memory of a window on a rank.

In:   a runner and a window of micro-batches.
Out:  bytes of activations and buffers, without parameters, gradients and the batch itself.
Must hold: counted, not estimated: by CUDA's own allocator, on a CPU by a tally of every storage that an operator makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_helix.measure.overlap import forget_gradients
from hf_helix.operators.zero.zero1 import zero1_flat_parameters
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner


class LiveBytes(TorchDispatchMode):
    """A tally of the live bytes of every storage that an operator returns, except of `existing` and of meta tensors."""

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._existing = {tensor.untyped_storage().data_ptr() for tensor in existing}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._upper_bound = 0  # bytes of these, also of storages freed since the last look
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.is_meta:
                continue
            if leaf.untyped_storage().data_ptr() not in self._existing:
                reference, size = StorageWeakRef(leaf.untyped_storage()), leaf.untyped_storage().nbytes()
                _, before = self._live.get(reference.cdata, (None, 0))  # no other has the address while this is kept
                self._live[reference.cdata] = reference, size
                self._upper_bound += size - before
        if self._upper_bound > self.peak:  # looking at all of them for every operator would take most of the time
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Returns the live bytes."""
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        self._upper_bound = sum(size for _, size in self._live.values())
        return self._upper_bound


def peak_bytes(runner: Runner, window: Sequence[MicroBatch]) -> int:
    """Returns the peak memory of a window on this rank. Collective; there must be no gradients."""
    sides = [batch.prepare() for batch in window]
    window = [replace(batch, prepare=partial(dict, side)) for batch, side in zip(window, sides, strict=True)]
    runner.train_window(window)  # makes the gradients
    device = runner.mesh.device
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            runner.train_window(window)
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_allocated(device) - before
        existing: list[Tensor] = [flat.buffer for flat in zero1_flat_parameters(runner.stage.flat_parameters)]
        for parameter in runner.stage.stepped:
            existing += [parameter] if parameter.grad is None else [parameter, parameter.grad]
        for side in sides:
            existing += [value for value in side.values() if isinstance(value, Tensor)]
        with LiveBytes(existing) as tally:
            runner.train_window(window)
        return tally.peak
    finally:
        forget_gradients(runner)
