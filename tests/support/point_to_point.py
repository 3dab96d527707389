"""What ranks of a pipeline send each other under the rules of NCCL, simulated: do they wait for each other for ever?

In:   the programs of all ranks, and which operations a rank runs one after the other.
Out:  nothing, or `Deadlock`.
Must hold: whatever the speeds of computations and links, which is why nothing here takes time: what can begin, does; if
in the end something is left, no speed helps.

An operation ends once both its ends have begun, and it begins once everything that was issued before it on its queue
has ended, and on the compute stream, too. The host issues without waiting, but where a rule says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.window.instructions import Instruction, transfer_key
from hf_helix.planning.window.layout import Layout

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
        self._ranks = [_Rank([each for each in program if each.operator is not None]) for program in programs]
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
                if each.operator is not None and each.operator.kind is Kind.PIPELINE:
                    self._ends.setdefault(transfer_key(each), []).append((number, place))

    def run(self) -> None:
        """To the end.

        Raises:
            Deadlock: ranks wait for each other.
        """
        while any(len(ended) < len(rank.program) for ended, rank in zip(self._ended, self._ranks, strict=True)):
            moved = [self._issue(number) or self._begin(number) for number in range(len(self._ranks))]
            if not self._end() and not any(moved):
                raise Deadlock("\n".join(self._waiting(number) for number in range(len(self._ranks))))

    def way(self, each: Instruction) -> Way:
        """Of an operation of the pipeline."""
        op = each.operator
        assert op is not None
        backward = op.part is not Part.F
        other = each.unit + (1 if op.sends is not backward else -1)
        mine, peer = self._layout.rank_of(each.unit), self._layout.rank_of(other)
        return (mine, peer, backward) if op.sends else (peer, mine, backward)

    def _issue(self, number: int) -> bool:
        rank, before = self._ranks[number], self._ranks[number].issued
        while rank.issued < len(rank.program):
            each, place = rank.program[rank.issued], rank.issued
            op = each.operator
            assert op is not None
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
        if each.operator is None or each.operator.kind is not Kind.PIPELINE:
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
        heads = [rank.program[queue[0]] for queue in rank.queues.values() if queue]
        host = rank.program[rank.issued : rank.issued + 1]

        def names(result: Sequence[Instruction]) -> str:
            return ", ".join(f"{each.operator.name} of {each.microbatch} in unit {each.unit}" for each in result)

        return f"rank {number}: the host is at {names(host) or 'its end'}; first in their queues: {names(heads)}"
