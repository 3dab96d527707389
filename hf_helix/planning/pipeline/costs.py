"""What the virtual stages of a pipeline cost: seconds of F, I and W, of transfers, and what fusing two slots gains.

In:   seconds, or a profile.
Out:  `Costs`.
Must hold: every virtual stage has a time for each part, and the times are possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_helix.planning.graph.operator import Kind, Operator, Part
from hf_helix.planning.graph.pair import SEND
from hf_helix.planning.pipeline.actions import Action, Slot
from hf_helix.planning.profile import Profile

USUAL_GAIN = 1.2  # of forward beside backward, where nothing is measured


@dataclass(frozen=True)
class Costs:
    """The seconds that the parts of each virtual stage take alone.

    Attributes:
        forward: seconds of F, of each virtual stage.
        input: seconds of I, of each virtual stage.
        weight: seconds of W, of each virtual stage; a B takes I and W.
        transfer: seconds from the end of an action to its arrival on another rank.
        gain: a fused slot takes the sum of its two actions divided by this, but no less than the longer of them.
    """

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    transfer: float = 0.0
    gain: float = 1.0

    def __post_init__(self) -> None:
        parts = (self.forward, self.input, self.weight)
        numbers = [self.transfer, *(seconds for part in parts for seconds in part)]
        if len({len(part) for part in parts}) != 1:
            raise ValueError(f"costs need a number for each virtual stage in every part; got {[len(p) for p in parts]}")
        if not all(0 <= seconds < math.inf for seconds in numbers) or sum(self.forward) <= 0:
            raise ValueError("costs need times of at least 0, and a forward that takes more; such as 1, 1 and 1")
        if not 0 < self.gain < math.inf:
            raise ValueError(f"gain={self.gain} must be more than 0, such as gain=1.0 where nothing is gained")

    @classmethod
    def of_layers(
        cls,
        counts: Sequence[int],
        forward: float = 1.0,
        input: float = 1.0,
        weight: float = 1.0,
        transfer: float = 0.0,
        gain: float = 1.0,
    ) -> Costs:
        """Returns the costs of stages that hold equal layers.

        Args:
            counts: layers of each virtual stage.
            forward: seconds of a layer's F.
            input: seconds of a layer's I.
            weight: seconds of a layer's W.
            transfer: see `Costs`.
            gain: see `Costs`.
        """
        forwards, inputs, weights = ([count * seconds for count in counts] for seconds in (forward, input, weight))
        return cls(forwards, inputs, weights, transfer, gain)

    @classmethod
    def even(cls, num_stages: int) -> Costs:
        """Returns what is assumed where nothing is measured: all parts of all stages take equally long."""
        return cls.of_layers([1] * num_stages, gain=USUAL_GAIN)

    def seconds(self, action: Action) -> float:
        """Returns the seconds of an action alone."""
        if action.computation_type == "F":
            return self.forward[action.stage]
        inputs = self.input[action.stage] if action.computation_type in "BI" else 0.0
        return inputs + (self.weight[action.stage] if action.computation_type in "BW" else 0.0)

    def slot_seconds(self, slot: Slot) -> float:
        """Returns the seconds that a slot takes."""
        alone = [self.seconds(action) for action in slot.actions]
        return max(sum(alone) / self.gain, *alone) if slot.fused else sum(alone)


def part_of(op: Operator) -> str:
    """Returns the part of a stage's work that an operator belongs to: "F", "I" or "W"."""
    return "F" if op.part is Part.F else "W" if op.part is Part.W else "I"


def stage_costs(profile: Profile) -> Costs:
    """Returns the costs of the virtual stages of a profile's layout: its operators' times, one after the other.

    The gain is what two strands could gain at most: the time of all operators over that of the busiest kind.
    """
    layout = profile.layout
    totals: dict[tuple[int, str], float] = {}
    loads = dict.fromkeys(Kind, 0.0)
    for stage, chunk in layout.chunks.items():
        for unit in chunk:
            if layout.transfers(unit):
                continue
            name = layout.units[unit]
            for entry, op in layout.graphs[name].entries():
                part, seconds = part_of(op), profile.times[name, entry]
                totals[stage, part] = totals.get((stage, part), 0.0) + seconds
                loads[op.kind] += seconds
    forward, inputs, weights = ([totals.get((stage, part), 0.0) for stage in layout.chunks] for part in "FIW")
    transfer = profile.times.get((SEND, "F.transfer"), 0.0)
    return Costs(forward, inputs, weights, transfer, sum(loads.values()) / max(loads.values()))
