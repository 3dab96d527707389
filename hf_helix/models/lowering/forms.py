"""The forms in which operators call glue and dropout of a model.

In:   a function over values as a trace has them [batch, sequence, ...], or a module whose code drops out by itself.
Out:  the same over values as operators hand them on [tokens, batch, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_helix.models.graph.balance import RouterRecord
from hf_helix.operators.base import Tensors
from hf_helix.operators.moe.dispatch import COUNTED


class ByRows:
    """Glue that needs to know which token stands where: it gets values [batch, sequence, ...] without padding."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, *values: Tensor, length: int, **side: Tensor) -> Tensor:
        padded = values[0].shape[0]
        result = self.function(*(value[:length].transpose(0, 1) for value in values), **side).transpose(0, 1)
        extra = padded - result.shape[0]
        if extra <= 0:
            return result
        return nn.functional.pad(result, (0, 0) * (result.dim() - 1) + (0, extra))


@dataclass(frozen=True)
class OfShard:
    """Glue that reads the positions of tokens [tokens of all ranks, batch or 1]: it gets those of this rank's."""

    function: Callable[..., Any]
    rank: int

    def __call__(self, *values: Tensor, places: Tensor) -> Any:
        count = values[0].shape[0]
        return self.function(*values, places=places[self.rank * count :][:count])


@dataclass(frozen=True)
class Routing:
    """Glue that chooses experts, of which a record is kept.

    Attributes:
        function: returns the weights of choices and the choices [tokens, k], then the logits where they are known.
        record: keeps what the router says.
        layer: says whether it is in training.
    """

    function: Callable[..., Any]
    record: RouterRecord
    layer: nn.Module

    def __call__(self, *values: Tensor, counted: Tensor, **side: Tensor) -> Tensors:
        weights, chosen, *said = self.function(*values, **side)
        logits = said[0].flatten(0, -2) if said else None
        part = self.record.keep(logits, chosen, {COUNTED: counted}, self.layer.training)
        return (weights, *part, chosen)


@dataclass(frozen=True)
class DropoutIn:
    """Dropout by a function in the code of a module, which says whether it is in training."""

    module: nn.Module
    p: float

    @property
    def training(self) -> bool:
        return self.module.training
