"""How long collectives keep their buffers alive.

In:   the program of a rank; on CPUs also the times of its instructions.
Out:  for each collective and gradient reduction, by index in the program, the index of the instruction before which
      its buffers are released.
Must hold: releases follow the rules of `hf_helix.runtime.streams`. On a GPU an event keeps the buffers until the
compute stream waits for the event, or until nothing refers to the event; on a CPU a thread releases the buffers at the
end of the collective. Transfers between stages are not followed here: `peaks` frees their values at the next transfer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Key

COLLECTIVE = (Kind.INTRA_NODE, Kind.INTER_NODE)

Held = Mapping[int, int]
"""Index of a collective -> index of the instruction before which its buffers are released."""


def held_until_waited(program: Sequence[Instruction]) -> Held:
    """Returns the releases of a program on a GPU."""
    events = _Events()
    for place, instruction in enumerate(program):
        op = instruction.operator
        if op is None:
            events.wait_for_all(place)
        elif op.kind in COLLECTIVE:
            events.issue(place, instruction)
        elif instruction.reduction >= 0:
            events.until[place] = len(program)  # gradient reductions are waited for at the end of the window
        elif op.kind is Kind.COMPUTE:
            for key in instruction.needs:
                events.wait(instruction.microbatch, key, place)
        for key in instruction.frees:
            events.forget(instruction.microbatch, key, place + 1)
        if instruction.ends:
            events.wait_for_microbatch(instruction.microbatch, place + 1)
    return events.until


def held_until_over(program: Sequence[Instruction], starts: Sequence[float], ends: Sequence[float]) -> Held:
    """Returns the releases of a program on a CPU, whose host thread computes while issuing; times are in seconds."""
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
    """Events of collectives, before the compute stream has waited for them; `until` are the releases so far."""

    def __init__(self) -> None:
        self.until: dict[int, int] = {}
        self._of: dict[tuple[int, Key], int] = {}  # (micro-batch, value) -> the collective that writes the value
        self._ahead: set[int] = set()
        self._after: dict[int, list[int]] = {}  # collective -> its predecessors, whose events it refers to

    def issue(self, place: int, instruction: Instruction) -> None:
        """Notes a collective after the writers of its inputs; the host waits for sizes read on the host."""
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
        """Lets the compute stream wait for the writer of a value."""
        if (microbatch, key) in self._of:
            self._let_go(self._of.pop((microbatch, key)), place)

    def forget(self, microbatch: int, key: Key, place: int) -> None:
        """Forgets a value; its event goes unless another value or a later collective refers to the event."""
        collective = self._of.pop((microbatch, key), None)
        if collective is not None and not self._is_known(collective):
            self._let_go(collective, place)

    def wait_for_microbatch(self, microbatch: int, place: int) -> None:
        """Lets the compute stream wait for all collectives of a micro-batch."""
        for number, key in list(self._of):
            if number == microbatch:
                self.wait(number, key, place)

    def wait_for_all(self, place: int) -> None:
        """Lets the compute stream wait for all collectives except prefetches."""
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
