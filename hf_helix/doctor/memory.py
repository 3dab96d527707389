"""The memory of a rank: by part, in bytes.

In:   what it holds of the model, what ranks share of it, and the peak of a window.
Out:  `Memory`.
Must hold: trained weights, gradients and states are in fp32; frozen weights in the type in which they were loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from hf_helix.doctor.amounts.amounts import Amounts, Weights
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.passes import BUCKET_BYTES

PARAMETER, GRADIENT, STATES = 4, 4, 8
"""Bytes of an element: trained weights and gradients in fp32, and the two states of Adam."""

ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of an element by the type of matrix products, of weights that operators compute with."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank.

    Attributes:
        weights: parameters; where they are spread, this rank's part.
        gradients: of the trained ones.
        states: of the optimizer.
        copies: of weights during a window: in the type of matrix products, or gathered.
        activations: the most that a window keeps and works with.
        buffers: of sums of gradients.
    """

    weights: float
    gradients: float
    states: float
    copies: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """Returns the sum of all parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Returns the bytes by part."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True)
class Peak:
    """What is alive in a window when most is, beside what there is between windows, in bytes.

    Attributes:
        activations: what operators keep and work with.
        weights: gathered weights, and copies of these.
        gradients: those that are in nobody's part yet, where weights are spread.
    """

    activations: int = 0
    weights: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        """Returns the sum of all."""
        return self.activations + self.weights + self.gradients


@dataclass(frozen=True)
class Sharing:
    """What ranks that hold copies of the model keep of it.

    Attributes:
        copies: ranks with copies of a parameter.
        expert_copies: ranks with copies of an expert.
        states: whether each keeps a part of the optimizer's states, and of the weights that it steps.
        parameters: whether each keeps a part of everything.
    """

    copies: int = 1
    expert_copies: int = 1
    states: bool = False
    parameters: bool = False

    def part_of(self, held: Weights) -> float:
        """Returns how many of the trained elements that a rank would hold by itself are its own."""
        if not self.states and not self.parameters:
            return held.all_trained
        return held.trained / self.copies + held.experts / self.expert_copies

    def frozen_bytes_of(self, held: Weights) -> float:
        """Returns how many bytes of the weights that get no gradients, which a rank would hold by itself, it keeps."""
        if not self.parameters:
            return held.frozen_itemsize * held.all_frozen
        return held.frozen_itemsize * (held.frozen / self.copies + held.frozen_experts / self.expert_copies)


def bytes_text(count: float) -> str:
    """Returns bytes in a unit in which they can be read, such as "43.7 GB"."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def held_weights(amounts: Amounts, layout: Layout, rank: int) -> Weights:
    """Returns the parameters of a pipeline rank, as if none were spread."""
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
    """Returns the memory of a pipeline rank."""
    held = held_weights(amounts, layout, rank)
    trained, mine = held.all_trained, sharing.part_of(held)
    names = [layout.units[unit] for unit in layout.units_of(rank)]
    copies: float = sum(amounts.copies.get(name, 0) for name in names)
    gradients: float = GRADIENT * trained
    buffers: float = 0
    if sharing.parameters:
        gradients, copies = GRADIENT * mine + peak.gradients, copies + peak.weights
    elif sharing.states:  # the gradients of a unit are in one piece more while they are summed
        gradients, copies = gradients + GRADIENT * mine, copies + _kept_by_others(amounts, names, sharing)
        units = [amounts.weights[name] for name in names if name in amounts.weights]
        buffers = GRADIENT * max((each.all_trained for each in units), default=0)
    elif sharing.copies > 1:
        buffers = min(BUCKET_BYTES, GRADIENT * trained)
    return Memory(
        weights=PARAMETER * mine + sharing.frozen_bytes_of(held),
        gradients=gradients,
        states=STATES * mine,
        copies=copies,
        activations=peak.activations,
        buffers=buffers,
    )


def _kept_by_others(amounts: Amounts, names: Sequence[str], sharing: Sharing) -> float:
    """Returns the bytes of those weights of some units, kept as they are trained, that other ranks step. Weights that
    are kept in the type of matrix products are copies already."""
    total = 0.0
    for kept in amounts.kept:
        if kept.element_bytes == PARAMETER:
            ranks = sharing.expert_copies if kept.is_experts else sharing.copies
            total += names.count(kept.units[0]) * kept.bytes * (1 - 1 / ranks)
    return total
