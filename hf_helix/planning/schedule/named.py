"""The named schedules, for any number of ranks and micro-batches.

In:   the number of pipeline ranks P and of micro-batches M.
Out:  a `Schedule`.
Must hold: `validate` accepts each; the builders do not use it. The names are listed in `hf_helix.config.SCHEDULES`.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hf_helix.config import AUTO, SCHEDULES
from hf_helix.planning.schedule.actions import PARTS, Action, Schedule, Slot, without_microbatches
from hf_helix.planning.schedule.placement import FOLD, LINEAR, stage_ranks
from hf_helix.planning.schedule.validate import validate

Step = tuple[tuple[int, str], ...]
"""The stages and computation types of a slot, without micro-batches."""


def folded_1f1b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the paper's W schedule on the fold (section 4.1, figure 8): 1F1B over M+P units that go down and up.

    Over global slot numbers t, rank r runs: F of chunk 0 at 2k+r; F of chunk 1 at 2k+2P-1-r; B of chunk 1 at
    2P+2k+r; B of chunk 0 at 4P+2k-1-r. With M >= P there are 4P+2M-2 slots; 2(M-P) slots of a rank are fused.
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


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns Megatron's 1F1B on the linear placement, one strand: rank r is P-1-r forwards ahead."""

    def steps(rank: int) -> list[Step]:
        forward: list[Step] = [((rank, "F"),)]
        backward: list[Step] = [((rank, "B"),)]
        ahead = min(num_microbatches, num_ranks - 1 - rank)
        return forward * ahead + (forward + backward) * (num_microbatches - ahead) + backward * ahead

    return [_numbered(steps(rank)) for rank in range(num_ranks)]


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns DeepSeek's DualPipeV on the fold: fused slots in the middle, I and W apart at both ends.

    For M >= 2P; with fewer micro-batches, the schedule of 2P micro-batches without the missing ones.
    """
    built_for = max(num_microbatches, 2 * num_ranks)
    schedule = [_numbered(_dualpipe_v_steps(rank, num_ranks, built_for)) for rank in range(num_ranks)]
    return without_microbatches(schedule, num_microbatches)


def _dualpipe_v_steps(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    """Returns the eight phases of DualPipeV on a rank; `below` ranks are nearer to the turn of the fold."""
    below, through = num_ranks - 1 - rank, rank + 1
    f0, f1 = (rank, "F"), (2 * num_ranks - 1 - rank, "F")
    (b0, i0, w0), (b1, i1, w1) = ([(stage, kind) for kind in "BIW"] for stage, _ in (f0, f1))

    steps: list[Step] = [(f0,)] * (2 * below)  # 1: F0
    steps += [(f0,), (f1,)] * through  # 2: F0 F1
    steps += [(i1,), (w1,), (f1,)] * below  # 3: I1 W1 F1
    main: list[Step] = [(f0, b1), (f1, b0)] * (num_microbatches - 2 * num_ranks + through)  # 4: F0B1 F1B0
    if below == 0:  # the turn of the fold: everyone waits for its first B1, so nothing overlaps with it
        main[:1] = [(f0,), (b1,)]
    steps += main
    steps += [(b1,), (f1, b0)] * below  # 5: B1 F1B0

    # From the middle of phase 6 on only input gradients are on the way of others; weight gradients wait.
    last = [b1, b0] * through
    split = [{b0: i0, b1: i1}[step] for step in last[through:]]
    waiting = [{i0: w0, i1: w1}[step] for step in split] + [w0] * below
    steps += [(step,) for step in last[:through] + split]  # 6: B1 B0, then I1 I0
    steps += [(step,) for weight in waiting[:below] for step in (weight, i0)]  # 7: W I0
    steps += [(weight,) for weight in waiting[below:]]  # 8: W
    return steps


def _numbered(steps: Iterable[Step]) -> list[Slot]:
    """Returns the steps with micro-batches: every stage and part takes them in order."""
    count: Counter[tuple[int, str]] = Counter()
    slots = []
    for step in steps:
        actions = {}
        for stage, computation_type in step:
            parts = [(stage, part) for part in PARTS[computation_type]]
            actions[computation_type] = Action(stage, computation_type, count[parts[0]])
            count.update(parts)
        slots.append(Slot(actions.pop("F", None), next(iter(actions.values()), None)))
    return slots


class NamedSchedule(NamedTuple):
    """A builder by the numbers of ranks and of micro-batches, and the placement of its virtual stages."""

    build: Callable[[int, int], Schedule]
    placement: str


NAMED_SCHEDULES = {
    "folded_1f1b": NamedSchedule(folded_1f1b, FOLD),
    "dualpipe_v": NamedSchedule(dualpipe_v, FOLD),
    "1f1b": NamedSchedule(one_f_one_b, LINEAR),
}
PLACEMENT_OF = {name: schedule.placement for name, schedule in NAMED_SCHEDULES.items()}
FOLDED = tuple(name for name, placement in PLACEMENT_OF.items() if placement == FOLD)
"""The schedules that `auto` may choose: all of one placement."""

assert (AUTO, *NAMED_SCHEDULES) == SCHEDULES, "a schedule has its name in hf_helix.config.SCHEDULES, too"


def build_schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the schedule of a name, validated.

    Args:
        name: in `NAMED_SCHEDULES`.

    Raises:
        ValueError: an unknown name, or fewer than one rank or micro-batch.
    """
    named = NAMED_SCHEDULES.get(name)
    if named is None or num_ranks < 1 or num_microbatches < 1:
        raise ValueError(
            f"no schedule {name!r} for {num_ranks} ranks and {num_microbatches} micro-batches; "
            f"schedules: {', '.join(NAMED_SCHEDULES)}, with at least one of each"
        )
    schedule = named.build(num_ranks, num_microbatches)
    validate(schedule, num_microbatches, stage_ranks(named.placement, num_ranks))
    return schedule
