"""The two kinds of operator, and what they are handed when they run.

In:   tensors of one micro-batch.
Out:  tensors; parameter gradients are added to `parameter.grad`.
Must hold: a computation never communicates; a communication never computes a gradient. What an operator keeps
between forward and backward lies in its `Call`, so the same operator serves many micro-batches at once. A gradient that
goes to another rank has the type of its value.
Activations are laid out [sequence, batch, hidden]; a rank holds its slice of the sequence where a comment says "shard".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.linears.matmul_dtype import LoweredWeights
from hf_helix.planning.graph.operator import Part

Tensors = tuple[Tensor, ...]
Work = Callable[[], object]
"""Moves data into what was allocated before."""


@dataclass(frozen=True)
class Precision:
    """Which types a forward pass computes in.

    Attributes:
        device: the type of the device, such as "cuda".
        products: of matrix products, as under `torch.autocast`; None where values keep the types they have.
        weights: in the type of the products.
    """

    device: str = "cpu"
    products: torch.dtype | None = None
    weights: LoweredWeights = field(default_factory=LoweredWeights)

    def autocast(self) -> AbstractContextManager[Any]:
        """In which torch computes so by itself."""
        return nullcontext() if self.products is None else torch.autocast(self.device, self.products)

    def lowered(self, value: Tensor) -> Tensor:
        """A value as matrix products take it."""
        return value if self.products is None or value.dtype is self.products else value.to(self.products)


@dataclass(slots=True)
class Call:
    """One operator for one micro-batch: what it may read besides its inputs, and what it keeps for backward.

    Attributes:
        side: tensors of the micro-batch that carry no gradient (masks, positions, labels), by name.
        seed: for operators that draw random numbers; does not depend on the plan.
        training: False when nothing need be kept: there will be no backward, or it runs the operator again.
        precision: of the forward pass; backward follows the types that it left.
        saved: whatever forward left for backward.
        shared: what the host knows of the micro-batch that other operators ask for, too, by what keeps it there.
    """

    side: Mapping[str, Any]
    seed: int
    training: bool
    precision: Precision = field(default_factory=Precision)
    saved: Any = field(default=None)
    shared: dict[object, Any] = field(default_factory=dict)


@contextmanager
def explicit_gradients() -> Iterator[None]:
    """Around operators: nothing is recorded for autograd, but where an operator asks for it; and what autograd then
    runs backward runs in the calling thread. For a GPU it otherwise has a thread of its own, which the caller waits
    for."""
    with torch.no_grad(), torch.autograd.set_multithreading_enabled(False):
        yield


class Computation(ABC):
    """An operator on the compute stream. It is called within `explicit_gradients`.

    Attributes:
        saves: whether forward leaves anything of weight for backward, which must run it again where it did not.
    """

    saves = True

    @abstractmethod
    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        """Values out, from values in."""

    @abstractmethod
    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        """Gradients of the inputs, from gradients of the outputs (and behind them the values that it declares to keep);
        parameters' gradients on the way."""

    def again(self, call: Call, *inputs: Tensor) -> Tensors:
        """Forward once more, in backward: the same values, and what is left for backward."""
        return self.forward(call, *inputs)


class SplitComputation(ABC):
    """An operator whose input gradient (I) and weight gradient (W) run at different times. It is called within
    `explicit_gradients`."""

    saves = False

    @property
    def trained(self) -> float:
        """How much of W there is, see `hf_helix.planning.graph.operator.Operator`."""
        return 1.0

    @abstractmethod
    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        """Values out, from values in."""

    @abstractmethod
    def input_gradient(self, call: Call, *gradients: Tensor) -> Tensors:
        """Gradients of the inputs, from gradients of the outputs (and behind them the values that it declares to
        keep)."""

    @abstractmethod
    def weight_gradient(self, call: Call, *gradients: Tensor) -> None:
        """Add to the parameters' gradients, from gradients of the outputs and behind them all that forward read."""

    def again(self, call: Call, *inputs: Tensor) -> Tensors:
        """Forward once more, in backward: the same values."""
        return self.forward(call, *inputs)

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        """Where there is nothing to train, I is all of it."""
        return self.input_gradient(call, *gradients)


class Communication(ABC):
    """An operator on a communication stream.

    `prepare` runs when the operator is issued and allocates everything; the work it returns only moves data into
    what was allocated, later and on another stream.
    """

    saves = False

    @abstractmethod
    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, Work]:
        """The outputs, not yet filled, and the work that fills them. `part` is F, B, or R for F once more."""

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        """The same on the compute stream, where a plan may not overlap it."""
        return self._now(call, Part.F, *inputs)

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        """See `forward`."""
        return self._now(call, Part.B, *gradients)

    def again(self, call: Call, *inputs: Tensor) -> Tensors:
        """See `forward`; run a second time in backward."""
        return self._now(call, Part.R, *inputs)

    def _now(self, call: Call, part: Part, *inputs: Tensor) -> Tensors:
        outputs, work = self.prepare(call, part, *inputs)
        work()
        return outputs
