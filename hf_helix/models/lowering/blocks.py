"""The declaration of blocks: submodules that run as they are, forward and under autograd.

In:   the segment plan of a unit, and the builder for its operators.
Out:  an operator for each block, with the segment before it. The plan moves it whole, with its weight gradients.
Must hold: a tensor-parallel rank runs the block on all tokens, and its gradients are a part of the sum over the ranks,
whatever the block computes. A context-parallel rank has other tokens than the others, so a block must work token by
token: runs of a copy with random weights, on all tokens and on some of them, have equal results.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from hf_helix.models.graph.context import ATTENTION
from hf_helix.models.lowering.experts import ValueNames
from hf_helix.models.lowering.segment_function import SegmentFunction
from hf_helix.models.lowering.segment_plan import BatchFirstSegment
from hf_helix.models.placement.value_placement import FULL, features_of
from hf_helix.models.stock.batch_inputs import SequenceCut
from hf_helix.models.trace.blocks import runnable_copy
from hf_helix.models.trace.opaque_calls import CallKind, OpaqueCall
from hf_helix.models.trace.trace import Underivable

ROWS, TOKENS = 2, 8
"""The sizes of the runs that compare tokens."""

SMALLEST, LARGEST = -3.0, 3.0
"""The powers of ten between which tokens are scaled: code that branches by the size of values takes both branches."""

TOLERANCE = 1e-4
"""The largest difference of a token, relative to its size."""


class BlockCalls(ValueNames):
    """Declares blocks."""

    def _block(self, node: Node, opaque: OpaqueCall) -> None:
        read = [other for other in self.trace.nodes if self._is_of(other, node) and other in self.plan.needed]
        if len(read) > 1:
            raise Underivable(f"{opaque.path or 'the layer'} returns several values that are read", opaque.path)
        segment, inputs = self.plan.segment([node])
        bound, module = segment.bind(self.module), self.module
        function: Callable[..., Tensor] = BatchFirstSegment(bound)
        if self.b.cp.size > 1:
            self._check_tokens(opaque.path, segment, inputs)
            function = _OwnTokens(function, SequenceCut.of(self.b.tp, self.b.cp))
        name = self.b.autograd(
            self._name(node),
            function,
            *[self.value(value, FULL) for value in inputs],
            side=(*segment.side, "length"),
            **self._used_by(segment),
            on_shard=True,
            draws=lambda: bool(module.training),
            compiles=False,
            by_data=True,
            relative_cost=ATTENTION,
        )
        self._set(node, name)

    def _is_of(self, other: Node, node: Node) -> bool:
        """Returns whether two results are of one call of a block."""
        if self.trace.kind_of(other) is not CallKind.BLOCK or self.trace.path_of(other) != self.trace.path_of(node):
            return False
        return other.args[0] == node.args[0]

    def _check_tokens(self, path: str, segment: SegmentFunction, inputs: list[Node]) -> None:
        """Refuses a block that does not work token by token, over a shared sequence."""
        shapes = [features_of(self.trace, value) for value in inputs]
        if segment.side or not works_by_token(segment, self.module, shapes):
            raise Underivable(
                f"cp_size={self.b.cp.size}: {path or 'the layer'} runs as one block, which does not work token by "
                "token, and each rank has other tokens of a shared sequence; use cp_size=1 with tp_size or pp_size"
            )


class _OwnTokens:
    """A function of tokens over this rank's tokens, without the padding at the end of the sequence.

    Args:
        function: over values [tokens, batch, ...].
        cut: of the sequence.
    """

    def __init__(self, function: Callable[..., Tensor], cut: SequenceCut) -> None:
        self._function = function
        self._cut = cut

    def __call__(self, *values: Tensor, length: int) -> Tensor:
        kept = self._cut.take(torch.ones(length, dtype=torch.bool), 0)
        if kept.all():
            return self._function(*values, length=len(kept))
        places = kept.nonzero().flatten().to(values[0].device)
        result = self._function(*(value.index_select(0, places) for value in values), length=len(places))
        return result.new_zeros(len(kept), *result.shape[1:]).index_copy(0, places, result)


@torch.no_grad()
def works_by_token(segment: SegmentFunction, module: nn.Module, features: list[tuple[Any, ...]]) -> bool:
    """Returns whether a segment computes every token by itself: the same from all tokens of a batch, from a row, from
    half of each row, from the tokens in reverse, and from a single token.

    Args:
        segment: the segment.
        module: the traced module, which is not touched.
        features: the shape of a token of each value that the segment reads.
    """
    copied = runnable_copy(module, torch.float32)
    for part in copied.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    run, generator = segment.bind(copied), torch.Generator().manual_seed(2)
    values = [torch.randn(ROWS, TOKENS, *shape, generator=generator) for shape in features]
    scales = 10 ** torch.linspace(SMALLEST, LARGEST, ROWS * TOKENS)[torch.randperm(ROWS * TOKENS, generator=generator)]
    values = [value * scales.view(ROWS, TOKENS, *[1] * (value.dim() - 2)) for value in values]
    rows, tokens = torch.arange(ROWS), torch.arange(TOKENS)
    parts = [(rows[:1], tokens), (rows, tokens[: TOKENS // 2]), (rows.flip(0), tokens.flip(0))]
    parts += [(row.view(1), token.view(1)) for row in rows for token in tokens]
    with torch.random.fork_rng(devices=[]):
        whole = run(*values)
        return all(
            _is_close(run(*(value[row][:, token] for value in values)), whole[row][:, token]) for row, token in parts
        )


def _is_close(value: Tensor, other: Tensor) -> bool:
    """Returns whether values of tokens [batch, sequence, ...] are equal but for rounding."""
    difference, size = ((value - other).flatten(2).norm(dim=-1), other.flatten(2).norm(dim=-1))
    return bool((difference <= TOLERANCE * size + 1e-12).all())
