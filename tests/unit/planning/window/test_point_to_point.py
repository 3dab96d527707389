"""Under the rules of NCCL, ranks of a pipeline never wait for each other for ever, whatever the schedule and plan.

Whatever the speeds of computations and links, which is why nothing here takes time: ranks wait for ever exactly if
events wait for each other in a circle. An operation ends once both its ends have begun, and it begins once everything
that was issued before it on its queue has ended, and on the compute stream, too. The host issues without waiting, but
where a rule says so.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

import pytest
from support.arrays import arrays_of
from support.graphs import (
    ORDER_BLOCK,
    SMALL,
    pipeline_of,
    priority_plan,
    profile_of,
    random_priority,
    random_times,
)
from support.marks import slow
from support.programs import build_programs

from hf_helix.planning.choice import auto
from hf_helix.planning.choice.auto import choose_schedule
from hf_helix.planning.choice.slot_clock import Costs
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.plan.list_scheduler import Priorities
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.search import greedy, search
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.schedule.named import PLACEMENT_OF, build_schedule
from hf_helix.planning.schedule.placement import FOLD, stage_ranks
from hf_helix.planning.timing.operator_clock import simulate
from hf_helix.planning.window.instructions import Instruction, transfer_key
from hf_helix.planning.window.layout import Layout
from hf_helix.runtime.streams.streams import CudaStreams

Way = tuple[int, int, bool]
"""The rank that sends, the one that receives, whether it is of a backward pass."""


@dataclass(frozen=True)
class Rules:
    """How NCCL runs what is sent and received.

    Attributes:
        queue: operations of a rank that are on the same one run one after the other, in the order of issue.
        meets: whether the host waits at its first use of a way until the other end uses it for the first time, too,
            since that makes the communicator.
        idles: whether the host waits for the device before every computation, as with lazy loading of kernels.
    """

    queue: Callable[[Way], Hashable]
    meets: bool = False
    idles: bool = False


BUILT = Rules(queue=lambda way: way)
"""As it is built: a communicator and a stream for each way."""

FIRST_USE = Rules(queue=lambda way: way, meets=True)
"""The same where the communicators are not made at start."""

FOUR_GROUPS = Rules(queue=lambda way: (way[0] < way[1], way[2]))
"""Send and receive over groups of all ranks, with `device_id`: one stream of the group's own for all of its pairs."""


Event = tuple[str, Hashable, int]
"""What happens, on which rank or way, and the place in the rank's program."""


def way_of(each: Instruction, layout: Layout) -> Way:
    """Of an operation of the pipeline."""
    op, backward = each.operator, each.operator.part is not Part.F
    mine, peer = (layout.rank_of(unit) for unit in (each.unit, each.unit + (1 if op.sends is not backward else -1)))
    return (mine, peer, backward) if op.sends else (peer, mine, backward)


def run(programs: Sequence[Sequence[Instruction]], layout: Layout, rules: Rules) -> None:
    """Runs programs of all ranks to their end.

    Raises:
        CycleError: ranks wait for each other.
    """
    waits: dict[Event, set[Event]] = {}
    ends: dict[Hashable, list[Event]] = {}
    for rank, whole in enumerate(programs):
        program = [each for each in whole if each.operator]
        writers = {(each.microbatch, key): place for place, each in enumerate(program) for key in each.writes}
        latest: dict[Hashable, int] = {}  # by queue
        used: set[Way] = set()
        for place, each in enumerate(program):
            issue, begin, end = ((what, rank, place) for what in ("issue", "begin", "end"))
            queue: Hashable = each.operator.kind
            waits[issue] = {("issue", rank, place - 1)} if place else set()
            if rules.idles and not each.operator.kind.communicates:
                waits[issue] |= {("end", rank, before) for before in range(place)}
            if each.operator.kind is Kind.PIPELINE:
                way = way_of(each, layout)
                queue = rules.queue(way)
                ends.setdefault(transfer_key(each), []).append(begin)
                if rules.meets and way not in used:
                    waits.setdefault(("meet", way, 0), set()).update(waits[issue])
                    waits[issue] = {("meet", way, 0)}
                used.add(way)
            needs = {writers.get((each.microbatch, key)) for key in each.needs}
            before = {latest.get(queue), latest.get(Kind.COMPUTE), *needs}
            waits[begin] = {issue, *(("end", rank, other) for other in before - {None})}
            waits[end] = {begin}
            latest[queue] = place
    for pair in ends.values():
        assert len(pair) == 2
        for _, rank, place in pair:
            waits["end", rank, place].update(pair)
    TopologicalSorter(waits).prepare()


BLOCKS = tuple(ORDER_BLOCK)
FURTHER = ("round_robin", "dhelix", "searched")
SCHEDULES = [*PLACEMENT_OF, "auto"]
IDLING = replace(BUILT, idles=True)


