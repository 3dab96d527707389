"""Tensor operators: the base class of everything that a program runs, its three kinds, and their context.

    TensorOperator       `method_of(part)`: runs a part of the operator on the compute stream
      Computation        forward, backward
      SplitComputation   forward; backward as input gradient (I) and weight gradient (W), which run at different times
      Communication      `prepare`: allocates on the compute stream, and returns a transfer for a communication stream

In:   tensors of one micro-batch.
Out:  tensors; parameter gradients are added to `parameter.grad`.
Must hold: a computation never communicates; a communication never computes a gradient. The state of an operator between
forward and backward lies in its `OperatorContext`, so the same operator serves many micro-batches at once. A gradient
for another rank has the type of its value.
Activations have the layout [sequence, batch, hidden]; a rank holds its part of the sequence where a comment says
"shard".
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from hf_helix.operators.fused import kernels
from hf_helix.operators.matmul_dtype import CastWeights
from hf_helix.planning.graph.operator import Part

Tensors = tuple[Tensor, ...]
TransferFn = Callable[[], object]
"""Moves data into buffers that were allocated before."""

Method = Callable[..., Tensors]
"""`method(ctx, *tensors)`: a part of an operator, for one micro-batch."""


@dataclass(frozen=True)
class Precision:
    """The types of a forward pass.

    Attributes:
        device: the type of the device, such as "cuda".
        autocast_dtype: the type of matrix products, as under `torch.autocast`; None if values keep their types.
        weights: casts of weights to the type of the products.
        fused: whether fused kernels run, which round less often.
    """

    device: str = "cpu"
    autocast_dtype: torch.dtype | None = None
    weights: CastWeights = field(default_factory=CastWeights)
    fused: bool = True

    @contextmanager
    def in_window(self) -> Iterator[None]:
        """Returns the context of a window: weights are cast once, and fused kernels run or not."""
        with self.weights.kept(), kernels.using(self.fused):
            yield

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context in which torch itself computes in these types."""
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
    """Returns the type of device whose autocast serves a device. Torch has none for meta tensors; the CPU's serves for
    them."""
    return "cpu" if device == "meta" else device


@dataclass(slots=True)
class OperatorContext:
    """An operator's context for one micro-batch, like the `ctx` of `torch.autograd.Function`: its side inputs, and its
    state for backward.

    Attributes:
        side: tensors of the micro-batch without gradient (masks, positions, labels), by name.
        seed: the seed of operators that draw random numbers; it does not depend on the plan.
        saves_for_backward: whether forward saves its state; not without a later backward, nor where backward runs
            forward again. The mode of a module, by which dropout draws, is `nn.Module.training`.
        precision: the types of the forward pass; backward follows the types of saved values.
        saved: the state of forward for backward.
        shared: host-side knowledge of the micro-batch for several operators, by the object that keeps it there.
        partials: for each gradient that backward returns, a part from other readers of the input, or None. The sums are
            made after the operator, unless it adds the parts itself and sets them to an empty tuple.
    """

    side: Mapping[str, Any]
    seed: int
    saves_for_backward: bool
    precision: Precision = field(default_factory=Precision)
    saved: Any = field(default=None)
    shared: dict[object, Any] = field(default_factory=dict)
    partials: tuple[Tensor | None, ...] = ()


@contextmanager
def explicit_gradients() -> Iterator[None]:
    """Returns the context in which operators run. Autograd records nothing unless an operator enables it. Recorded
    graphs run backward in the calling thread; by default a GPU's run in another thread, and the caller waits for it."""
    with torch.no_grad(), torch.autograd.set_multithreading_enabled(False):
        yield


class TensorOperator(ABC):
    """The action of an operator of a unit on tensors. Runs within `explicit_gradients`, for many micro-batches at once.

    Attributes:
        has_saved_state: whether forward saves large state for backward in `OperatorContext.saved`. A recomputed
            operator must then run forward again, even if all its outputs are kept.
        by_data: whether the host reads values of its inputs, which decide the code that runs and which parameters get a
            gradient. Ranks with other inputs then have gradients of other parameters, and no CUDA graph is captured.
    """

    has_saved_state = False
    by_data = False

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters whose gradients backward adds to. Where every run chooses between parameters (of adapters,
        say), all of them."""
        return ()

    def weights_read_by(self, part: Part) -> tuple[Tensor, ...]:
        """Returns the parameters whose values a part reads. Of other parameters it reads shape and type, and may add to
        their gradients."""
        return () if part is Part.W else self.parameters

    @property
    def cast_parameters(self) -> tuple[Tensor, ...]:
        """The parameters that are read only in the type of matrix products, from `Precision.weights`."""
        return ()

    @abstractmethod
    def method_of(self, part: Part) -> Method:
        """Returns the method that runs a part on the compute stream; the same in every window.

        part        arguments                                                      result
        F, R        inputs                                                         outputs
        B, I        gradients of the outputs, then the values that the operator    gradients of the inputs
                    declares to keep
        W           gradients of the outputs, then the inputs of forward           nothing
        """


class Computation(TensorOperator):
    """An operator on the compute stream."""

    has_saved_state = True

    @abstractmethod
    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        """Returns the outputs."""

    @abstractmethod
    def backward(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        """Returns the gradients of the inputs, and adds to the gradients of parameters."""

    @final
    def method_of(self, part: Part) -> Method:
        return {Part.F: self.forward, Part.R: self.forward, Part.B: self.backward}[part]


class SplitComputation(TensorOperator):
    """An operator on the compute stream whose input gradient (I) and weight gradient (W) run at different times."""

    @property
    @abstractmethod
    def trained(self) -> float:
        """The size of W, see `hf_helix.planning.graph.operator.Operator`."""

    @abstractmethod
    def forward(self, ctx: OperatorContext, *inputs: Tensor) -> Tensors:
        """Returns the outputs."""

    @abstractmethod
    def input_gradient(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        """Returns the gradients of the inputs."""

    @abstractmethod
    def weight_gradient(self, ctx: OperatorContext, *gradients: Tensor) -> Tensors:
        """Adds to the gradients of parameters; returns an empty tuple."""

    @final
    def method_of(self, part: Part) -> Method:
        # With nothing to train, the full backward (B) is the input gradient.
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
    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        """Allocates on the compute stream, at the time of issue.

        Args:
            ctx: the operator's context for the micro-batch.
            part: F, B, or R for F once more.
            inputs: values, or in B gradients.

        Returns:
            The outputs, not filled yet, and the transfer that fills them, later and on another stream. The transfer
            allocates nothing.
        """

    def lane(self, part: Part) -> str:
        """Returns the queue of a part on its stream; lanes do not wait for each other."""
        return ""

    @final
    def method_of(self, part: Part) -> Method:
        def run(ctx: OperatorContext, *inputs: Tensor) -> Tensors:
            outputs, transfer = self.prepare(ctx, part, *inputs)
            transfer()
            return outputs

        return run
