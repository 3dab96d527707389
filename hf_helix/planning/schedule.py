"""Schedules: what each rank runs in each slot, as data.

In:   a schedule's name, the number of pipeline ranks P and of micro-batches M.
Out:  per rank a list of `Slot`s, each with the action that runs forward and the one that runs backward beside it.
Must hold: `validate` knows nothing of the builders. The text form is torch.distributed.pipelining's:
`0F2` is virtual stage 0, forward, micro-batch 2; `(0F3;1B0)OVERLAP_F_B` is a fused slot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_helix.planning.fold import chunks_of_rank

_ACTION = re.compile(r"^(\d+)([FB])(\d+)$")
_FUSED = re.compile(r"^\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B$")


@dataclass(frozen=True, order=True)
class Action:
    """One micro-batch through one virtual stage, forward ("F") or backward ("B")."""

    stage: int
    direction: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.direction}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = _ACTION.match(text)
        if match is None:
            raise ValueError(f"not an action: {text!r}; one looks like '0F2' (stage 0, forward, micro-batch 2)")
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Slot:
    """What a rank runs at once: a forward action, a backward action, or one beside the other."""

    forward: Action | None = None
    backward: Action | None = None

    @property
    def actions(self) -> tuple[Action, ...]:
        return tuple(action for action in (self.forward, self.backward) if action is not None)

    def __str__(self) -> str:
        if self.forward and self.backward:
            return f"({self.forward};{self.backward})OVERLAP_F_B"
        return str(self.forward or self.backward)

    @classmethod
    def parse(cls, text: str) -> Slot:
        fused = _FUSED.match(text)
        actions = [Action.parse(part) for part in (fused.groups() if fused else (text,))]
        by_direction = {action.direction: action for action in actions}
        return cls(by_direction.get("F"), by_direction.get("B"))


Schedule = list[list[Slot]]
"""Per rank, its slots in order."""


def w_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """The paper's W-shaped schedule on a folded placement (section 4.1, figure 8), for any M.

    Over global slot numbers t, rank r runs: F of chunk 0 at 2k+r; F of chunk 1 at 2k+2P-1-r; B of chunk 1 at
    2P+2k+r; B of chunk 0 at 4P+2k-1-r. With M >= P that makes 4P+2M-2 slots of which 2(M-P) a rank are fused.
    """
    schedule = []
    for rank in range(num_ranks):
        down, up = rank, 2 * num_ranks - 1 - rank
        forward, backward = {}, {}
        for k in range(num_microbatches):
            forward[2 * k + rank] = Action(down, "F", k)
            forward[2 * k + 2 * num_ranks - 1 - rank] = Action(up, "F", k)
            backward[2 * num_ranks + 2 * k + rank] = Action(up, "B", k)
            backward[4 * num_ranks + 2 * k - 1 - rank] = Action(down, "B", k)
        times = sorted(forward.keys() | backward.keys())
        schedule.append([Slot(forward.get(time), backward.get(time)) for time in times])
    return schedule


BUILDERS = {"w": w_schedule}


def build_schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule called `name`, validated.

    Raises:
        ValueError: an unknown name, or fewer than one rank or micro-batch.
    """
    if name not in BUILDERS or num_ranks < 1 or num_microbatches < 1:
        raise ValueError(
            f"no schedule {name!r} for {num_ranks} ranks and {num_microbatches} micro-batches; "
            f"schedules: {', '.join(BUILDERS)}, with at least one of each"
        )
    schedule = BUILDERS[name](num_ranks, num_microbatches)
    validate(schedule, num_microbatches)
    return schedule


def validate(schedule: Schedule, num_microbatches: int) -> None:
    """Run the schedule on paper: each action once, where its stage is, after what it needs; no rank waits for ever.

    Raises:
        ValueError: with the whole schedule printed and an arrow at the first slot that can never run.
    """
    num_stages = 2 * len(schedule)
    expected = [
        {Action(s, d, m) for s in chunks_of_rank(r, len(schedule)) for d in "FB" for m in range(num_microbatches)}
        for r in range(len(schedule))
    ]
    done: set[Action] = set()
    position = [0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for rank, slots in enumerate(schedule):
            held = expected[rank]
            while position[rank] < len(slots) and _can_run(slots[position[rank]], done, held, num_stages):
                done.update(slots[position[rank]].actions)
                position[rank] += 1
                progress = True
    stuck = {rank: place for rank, place in enumerate(position) if place < len(schedule[rank])}
    if stuck:
        raise ValueError("the schedule cannot run past the slots marked '>>>':\n" + format_schedule(schedule, stuck))
    missing_actions = set().union(*expected) - done
    if missing_actions:
        missing = ", ".join(str(action) for action in sorted(missing_actions)[:8])
        raise ValueError(f"the schedule never runs {missing}:\n{format_schedule(schedule)}")


def _can_run(slot: Slot, done: set[Action], held: set[Action], num_stages: int) -> bool:
    return bool(slot.actions) and all(
        action in held and action not in done and _needs(action, num_stages) <= done for action in slot.actions
    )


def _needs(action: Action, num_stages: int) -> set[Action]:
    stage, microbatch = action.stage, action.microbatch
    if action.direction == "F":
        return {Action(stage - 1, "F", microbatch)} if stage > 0 else set()
    needed = {Action(stage, "F", microbatch)}
    if stage < num_stages - 1:
        needed.add(Action(stage + 1, "B", microbatch))
    return needed


def format_schedule(schedule: Schedule, marked: dict[int, int] | None = None) -> str:
    """One line per rank; `marked` maps a rank to the slot that gets an arrow."""
    lines = []
    for rank, slots in enumerate(schedule):
        mark = (marked or {}).get(rank)
        cells = [f">>> {slot}" if place == mark else str(slot) for place, slot in enumerate(slots)]
        lines.append(f"rank {rank}: " + " ".join(cells))
    return "\n".join(lines)
