"""The memory of a rank: by part, in bytes.

In:   a rank's weights, how replicas shard them, and the peak of a window.
Out:  `Memory`.
Must hold: trained weights, gradients and states are in fp32, frozen weights in the type of the loaded model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from hf_helix.doctor.amounts.amounts import Amounts, Weights
from hf_helix.planning.schedule.memory import Peak
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.passes import BUCKET_BYTES

PARAMETER, GRADIENT, STATES = 4, 4, 8
"""Bytes of an element: trained weights and gradients in fp32, and the two states of Adam."""

ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of an element of cast weights, by the type of matrix products


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank."""

    weights: float  # parameters, or the rank's shard of parameters
    gradients: float
    states: float
    copies: float  # copies of weights during a window: cast to the type of matrix products, or gathered
    activations: float  # peak of activations and workspace
    buffers: float  # buffers of gradient reduction

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Returns the bytes by part."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True)
class Sharing:
    """How replicas of a parameter and of an expert shard states and trained weights (ZeRO-1), or all (ZeRO-3)."""

    copies: int = 1
    expert_copies: int = 1
    states: bool = False
    parameters: bool = False
    state_bytes: float = STATES  # of an element
    on_host: bool = False  # whether trained weights and states lie on the host
    copy_bytes: int = 0  # of an element of these weights on the device between uses; 0 for weights that uses copy

    def part_of(self, held: Weights) -> float:
        """Returns the number of trained elements of a rank, given its unsharded weights."""
        if not self.states and not self.parameters:
            return held.all_trained
        return held.trained / self.copies + held.experts / self.expert_copies

    def frozen_bytes_of(self, held: Weights) -> float:
        """Returns the bytes of frozen weights of a rank, given its unsharded weights."""
        if self.on_host and not self.copy_bytes:
            return 0.0
        if not self.parameters:
            return held.frozen_itemsize * held.all_frozen
        return held.frozen_itemsize * (held.frozen / self.copies + held.frozen_experts / self.expert_copies)


def bytes_text(count: float) -> str:
    """Returns bytes as text in a readable unit, like "43.7 GB"."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def needs_text(needed: float, budget: float) -> str:
    """Returns why bytes do not fit."""
    more = f", {bytes_text(needed - budget)} too much" if bytes_text(needed) == bytes_text(budget) else ""
    return f"needs {bytes_text(needed)} of a device that has {bytes_text(budget)}{more}, with all that saves memory"


def held_weights(amounts: Amounts, layout: Layout, rank: int) -> Weights:
    """Returns the full parameters of a pipeline rank."""
    names = [layout.units[unit] for unit in layout.units_of(rank)]
    weights = [amounts.weights[name] for name in names if name in amounts.weights]
    return Weights(
        trained=sum(each.trained for each in weights),
        experts=sum(each.experts for each in weights),
        frozen=sum(each.frozen for each in weights),
        frozen_experts=sum(each.frozen_experts for each in weights),
        frozen_itemsize=max((each.frozen_itemsize for each in weights), default=PARAMETER),
    )


def memory_of(amounts: Amounts, layout: Layout, rank: int, peak: Peak, sharing: Sharing) -> Memory:
    """Returns the memory of a pipeline rank.

    Args:
        amounts: the amounts of a rank.
        layout: the units of all ranks.
        rank: the pipeline rank.
        peak: the peak of its window.
        sharing: how replicas share weights and states.
    """
    held, on_host = held_weights(amounts, layout, rank), sharing.on_host
    trained, mine = held.all_trained, sharing.part_of(held)
    names = [layout.units[unit] for unit in layout.units_of(rank)]
    copies: float = sum(amounts.copies.get(name, 0) for name in names) + peak.weights
    gradients: float = GRADIENT * trained
    buffers: float = 0
    if sharing.parameters:
        gradients, copies = GRADIENT * mine + peak.gradients, copies + sharing.copy_bytes * mine
    elif sharing.states or on_host:  # a gradient reduction holds the gradients of a unit in a second buffer
        gradients += 0 if on_host else GRADIENT * mine
        copies += _unsharded_bytes(amounts, names, sharing)
        units = [amounts.weights[name] for name in names if name in amounts.weights]
        buffers = GRADIENT * max((each.all_trained for each in units), default=0)
    elif sharing.copies > 1:
        buffers = min(BUCKET_BYTES, GRADIENT * trained)
    return Memory(
        weights=(0 if on_host else PARAMETER * mine) + sharing.frozen_bytes_of(held),
        gradients=gradients,
        states=0 if on_host else sharing.state_bytes * mine,
        copies=copies,
        activations=peak.activations,
        buffers=buffers,
    )


def _unsharded_bytes(amounts: Amounts, names: Sequence[str], sharing: Sharing) -> float:
    """Returns the bytes of full fp32 weights outside this rank's shard on the device; other types count as copies
    already."""
    total = 0.0
    for kept in amounts.kept:
        if kept.element_bytes == PARAMETER:
            ranks = sharing.expert_copies if kept.is_experts else sharing.copies
            total += names.count(kept.units[0]) * kept.bytes * (1 if sharing.on_host else 1 - 1 / ranks)
    return total
