"""Checks a schedule by running it, slot by slot, without a model.

In:   the schedule of every rank, the number of micro-batches, and the rank of every virtual stage.
Out:  nothing, or an error that prints the schedule with an arrow at the first wrong slot.
Must hold: no code is shared with the builders of schedules and the slot clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_helix.planning.schedule.actions import PARTS, Action, Schedule, Slot, format_schedule


def validate(schedule: Schedule, num_microbatches: int, ranks: Sequence[int]) -> None:
    """Runs a schedule without a model: each action once, on its stage's rank, after its inputs; no rank is stuck.

    Every stage takes the micro-batches in order, so that gradients add up in equal order under every schedule.

    Args:
        ranks: the rank of every virtual stage.

    Raises:
        ValueError: with the full schedule printed and an arrow at the first slot that is wrong or can never run.
    """
    if len(schedule) != max(ranks) + 1:
        raise ValueError(
            f"the schedule is for {len(schedule)} ranks and the stages are on {max(ranks) + 1}:\n"
            f"{format_schedule(schedule)}"
        )
    dry_run = _DryRun(num_microbatches, ranks)
    position = [0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for rank, slots in enumerate(schedule):
            while position[rank] < len(slots):
                slot = slots[position[rank]]
                problem = dry_run.problem(slot, rank)
                if problem:
                    raise _wrong(schedule, {rank: position[rank]}, [problem])
                if dry_run.waits_for(slot):
                    break
                dry_run.run(slot)
                position[rank] += 1
                progress = True
    stuck = {rank: place for rank, place in enumerate(position) if place < len(schedule[rank])}
    if stuck:
        raise _wrong(schedule, stuck, [_waiting(schedule[rank][place], rank, dry_run) for rank, place in stuck.items()])
    missing = dry_run.missing()
    if missing:
        ends = {ranks[action.stage]: len(schedule[ranks[action.stage]]) for action in missing}
        raise _wrong(schedule, ends, [f"it never runs {', '.join(map(str, missing[:8]))}"])


def _wrong(schedule: Schedule, marked: dict[int, int], problems: Sequence[str]) -> ValueError:
    told = "\n".join(problems)
    return ValueError(f"the schedule cannot run past '>>>': {told}\n{format_schedule(schedule, marked)}")


def _waiting(slot: Slot, rank: int, dry_run: _DryRun) -> str:
    needs = ", ".join(_named(need) for need in dry_run.waits_for(slot))
    return f"rank {rank} waits for {needs} before {slot}"


def _named(need: Action) -> str:
    """Returns an action's name for errors: a full backward includes an input gradient."""
    return f"{Action(need.stage, 'B', need.microbatch)} or {need}" if need.computation_type == "I" else str(need)


class _DryRun:
    """Counts completed actions, in parts: a full backward is an input gradient and a weight gradient."""

    def __init__(self, num_microbatches: int, ranks: Sequence[int]) -> None:
        self.num_microbatches = num_microbatches
        self.ranks = ranks
        self.count = {(stage, part): 0 for stage in range(len(ranks)) for part in "FIW"}
        """Micro-batches that have run each part of each stage; they run in order, so the count is also the next one."""

    def problem(self, slot: Slot, rank: int) -> str:
        """Returns the reason why a slot can never run from here on; empty if it can."""
        if not slot.actions:
            return f"rank {rank} has an empty slot"
        return next(filter(None, (self._problem(action, rank) for action in slot.actions)), "")

    def _problem(self, action: Action, rank: int) -> str:
        if action.stage >= len(self.ranks):
            return f"{action} is of stage {action.stage}; the stages are 0 to {len(self.ranks) - 1}"
        if self.ranks[action.stage] != rank:
            return f"{action} is on rank {rank}, but rank {self.ranks[action.stage]} holds stage {action.stage}"
        if action.microbatch >= self.num_microbatches:
            return f"{action} is of micro-batch {action.microbatch}; they are 0 to {self.num_microbatches - 1}"
        following = [self.count[action.stage, part] for part in PARTS[action.computation_type]]
        if action.microbatch < max(following):
            return f"{action} runs twice, or after a later micro-batch; each stage takes them in order"
        if action.microbatch > min(following):
            return f"{action} runs before micro-batch {min(following)}; each stage takes them in order"
        return ""

    def waits_for(self, slot: Slot) -> list[Action]:
        """The missing inputs of a slot."""
        needs = {need for action in slot.actions for need in self._needs(action)}
        return sorted(need for need in needs if self.count[need.stage, need.computation_type] <= need.microbatch)

    def _needs(self, action: Action) -> list[Action]:
        stage, microbatch = action.stage, action.microbatch
        if action.computation_type == "F":
            return [Action(stage - 1, "F", microbatch)] if stage > 0 else []
        if action.computation_type == "W":
            return [Action(stage, "I", microbatch)]
        after = [Action(stage + 1, "I", microbatch)] if stage < len(self.ranks) - 1 else []
        return [Action(stage, "F", microbatch), *after]

    def run(self, slot: Slot) -> None:
        """Counts a slot."""
        for action in slot.actions:
            for part in PARTS[action.computation_type]:
                self.count[action.stage, part] += 1

    def missing(self) -> list[Action]:
        """Returns the actions that never ran; a missing I with its missing W as a B."""
        actions = []
        for stage in range(len(self.ranks)):
            for microbatch in range(self.num_microbatches):
                parts = "".join(part for part in "FIW" if self.count[stage, part] <= microbatch)
                actions += [Action(stage, kind, microbatch) for kind in parts.replace("IW", "B")]
        return actions
