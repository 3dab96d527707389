"""Gradients in one piece that lies as a flat does, and their sums over the ranks that the flat is spread over.

In:   a flat whose parameters have the gradients that this rank has computed in a window.
Out:  `shard.grad`, the average over the data-parallel ranks, for the part of every parameter that this rank owns; the
      parameters have no gradients then.
Must hold: sums are taken in float32 at least, in the same order every time. A parameter without a gradient on this rank
has none on the others, and its shards get none.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_helix.operators.base import Work
from hf_helix.operators.communication.collectives import prepare_reduce_scatter
from hf_helix.operators.zero.flat_parameter import Flat


class FlatGradients:
    """The gradients of a flat.

    Gradients in float32 are moved into the piece at once, so that sums over other axes run in it, and what they were in
    before is free then; those in half precision stay where they are until the piece is summed.

    Args:
        flat: what they are the gradients of.
    """

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._with_gradient = [parameter for parameter in flat.placements if parameter.grad is not None]

    @classmethod
    def take(cls, flat: Flat) -> FlatGradients | None:
        """Returns the gradients of a flat; None where there are none."""
        made = cls(flat)
        if not made._with_gradient:
            return None
        made._gather()
        return made

    def _gather(self) -> None:
        gradients: list[Any] = [parameter.grad for parameter in self._with_gradient]
        dtype = gradients[0].dtype
        summed_in = torch.promote_types(dtype, torch.float32)
        self._whole = self._flat.shard.new_zeros(self._flat.length, dtype=summed_in)
        views = self._flat.views(self._whole)
        self._places: list[Any] = [views[parameter] for parameter in self._with_gradient]
        self._is_moved = summed_in is dtype
        if self._is_moved:
            torch._foreach_copy_(self._places, gradients)
            for parameter, place in zip(self._with_gradient, self._places, strict=True):
                parameter.grad = place

    def reduce_scatter(self, divisor: int) -> Work:
        """Gives the shards their gradients, not yet filled, and returns the work that fills them. Collective.

        Args:
            divisor: what the sums are divided by.
        """
        local: list[Any] = [parameter.grad for parameter in self._with_gradient]
        stretch, scatter = prepare_reduce_scatter(self._flat.sums, self._whole)
        parts = self._flat.split_shard(stretch)
        sums: list[Any] = [parts[parameter] for parameter in self._with_gradient]
        gradients: list[Any] = [
            part if part.dtype is parameter.dtype else torch.empty_like(part, dtype=parameter.dtype)
            for parameter, part in zip(self._with_gradient, sums, strict=True)
        ]
        for parameter, gradient in zip(self._with_gradient, gradients, strict=True):
            parameter.grad = None
            self._flat.shards[parameter].grad = gradient

        def work() -> None:
            if not self._is_moved:
                torch._foreach_copy_(self._places, local)
            scatter()
            if divisor > 1:
                stretch.div_(divisor)
            if not self._is_moved:
                torch._foreach_copy_(gradients, sums)

        return work
