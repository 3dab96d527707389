"""A head in tiles of tokens and rows: logits of one tile at a time.

In:   hidden states, and this rank's rows of the head.
Out:  tiles, and their products; for `TokenStatistics` also what follows the products, and the gradients.
Must hold: the results are those of whole logits, in the same types, but for the order of sums in fp32.

The loss of a micro-batch with more logits on a rank than a limit (`HeadInTiles.is_used`) is computed in tiles: the
linear of the head, and element-wise functions of logits behind it, hand their input on to `TokenStatistics`
(`Deferred`), which multiplies. Backward multiplies once more, a third more work in the head: with what a rank knows in
forward, it cannot make the gradient of the weights, which depends on the exponentials of other ranks. Forward alone, as
in evaluation, has whole logits, which predictions read.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.base import Method, OperatorContext, TensorOperator, Tensors
from hf_helix.operators.linears.accumulate import add_product, started_gradient
from hf_helix.operators.linears.linear import Projection
from hf_helix.planning.graph.operator import Part

CHUNK = {"cpu": 2**20, "cuda": 2**26}
"""The most logits computed in fp32 at a time. On CUDA 256 MiB, which is 512 tokens of 128 thousand rows, so that
kernels are few; on a CPU 4 MiB, which stay in its caches."""

WHOLE, AT_MOST = 2**27, 8
"""The most logits of a micro-batch that a rank keeps whole where layers are recomputed: 256 MiB in bf16; and times as
many where none is, and memory is worth less than time."""

TOKENS, ROWS = 4096, 4096
"""The size of a tile, in tokens and in rows of the head, where a loss is computed in tiles."""


@contextmanager
def whole_logits() -> Iterator[None]:
    """Returns a context in which no loss is computed in tiles."""
    global WHOLE
    before, WHOLE = WHOLE, sys.maxsize
    try:
        yield
    finally:
        WHOLE = before


class Tile(NamedTuple):
    """Some tokens and some rows of the head: positions, and the operands of their product. `number` counts the parts of
    the rows."""

    number: int
    tokens: slice
    rows: slice
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def products(self) -> Tensor:
        """Returns the products of hidden states and rows [tokens, rows], in their type."""
        return functional.linear(self.hidden, self.weight, self.bias)


def tiles_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, rows: int) -> Iterator[Tile]:
    """Yields tiles of at most `TOKENS` tokens of hidden states [tokens, hidden], and of at most `rows` rows of a head
    [rows, hidden], with operands in a type."""
    for start in range(0, len(hidden), TOKENS):
        tokens = slice(start, min(start + TOKENS, len(hidden)))
        values = hidden[tokens].to(dtype)
        for number, first in enumerate(range(0, len(weight), rows)):
            place = slice(first, min(first + rows, len(weight)))
            added = None if bias is None else bias[place].to(dtype)
            yield Tile(number, tokens, place, values, weight[place].to(dtype), added)


class HeadInTiles:
    """The linear of a head, and an element-wise function of its outputs, for `TokenStatistics`.

    Args:
        linear: with this rank's rows.
        parameters: the parameters that the linear may read.
        change: the function, such as a softcap; None for none.
        recomputes: whether layers are recomputed.
    """

    def __init__(
        self,
        linear: Projection,
        parameters: Tensors,
        change: Callable[[Tensor], Tensor | Tensors] | None,
        recomputes: bool = False,
    ) -> None:
        self._factor = 1 if recomputes else AT_MOST
        self.linear = linear
        self.parameters = parameters
        self._change = change

    def is_used(self, ctx: OperatorContext) -> bool:
        """Returns whether a micro-batch with backward has too many logits to keep."""
        return int(ctx.side["targets"].numel()) * len(self.linear.weight) > self._factor * WHOLE

    def tiles(self, ctx: OperatorContext, hidden: Tensor) -> Iterator[Tile]:
        """Yields the tiles of hidden states [..., hidden]."""
        value = ctx.precision.cast_for_matmul(hidden).flatten(0, -2)
        weight, bias = (
            None if each is None else ctx.precision.weights.of((each,), value.dtype)
            for each in (self.linear.weight, self.linear.bias)
        )
        assert weight is not None
        return tiles_of(value, weight, bias, value.dtype, ROWS)

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
            leaf = products.requires_grad_()
            logits = self.logits(ctx, leaf)
        return torch.autograd.grad(logits, leaf, of_logits(logits.detach()))[0]

    def new_gradient(self, hidden: Tensor) -> Tensor:
        """Returns zeros for the gradient of hidden states [tokens, hidden], in a type for sums."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return torch.zeros_like(hidden, dtype=dtype).flatten(0, -2)

    def add_gradients(self, tile: Tile, of_products: Tensor, of_hidden: Tensor) -> None:
        """Adds to the gradients of the hidden states [tokens, hidden], and of the parameters.

        Args:
            of_products: the gradient of the tile's products [tokens, rows].
        """
        add_product(of_hidden[tile.tokens], of_products, tile.weight)
        weight, bias = self.linear.weight, self.linear.bias
        if weight.requires_grad:
            add_product(started_gradient(weight)[tile.rows], of_products.t(), tile.hidden)
        if bias is not None and bias.requires_grad:
            started_gradient(bias)[tile.rows] += of_products.sum(0, dtype=bias.dtype)


class Deferred(TensorOperator):
    """An operator between hidden states and `TokenStatistics`, which runs it where the loss is computed in tiles. The
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
            if self._head.is_used(ctx) and (ctx.saves_for_backward or not is_forward):
                return () if part is Part.W else tensors[:1]
            return run(ctx, *tensors)

        return run_or_pass
