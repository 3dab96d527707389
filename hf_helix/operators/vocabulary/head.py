"""A head in tiles of tokens and rows: logits of one tile at a time.

In:   hidden states, equal on all ranks of the cut, and this rank's rows of the head.
Out:  statistics of the logits, joined over the tiles of this rank; the gradients of hidden states and head.
Must hold: the results equal whole logits', in the same types, but for the order of sums in fp32.

The loss of a micro-batch with more logits on a rank than a limit (`HeadInTiles.is_used`) is computed in tiles: the
linear of the head, and an element-wise function of its outputs, hand their input on to `TokenStatistics` (`Deferred`),
which multiplies. Backward multiplies once more, a third more work in the head: with its knowledge in forward, a rank
cannot make the gradient of the weights, which depends on the exponentials of other ranks. Forward alone, as in
evaluation, has whole logits, which predictions read; not so if few are kept (`keeps_few`).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.base import Method, OperatorContext, TensorOperator, Tensors
from hf_helix.operators.linears.accumulate import add_product, started_gradient
from hf_helix.operators.linears.linear import Projection
from hf_helix.operators.vocabulary.statistics import Tile, run_parts, type_of_sums
from hf_helix.planning.graph.operator import Part

WHOLE, AT_MOST = 2**27, 8
"""The most logits of a micro-batch that a rank keeps whole if layers are recomputed: 256 MiB in bf16; and a multiple of
them if none is, and memory is worth less than time."""

TOKENS, ROWS = 4096, 4096
"""The size of a tile, in tokens and in rows of the head, if a loss is computed in tiles."""


@contextmanager
def whole_logits() -> Iterator[None]:
    """Returns a context in which no loss is computed in tiles."""
    global WHOLE
    before, WHOLE = WHOLE, sys.maxsize
    try:
        yield
    finally:
        WHOLE = before


class Sums(NamedTuple):
    """Tensors that take the gradients of a head: hidden states [tokens, hidden], weight, bias; None for none."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None

    def add(self, tokens: slice, rows: slice, hidden: Tensor, weight: Tensor, of_products: Tensor) -> None:
        """Adds the gradients of a tile.

        Args:
            tokens, rows: the position of the tile.
            hidden, weight: the operands of its product.
            of_products: [tokens, rows].
        """
        if self.hidden is not None:
            add_product(self.hidden[tokens], of_products, weight)
        if self.weight is not None:
            add_product(self.weight[rows], of_products.t(), hidden)
        if self.bias is not None:
            self.bias[rows] += of_products.sum(0, dtype=self.bias.dtype)


NO_SUMS = Sums()


