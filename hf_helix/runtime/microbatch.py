"""Strands: micro-batches on their way through the units.

In:   the side inputs of a micro-batch, made when its first operator runs.
Out:  the values that are alive, the communication not yet waited for, and what operators keep for backward.
Must hold: nothing of a micro-batch exists before its first operator or after its last.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_helix.operators.base import Call, Precision
from hf_helix.operators.unit import Unit
from hf_helix.planning.window.layout import Key
from hf_helix.runtime.streams import Event


@dataclass(frozen=True)
class MicroBatch:
    """A slice of the batch.

    Attributes:
        prepare: makes the tensors that carry no gradient, by name (ids, targets, masks, positions).
        key: where it stands in the run, (optimizer step, place in the window); seeds derive from it.
        num_tokens: how many tokens it holds, for figures.
        shape: of its token ids as text, such as "2 x 256"; times are measured for it.
    """

    prepare: Callable[[], Mapping[str, Any]]
    key: tuple[int, int]
    num_tokens: int = 0
    shape: str = ""


@dataclass(slots=True)
class Strand:
    """One micro-batch, from its first operator to its last.

    Attributes:
        key, training, seed, precision: as of `MicroBatch` and `Executor`.
        side: the tensors that carry no gradient, by name.
        values: what its operators have written and nothing has freed.
        events: of those of `values` that nothing has waited for, the communication that brings them.
        ahead: values that come from operators which are issued ahead.
        calls: what operators keep for it.
        shared: what they share.
    """

    key: tuple[int, int]
    side: Mapping[str, Any]
    training: bool
    seed: int
    precision: Precision
    values: dict[Key, Tensor] = field(default_factory=dict)
    events: dict[Key, Event] = field(default_factory=dict)
    ahead: set[Key] = field(default_factory=set)
    calls: dict[tuple[int, str], Call] = field(default_factory=dict)
    shared: dict[object, Any] = field(default_factory=dict)

    def call(self, index: int, operator: str, unit: Unit) -> Call:
        """What an operator of a unit keeps for this micro-batch.

        Args:
            index: of the unit in the layout.
            operator: the name of the declared operator.
            unit: that it belongs to.
        """
        call = self.calls.get((index, operator))
        if call is None:
            seed = derive_seed(self.seed, *self.key, unit.label, operator)
            call = Call(self.side, seed, self.training, self.precision, shared=self.shared)
            self.calls[index, operator] = call
        return call


def derive_seed(*parts: object) -> int:
    """A seed that depends on nothing but its parts; the same on every platform."""
    text = "/".join(map(str, parts)).encode()
    return zlib.crc32(text) << 31 ^ zlib.adler32(text)
