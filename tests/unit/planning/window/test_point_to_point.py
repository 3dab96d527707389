"""Under the rules of NCCL, ranks of a pipeline never wait for each other for ever, whatever the schedule and plan.

What ranks send each other is simulated, whatever the speeds of computations and links, which is why nothing here takes
time: what can begin, does; if in the end something is left, no speed helps. An operation ends once both its ends have
begun, and it begins once everything that was issued before it on its queue has ended, and on the compute stream, too.
The host issues without waiting, but where a rule says so.
"""

import functools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

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

from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.plan.list_scheduler import Priorities
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.registry import make_plan
from hf_helix.planning.plan.search import greedy, search
from hf_helix.planning.schedule import auto
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.schedule.auto import choose_schedule
from hf_helix.planning.schedule.named import PLACEMENT_OF, build_schedule
from hf_helix.planning.schedule.placement import FOLD, stage_ranks
from hf_helix.planning.schedule.slot_clock import Costs
from hf_helix.planning.timing.operator_clock import simulate
from hf_helix.planning.window.instructions import Instruction, transfer_key
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.program import build_programs
from hf_helix.runtime.streams import CudaStreams

Way = tuple[int, int, bool]
"""The rank that sends, the one that receives, whether it is of a backward pass."""


class Deadlock(Exception):
    """Says what every rank waits for."""


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


@dataclass
class _Rank:
    program: Sequence[Instruction]
    issued: int = 0
    queues: dict[Hashable, deque[int]] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    behind: dict[int, int] = field(default_factory=dict)
    computed: int = -1  # the computation issued last
    known: set[Way] = field(default_factory=set)


