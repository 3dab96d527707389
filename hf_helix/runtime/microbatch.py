"""Micro-batches, and their state on the way through the units.

In:   the side inputs of a micro-batch, made when its first operator runs.
Out:  live values, pending communication, and the operators' state for backward.
Must hold: nothing of a micro-batch exists before its first operator or after its last.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_helix.operators.base import OperatorContext, Precision
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.window.layout import Key
from hf_helix.runtime.streams.streams import Event


@dataclass(frozen=True)
class MicroBatch:
    """A part of the batch.

    Attributes:
        prepare: makes the tensors without gradient, by name (ids, targets, masks, positions).
        key: its position in the run, (optimizer step, index in the window); seeds derive from the key.
        rows: the number of sequences.
        length: their tokens, with padding.
        output: if a caller computes the loss, a tensor on the meta device like the decoder's output; None on ranks
            without the last unit.
    """

    prepare: Callable[[], Mapping[str, Any]]
    key: tuple[int, int]
    rows: int = 0
    length: int = 0
    output: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens, for figures."""
        return self.rows * self.length

    @property
    def shape(self) -> str:
        """The shape of the token ids as text, such as "2 x 256"; measured times are per shape."""
        return f"{self.rows} x {self.length}"


@dataclass(slots=True)
class MicroBatchState:
    """The state of a micro-batch, from its first operator to its last.

    Attributes:
        key, saves_for_backward, seed, precision: see `MicroBatch` and `Executor`.
        side: the tensors without gradient, by name.
        values: outputs of operators that nothing has freed.
        events: by values that nothing has waited for, their communication.
        ahead: values from operators that are issued ahead.
        contexts: the state that operators save.
        shared: the state that operators share.
        given: gradients from outside, added to the program's gradients before an operator first reads them.
    """

    key: tuple[int, int]
    side: Mapping[str, Any]
    saves_for_backward: bool
    seed: int
    precision: Precision
    values: dict[Key, Any] = field(default_factory=dict)
    events: dict[Key, Event] = field(default_factory=dict)
    ahead: set[Key] = field(default_factory=set)
    contexts: dict[tuple[int, str], OperatorContext] = field(default_factory=dict)
    shared: dict[object, Any] = field(default_factory=dict)
    given: dict[Key, Tensor] = field(default_factory=dict)

    def context_of(self, index: int, operator: str, unit: Unit) -> OperatorContext:
        """Returns the state of an operator of a unit for this micro-batch.

        Args:
            index: of the unit in the layout.
            operator: the name of the declared operator.
            unit: the unit.
        """
        ctx = self.contexts.get((index, operator))
        if ctx is None:
            seed = derive_seed(self.seed, *self.key, unit.label, operator)
            ctx = OperatorContext(self.side, seed, self.saves_for_backward, self.precision, shared=self.shared)
            self.contexts[index, operator] = ctx
        return ctx


def derive_seed(*parts: object) -> int:
    """Returns a seed that depends only on the parts; the same on every platform."""
    text = "/".join(map(str, parts)).encode()
    return zlib.crc32(text) << 31 ^ zlib.adler32(text)