def tiles_of_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    rows: int,
    sums: Sums = NO_SUMS,
    kept: Sequence[Tensor] = (),
) -> Iterator[Tile]:
    """Yields tiles of at most `TOKENS` tokens; tiles of the same tokens in the order of their rows.

    Args:
        hidden: [tokens, hidden].
        weight, bias: this rank's rows [rows, hidden] and [rows]; the bias may be None.
        dtype: of the products.
        rows: the most rows of a tile.
        sums: take the gradients.
        kept: the products of all tiles, which stay as they are; computed if empty.
    """
    places = [slice(first, min(first + rows, len(weight))) for first in range(0, len(weight), rows)]
    starts = range(0, max(1, len(hidden)), TOKENS)
    for tokens in run_parts([slice(start, min(start + TOKENS, len(hidden))) for start in starts]):
        values = hidden[tokens].to(dtype)
        for place in run_parts(places, 3):
            matrix, added = weight[place].to(dtype), None if bias is None else bias[place].to(dtype)
            take = partial(sums.add, tokens, place, values, matrix)
            number = place.start // rows
            known = kept[tokens.start // TOKENS * len(places) + number] if kept else None
            products = functional.linear(values, matrix, added) if known is None else known
            yield Tile(number, tokens, place.start, products, torch.empty_like(products) if kept else None, take)


class HeadInTiles:
    """The linear of a head, and an element-wise function of its outputs, for `TokenStatistics`.

    Args:
        linear: with this rank's rows.
        parameters: the parameters that the linear may read.
        change: the function, such as a softcap; None for none.
        recomputes: whether layers are recomputed.
        keeps_few: whether at most the logits of a tile are kept, also by forward alone.
    """

    def __init__(
        self,
        linear: Projection,
        parameters: Tensors,
        change: Callable[[Tensor], Tensor | Tensors] | None,
        recomputes: bool = False,
        keeps_few: bool = False,
    ) -> None:
        self._factor = 1 if recomputes else AT_MOST
        self.keeps_few = keeps_few
        self.linear = linear
        self.parameters = parameters
        self._change = change

    def is_used(self, ctx: OperatorContext) -> bool:
        """Returns whether a micro-batch has too many logits to keep, if forward keeps any."""
        most = TOKENS * ROWS if self.keeps_few else self._factor * WHOLE
        return int(ctx.side["targets"].numel()) * len(self.linear.weight) > most

    def parts(self) -> int:
        """Returns the number of parts of this rank's rows."""
        return -(-len(self.linear.weight) // ROWS)

    def tiles(self, ctx: OperatorContext, hidden: Tensor, sums: Sums = NO_SUMS) -> Iterator[Tile]:
        """Returns the tiles of a micro-batch.

        Args:
            ctx: of `TokenStatistics`.
            hidden: [..., hidden].
            sums: take the gradients.
        """
        value = ctx.precision.cast_for_matmul(hidden).flatten(0, -2)
        weight, bias = (
            None if each is None else ctx.precision.weights.of((each,), value.dtype)
            for each in (self.linear.weight, self.linear.bias)
        )
        assert weight is not None
        return tiles_of_head(value, weight, bias, value.dtype, ROWS, sums)

    def sums(self, hidden: Tensor) -> Sums:
        """Returns zeros for the gradient of hidden states [..., hidden], and the gradients of the parameters."""
        own = (self.linear.weight, self.linear.bias)
        trained = [started_gradient(each) if each is not None and each.requires_grad else None for each in own]
        return Sums(torch.zeros_like(hidden, dtype=type_of_sums(hidden)).flatten(0, -2), *trained)

    def logits(self, ctx: OperatorContext, products: Tensor) -> Tensor:
        """Returns the logits [tokens, rows] of products."""
        if self._change is None:
            return products
        with ctx.precision.autocast():
            result = self._change(products.unsqueeze(1))
        return (result if isinstance(result, Tensor) else result[0]).squeeze(1)

    def of_products(self, ctx: OperatorContext, products: Tensor, of_logits: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the gradient of products [tokens, rows].

        Args:
            of_logits: returns the gradient of logits.
        """
        if self._change is None:
            return of_logits(products)
        with torch.enable_grad():
            leaf = products.detach().requires_grad_()
            logits = self.logits(ctx, leaf)
        return torch.autograd.grad(logits, leaf, of_logits(logits.detach()))[0]


class Deferred(TensorOperator):
    """An operator between hidden states and `TokenStatistics`, which runs it if the loss is computed in tiles. The
    operator then hands its input on, and in backward the gradient of that input."""

    def __init__(self, operator: TensorOperator, head: HeadInTiles) -> None:
        self.operator, self._head = operator, head
        self.has_saved_state = operator.has_saved_state

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.operator.parameters

    def weights_read_by(self, part: Part) -> tuple[Tensor, ...]:
        return self.operator.weights_read_by(part)

    @property
    def cast_parameters(self) -> tuple[Tensor, ...]:
        return self.operator.cast_parameters

    def method_of(self, part: Part) -> Method:
        run, is_forward = self.operator.method_of(part), part in (Part.F, Part.R)

        def run_or_pass(ctx: OperatorContext, *tensors: Tensor) -> Tensors:
            if self._head.is_used(ctx) and (self._head.keeps_few or ctx.saves_for_backward or not is_forward):
                return () if part is Part.W else tensors[:1]
            return run(ctx, *tensors)

        return run_or_pass