class Pipeline:
    """Programs of all ranks on their way."""

    def __init__(self, programs: Sequence[Sequence[Instruction]], layout: Layout, rules: Rules) -> None:
        self._ranks = [_Rank([each for each in program if each.operator]) for program in programs]
        self._layout = layout
        self._rules = rules
        self._ended: list[set[int]] = [set() for _ in programs]
        self._writers = [
            {(each.microbatch, key): place for place, each in enumerate(rank.program) for key in each.writes}
            for rank in self._ranks
        ]
        self._ends = {}
        for number, rank in enumerate(self._ranks):
            for place, each in enumerate(rank.program):
                if each.operator.kind is Kind.PIPELINE:
                    self._ends.setdefault(transfer_key(each), []).append((number, place))

    def run(self) -> None:
        """To the end, or to a `Deadlock`: ranks wait for each other."""
        while any(len(ended) < len(rank.program) for ended, rank in zip(self._ended, self._ranks, strict=True)):
            moved = [self._issue(number) or self._begin(number) for number in range(len(self._ranks))]
            if not self._end() and not any(moved):
                raise Deadlock("\n".join(self._waiting(number) for number in range(len(self._ranks))))

    def way(self, each: Instruction) -> Way:
        """Of an operation of the pipeline."""
        op = each.operator
        backward = op.part is not Part.F
        other = each.unit + (1 if op.sends is not backward else -1)
        mine, peer = self._layout.rank_of(each.unit), self._layout.rank_of(other)
        return (mine, peer, backward) if op.sends else (peer, mine, backward)

    def _issue(self, number: int) -> bool:
        rank, before = self._ranks[number], self._ranks[number].issued
        while rank.issued < len(rank.program):
            each, place = rank.program[rank.issued], rank.issued
            op = each.operator
            if self._rules.idles and not op.kind.communicates and len(self._ended[number]) < place:
                break
            queue: Hashable = op.kind
            if op.kind is Kind.PIPELINE:
                way = self.way(each)
                if self._rules.meets and not self._has_met(number, way):
                    break
                queue = Kind.PIPELINE, self._rules.queue(way)
            rank.queues.setdefault(queue, deque()).append(place)
            if op.kind.communicates:
                rank.behind[place] = rank.computed
            else:
                rank.computed = place
            rank.issued += 1
        return rank.issued > before

    def _has_met(self, number: int, way: Way) -> bool:
        rank, other = self._ranks[number], self._ranks[way[0] + way[1] - number]
        if way not in rank.known:
            nexts = other.program[other.issued : other.issued + 1]
            waits = any(each.operator.kind is Kind.PIPELINE and self.way(each) == way for each in nexts)
            if not waits:
                return False
            rank.known.add(way)
            other.known.add(way)
        return True

    def _begin(self, number: int) -> bool:
        rank, ended = self._ranks[number], self._ended[number]
        before = len(rank.running) + len(ended)
        for queue in rank.queues.values():
            if queue and queue[0] not in rank.running and self._is_ready(number, queue[0]):
                rank.running.add(queue[0])
        return len(rank.running) + len(ended) > before

    def _is_ready(self, number: int, place: int) -> bool:
        ended, each = self._ended[number], self._ranks[number].program[place]
        needs = [self._writers[number].get((each.microbatch, key)) for key in each.needs]
        return self._ranks[number].behind.get(place, -1) in {-1, *ended} and all(
            need is None or need in ended for need in needs
        )

    def _end(self) -> bool:
        moved = False
        for number, rank in enumerate(self._ranks):
            for queue in rank.queues.values():
                while queue and queue[0] in rank.running and self._has_begun_everywhere(number, queue[0]):
                    self._finish(number, queue[0])
                    moved = True
        return moved

    def _has_begun_everywhere(self, number: int, place: int) -> bool:
        each = self._ranks[number].program[place]
        if each.operator.kind is not Kind.PIPELINE:
            return True
        ends = self._ends[transfer_key(each)]
        assert len(ends) == 2
        return all(at in self._ranks[rank].running or at in self._ended[rank] for rank, at in ends)

    def _finish(self, number: int, place: int) -> None:
        rank = self._ranks[number]
        for queue in rank.queues.values():
            if queue and queue[0] == place:
                queue.popleft()
        rank.running.discard(place)
        self._ended[number].add(place)

    def _waiting(self, number: int) -> str:
        rank = self._ranks[number]
        at = [
            *rank.program[rank.issued : rank.issued + 1],
            *(rank.program[queue[0]] for queue in rank.queues.values() if queue),
        ]
        names = [f"{each.operator.name} of {each.microbatch} in unit {each.unit}" for each in at]
        return f"rank {number}: the host, and the first of each queue, are at {', '.join(names)}"


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
            Pipeline(programs, layout, rules).run()


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
    why pipelines load all kernels at start (`hf_helix.runtime.environment`).
    """
    layout, made = pipeline(schedule, 2, 5)
    plan = planned("sequential", layout, made)
    late, early = (build_programs(made, layout, plan, slots_ahead=ahead) for ahead in (0, 1))
    with pytest.raises(Deadlock):
        Pipeline(early, layout, IDLING).run()
    if schedule in ("folded_1f1b", "1f1b"):
        Pipeline(late, layout, IDLING).run()
    else:
        with pytest.raises(Deadlock, match=r"rank 0: .* transfer of"):
            Pipeline(late, layout, IDLING).run()


def test_early_receives_could_hang_where_their_use_makes_a_communicator() -> None:
    """Both ranks would begin with what they receive."""
    layout, made = pipeline("folded_1f1b", 2, 1)
    early = build_programs(made, layout, planned("sequential", layout, made), slots_ahead=1)
    with pytest.raises(Deadlock):
        Pipeline(early, layout, FIRST_USE).run()


def test_ways_that_wait_for_each_other_could_hang() -> None:
    """Why each way has a group of its own: a send to one neighbour would wait behind a receive from the other."""
    layout, made = pipeline("auto", 4, 6)
    plan = planned("sequential", layout, made)
    programs = build_programs(made, layout, plan, slots_ahead=CudaStreams.slots_ahead)
    with pytest.raises(Deadlock):
        Pipeline(programs, layout, FOUR_GROUPS).run()
    Pipeline(programs, layout, BUILT).run()
    # A way in another order at one of its ends is seen, too.
    first, second = [place for place, each in enumerate(programs[0]) if each.operator and each.operator.sends][:2]
    programs[0].insert(second + 1, programs[0].pop(first))
    with pytest.raises(Deadlock):
        Pipeline(programs, layout, BUILT).run()
