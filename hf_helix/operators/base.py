"""Tensor operators: the one base class of everything that a program runs, its three kinds, and what they are handed.

    TensorOperator       `method_of(part)`: what runs on the compute stream for a part of the operator
      Computation        forward, backward
      SplitComputation   forward; backward as input gradient (I) and weight gradient (W), which run at different times
      Communication      `prepare`: allocates on the compute stream, and returns the work for a communication stream

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
from typing import Any, final

import torch
from torch import Tensor

from hf_helix.operators.matmul_dtype import CastWeights
from hf_helix.planning.graph.operator import Part

Tensors = tuple[Tensor, ...]
TransferFn = Callable[[], object]
"""Moves data into what was allocated before."""

Method = Callable[..., Tensors]
"""`method(call, *tensors)`: a part of an operator, for one micro-batch."""


@dataclass(frozen=True)
class Precision:
    """Which types a forward pass computes in.

    Attributes:
        device: the type of the device, such as "cuda".
        autocast_dtype: the type of matrix products, as under `torch.autocast`; None where values keep their types.
        weights: copies of weights in the type of the products.
    """

    device: str = "cpu"
    autocast_dtype: torch.dtype | None = None
    weights: CastWeights = field(default_factory=CastWeights)

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context in which torch computes in these types by itself."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(autocast_device(self.device), self.autocast_dtype)

    def cast_for_matmul(self, value: Tensor) -> Tensor:
        """Returns a value in the type of matrix products."""
        return (
            value
            if self.autocast_dtype is None or value.dtype is self.autocast_dtype
            else value.to(self.autocast_dtype)
        )


def autocast_device(device: str) -> str:
    """Returns the type of device whose autocast serves a device: torch has none for meta tensors, which take that of
    the CPU as a sign."""
    return "cpu" if device == "meta" else device


@dataclass(slots=True)
class Call:
    """One operator for one micro-batch: what it may read besides its inputs, and what it keeps for backward.

    Attributes:
        side: tensors of the micro-batch that carry no gradient (masks, positions, labels), by name.
        seed: the seed of operators that draw random numbers; it does not depend on the plan.
        training: False when forward need not save anything: there will be no backward, or it runs forward again.
        precision: the types of the forward pass; backward follows the types of what forward saved.
        saved: whatever forward saved for backward.
        shared: what the host knows of the micro-batch and several operators read, by the object that keeps it there.
    """

    side: Mapping[str, Any]
    seed: int
    training: bool
    precision: Precision = field(default_factory=Precision)
    saved: Any = field(default=None)
    shared: dict[object, Any] = field(default_factory=dict)


@contextmanager
def explicit_gradients() -> Iterator[None]:
    """Returns the context in which operators run. Autograd records nothing unless an operator enables it. What it
    recorded runs backward in the calling thread; for a GPU otherwise in another one, which the caller waits for."""
    with torch.no_grad(), torch.autograd.set_multithreading_enabled(False):
        yield


class TensorOperator(ABC):
    """What an operator of a unit does to tensors. It runs within `explicit_gradients`, for many micro-batches at once.

    Attributes:
        has_saved_state: whether forward leaves anything of weight for backward in `Call.saved`. What is recomputed
            must then run forward again, also where all its outputs are kept.
    """

    has_saved_state = False

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters whose gradients backward adds to. Where a choice between some is made whenever it runs (of
        adapters, say), all of them."""
        return ()

    def weights_read_by(self, part: Part) -> tuple[Tensor, ...]:
        """Returns those of `parameters` whose values a part reads. Of others it knows shape and type, and may add to
        their gradients."""
        return () if part is Part.W else self.parameters

    @property
    def cast_parameters(self) -> tuple[Tensor, ...]:
        """Those of `parameters` that it reads in the type of matrix products alone, from `Precision.weights`."""
        return ()

    def draws(self) -> bool:
        """Returns whether forward draws random numbers at present; the mode of a module may decide."""
        return False

    @abstractmethod
    def method_of(self, part: Part) -> Method:
        """Returns the method that runs a part on the compute stream. It is the same in every window.

        F and R (forward again, in backward) take the inputs and return the outputs. B and I take the gradients of the
        outputs, behind them the values that the operator declares to keep, and return the gradients of the inputs. W
        takes the gradients of the outputs, behind them all that forward read, and returns nothing.
        """


class Computation(TensorOperator):
    """An operator on the compute stream."""

    has_saved_state = True

    @abstractmethod
    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        """Returns the outputs."""

    @abstractmethod
    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        """Returns the gradients of the inputs, and adds to those of parameters."""

    @final
    def method_of(self, part: Part) -> Method:
        return {Part.F: self.forward, Part.R: self.forward, Part.B: self.backward}[part]


class SplitComputation(TensorOperator):
    """An operator on the compute stream whose input gradient (I) and weight gradient (W) run at different times."""

    @property
    @abstractmethod
    def trained(self) -> float:
        """How much of W there is, see `hf_helix.planning.graph.operator.Operator`."""

    @abstractmethod
    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        """Returns the outputs."""

    @abstractmethod
    def input_gradient(self, call: Call, *gradients: Tensor) -> Tensors:
        """Returns the gradients of the inputs."""

    @abstractmethod
    def weight_gradient(self, call: Call, *gradients: Tensor) -> Tensors:
        """Adds to the gradients of parameters; returns nothing, as a tuple."""

    @final
    def method_of(self, part: Part) -> Method:
        # Where there is nothing to train, the whole backward (B) is the input gradient.
        return {
            Part.F: self.forward,
            Part.R: self.forward,
            Part.B: self.input_gradient,
            Part.I: self.input_gradient,
            Part.W: self.weight_gradient,
        }[part]


class Communication(TensorOperator):
    """An operator on a communication stream."""

    @abstractmethod
    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        """Allocates on the compute stream. Runs when the operator is issued.

        Args:
            part: F, B, or R for F once more.
            inputs: values, or in B gradients.

        Returns:
            The outputs, not yet filled, and the work that fills them, later and on another stream. The work allocates
            nothing.
        """

    def lane(self, part: Part) -> str:
        """Returns the queue on its stream that a part goes to; lanes do not wait for each other."""
        return ""

    @final
    def method_of(self, part: Part) -> Method:
        def run(call: Call, *inputs: Tensor) -> Tensors:
            outputs, work = self.prepare(call, part, *inputs)
            work()
            return outputs

        return run
