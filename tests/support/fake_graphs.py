"""CUDA graphs on a CPU: work is written down as the operators that torch ran, and replayed into the same tensors.

In:   work, as `hf_helix.runtime.cuda_graphs.CudaRecorder` takes it.
Out:  what it returned, every value of it poisoned as if nothing had run yet, and a graph that can be replayed.
Must hold: a replay runs what was dispatched when the work was recorded, and nothing of the host's: whatever the host
would decide anew in a window stays as it was. As on a GPU, the host may read no value while work is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

READS = ("_local_scalar_dense", "nonzero", "bincount", "masked_select")
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class FakeGraph(TorchDispatchMode):
    """The operators of a window, in the order of issue. Everything that they read or made stays alive."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self._tape: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        assert name not in READS, f"{name}: the host reads a value while a window is captured"
        result = func(*args, **(kwargs or {}))
        if name not in EMPTY and not _is_view(func):
            # The same memory, and nothing of autograd's, whose part was over when this was dispatched.
            given, made = tree_map_only(Tensor, _bare, ((args, kwargs or {}), result))
            # Collectives say of nothing that they write to it, and return what they were given.
            memory = {each.untyped_storage()._cdata for each in _tensors(given)}
            new = [each for each in _tensors(made) if each.untyped_storage()._cdata not in memory]
            self._tape.append((func, *given, new if len(new) == len(_tensors(made)) else []))
        return result

    @torch.no_grad()
    def poison(self) -> None:
        """Of the numbers that were made while recording, none is there before the first replay."""
        for func, *_, outputs in self._tape:
            if not func._schema.is_mutable:
                for output in outputs:
                    output.fill_(float("nan") if output.is_floating_point() else 0)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, outputs in self._tape:
            result = func(*args, **kwargs)
            if outputs and not func._schema.is_mutable:
                for output, value in zip(outputs, _tensors(result), strict=True):
                    output.copy_(value)

    def reset(self) -> None:
        self._tape.clear()


class FakeRecorder:
    """Attributes: graphs: that were recorded."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def record(self, work: Callable[[], Any]) -> tuple[Any, FakeGraph]:
        graph = FakeGraph()
        with graph:
            result = work()
        graph.poison()
        self.graphs.append(graph)
        return result, graph

    def forget(self) -> None:
        pass


def _bare(value: Tensor) -> Tensor:
    with torch.no_grad():
        return value.detach()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_view(func: Any) -> bool:
    """Whether it gives another view of a storage and touches nothing."""
    aliases = [each.alias_info for each in func._schema.returns]
    return bool(aliases) and all(info is not None and not info.is_write for info in aliases)
