"""Programs: everything one rank issues for a window, in one flat list.

In:   the rank's slots, the units of its chunks, and a plan.
Out:  instructions: which operator of which unit for which micro-batch, what it reads and writes, what may be freed.
Must hold: every operator of every micro-batch once, each after what it reads; a value is freed with its last reader,
so what is alive follows from the program alone. An operator that a plan runs one block late (`B.mlp.down.W-1`) runs in
the next block whatever that is; where the next block has no place for it, it runs as soon as it is needed, after the
block's first communication, or at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from hf_helix.planning.graph import Graph, Operator
from hf_helix.planning.plan import BARRIER, GraphPair, Plan, entries, is_late, on_time
from hf_helix.planning.schedule import Action, Slot

Key = tuple[int, str]
"""A value of a micro-batch: the unit it is named in, and its name. What leaves a unit keeps its key in the next."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operator for one micro-batch; without an operator, a barrier.

    Attributes:
        unit: index among the rank's units, in forward order.
        adds: as `Operator.adds`, by key.
        frees: values that nothing reads any more.
        ends: whether nothing of the micro-batch comes after.
    """

    microbatch: int
    unit: int
    operator: Operator | None
    reads: tuple[Key, ...] = ()
    adds: tuple[Key | None, ...] = ()
    writes: tuple[Key, ...] = ()
    frees: tuple[Key, ...] = ()
    ends: bool = False

    @property
    def needs(self) -> tuple[Key, ...]:
        """Every value that must exist."""
        return self.reads + tuple(key for key in self.adds if key is not None)


_BARRIER = Instruction(-1, -1, None)


@dataclass(frozen=True)
class Layout:
    """What a rank holds, by name: the graphs of its units in forward order, and the units of each virtual stage."""

    units: Sequence[str]
    chunks: Mapping[int, Sequence[int]]
    graphs: Mapping[str, GraphPair]

    def key(self, unit: int, value: str, forward: bool) -> Key:
        """The key of a value: of the unit that writes it."""
        pair = self.graphs[self.units[unit]]
        if forward and value in pair.forward.inputs and unit > 0:
            before = self.graphs[self.units[unit - 1]].forward
            return unit - 1, before.outputs[pair.forward.inputs.index(value)]
        if not forward and value in pair.backward.inputs and unit < len(self.units) - 1:
            after = self.graphs[self.units[unit + 1]].backward
            return unit + 1, after.outputs[pair.backward.inputs.index(value)]
        return unit, value


def build_program(slots: Iterable[Slot], layout: Layout, plan: Plan, keep: Collection[Key] = ()) -> list[Instruction]:
    """The instructions of a window.

    Args:
        keep: values that are never freed.
    """
    builder = _Builder(layout, plan)
    for slot in slots:
        for block in _blocks(slot, layout):
            builder.add(*block)
    builder.finish()
    return _free(builder.program, keep)


Place = tuple[int, int]
"""A micro-batch and a unit."""


def _blocks(slot: Slot, layout: Layout) -> Iterator[tuple[Place | None, Place | None]]:
    """The i-th unit of the forward action beside the i-th unit of the backward action."""

    def places(action: Action | None) -> list[Place]:
        return [(action.microbatch, unit) for unit in layout.chunks[action.stage]] if action else []

    yield from zip_longest(places(slot.forward), places(slot.backward)[::-1])


class _Builder:
    def __init__(self, layout: Layout, plan: Plan) -> None:
        self.layout = layout
        self.plan = plan
        self.program: list[Instruction] = []
        self._late: dict[str, Instruction] = {}  # of the block before, by entry
        self._writers: dict[tuple[int, Key], str] = {}  # of the late ones

    def add(self, forward: Place | None, backward: Place | None) -> None:
        """The next block."""
        order = self.plan.order(
            self.layout.units[forward[1]] if forward else None, self.layout.units[backward[1]] if backward else None
        )
        made = self._instructions(forward, backward)
        placed = {on_time(entry) for entry in order if is_late(entry)}
        homeless = [entry for entry in self._late if entry not in placed]
        for entry in order:
            if entry == BARRIER:
                self.program.append(_BARRIER)
            elif is_late(entry):
                self._run_late(on_time(entry))
            else:
                self._run(made[entry])
                if made[entry].operator.kind.communicates:  # type: ignore[union-attr]
                    while homeless:
                        self._run_late(homeless.pop(0))
        self.finish()
        for entry in order:
            if is_late(entry):
                instruction = self._late[on_time(entry)] = made[on_time(entry)]
                self._writers.update({(instruction.microbatch, key): on_time(entry) for key in instruction.writes})

    def finish(self) -> None:
        """Run what is still late."""
        for entry in list(self._late):
            self._run_late(entry)

    def _run(self, instruction: Instruction) -> None:
        for key in instruction.needs:
            if (instruction.microbatch, key) in self._writers:
                self._run_late(self._writers[instruction.microbatch, key])
        self.program.append(instruction)

    def _run_late(self, entry: str) -> None:
        instruction = self._late.pop(entry, None)
        if instruction is not None:
            for key in instruction.writes:
                self._writers.pop((instruction.microbatch, key))
            self._run(instruction)

    def _instructions(self, forward: Place | None, backward: Place | None) -> dict[str, Instruction]:
        graphs = self.layout.graphs
        made = {}
        for place, is_forward in ((forward, True), (backward, False)):
            if place is not None:
                pair = graphs[self.layout.units[place[1]]]
                graph = pair.forward if is_forward else pair.backward
                for entry, op in _entries(graph, is_forward).items():
                    made[entry] = self._instruction(*place, op, is_forward)
        return made

    def _instruction(self, microbatch: int, unit: int, op: Operator, is_forward: bool) -> Instruction:
        def keys(names: Iterable[str]) -> tuple[Key, ...]:
            return tuple(self.layout.key(unit, name, is_forward) for name in names)

        adds = tuple(None if name is None else keys([name])[0] for name in op.adds)
        return Instruction(microbatch, unit, op, keys(op.reads), adds, keys(op.writes))


def _entries(graph: Graph, is_forward: bool) -> dict[str, Operator]:
    return entries(graph, None) if is_forward else entries(None, graph)


def _free(program: list[Instruction], keep: Collection[Key]) -> list[Instruction]:
    """Note on each instruction what it is the last to touch."""
    last: dict[tuple[int, Key], int] = {}
    end: dict[int, int] = {}
    for place, instruction in enumerate(program):
        if instruction.operator is not None:
            end[instruction.microbatch] = place
            for key in (*instruction.writes, *instruction.needs):
                last[instruction.microbatch, key] = place
    frees: dict[int, list[Key]] = {}
    for (_, key), place in last.items():
        if key not in keep:
            frees.setdefault(place, []).append(key)
    return [
        replace(instruction, frees=tuple(frees.get(place, ())), ends=end.get(instruction.microbatch) == place)
        for place, instruction in enumerate(program)
    ]


def validate_program(program: Sequence[Instruction], sources: Collection[Key]) -> None:
    """Check a program by itself: nothing is read before it is written or after it is freed, nothing runs twice.

    Args:
        sources: values that exist from the start, such as the gradient of the loss.

    Raises:
        ValueError: names the first instruction that is wrong.
    """
    alive: dict[int, set[Key]] = {}
    seen: set[tuple[int, int, str, bool]] = set()
    for place, instruction in enumerate(program):
        op = instruction.operator
        if op is None:
            continue
        values = alive.setdefault(instruction.microbatch, set(sources))
        what = f"instruction {place} ({op.part.value}{instruction.microbatch} unit {instruction.unit} {op.name})"
        missing = [key for key in instruction.needs if key not in values]
        if missing:
            raise ValueError(f"{what} reads {missing}, which is not there")
        name = (instruction.microbatch, instruction.unit, op.name, op.part.value == "F")
        if name in seen:
            raise ValueError(f"{what} runs a second time")
        seen.add(name)
        values.update(instruction.writes)
        values.difference_update(instruction.frees)
