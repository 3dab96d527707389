"""Lifetimes of the memory that operators leave allocated.

In:   one micro-batch on the meta device, one operator after the other.
Out:  `Lifetimes`: by operator, the memory left allocated and the conditions of its release.
Must hold: the conditions are true of every order of the operators. Memory is freed after the last read of its values,
and not before the operator after which the meter saw its release: backward may hold memory without a name.

Outputs of a unit are inputs of the next unit, and only its operators decide their lifetime there. So the lifetime is
noted with the receiving unit.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping

from torch import Tensor

from hf_helix.doctor.amounts.meter import Allocated, Meter
from hf_helix.doctor.amounts.records import Lifetimes, Storage, outputs_of
from hf_helix.planning.window.layout import Key, Layout, Name
from hf_helix.runtime.executor import Executor, Sources
from hf_helix.runtime.microbatch import MicroBatch, MicroBatchState
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams.streams import Streams
from hf_helix.runtime.streams.trace import Trace

UnitEntry = tuple[int, str]  # an operator: the index of its unit, and its entry in a plan


class LifetimeTrace(Trace):
    """Tells a meter the next operator, and notes the values in each allocation."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.values: dict[Allocated, list[Key]] = defaultdict(list)
        self._meter = meter
        self._states: list[MicroBatchState] = []
        self._seen: set[Key] = set()

    def follow(self, state: MicroBatchState) -> None:
        """Notes the values of a micro-batch from now on."""
        self._states.append(state)

    def note(self, verb: str, label: str) -> None:
        if verb != "wait":
            self._begin(label)

    def end(self) -> None:
        """Ends counting."""
        self._begin(None)

    def _begin(self, label: str | None) -> None:
        self._meter.begin(label)
        for key, value in ((key, value) for state in self._states for key, value in state.values.items()):
            made = vars(value).get("copies")
            if key in self._seen and not made:
                continue
            copies = [copy for copy in made.values() if isinstance(copy, Tensor)] if made else []
            for tensor in (*copies, *([] if key in self._seen else [value])):
                allocated = self._meter.allocation_of(tensor)
                if allocated is not None and key not in self.values[allocated]:
                    self.values[allocated].append(key)
            self._seen.add(key)


class WatchedExecutor(Executor):
    """An executor whose micro-batches a `LifetimeTrace` follows."""

    def __init__(self, watch: LifetimeTrace, runner: Runner, streams: Streams) -> None:
        super().__init__(runner.executor.units, streams, runner.seed, runner.precision, runner.layout)
        self._watch = watch

    def begin(self, batch: MicroBatch, sources: Sources, saves_for_backward: bool) -> MicroBatchState:
        state = super().begin(batch, sources, saves_for_backward)
        self._watch.follow(state)
        return state


def lifetimes_of(
    meter: Meter, watch: LifetimeTrace, entries: Mapping[str, UnitEntry], layout: Layout, weights: Collection[Key]
) -> Lifetimes:
    """Returns the lifetimes of the memory that a meter has counted for a micro-batch."""
    left: dict[Name, list[Storage]] = defaultdict(list)
    entering: dict[tuple[str, bool, int], str] = {}
    for memory in meter.allocated:
        if memory.maker is None or memory.maker == memory.last:
            continue
        unit, entry = entries[memory.maker]
        keys = watch.values.get(memory, [])
        values = tuple(name for index, name in keys if index == unit)
        where, behind = entries[memory.last] if memory.last is not None else (unit, "")
        if where != unit:
            for forward, position in outputs_of(layout, unit, values):
                if where == unit + (1 if forward else -1):
                    entering[layout.units[where], forward, position] = behind
            behind = ""
        storage = Storage(memory.bytes, values, behind, any(key in weights for key in keys))
        left[layout.units[unit], entry].append(storage)
    return Lifetimes(dict(left), entering)
