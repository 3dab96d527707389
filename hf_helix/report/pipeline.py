"""Pipelines: the ranks of a schedule, as text.

In:   simulated schedules.
Out:  a row for every rank, to scale, with bubbles, fused slots and peak memory; tables.
Must hold: idle time stays visible.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import groupby

from hf_helix.planning.schedule.actions import Action, Slot
from hf_helix.planning.schedule.placement import stages_of_rank
from hf_helix.planning.schedule.slot_clock import Simulated

LEGEND = """F forward   B backward   I input gradient   W weight gradient   X forward beside backward
small letters: further chunks   · idle"""


def chunk_of(simulated: Simulated, action: Action) -> int:
    """Returns the number of the chunk of an action on its rank."""
    return stages_of_rank(simulated.ranks[action.stage], simulated.ranks).index(action.stage)


def text_ranks(simulated: Simulated) -> str:
    """Returns a line for every rank: bubble, fused slots, activations."""
    lines = [f"{'':<8}{'bubble':>8}{'fused':>7}{'live activations':>18}{'in stage-shares':>17}"]
    for rank, bubble in enumerate(simulated.bubbles):
        numbers = f"{bubble:>8.1%}{simulated.fused[rank]:>7}{simulated.live[rank]:>18}{simulated.shares[rank]:>17.2f}"
        lines.append(f"{f'rank {rank}':<8}{numbers}")
    return "\n".join(lines)


def text_comparison(simulations: Mapping[str, Simulated]) -> str:
    """Returns a line for every schedule, with the numbers of its worst rank."""
    lines = [f"{'schedule':<24}{'time':>10}{'bubble':>8}{'fused':>7}{'live activations':>18}{'in stage-shares':>17}"]
    for name, simulated in simulations.items():
        numbers = f"{simulated.seconds:>10,.2f}{simulated.bubble:>8.1%}{max(simulated.fused):>7}"
        lines.append(f"{name:<24}{numbers}{max(simulated.live):>18}{max(simulated.shares):>17.2f}")
    return "\n".join(lines)


def text_pipeline(simulated: Simulated, width: int = 100) -> str:
    """Returns a row for every rank, micro-batch numbers where there is room; all columns are equally long."""
    names = [f"rank {rank}  " for rank in range(len(simulated.schedule))]
    margins = [f"  {bubble:4.0%} idle" for bubble in simulated.bubbles]
    columns = max(10, width - len(names[-1]) - len(margins[0]))
    lines = [
        f"{name:<{len(names[-1])}}{''.join(_cells(simulated, rank, columns))}{margins[rank]}"
        for rank, name in enumerate(names)
    ]
    return "\n".join([*lines, LEGEND])


def _cells(simulated: Simulated, rank: int, columns: int) -> Iterator[str]:
    """The texts of the slots of a rank in order; a column shows the slot at its middle."""
    step = simulated.seconds / columns
    starts, ends = simulated.starts[rank], simulated.ends[rank]

    def place(column: int) -> int | None:
        time = (column + 0.5) * step
        slot = bisect_right(starts, time) - 1
        return slot if slot >= 0 and time < ends[slot] else None

    for slot, group in groupby(range(columns), place):
        size = len(list(group))
        yield "·" * size if slot is None else _cell(simulated, simulated.schedule[rank][slot], size)


def _cell(simulated: Simulated, slot: Slot, size: int) -> str:
    """The longest name of a slot that fits, filled up with dashes."""
    letters = [a.computation_type.lower() if chunk_of(simulated, a) else a.computation_type for a in slot.actions]
    full = "".join(f"{letter}{a.microbatch}" for letter, a in zip(letters, slot.actions, strict=True))
    short = "X" if slot.fused else letters[0]
    return f"{full if len(full) <= size else short:─<{size}}"
