"""The division of a parameter over the ranks: this rank's elements, full tensors, and results of functions.

In:   a parameter with its cut and its pipeline rank, and the arguments of a function of torch.
Out:  this rank's elements of a full tensor, and full tensors; the results of linears and lookups with the full
      parameter, equal on every rank of a batch. Under autograd, of parameters above the decoder, the logits of a head
      stay divided over the vocabulary.
Must hold: every rank of a batch runs the caller's code on equal values, also the pipeline ranks without the parameter.
A gradient on a rank is the full loss's; if the gradients of several ranks are summed, this rank's share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.parameters.parts import cut_tensor, paste, views_with_index
from hf_helix.operators.vocabulary.logits import divided_logits
from hf_helix.operators.vocabulary.lookup import lookup
from hf_helix.operators.vocabulary.slices import changed_gradient, sliced_linear, start_sum
from hf_helix.planning.parameters import EXPERTS, VOCABULARY, Cut, Part
from hf_helix.runtime.distributed.agreement import agree_on_action
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.failures.heartbeat import watched


@dataclass(frozen=True, eq=False)
class Division:
    """The division of a parameter over the ranks. All tensors made of the parameter share its division.

    Attributes:
        part: this rank's part of the parameter.
        mesh: the mesh of ranks.
    """

    part: Part
    mesh: Mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> Division:
        return self

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self.part.row.name

    @property
    def shape(self) -> torch.Size:
        """The shape of the full parameter."""
        return torch.Size(self.part.row.shape)

    @property
    def is_here(self) -> bool:
        """Whether this rank holds the parameter, or its part of it."""
        return self.part.is_here

    @property
    def _cut(self) -> Cut:
        return self.part.row.cut

    @property
    def refusal(self) -> str:
        """The reason why a loss cannot read the parameter; empty if a loss can."""
        if self.part.row.flat is not None:
            return (
                "data-parallel ranks hold shards of it, or the host holds it (shard_optimizer, shard_parameters, "
                "offload)"
            )
        is_of_experts = self.part.is_cut and self._cut.mesh_axis == EXPERTS
        return "ranks with other tokens hold other experts" if is_of_experts else ""

    # -- elements of this rank, for any use of the parameter -------------------------------------------------------

    def _views(self, held: Tensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """Returns views of this rank's elements, each with its position in the full tensor."""
        return views_with_index(self.part, held.detach()) if self.is_here else iter(())

    def cut(self, full: Tensor, held: Tensor) -> Tensor:
        """Returns this rank's elements of a full tensor, in the shape of `held`."""
        result = torch.empty_like(held, dtype=full.dtype)
        for piece, place in self._views(result):
            piece.copy_(full[place])
        return result

    def gather(self, held: Tensor) -> Tensor:
        """Returns the full tensor on every rank. Collective over all ranks."""
        full = self._with_zeros(held)
        self.sum(full.view(-1).view(torch.uint8))
        return full.to(held.device)

    def start_gather(self, held: Tensor, reader: int | None = None) -> Callable[[], Tensor]:
        """Starts to gather the full tensor, for one reader or for all ranks. Collective over all ranks, which are not
        compared.

        Returns:
            A function that waits, and returns the full tensor on `Mesh.device`; on ranks that do not read, a tensor
            without memory.
        """
        full = self._with_zeros(held)
        bits, work = full.view(-1).view(torch.uint8), None
        if world_size() > 1 and reader is None:
            work = dist.all_reduce(bits, async_op=True)
        elif world_size() > 1:
            work = dist.reduce(bits, reader, async_op=True)

        def finish() -> Tensor:
            if work is not None:
                work.wait()
            if reader not in (None, rank()):
                full.untyped_storage().resize_(0)  # now: the thread of a transfer may keep it for a moment
            return full

        return finish

    def _with_zeros(self, held: Tensor) -> Tensor:
        """Returns a tensor of the full shape with this rank's elements, whose bits all ranks add up to the full one."""
        full = torch.zeros(self.shape, dtype=held.dtype, device=self.mesh.device)
        if self.part.counts:
            for piece, place in self._views(held):
                full[place] = piece
        return full

    def sum(self, tensor: Tensor) -> None:
        """Sums a tensor on `Mesh.device` over all ranks, in place. Collective."""
        if world_size() > 1:
            with watched():
                agree_on_action(f"{self.name} is read, {tensor.numel()} numbers of {tensor.dtype}")
                dist.all_reduce(tensor)

    # -- functions of the full parameter, for the ranks of a batch -------------------------------------------------

    def linear(self, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns `functional.linear` under autograd; weight and bias as this rank holds them.

        Args:
            value: [..., features], equal on every rank of a batch.
            weight: above the decoder; empty on other pipeline ranks.
            bias: the linear's bias, or None.
        """
        if not self.is_here:
            part = self._cut.shape(self.shape, self.mesh.tp.size, self.mesh.tp.rank) if self.part.is_cut else self.shape
            result = self.received(value, (*value.shape[:-1], part[0]), _type_of_products(value))
        else:
            bias = None if bias is None else self.recorded(bias)
            operands = value, self.recorded(weight), bias
            result = sliced_linear(*operands, self.mesh.tp) if self.part.is_cut else functional.linear(*operands)
            self.share(result.detach())
        return divided_logits(result, self.mesh.tp, self._cut.length) if self.part.is_cut else result

    @torch.no_grad()
    def full_linear(self, value: Tensor, weight: Tensor, bias: Tensor | None, features: int = 0) -> Tensor:
        """Returns `functional.linear` with the full weight, without gradients.

        Args:
            value, weight, bias: see `linear`; any parameter of the model.
            features: the dimension of the output features; 1 for a weight [in, out].
        """
        shape = (*value.shape[:-1], self.shape[features])
        if not self.is_here:
            return self.share(value.new_empty(shape, dtype=_type_of_products(value)))
        matrix = weight.t() if features else weight
        if not self.part.is_cut:
            return self.share(functional.linear(value, matrix, bias))
        if self._cut.dim == features:
            outputs = replace(self._cut, dim=value.dim() - 1)
            return self.share(self._joined(functional.linear(value, matrix, bias), shape, outputs))
        axis = self.mesh.axis_of(self._cut)
        parts = [value[..., first:last] for first, last in self._cut.bounds(axis.size, axis.rank)]
        total = functional.linear(torch.cat(parts, -1), matrix)
        start_sum(total, axis)()
        return self.share(total if bias is None else total + bias.to(total.dtype))

    @torch.no_grad()
    def full_lookup(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Returns the rows of a full table [..., features] for ids [...], without gradients."""
        shape = (*ids.shape, self.shape[1])
        if not self.is_here:
            return self.share(weight.new_empty(shape))  # autocast leaves lookups in the type of the table
        if not self.part.is_cut or self._cut.dim != 0:
            return self.share(functional.embedding(ids, self._gathered(weight)))
        axis = self.mesh.axis_of(self._cut)
        ((first, _),) = self._cut.bounds(axis.size, axis.rank)
        found = lookup(ids, weight, first, self.shape[0], None)
        start_sum(found, axis)()
        return self.share(found)

    def full(self, held: Tensor) -> Tensor:
        """Returns the full parameter from the part that this rank holds, under autograd."""
        full: Tensor = _Full.apply(self.recorded(held), self)
        return full

    def recorded(self, held: Tensor) -> Tensor:
        """Returns a plain tensor in the memory of a parameter, whose gradient is this rank's share."""
        return changed_gradient(held, lambda gradient: gradient / self.part.num_summed)

    def received(self, value: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the owner's result for a value, under autograd; called on other ranks.

        Args:
            value: equal on every rank of a batch.
            shape: of the result.
            dtype: of the result.
        """
        result: Tensor = _Received.apply(value, self, shape, dtype)
        return result

    def share(self, value: Tensor) -> Tensor:
        """Returns the owner's value on every rank of the pipeline; other ranks give an empty one of its shape. Where
        all ranks have slices, all have the value."""
        pipe = self.mesh.pipe
        if pipe.group is not None and self._cut.mesh_axis != VOCABULARY:
            value = value.contiguous()
            dist.broadcast(value, pipe.ranks[self.part.row.owner], group=pipe.group)
        return value

    def _gathered(self, held: Tensor) -> Tensor:
        """Returns the full parameter on the ranks of the cut."""
        if not self.part.is_cut:
            return held.view_as(held)
        return self._joined(held, self.shape, self._cut)

    def _joined(self, part: Tensor, shape: Sequence[int], cut: Cut) -> Tensor:
        """Returns a full tensor from each rank's part of it."""
        axis, full = self.mesh.axis_of(cut), part.new_zeros(shape)
        paste(full, part, cut, axis.size, axis.rank)
        start_sum(full, axis)()
        return full


def _type_of_products(value: Tensor) -> torch.dtype:
    """The type of a product with a value, also under autocast."""
    kind = value.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype


class _Received(torch.autograd.Function):
    """The result of another pipeline rank. The gradient of its operand is zero: the owner's counts."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, division: Division, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        ctx.like = value.new_zeros(()), value.shape
        return division.share(value.new_empty(shape, dtype=dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        zero, shape = ctx.like
        return zero.expand(shape), None, None, None


class _Full(torch.autograd.Function):
    """A full parameter, of parts on the ranks of its cut on one pipeline rank."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, division: Division) -> Tensor:
        ctx.division, ctx.held_shape = division, held.shape
        full = division._gathered(held) if division.is_here else held.new_empty(division.shape)
        return full if division.mesh.pipe.group is None else division.share(full.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        division, (gradient,) = ctx.division, gradients
        if not division.is_here:
            return gradient.new_zeros(ctx.held_shape), None
        part = division.part
        return cut_tensor(gradient, part.row.cut, *part.ranks), None
