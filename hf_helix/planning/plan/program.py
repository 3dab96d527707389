"""Programs: all instructions that a rank issues for a window, in one flat list.

In:   a schedule, a layout and a plan.
Out:  a `Program`: the instructions of a rank in the order of issue, with the values that each instruction frees.
Must hold: every operator of every micro-batch once, each after its inputs; a value is freed by its last reader;
messages between two ranks are received in the order of sending.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hf_helix.planning.collection import without_collection
from hf_helix.planning.graph.operator import Kind, Operator, Part
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.repetition import order_window
from hf_helix.planning.schedule.actions import Schedule, Slot
from hf_helix.planning.traffic import Traffic
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Key, Layout
from hf_helix.planning.window.window import Window

COPIES = (2, 6, 14)  # repetitions to write out until two neighbours free the same values


@dataclass(frozen=True, eq=False)
class Program(Sequence[Instruction]):
    """The instructions of a rank; a long window holds its repeated part once."""

    once: list[Instruction]  # the instructions of a short window
    period: tuple[int, int] = (0, 0)  # begin and end of the part of `once` that repeats
    repeats: int = 0  # the number of further repetitions
    shift: int = 0  # micro-batch indices grow by `shift` per repetition
    slots: Sequence[Slot] = ()  # of the short window

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Yields parts of `once` in the order of issue: begin, end, and the summand of micro-batch indices."""
        yield 0, self.period[1], 0
        for number in range(1, self.repeats + 1):
            yield *self.period, number * self.shift
        yield self.period[1], len(self.once), self.repeats * self.shift

    def __len__(self) -> int:
        return len(self.once) + self.repeats * (self.period[1] - self.period[0])

    def __iter__(self) -> Iterator[Instruction]:
        for begin, end, later in self.parts():
            for place in range(begin, end):
                instruction = self.once[place]
                yield instruction.of(instruction.microbatch + later) if later and instruction.operator else instruction

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


@without_collection
def build_program(
    schedule: Schedule, layout: Layout, plan: Plan, rank: int, keep: Collection[Key] = (), slots_ahead: int = 1
) -> Program:
    """Returns the program of a rank."""
    ordered = order_window(plan, schedule, layout, slots_ahead, rank)
    for copies in (*COPIES, ordered.repeats):
        made = ordered.lengthened(min(copies, ordered.repeats), rank)
        once = free_values(made.ordered.program(rank), keep)
        if not made.repeats:
            break
        planned = [place for place, each in enumerate(once) if not each.is_traffic]  # the plan's order
        begin, end = (planned[place] for place in made.stretches[rank])
        if _repeats(once, begin, end, made.shift):
            return Program(once, (begin, end), made.repeats, made.shift, made.schedule[rank])
    return Program(once, slots=made.schedule[rank])


def _repeats(program: Sequence[Instruction], begin: int, end: int, shift: int) -> bool:
    """Whether the next stretch issues, frees and ends the same, `shift` micro-batches later."""

    def key(instruction: Instruction, later: int) -> object:
        microbatch = instruction.microbatch - (later if instruction.operator else 0)
        return microbatch, instruction.unit, instruction.operator, instruction.frees, instruction.ends

    return all(
        key(one, 0) == key(other, shift)
        for one, other in zip(program[begin:end], program[end : 2 * end - begin], strict=True)
    )


def free_values(program: list[Instruction], keep: Collection[Key] = ()) -> list[Instruction]:
    """The program with `frees` and `ends` on each instruction; values of `keep` are never freed."""
    freed: list[Instruction] = []
    used: dict[int, set[Key]] = {}
    for instruction in reversed(program):
        if instruction.operator is not None and not instruction.is_traffic:
            ends = instruction.microbatch not in used
            known = used.setdefault(instruction.microbatch, set(keep))
            keys = dict.fromkeys((*instruction.writes, *instruction.needs))
            frees = tuple([key for key in keys if key not in known])
            known.update(frees)
            if frees or ends:
                instruction = instruction._replace(frees=frees, ends=ends)
        freed.append(instruction)
    return freed[::-1]


def validate_program(
    program: Sequence[Instruction],
    sources: Collection[Key],
    layout: Layout | None = None,
    slots: Sequence[Slot] = (),
) -> None:
    """Checks the program of a rank: no value is read before its writer or after it was freed, no operator runs twice,
    gradients accumulate and transfers follow each other in the order of micro-batches, a gradient reduction follows all
    its adders, and weights are gathered before their unit computes.

    Args:
        sources: values that exist from the start, for example the gradient of the loss.
        layout: with shared gradients and traffic; None for none.
        slots: of the rank; shared gradients accumulate in their order.

    Raises:
        ValueError: names the first wrong instruction.
    """
    check = _Check(sources, layout, slots)
    for place, instruction in enumerate(program):
        op = instruction.operator
        if op is not None and (problem := check.problem(instruction, op)):
            what = f"instruction {place} ({op.part.value}{instruction.microbatch} unit {instruction.unit} {op.name})"
            raise ValueError(f"{what} {problem}")


