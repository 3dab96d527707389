"""The programs of a decoder that is called: a window in three kinds of programs, with the loss between them.

In:   a plan, the forward schedule of one call, and a layout whose last unit ends at the decoder's output.
Out:  `CallPrograms`: the program of a call's forward pass, single and overlapped with the backward pass of an earlier
      call, and of a single backward pass.
Must hold: a program contains every operator of its passes, so that the caller's code runs between two programs. On the
fold, a forward slot of stage t is overlapped with the backward slot of stage S-1-t, which lies on the same rank and has
the same position in the mirrored order; so every forward schedule gives a schedule of both.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.program import free_values
from hf_helix.planning.schedule.actions import Action, Schedule, Slot, num_microbatches_of
from hf_helix.planning.schedule.placement import FOLD
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Key, Layout


@dataclass(frozen=True, eq=False)
class CallPrograms:
    """The programs of one rank. The pieces of a call are micro-batches: 0 to n-1 of the call that goes backward, n to
    2n-1 of the call that goes forward.

    Attributes:
        forward: a single forward pass.
        both: a forward pass overlapped with the backward pass of an earlier call, with the gradient reductions of every
            micro-batch.
        backward: a single backward pass, with the gradient reductions.
    """

    forward: Sequence[Instruction]
    both: Sequence[Instruction]
    backward: Sequence[Instruction]

    @cached_property
    def read_backward(self) -> Collection[Key]:
        """The values that a backward pass reads."""
        return {key for each in self.backward for key in each.needs}


def build_call_programs(
    plan: Plan,
    forward: Schedule,
    layout: Layout,
    rank: int,
    outputs: Collection[Key],
    placement: str,
    slots_ahead: int = 1,
) -> CallPrograms:
    """Returns the programs of a rank, from the forward slots of one call of every rank.

    The programs never free `outputs`, which the caller reads. Where the placement of the virtual stages is no fold, the
    passes of `both` follow each other.
    """
    count = num_microbatches_of(forward)
    within = layout if layout.reduces_often else layout.without_reductions

    def instructions(schedule: Schedule, of: Layout) -> list[Instruction]:
        return plan.issue(schedule, of, slots_ahead, None if plan.BY_TIMES else rank).program(rank)

    begin = instructions(moved_by(forward, count), within)
    both = instructions(schedule_of_both(forward, placement), within)
    end = instructions(mirrored(forward), layout.without_gathers)
    parts = [_shifted(begin, -count), both, _shifted(end, count)]
    freed = free_values([each for part in parts for each in part], outputs)
    first, second = len(begin), len(begin) + len(both)
    return CallPrograms(_shifted(freed[:first], count), freed[first:second], _shifted(freed[second:], -count))


def schedule_of_both(forward: Schedule, placement: str) -> Schedule:
    """Returns the schedule of a forward pass overlapped with a backward pass, see `CallPrograms`."""
    later, back_again = moved_by(forward, num_microbatches_of(forward)), mirrored(forward)
    if placement != FOLD:
        return [[*back, *ahead] for ahead, back in zip(later, back_again, strict=True)]
    empty = Slot()
    return [
        [Slot(ahead.forward, back.backward) for ahead, back in zip_longest(*slots, fillvalue=empty)]
        for slots in zip(later, back_again, strict=True)
    ]


def moved_by(forward: Schedule, later: int) -> Schedule:
    """Returns a forward schedule with larger numbers of micro-batches."""
    return [[slot.later(later) for slot in slots] for slots in forward]


def mirrored(forward: Schedule) -> Schedule:
    """Returns the backward schedule of a forward schedule: the stages in reverse, on the same ranks if folded."""
    last = max(action.stage for slots in forward for slot in slots for action in slot.actions)
    ranks: dict[int, int] = {}
    for rank, slots in enumerate(forward):
        ranks.update({action.stage: rank for slot in slots for action in slot.actions})
    result: Schedule = [[] for _ in forward]
    for slots in forward:
        for slot in slots:
            assert slot.forward is not None
            stage = last - slot.forward.stage
            result[ranks[stage]].append(Slot(backward=Action(stage, "B", slot.forward.microbatch)))
    return result


def _shifted(instructions: Sequence[Instruction], later: int) -> list[Instruction]:
    """Returns instructions with other numbers of micro-batches; instructions of a step and barriers stay."""
    return [
        each.of(each.microbatch + later) if each.operator is not None and not each.is_traffic else each
        for each in instructions
    ]
