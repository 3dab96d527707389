"""Weights in the type of matrix products.

In:   parameters in the higher precision that an optimizer keeps, and the type of what they are multiplied with.
Out:  copies in that type; those of linears that read one value lie in one piece, for one GEMM. Where ranks gather a
      piece that has them in it (`hf_helix.operators.zero.flat_parameter`), they are views of it.
Must hold: a copy lives within one window only. Meanwhile nobody writes to weights. Between windows anybody may
(optimizers, `load_state_dict`, merged adapters, callbacks), and not all of them leave a mark such as `Tensor._version`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.side_by_side import contiguous_rows


class CastWeights:
    """Copies of weights, each made at its first use in a window. Outside of windows every use makes its own.

    Args:
        there: returns the copy of a weight that is there already; None where there is none.
    """

    def __init__(self, there: Callable[[Tensor], Tensor | None] = lambda _: None) -> None:
        self._there = there
        self._kept: dict[tuple[object, ...], Any] | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a window, or several: micro-batches, forward and backward share what is made meanwhile."""
        before, self._kept = self._kept, {} if self._kept is None else self._kept
        try:
            yield
        finally:
            self._kept = before

    @contextmanager
    def within(self, kept: dict[tuple[object, ...], Any]) -> Iterator[None]:
        """Around operators whose weights are there for a while only: copies are kept as long as these.

        Args:
            kept: what belongs to the weights; empty at first.
        """
        before, self._kept = self._kept, kept
        try:
            yield
        finally:
            self._kept = before

    def of(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The weights one below the other; itself where there is one, of this type already.

        Args:
            weights: [rows, ...], of any number of rows each.
        """
        if len(weights) == 1 and weights[0].dtype is dtype and self._there(weights[0]) is None:
            return weights[0]
        copy: Tensor = self.once((dtype, *map(id, weights)), lambda: self._make(weights, dtype))
        return copy

    def _make(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        there = [self._there(weight) for weight in weights]
        parts = [weight if copy is None else copy for weight, copy in zip(weights, there, strict=True)]
        whole = None if any(copy is None for copy in there) else contiguous_rows(parts)
        return joined_cast(parts, dtype) if whole is None else whole.to(dtype)

    def once(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """What follows from the weights as they are: made once in a window for a key, elsewhere at every call."""
        if self._kept is None:
            return make()
        value = self._kept.get(key)
        if value is None:
            value = self._kept[key] = make()
        return value


def joined_cast(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns a copy of weights in another type, one below the other; it has no gradient."""
    if len(weights) == 1:
        return weights[0].detach().to(dtype)
    lengths = [len(weight) for weight in weights]
    whole = weights[0].new_empty((sum(lengths), *weights[0].shape[1:]), dtype=dtype)
    for place, weight in zip(whole.split(lengths), weights, strict=True):
        place.copy_(weight.detach())
    return whole
