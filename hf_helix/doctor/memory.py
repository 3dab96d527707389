"""The memory of a rank: by part, in bytes.

In:   a rank's weights, a case, whose options say how replicas shard them, and the peak of a window.
Out:  `Memory`.
Must hold: trained weights, gradients and states are in fp32, frozen weights in the type of the loaded model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from hf_helix.doctor.amounts.amounts import Amounts, Weights
from hf_helix.doctor.case import ELEMENT, GRADIENT, PARAMETER, Case
from hf_helix.planning.schedule.memory import Peak
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.passes import BUCKET_BYTES


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


def frozen_bytes(held: Weights, case: Case) -> float:
    """Returns the bytes of frozen weights of a rank, given its unsharded weights."""
    if case.streams_weights:
        return 0.0
    ranks = case.spread_weights
    elements = held.frozen / ranks.get(COPIES, 1) + held.frozen_experts / ranks.get(EXPERT_COPIES, 1)
    return held.frozen_itemsize * elements


def memory_of(amounts: Amounts, layout: Layout, rank: int, peak: Peak, case: Case) -> Memory:
    """Returns the memory of a pipeline rank.

    Args:
        amounts: the amounts of a rank.
        layout: the units of all ranks.
        rank: the pipeline rank.
        peak: the peak of its window.
        case: the case, whose options say where weights and states lie.
    """
    held, on_host = held_weights(amounts, layout, rank), bool(case.offload)
    trained, mine = held.all_trained, case.stepped(held.trained, held.experts)
    names = [layout.units[unit] for unit in layout.units_of(rank)]
    copies: float = sum(amounts.copies.get(name, 0) for name in names) + peak.weights
    gradients: float = GRADIENT * trained
    buffers: float = 0
    if case.spread_weights:
        gradients, copies = GRADIENT * mine + peak.gradients, copies + case.keeps_copies * ELEMENT[case.dtype] * mine
    elif case.spread_gradients or on_host:  # a gradient reduction holds the gradients of a unit in a second buffer
        gradients += 0 if on_host else GRADIENT * mine
        copies += _unsharded_bytes(amounts, names, case)
        units = [amounts.weights[name] for name in names if name in amounts.weights]
        buffers = GRADIENT * max((each.all_trained for each in units), default=0)
    elif case.sizes.copies > 1:
        buffers = min(BUCKET_BYTES, GRADIENT * trained)
    return Memory(
        weights=(0 if on_host else PARAMETER * mine) + frozen_bytes(held, case),
        gradients=gradients,
        states=0 if on_host else case.state_bytes * mine,
        copies=copies,
        activations=peak.activations,
        buffers=buffers,
    )


def _unsharded_bytes(amounts: Amounts, names: Sequence[str], case: Case) -> float:
    """Returns the bytes of full fp32 weights outside this rank's shard on the device; other types count as copies
    already."""
    total = 0.0
    for kept in amounts.kept:
        if kept.element_bytes == PARAMETER:
            ranks = case.spread_gradients.get(kept.axis, 1)
            total += names.count(kept.units[0]) * kept.bytes * (1 if case.offload else 1 - 1 / ranks)
    return total
