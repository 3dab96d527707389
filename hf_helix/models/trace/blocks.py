"""Blocks: submodules of a layer whose code cannot be followed, as one operation of the trace each.

In:   a layer, and refusals that name the submodule with the code.
Out:  a skeleton with a custom operator in place of each such submodule; a `BlockCall`, which calls the submodule again.
Must hold: the model's own code runs, forward and under autograd. Only the shapes of its results are assumed, which two
runs of a copy with random weights have shown. A block that writes to a buffer is refused: recomputation would write
twice.

    code raises in a.b.c, or cannot be followed there -> a.b.c is a block; trace again
    the trace reaches the block                       -> its copy runs twice, for the shapes; trace again
    the copy cannot run by itself                     -> a.b is the block; trace again
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from hf_helix.models.trace.opaque_calls import (
    DTYPE,
    OPS,
    CallKind,
    MaskOf,
    OpaqueCalls,
    OtherMask,
    PaddingMask,
    skeleton_of,
)
from hf_helix.models.trace.trace import EXAMPLE_BATCH, EXAMPLE_LENGTH, ComputesWithMask, HandsOn, Underivable

logger = logging.getLogger(__name__)

RUNS = ((2, 6), (3, 11))
"""Batch and sequence of the two runs of a copy."""

TOKENS = {
    EXAMPLE_BATCH: lambda batch, sequence: batch,
    EXAMPLE_LENGTH: lambda batch, sequence: sequence,
    EXAMPLE_BATCH * EXAMPLE_LENGTH: lambda batch, sequence: batch * sequence,
}
"""From an open size of the examples to the same size at another batch and sequence."""

_PLAIN = (bool, int, float, str, type(None))


class Reached(Underivable):
    """Ends a trace at a block with results of unknown shapes; `given` are the arguments of its call."""

    def __init__(self, path: str, given: Any) -> None:
        super().__init__("a block is reached", path)
        self.given = given


@dataclass(frozen=True)
class Shape:
    """The shape and type of a tensor among the results of a block; an open size is a key of `TOKENS` and negative."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Block:
    """A submodule that runs as it is.

    Attributes:
        path: of the submodule in the layer; empty for the layer itself.
        reason: why its code is not followed.
        results: a `Shape` for each tensor among the results, and the other leaves; None before they are known.
        form: of the results.
    """

    path: str
    reason: str
    results: tuple[Any, ...] | None = None
    form: TreeSpec | None = None

    def line(self, extent: str, tp_size: int) -> str:
        """Returns a line about the block, the reason and the cost; `extent` is the part of the model."""
        whole = f"; each of {tp_size} tensor-parallel ranks holds and computes all of it" if tp_size > 1 else ""
        return (
            f"{self.path or 'the whole layer'} ({extent}) runs as one operator, since {' '.join(self.reason.split())}: "
            "no communication overlaps with parts of it, its weight gradients come with its input gradient, and no "
            f"window is a CUDA graph{whole}"
        )


@dataclass(frozen=True)
class BlockCall:
    """A call of a block.

    Attributes:
        leaves: the arguments, without the tensors.
        places: of the tensors among the arguments.
        form: of the arguments.
        result: the place of the result among the leaves of the block's output.
    """

    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    form: TreeSpec = field(repr=False)
    result: int = 0

    def run(self, module: nn.Module, *tensors: Tensor) -> Any:
        """Returns the result of a call of the module with other tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor.contiguous()  # as the model has it: operators have tokens first
        args, kwargs = tree_unflatten(leaves, self.form)
        return tree_leaves(module(*args, **kwargs))[self.result]


class Blocks:
    """The blocks of equal layers; `layer` is one of them.

    Attributes:
        found: by path.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self.found: dict[str, Block] = {}

    def take(self, error: Underivable) -> bool:
        """Makes the submodule that a refusal names a block, or follows up on a block that was reached; returns False if
        no block is a remedy.

        Raises:
            Underivable: the layer itself does not run as a block.
        """
        if error.path is None or isinstance(error, (HandsOn, ComputesWithMask)):
            return False
        if not isinstance(error, Reached):
            self._add(error.path, str(error))
            return True
        block = self.found[error.path]
        try:
            results, form = _results_of(self._layer.get_submodule(block.path), error.given)
            self.found[block.path] = replace(block, results=results, form=form)
        except _WritesBuffer:
            raise
        except Exception as failure:  # of the model's own code, which does not run by itself
            logger.debug("block %s does not run by itself", block.path, exc_info=failure)
            self._add(block.path, block.reason)
        return True

    def _add(self, path: str, reason: str) -> None:
        """Adds the innermost submodule with a forward, at a path or around it, that is no block yet."""
        if path in self.found:
            reason = self.found[path].reason
        while path in self.found or type(self._layer.get_submodule(path)).forward is nn.Module.forward:
            if not path:
                raise Underivable(reason)
            path = path.rpartition(".")[0]
        for other in [other for other in self.found if not path or other.startswith(f"{path}.")]:
            reason = self.found.pop(other).reason
        self.found[path] = Block(path, reason)

    def next_child(self) -> str:
        """Returns the first submodule of the layer that is no block yet and has submodules; if there is none, the
        layer."""
        names = (name for name, child in self._layer.named_children() if next(child.children(), None) is not None)
        return next((name for name in names if name not in self.found), "")

    def replace(self, skeleton: nn.Module, opaque_calls: OpaqueCalls) -> Callable[[Tensor], None]:
        """Makes the submodules of a skeleton opaque, the blocks as well; returns a function that takes the value that
        enters a trace [batch, sequence, ...], before the skeleton is called."""
        modules = {path: skeleton.get_submodule(path) for path in self.found}
        inside = set(map(id, modules.values()))
        opaque_calls.replace(skeleton, skip=lambda module: id(module) in inside)
        entered: list[Tensor] = []
        for path, module in modules.items():
            module.forward = _as_operator(self.found[path], opaque_calls, entered)

        def enter(x: Tensor) -> None:
            entered[:] = [x]

        return enter


