"""Casts of weights to the type of matrix products.

In:   parameters in the higher precision that an optimizer keeps, and the type of their other factor.
Out:  casts to that type. The weights of linears that read the same value are joined, for a single GEMM. Where a
      gathered buffer contains the casts (`hf_helix.operators.parameters.flat_parameter`), they are views of the buffer.
Must hold: a cast lives within one window only, while nothing writes to weights. Between windows anything may write to
weights (optimizers, `load_state_dict`, merged adapters, callbacks), and not every write leaves a mark such as
`Tensor._version`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.side_by_side import contiguous_rows


class CastWeights:
    """Casts of weights, each made at its first use in a window. Outside of windows every use makes a new cast.

    Args:
        existing: returns an existing cast of a weight, or None.
    """

    def __init__(self, existing: Callable[[Tensor], Tensor | None] = lambda _: None) -> None:
        self._existing = existing
        self._kept: dict[tuple[object, ...], Any] | None = None

    def kept(self) -> AbstractContextManager[None]:
        """Returns a context around a window, or several: micro-batches, forward and backward share casts."""
        return self.within({} if self._kept is None else self._kept)

    @contextmanager
    def within(self, kept: dict[tuple[object, ...], Any]) -> Iterator[None]:
        """Returns a context around operators whose weights exist for a while only: casts live in `kept`, as long as the
        weights."""
        before, self._kept = self._kept, kept
        try:
            yield
        finally:
            self._kept = before

    def of(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Returns weights [rows, ...] joined along the first dimension in a type; a single weight of this type as it
        is."""
        if len(weights) == 1 and weights[0].dtype is dtype and self._existing(weights[0]) is None:
            return weights[0]
        cast: Tensor = self.once((dtype, *map(id, weights)), lambda: self.cast(weights, dtype))
        return cast

    def cast(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Returns the weights joined along the first dimension, in a type, and keeps nothing; see `of`."""
        existing = [self._existing(weight) for weight in weights]
        parts = [weight if cast is None else cast for weight, cast in zip(weights, existing, strict=True)]
        joined = None if any(cast is None for cast in existing) else contiguous_rows(parts)
        return joined_cast(parts, dtype) if joined is None else joined.to(dtype)

    def once(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """Returns a value that depends on the weights: made once in a window for a key, elsewhere at every call."""
        if self._kept is None:
            return make()
        value = self._kept.get(key)
        if value is None:
            value = self._kept[key] = make()
        return value


def joined_cast(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns a cast of weights, joined along the first dimension, without gradient."""
    if len(weights) == 1:
        return weights[0].detach().to(dtype)
    lengths = [len(weight) for weight in weights]
    joined = weights[0].new_empty((sum(lengths), *weights[0].shape[1:]), dtype=dtype)
    for part, weight in zip(joined.split(lengths), weights, strict=True):
        part.copy_(weight.detach())
    return joined
