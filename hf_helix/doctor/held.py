"""Until when communication holds the memory that it reads and works with.

In:   the program of a rank, and perhaps when each of its instructions ran.
Out:  for each collective and each sum of gradients, by its place in the program, the place of the instruction before
      which it lets go.
Must hold: the rules are those of `hf_helix.runtime.streams`. On a GPU an event keeps what its work holds until the
compute stream is told to wait for it, or until nothing knows the event any more; on a CPU a thread drops it once the
work is done. What is sent to another stage is not followed here: `peaks` frees it when the next transfer begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Key

COLLECTIVE = (Kind.INTRA_NODE, Kind.INTER_NODE)

Held = Mapping[int, int]
"""The place of a collective -> the place before which it lets go."""


def held_until_waited(program: Sequence[Instruction]) -> Held:
    """Returns until when collectives hold memory on a GPU."""
    events = _Events()
    for place, instruction in enumerate(program):
        op = instruction.operator
        if op is None:
            events.wait_for_all(place)
        elif op.kind in COLLECTIVE:
            events.issue(place, instruction)
        elif instruction.reduction >= 0:
            events.until[place] = len(program)  # sums are waited for when the window is over
        elif op.kind is Kind.COMPUTE:
            for key in instruction.needs:
                events.wait(instruction.microbatch, key, place)
        for key in instruction.frees:
            events.forget(instruction.microbatch, key, place + 1)
        if instruction.ends:
            events.wait_for_microbatch(instruction.microbatch, place + 1)
    return events.until


def held_until_over(program: Sequence[Instruction], starts: Sequence[float], ends: Sequence[float]) -> Held:
    """Returns until when collectives hold memory on a CPU, which computes while it issues.

    Args:
        starts: seconds at which each of them starts.
        ends: seconds at which each of them ends.
    """
    kinds = [made.operator.kind if made.operator is not None else None for made in program]
    computing = [place for place, kind in enumerate(kinds) if kind is Kind.COMPUTE]
    times = [starts[place] for place in computing]
    until = {}
    for place, kind in enumerate(kinds):
        if kind in COLLECTIVE:
            following = max(bisect_left(times, ends[place]), bisect_left(computing, place))
            until[place] = computing[following] if following < len(computing) else len(program)
    return until


class _Events:
    """The events of collectives that the compute stream has not waited for.

    Attributes:
        until: of those that let go, before which instruction.
    """

    def __init__(self) -> None:
        self.until: dict[int, int] = {}
        self._of: dict[tuple[int, Key], int] = {}  # the collective that brings a value of a micro-batch
        self._ahead: set[int] = set()
        self._after: dict[int, list[int]] = {}  # the collectives that one comes after, whose events it knows

    def issue(self, place: int, instruction: Instruction) -> None:
        """Notes a collective, behind those that bring what it reads; the host waits for sizes that it needs."""
        op, microbatch = instruction.operator, instruction.microbatch
        assert op is not None
        for name, key in zip(op.reads, instruction.reads, strict=True):
            if name in op.host_read_sizes:
                self.wait(microbatch, key, place)
        self._after[place] = [self._of[microbatch, key] for key in instruction.reads if (microbatch, key) in self._of]
        for key in instruction.writes:
            self._of[microbatch, key] = place
        if op.ahead:
            self._ahead.add(place)

    def wait(self, microbatch: int, key: Key, place: int) -> None:
        """Lets the compute stream wait for what brings a value."""
        if (microbatch, key) in self._of:
            self._let_go(self._of.pop((microbatch, key)), place)

    def forget(self, microbatch: int, key: Key, place: int) -> None:
        """Forgets a value; its event is gone unless another one is known by it, or by a later collective."""
        collective = self._of.pop((microbatch, key), None)
        if collective is not None and not self._is_known(collective):
            self._let_go(collective, place)

    def wait_for_microbatch(self, microbatch: int, place: int) -> None:
        """Lets the compute stream wait for all collectives of a micro-batch."""
        for number, key in list(self._of):
            if number == microbatch:
                self.wait(number, key, place)

    def wait_for_all(self, place: int) -> None:
        """Lets the compute stream wait for all collectives but those issued ahead."""
        for (microbatch, key), collective in list(self._of.items()):
            if collective not in self._ahead:
                self.wait(microbatch, key, place)

    def _is_known(self, collective: int) -> bool:
        return collective in self._of.values() or any(collective in before for before in self._after.values())

    def _let_go(self, collective: int, place: int) -> None:
        self.until.setdefault(collective, place)
        for earlier in self._after.pop(collective, ()):
            if earlier not in self.until and not self._is_known(earlier):
                self._let_go(earlier, place)