def _as_operator(block: Block, opaque_calls: OpaqueCalls, entered: Sequence[Tensor]) -> Callable[..., Any]:
    """Returns a forward with a call of the custom operator for each result of a block."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        if any(isinstance(leaf, (MaskOf, PaddingMask, OtherMask)) for leaf in leaves):
            raise ComputesWithMask(f"{block.reason}; the block is handed an attention mask")
        if block.results is None:
            raise Reached(block.path, (args, kwargs))
        places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        tensors = [leaves[place] for place in places]
        rest = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        batch, sequence = entered[0].shape[:2]

        def call(place: int, result: Any) -> Any:
            if not isinstance(result, Shape):
                return result
            sizes = [TOKENS[-size](batch, sequence) if size < 0 else size for size in result.sizes]
            number = opaque_calls.add(CallKind.BLOCK, block.path, call=BlockCall(rest, places, form, place))
            return OPS.block(tensors, sizes, result.dtype, number)

        assert block.form is not None
        return tree_unflatten([call(*each) for each in enumerate(block.results)], block.form)

    return forward


# -- the shapes of results -------------------------------------------------------------------------------------------


class _WritesBuffer(Underivable):
    """Refuses a block whose forward pass writes to a buffer."""


def runnable_copy(module: nn.Module, dtype: torch.dtype = DTYPE) -> Any:
    """Returns a copy of a module on the CPU, with random weights that take no memory, in training mode."""
    generator = torch.Generator().manual_seed(0)

    def make(tensor: Tensor, is_buffer: bool) -> Tensor:
        if is_buffer:
            kept = torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().cpu().clone()
            return kept.to(dtype) if kept.is_floating_point() else kept
        return _windows(tensor.shape, dtype, generator)

    copied = skeleton_of(module, make).train()
    for part in copied.modules():
        config: Any = getattr(part, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # grouped products take no windows
    return copied


def _windows(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Returns random numbers of a shape: each row is a window of the same numbers, a few further on."""
    strides = [1]
    for place in range(1, len(shape)):
        strides.append(2 * place + 5)
    last = sum((size - 1) * stride for size, stride in zip(reversed(shape), strides, strict=False))
    drawn = torch.randn(max(last, 0) + 1, generator=generator) / math.sqrt(max(1, shape[-1] if shape else 1))
    return drawn.to(dtype).as_strided(tuple(shape), strides[: len(shape)][::-1])


def _results_of(module: nn.Module, given: Any) -> tuple[tuple[Any, ...], TreeSpec]:
    """Returns the results of a block, and their form, by two runs of a copy. Raises an error if it cannot run."""
    copied = runnable_copy(module)
    before = {name: buffer.clone() for name, buffer in copied.named_buffers()}
    found = []
    for sizes in RUNS:
        args, kwargs = tree_map(lambda leaf, sizes=sizes: _example(leaf, *sizes), given)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found.append(tree_flatten(copied(*args, **kwargs)))
    for name, buffer in copied.named_buffers():
        if not torch.equal(before[name], buffer):
            raise _WritesBuffer(f"its forward pass writes to the buffer {name} of a block, which is not built")
    (first, form), (second, other) = found
    if form != other:
        raise ValueError("the form of the results depends on the sizes of the batch")
    return tuple(_result(*each) for each in zip(first, second, strict=True)), form


def _example(leaf: Any, batch: int, sequence: int) -> Any:
    """Returns an argument at another batch and sequence: random numbers, zeros for integers, True."""
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise ValueError("a number among the arguments depends on the sizes of the batch")
    if not isinstance(leaf, Tensor):
        return leaf
    shape = [size if isinstance(size, int) else TOKENS[size.node.hint](batch, sequence) for size in leaf.shape]
    if leaf.is_floating_point():
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(leaf.dtype)
    return torch.full(shape, leaf.dtype is torch.bool, dtype=leaf.dtype)


def _result(first: Any, second: Any) -> Any:
    """Returns the shape of a result of two runs, or a result that is no tensor."""
    if not isinstance(first, Tensor):
        if not isinstance(first, _PLAIN):
            raise ValueError(f"a result is a {type(first).__name__}")
        return first
    return Shape(tuple(map(_size, first.shape, second.shape)), first.dtype)


def _size(first: int, second: int) -> int:
    if first == second:
        return first
    for example, size in TOKENS.items():
        if (size(*RUNS[0]), size(*RUNS[1])) == (first, second):
            return -example
    raise ValueError("a size of a result depends on the data")
