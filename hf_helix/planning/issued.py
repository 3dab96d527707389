"""Windows in the order of issue: what a plan makes of a window.

In:   a window, and the order of issue on every rank.
Out:  an `Issued`: the ranks' instructions, and the same as numbers.
Must hold: every instruction of the ranks once, each after what it reads; what is issued ahead as far ahead as it says;
sums of gradients as soon as they can be; gathers of weights that happen once first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_helix.planning.cost import COMPUTE, STREAMS, Times, Work
from hf_helix.planning.gradient_sums import add_sums, order_with_sums, sums_behind, with_sums
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.instructions import BARRIER_INSTRUCTION, Instruction
from hf_helix.planning.prefetch import prefetched
from hf_helix.planning.weight_gathers import add_gathers, order_with_gathers, with_gathers
from hf_helix.planning.window import ABSENT, Window

PIPELINE = STREAMS.index(Kind.PIPELINE)


@dataclass(frozen=True)
class Issued:
    """A window in the order of issue.

    Attributes:
        window: what the ranks run.
        orders: rank by rank, the places of the instructions in the window; ~u stands for a barrier beside unit u. Where
            gradients are summed, and where what is issued ahead is issued, follows from them.
        ends: of each instruction, when it ends by the clock that the plan ordered it with; None where the order does
            not depend on times.
    """

    window: Window
    orders: Sequence[Sequence[int]]
    ends: Sequence[float] | None = None

    def program(self, rank: int) -> list[Instruction]:
        """The instructions of a rank, with its gathers of weights in front and its sums of gradients."""
        window, order = self.window, prefetched(self.window, self.orders[rank])
        made = [
            window.instruction(place) if place >= 0 else replace(BARRIER_INSTRUCTION, unit=~place) for place in order
        ]
        summed = with_sums(made, sums_behind(window, order), window.layout)
        return with_gathers(summed, window.layout, rank) if order else summed

    def work(self, times: Times) -> tuple[Work, list[int]]:
        """The window as numbers, with barriers, sums of gradients and gathers of weights behind its
        instructions, and the order of issue.

        Raises:
            KeyError: `times` lacks an operator.
        """
        work, order = self.window.work(times), []
        ahead = self.window.pattern.ahead
        for rank, places in enumerate(self.orders):
            moving: list[int] = []
            for place in prefetched(self.window, places):
                if place >= 0:
                    if work.streams[place] not in (COMPUTE, PIPELINE) and self.window.calls[place] not in ahead:
                        moving.append(place)
                    order.append(place)
                else:
                    order.append(len(work))
                    _add_barrier(work, rank, moving)
                    moving = []
        summed, order = add_sums(work, self.window, times), order_with_sums(self.window, order, len(work))
        gathered = add_gathers(summed, self.window, times)
        return gathered, order_with_gathers(self.window.layout, order, len(summed))


def _add_barrier(work: Work, rank: int, moving: list[int]) -> None:
    """Adds a barrier at which a rank waits for these instructions."""
    work.streams.append(COMPUTE)
    work.seconds.append(0.0)
    work.needs.append(moving)
    work.entries.append(ABSENT)
    work.ranks.append(rank)
    work.lanes.append(0)
    work.size_sources.append(ABSENT)
