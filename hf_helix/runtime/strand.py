"""Strands: micro-batches on their way through the units.

In:   the side inputs of a micro-batch.
Out:  per unit a `UnitRun`, the values that are alive, the communication not yet waited for, and what operators keep.
Must hold: a value is dropped with its last reader; nothing of a micro-batch outlives its backward.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_helix.operators.base import Call
from hf_helix.operators.unit import Unit
from hf_helix.runtime.streams import Event


@dataclass(frozen=True)
class MicroBatch:
    """A slice of the batch.

    Attributes:
        side: tensors that carry no gradient, by name.
        key: where it stands in the run, (optimizer step, place in the window); seeds derive from it.
    """

    side: Mapping[str, Any]
    key: tuple[int, int]


@dataclass(slots=True)
class UnitRun:
    """One unit for one micro-batch, from its forward to the end of its backward."""

    unit: Unit
    microbatch: MicroBatch
    training: bool
    seed: int
    values: dict[str, Tensor] = field(default_factory=dict)
    events: dict[str, Event] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)

    def call(self, operator: str) -> Call:
        """What operator `operator` keeps for this micro-batch."""
        found = self.calls.get(operator)
        if found is None:
            seed = derive_seed(self.seed, *self.microbatch.key, self.unit.label, operator)
            found = self.calls[operator] = Call(self.microbatch.side, seed, self.training)
        return found

    def take(self, names: tuple[str, ...]) -> Carried:
        """Remove values that leave the unit, with the communication that still fills them."""
        return Carried(
            [self.values.pop(name) for name in names],
            [self.events.pop(name, None) for name in names],
        )

    def give(self, names: tuple[str, ...], carried: Carried) -> None:
        """Values that enter the unit."""
        for name, value, event in zip(names, carried.values, carried.events, strict=True):
            self.values[name] = value
            if event is not None:
                self.events[name] = event


@dataclass(slots=True)
class Carried:
    """Values between two units, and the communication that still fills them."""

    values: list[Tensor]
    events: list[Event | None]


def derive_seed(*parts: object) -> int:
    """A seed that depends on nothing but its parts; the same on every platform."""
    text = "/".join(map(str, parts)).encode()
    return zlib.crc32(text) << 31 ^ zlib.adler32(text)