def pipeline(schedule: str, num_ranks: int, num_microbatches: int) -> tuple[Layout, Schedule]:
    """Stages of one or two layers."""
    ranks = stage_ranks(PLACEMENT_OF.get(schedule, FOLD), num_ranks)
    layout = pipeline_of(SMALL, [1 + stage % 2 for stage in range(len(ranks))], ranks)
    return layout, scheduled(schedule, num_ranks, num_microbatches)


@functools.cache
def scheduled(schedule: str, num_ranks: int, num_microbatches: int) -> Schedule:
    if schedule != "auto":
        return build_schedule(schedule, num_ranks, num_microbatches)
    uneven = [1.0 + 0.3 * (stage % 3) for stage in range(2 * num_ranks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "TRIALS", 500)  # it need not be good
        return choose_schedule(num_ranks, num_microbatches, Costs(uneven, uneven, uneven, 0.2, 1.3))[1]


def planned(plan: str, layout: Layout, schedule: Schedule) -> Plan:
    if plan in BLOCKS:
        return make_plan(plan, profile_of(layout), model="m", mesh={"tp_size": 2})
    if plan == "at random":
        return priority_plan(Priorities(random_times(layout, 9), random_priority(layout, 9), 0), layout)
    profile = profile_of(layout, random_times(layout, 2))
    return priority_plan(greedy(profile) if plan == "greedy" else search(profile, schedule, search_share=0.002), layout)


@pytest.mark.parametrize(
    "plan", ["sequential", "greedy", "at random", *map(slow, ("round_robin", "dhelix", "searched"))]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sizes", [((2, 1), (2, 5), (3, 4)), slow(((4, 8), (6, 13)))], ids=str)
def test_no_rank_waits_for_ever(sizes: tuple[tuple[int, int], ...], schedule: str, plan: str) -> None:
    """With any numbers of ranks and of micro-batches."""
    for num_ranks, num_microbatches in sizes:
        layout, made = pipeline(schedule, num_ranks, num_microbatches)
        programs = build_programs(made, layout, planned(plan, layout, made), slots_ahead=CudaStreams.slots_ahead)
        for rules in (BUILT, FIRST_USE):
            run(programs, layout, rules)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("plan", ["sequential", "round_robin"])
def test_when_a_receive_is_issued_changes_no_prediction(schedule: str, plan: str) -> None:
    """It is over when the other rank has sent, but not before what was issued before it; readers come after both."""
    layout, made = pipeline(schedule, 2, 5)
    chosen, times = planned(plan, layout, made), random_times(layout, 1)
    late, early = (
        simulate(arrays_of([each for program in result for each in program], layout, times)).seconds
        for result in (build_programs(made, layout, chosen, slots_ahead=ahead) for ahead in (0, 1))
    )
    assert late == pytest.approx(early)


# -- what could hang, and is seen --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_early_receives_could_hang(schedule: str) -> None:
    """Where the host waits for the device, to load a kernel or to free memory: a receive that waits keeps the device
    busy. With late ones, `folded_1f1b` and `1f1b` go on even so. In the others it may be a send that waits, which is
    why pipelines load all kernels at start (`hf_helix.runtime.distributed.environment`).
    """
    layout, made = pipeline(schedule, 2, 5)
    plan = planned("sequential", layout, made)
    late, early = (build_programs(made, layout, plan, slots_ahead=ahead) for ahead in (0, 1))
    with pytest.raises(CycleError):
        run(early, layout, IDLING)
    if schedule in ("folded_1f1b", "1f1b"):
        run(late, layout, IDLING)
    else:
        with pytest.raises(CycleError):
            run(late, layout, IDLING)


def test_early_receives_could_hang_where_their_use_makes_a_communicator() -> None:
    """Both ranks would begin with what they receive."""
    layout, made = pipeline("folded_1f1b", 2, 1)
    early = build_programs(made, layout, planned("sequential", layout, made), slots_ahead=1)
    with pytest.raises(CycleError):
        run(early, layout, FIRST_USE)


def test_ways_that_wait_for_each_other_could_hang() -> None:
    """Why each way has a group of its own: a send to one neighbour would wait behind a receive from the other."""
    layout, made = pipeline("auto", 4, 6)
    plan = planned("sequential", layout, made)
    programs = build_programs(made, layout, plan, slots_ahead=CudaStreams.slots_ahead)
    with pytest.raises(CycleError):
        run(programs, layout, FOUR_GROUPS)
    run(programs, layout, BUILT)
    # A way in another order at one of its ends is seen, too.
    first, second = [place for place, each in enumerate(programs[0]) if each.operator and each.operator.sends][:2]
    programs[0].insert(second + 1, programs[0].pop(first))
    with pytest.raises(CycleError):
        run(programs, layout, BUILT)