class _Check:
    """The instructions of a rank so far."""

    def __init__(self, sources: Collection[Key], layout: Layout | None, slots: Sequence[Slot]) -> None:
        self._sources = sources
        self._alive: dict[int, set[Key]] = {}
        self._seen: set[tuple[int, int, str, bool]] = set()
        self._latest: dict[tuple[int, str, bool], int] = {}
        self._turns = _turns(slots, layout) if layout and layout.shared and slots else {}
        self._traffic = {each.unit: each for each in (layout.traffic if layout else ())}
        self._reduced: dict[int, float] = {}  # the last micro-batch in each reduction
        self._gathered: set[int] = set()
        self._adds_to: dict[tuple[int, str], set[int]] = {}
        self._awaited: dict[int, set[int]] = {}
        for each in self._traffic.values():
            for adder in each.adders:
                self._adds_to.setdefault(adder, set()).add(each.unit)
            for unit in each.readers:
                self._awaited.setdefault(unit, set()).add(each.unit)

    def problem(self, instruction: Instruction, op: Operator) -> str:
        """Returns the error of the next instruction; empty for a right one."""
        if instruction.is_traffic:
            self._note(self._traffic[instruction.unit], instruction.microbatch, op)
            return ""
        return self._of_values(instruction, op) or self._of_order(instruction, op) or self._of_traffic(instruction, op)

    def _note(self, traffic: Traffic, microbatch: int, op: Operator) -> None:
        if traffic.adders:
            self._reduced[traffic.unit] = microbatch if traffic.every_microbatch else math.inf
        elif not op.kind.copies:
            self._gathered.add(traffic.unit)

    def _of_values(self, instruction: Instruction, op: Operator) -> str:
        """Finds reads of missing values, and operators that run twice."""
        values = self._alive.setdefault(instruction.microbatch, set(self._sources))
        missing = [key for key in instruction.needs if key not in values]
        if missing:
            return f"reads {missing}, which is not there"
        name = (instruction.microbatch, instruction.unit, op.name, op.part is Part.F)
        if name in self._seen:
            return "runs a second time"
        self._seen.add(name)
        values.update(instruction.writes)
        values.difference_update(instruction.frees)
        return ""

    def _of_order(self, instruction: Instruction, op: Operator) -> str:
        """Finds accumulations and transfers out of order."""
        forward = op.part is Part.F
        if forward and op.kind is not Kind.PIPELINE:
            return ""
        key = (instruction.unit, op.name, forward)
        if self._latest.get(key, -1) > instruction.microbatch:
            return "comes after a later micro-batch, so gradients would add up in another order"
        self._latest[key] = instruction.microbatch
        turns = None if forward else self._turns.get((instruction.unit, op.name))
        if turns is not None and turns.pop(0) != (instruction.microbatch, instruction.unit, op.name):
            return "adds to a shared gradient out of turn"
        return ""

    def _of_traffic(self, instruction: Instruction, op: Operator) -> str:
        """Finds computations before their weight gathers, and additions to gradients after their reduction."""
        if op.kind is Kind.COMPUTE and not self._awaited.get(instruction.unit, set()) <= self._gathered:
            return "comes before its weights are gathered"
        numbers = () if op.part is Part.F else self._adds_to.get((instruction.unit, op.name), ())
        if any(self._reduced.get(number, -1) >= instruction.microbatch for number in numbers):
            return "adds to gradients that have been summed over ranks"
        return ""


def _turns(slots: Sequence[Slot], layout: Layout) -> dict[tuple[int, str], list[tuple[int, int, str]]]:
    """Returns, for every operator with a shared gradient, the turns of all its adders; a list for each gradient."""
    rows: dict[tuple[int, str], list[tuple[int, int, str]]] = {}
    for row in layout.shared:
        turns: list[tuple[int, int, str]] = []
        rows.update(dict.fromkeys(row, turns))
    window = Window([list(slots)], layout)
    for instruction in window.instructions(range(len(window))):
        op = instruction.operator
        if op is not None and op.part is not Part.F and (instruction.unit, op.name) in rows:
            rows[instruction.unit, op.name].append((instruction.microbatch, instruction.unit, op.name))
    return rows
