"""Lending: an operator runs while the parameters it reads are views of what was gathered for its micro-batch.

In:   a part of an operator, and the gathered pieces that it reads.
Out:  what the operator returns.
Must hold: nothing that an operator leaves for backward keeps a gathered piece alive: of what autograd saves of one,
only the place is kept, which is looked up in the piece that is lent by then. Copies in the type of matrix products, and
views of pieces that have this type, live as long as the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_helix.operators.base import Call, Method, Tensors
from hf_helix.operators.zero.flat_parameter import Flat

Lent = Sequence[tuple[Flat, Tensor]]
"""Flats, each with the piece that its parameters are views of meanwhile."""


class _Place(NamedTuple):
    """What autograd has saved of a gathered piece."""

    flat: Flat
    size: Sequence[int]
    stride: Sequence[int]
    offset: Any


def lending(method: Method, lent: Lent) -> Method:
    """Returns a part of an operator that reads gathered weights, such that it runs with these."""
    return lambda call, *inputs: _run(method, call, inputs, lent)


def _run(method: Method, call: Call, inputs: Sequence[Tensor], lent: Lent) -> Tensors:
    for flat, whole in lent:
        flat.lend(whole)
    with call.precision.weights.within(_copies_of(lent[0][1])):
        if not call.training:
            return method(call, *inputs)
        flats = {whole.untyped_storage()._cdata: flat for flat, whole in lent}

        def keep(value: Tensor) -> Tensor | _Place:
            flat = flats.get(value.untyped_storage()._cdata)
            return value if flat is None else _Place(flat, value.shape, value.stride(), value.storage_offset())

        with torch.autograd.graph.saved_tensors_hooks(keep, _find):
            return method(call, *inputs)


def casts_of(flats: Iterable[Flat]) -> Callable[[Tensor], Tensor | None]:
    """Returns what finds a weight in the type of matrix products, where ranks gather it in this type.

    Args:
        flats: those that this rank's parameters are in.
    """
    casting: dict[Tensor, Flat] = {p: flat for flat in flats if flat.cast_to is not None for p in flat.placements}

    def find(weight: Any) -> Tensor | None:
        flat = casting.get(weight)
        return None if flat is None else flat.cast(weight)

    return find


def _find(saved: Tensor | _Place) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    assert saved.flat.lent is not None, f"backward reads {saved.flat.name}, which is not lent"
    return saved.flat.lent.as_strided(saved.size, saved.stride, saved.offset)


def _copies_of(whole: Tensor) -> dict[tuple[object, ...], Any]:
    """What was made of a gathered piece; it goes with the piece."""
    copies: dict[tuple[object, ...], Any] = vars(whole).setdefault("copies", {})
    return copies
