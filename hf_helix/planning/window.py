"""Windows as numbers: what one micro-batch runs is worked out once, and repeated for every micro-batch of a schedule.

In:   a schedule, and what the ranks hold.
Out:  a `Window`: of every instruction of the window, which one of a single micro-batch's it is, and of which
      micro-batch; and the `Work` of all of them.
Must hold: instructions, their order and their needs are those of `window_instructions` and `work_of`. No operator reads
what another micro-batch wrote, so what one micro-batch runs says everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from hf_helix.planning.cost import Times, Work, entry_of, work_of
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.instructions import PARTS_OF, Instruction, pass_instructions, slot_passes
from hf_helix.planning.layout import Layout
from hf_helix.planning.pipeline.actions import Schedule, num_microbatches_of

Value = TypeVar("Value")

ABSENT = -1


class Pattern:
    """What one micro-batch runs in all units of a layout, forward and backward.

    Attributes:
        calls: the instructions of micro-batch 0: the units forward, then backward.
        spans: of each unit and direction (whether forward), its part of `calls`.
        names: of each call, the name of its unit and its entry in a plan.
        work: the calls as numbers, each taking a second; those that receive take none.
        after: of each call, the calls that plans have come first although it reads nothing of them: those of its unit
            that say so, and for what is issued ahead those that write what enters the unit that it comes with.
        ahead: of each call that is issued ahead, those that read what it brings.
    """

    def __init__(self, layout: Layout) -> None:
        self.calls: list[Instruction] = []
        self.spans: dict[tuple[int, bool], range] = {}
        units = sorted(unit for chunk in layout.chunks.values() for unit in chunk)
        for forward in (True, False):
            for unit in units if forward else reversed(units):
                made = pass_instructions(layout, (0, unit), forward)
                self.spans[unit, forward] = range(len(self.calls), len(self.calls) + len(made))
                self.calls += made
        self.names = [entry_of(call, layout) for call in self.calls]
        self.work = work_of(self.calls, layout, dict.fromkeys(self.names, 1.0))
        self._writers = {key: place for place, call in enumerate(self.calls) for key in call.writes}
        self.after = [after for pass_, span in self.spans.items() for after in self._after(*pass_, span, layout)]
        self.ahead = self._ahead()

    def _after(self, unit: int, forward: bool, span: range, layout: Layout) -> list[list[int]]:
        """Returns `after` of the calls of a unit in one direction."""
        operators = [self.calls[place].operator for place in span]
        places = {op.name: place for op, place in zip(operators, span, strict=True) if op}
        entering = [layout.key(unit, name, forward) for name in layout.graph(unit, forward).inputs]
        entered = [self._writers[key] for key in entering if key in self._writers]
        found = []
        for op, place in zip(operators, span, strict=True):
            if op:
                before = (*op.ordered_after, *([f"{op.forward_name}.I"] if op.part is Part.W else []))
                is_of_unit = self.calls[place].unit == unit
                found.append([places[name] for name in before] if is_of_unit else entered)
        return found

    def _ahead(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {
            place: [] for place, call in enumerate(self.calls) if call.operator and call.operator.ahead
        }
        for place, call in enumerate(self.calls) if found else ():
            for key in call.weights:
                found[self._writers[key]].append(place)
        return found

    def of(self, unit: int, computation_type: str) -> Sequence[int]:
        """The calls of a pass through a unit: those of the whole direction, or of a half of backward."""
        span = self.spans[unit, computation_type == "F"]
        if computation_type in "FB":
            return span
        parts = PARTS_OF[computation_type]
        return [place for place in span if (op := self.calls[place].operator) and op.part in parts]


class NumberedPass(NamedTuple):
    """A micro-batch going through a unit, as a part of an action.

    Attributes:
        microbatch, unit: which.
        computation_type: of the action.
        start: the place of its first instruction in the window; the others follow.
        calls: what it runs.
    """

    microbatch: int
    unit: int
    computation_type: str
    start: int
    calls: Sequence[int]


class Window:
    """The instructions of a window, rank by rank and slot by slot, as numbers.

    Args:
        schedule: of the window; ranks whose instructions do not matter may have no slots.
        layout: what the ranks hold.

    Attributes:
        pattern: what each micro-batch runs.
        passes: through units, in order.
        calls: of each instruction, the call of the pattern.
        microbatches: of each instruction, its micro-batch.
        at: of each micro-batch and call, the place of the instruction; `ABSENT` where the window does not have it.
        slots: of each rank and slot, the place of its first instruction; one more for the end of the rank.
    """

    def __init__(self, schedule: Schedule, layout: Layout) -> None:
        self.layout = layout
        self.pattern = pattern = pattern_of(layout)
        self.passes: list[NumberedPass] = []
        self.calls: list[int] = []
        self.microbatches: list[int] = []
        self.at = [[ABSENT] * len(pattern.calls) for _ in range(num_microbatches_of(schedule))]
        self.slots: list[list[int]] = []
        parts: dict[tuple[int, str], Sequence[int]] = {}
        for slots in schedule:
            self.slots.append([])
            for slot in slots:
                self.slots[-1].append(len(self.calls))
                for (microbatch, unit), action in slot_passes(slot, layout):
                    key = unit, action.computation_type
                    calls = parts[key] if key in parts else parts.setdefault(key, pattern.of(*key))
                    self._add(NumberedPass(microbatch, *key, len(self.calls), calls))
            self.slots[-1].append(len(self.calls))

    def __len__(self) -> int:
        return len(self.calls)

    def _add(self, made: NumberedPass) -> None:
        places = self.at[made.microbatch]
        for place, call in enumerate(made.calls, made.start):
            places[call] = place
        self.passes.append(made)
        self.calls += made.calls
        self.microbatches += [made.microbatch] * len(made.calls)

    def instruction(self, place: int) -> Instruction:
        """The instruction at a place."""
        return self.pattern.calls[self.calls[place]].of(self.microbatches[place])

    def of_calls(self, values: Sequence[Value]) -> list[Value]:
        """What is the same for every micro-batch, given for each call of the pattern, for each instruction."""
        return [values[call] for call in self.calls]

    def work(self, times: Times) -> Work:
        """The window as numbers.

        Raises:
            KeyError: `times` lacks an operator.
        """
        pattern, one, at = self.pattern, self.pattern.work, self.at
        numbers = self._numbers()
        seconds = [times[name] if takes else 0.0 for name, takes in zip(pattern.names, one.seconds, strict=True)]
        needs = [
            [at[k][need] for need in one.needs[call]] for call, k in zip(self.calls, self.microbatches, strict=True)
        ]
        if len(self) < len(self.at) * len(pattern.calls):
            needs = [[need for need in row if need != ABSENT] for row in needs]
        size_sources = [
            ABSENT if one.size_sources[call] == ABSENT else at[k][one.size_sources[call]]
            for call, k in zip(self.calls, self.microbatches, strict=True)
        ]
        return Work(
            self.of_calls(one.streams),
            self.of_calls(seconds),
            needs,
            [numbers[pattern.names[call]] for call in self.calls],
            list(numbers),
            self.of_calls(one.ranks),
            self.of_calls(one.lanes),
            size_sources,
        )

    def _numbers(self) -> dict[tuple[str, str], int]:
        """Numbers the operators as they come."""
        numbers: dict[tuple[str, str], int] = {}
        seen: set[tuple[int, str]] = set()  # layers may differ in what they issue ahead
        for made in self.passes:
            kind = made.unit, made.computation_type
            if kind not in seen:
                seen.add(kind)
                for call in made.calls:
                    numbers.setdefault(self.pattern.names[call], len(numbers))
        return numbers


def pattern_of(layout: Layout) -> Pattern:
    """The pattern of a layout, which is made once."""
    pattern = layout.derived.get("pattern")
    if not isinstance(pattern, Pattern):
        pattern = layout.derived["pattern"] = Pattern(layout)
    return pattern
