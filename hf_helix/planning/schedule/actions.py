"""Actions and slots: a schedule as data, and its text.

In:   actions, or the text of a schedule.
Out:  per rank a list of `Slot`s, each with a forward action, a backward action, or both.
Must hold: text and data say the same. The text of a slot is torch.distributed.pipelining's: `0F2` is virtual stage 0,
forward, micro-batch 2; `0B2` its backward, or apart `0I2` for the input gradient and `0W2` for the weight gradients;
`(0F3;1B0)OVERLAP_F_B` is a fused slot. A schedule is a line for every rank, `rank 0: 0F0 0F1 ...`, or torch's CSV.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_ACTION = re.compile(r"^(\d+)([FBIW])(\d+)$")
_FUSED = re.compile(r"^\((\d+F\d+);(\d+[BIW]\d+)\)OVERLAP_F_B$")
_MADE_BY_THE_RUNNER = re.compile(r"^\d+(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*$")
_WORD = re.compile(r"[^\s,]+")
_RANK = re.compile(r"\s*rank\s+(\d+)\s*:")

PARTS = {"F": "F", "B": "IW", "I": "I", "W": "W"}
"""The parts of each computation type: the full backward is an input gradient and a weight gradient."""


class Action(NamedTuple):
    """One micro-batch through one virtual stage."""

    stage: int  # the virtual stage
    computation_type: str  # "F" forward, "B" backward, or its parts "I" (input gradient) and "W" (weight gradients)
    microbatch: int  # its number in the window

    def __str__(self) -> str:
        return f"{self.stage}{self.computation_type}{self.microbatch}"

    def later(self, count: int) -> Action:
        """The same action `count` micro-batches later."""
        return Action(self.stage, self.computation_type, self.microbatch + count)

    @classmethod
    def parse(cls, text: str) -> Action:
        match = _ACTION.match(text)
        if match is None:
            raise ValueError(f"not an action: {text!r}; one looks like '0F2' (stage 0, forward, micro-batch 2)")
        return cls(int(match[1]), match[2], int(match[3]))


class Slot(NamedTuple):
    """A forward action, a backward action, or both at once."""

    forward: Action | None = None
    backward: Action | None = None

    @property
    def actions(self) -> tuple[Action, ...]:
        return tuple([action for action in self if action is not None])

    @property
    def fused(self) -> bool:
        """Whether two actions run at once."""
        return self.forward is not None and self.backward is not None

    def __str__(self) -> str:
        if self.fused:
            return f"({self.forward};{self.backward})OVERLAP_F_B"
        return str(self.forward or self.backward)

    def later(self, count: int) -> Slot:
        """The same slot `count` micro-batches later."""
        return Slot(self.forward and self.forward.later(count), self.backward and self.backward.later(count))

    @classmethod
    def alone(cls, action: Action) -> Slot:
        """A slot of one action."""
        return cls(forward=action) if action.computation_type == "F" else cls(backward=action)

    @classmethod
    def parse(cls, text: str) -> Slot:
        fused = _FUSED.match(text)
        if fused:
            return cls(Action.parse(fused[1]), Action.parse(fused[2]))
        return cls.alone(Action.parse(text))


Schedule = list[list[Slot]]
"""Per rank, its slots in order."""

SyncPoints = Sequence[Sequence[int]]
"""Of each rank, slots that begin only after all earlier instructions of the rank were issued; empty for none."""


def num_microbatches_of(schedule: Schedule) -> int:
    """The number of micro-batches of a schedule."""
    return 1 + max((action.microbatch for slots in schedule for slot in slots for action in slot.actions), default=-1)


def without_microbatches(schedule: Schedule, count: int) -> Schedule:
    """Returns the schedule of the first `count` micro-batches; it can run, since micro-batches are independent."""

    def kept(action: Action | None) -> Action | None:
        return action if action is not None and action.microbatch < count else None

    return [
        [slot for slot in (Slot(kept(slot.forward), kept(slot.backward)) for slot in slots) if slot.actions]
        for slots in schedule
    ]


def format_schedule(schedule: Schedule, marked: Mapping[int, int] | None = None) -> str:
    """Returns a line for each rank; by rank, `marked` is the slot with an arrow, or the number of slots for the end."""
    lines = []
    for rank, slots in enumerate(schedule):
        cells = [str(slot) for slot in slots]
        mark = (marked or {}).get(rank)
        if mark is not None:
            cells.insert(mark, ">>>")
        lines.append(" ".join([f"rank {rank}:", *cells]))
    return "\n".join(lines)


def parse_schedule(text: str, num_ranks: int) -> Schedule:
    """Reads the output of `format_schedule`, or torch's CSV of computations: commas, empty cells, no `rank 0:`.

    Raises:
        ValueError: with the full text and an arrow at the error, if the error has a position.
    """
    schedule: Schedule = []
    for start, line in _lines(text):
        named = _RANK.match(line)
        if named and int(named[1]) != len(schedule):
            raise _misread(text, start, f"here comes the line of rank {len(schedule)}, not of rank {named[1]}")
        slots = []
        for word in _WORD.finditer(line, named.end() if named else 0):
            try:
                slots.append(Slot.parse(word[0]))
            except ValueError as error:
                raise _misread(text, start + word.start(), _advice(word[0], str(error))) from error
        schedule.append(slots)
    if len(schedule) != num_ranks:
        raise ValueError(
            f"the schedule has lines for {len(schedule)} ranks and pp_size={num_ranks} needs {num_ranks}, one for each "
            f"rank:\n{text}"
        )
    return schedule


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields every non-blank line, with the position of its start."""
    start = 0
    for line in text.splitlines(keepends=True):
        if line.strip():
            yield start, line
        start += len(line)


def _misread(text: str, place: int, problem: str) -> ValueError:
    return ValueError(f"{problem}, see '>>>':\n{text[:place]}>>> {text[place:]}")


def _advice(word: str, problem: str) -> str:
    if _MADE_BY_THE_RUNNER.match(word):
        return f"{word} is communication, which the runner adds itself; write only computations (format='compute_only')"
    return problem
