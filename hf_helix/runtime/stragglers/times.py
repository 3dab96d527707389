"""The times of a rank in a look: a traced window and the time between windows, in a few numbers.

In:   spans of a window; the units and axes of the rank.
Out:  the time of every operator and transfer by name, as `RankTimes` have them.
Must hold: equal operators of different layers and micro-batches have one name, and so have equal units of different
ranks. On a CPU an operator counts the time that it had a core: other processes may take the core at any moment.
"""

import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from hf_helix.operators.communication.collectives import PipelineTransfer
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.units.unit import Unit
from hf_helix.operators.zero.zero3 import GatherWeights
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.parameters import Cut
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.stragglers.verdict import Timed, Transfer, Transfers
from hf_helix.runtime.streams.trace import Span

EXPERTS = "hf_helix.operators.experts"
COMPUTE = Kind.COMPUTE.value
SIZES = " ["  # begins the mark of sizes in a name
LOW = 0.25  # the quantile of an operator's time in a window
SAMPLE = 64  # transfers of a group in a look, at most


class Group(NamedTuple):
    """The ranks of a transfer, and the stream on which all of them have it in one order."""

    axis: str
    ranks: tuple[int, ...]
    stream: str = ""


class Names:
    """The names and groups of a rank's operators, by their labels in a trace.

    Args:
        units: of the rank.
        mesh: of the rank.
    """

    def __init__(self, units: Mapping[int, Unit], mesh: Mesh) -> None:
        self._mesh = mesh
        self._of_units: dict[str, str] = {}
        self._uneven: set[str] = set()  # operators whose work depends on the tokens that a router sends
        self._groups: dict[str, tuple[str, tuple[int, ...]] | None] = {
            "gradients.sum": self._over(mesh.tp),
            "gradients.average": self._replicas(mesh.replica_group, mesh.expert_replica_group),
            "gradients.scatter": self._replicas(
                *(None if axes is None else axes.reduce.group for axes in (mesh.replica_axes, mesh.expert_replica_axes))
            ),
        }
        for unit in units.values():
            self._add(unit)
        self._known: dict[str, str] = {}

    def __getitem__(self, label: str) -> str:
        """Returns the name of a label: of `B2.layers.3.mlp.down.W` it is `B layers.mlp.down.W [1f3a]`."""
        name = self._known.get(label)
        if name is None:
            place = _place(label)
            name = self._known[label] = f"{label[0]} {self._of_units[place]}" if place in self._of_units else label
        return name

    def has_even_work(self, span: Span) -> bool:
        """Whether the work of an operator is the same on ranks with equal slices and tokens."""
        return _place(span.label) not in self._uneven

    def group(self, span: Span) -> Group | None:
        """Returns the group of a transfer; None if it is unknown, or has a single rank."""
        found = self._groups.get(_place(span.label)) or self._groups.get(span.label)
        return None if found is None else Group(*found, span.stream)

    def _add(self, unit: Unit) -> None:
        name, sizes = re.sub(r"[.][0-9]+", "", unit.label), _sizes(unit, self._mesh)
        for graph in (unit.graphs.forward, unit.graphs.backward):
            for op in graph.operators:
                place = f"{unit.label}.{op.name}"
                operator = unit.operators[op.forward_name]
                self._of_units[place] = f"{name}.{op.name}{sizes}"
                if type(operator).__module__.startswith(EXPERTS):
                    self._uneven.add(place)
                if op.kind.communicates:
                    self._groups[place] = self._group_of(operator)
        for flat in unit.flat_parameters.values():
            self._groups.setdefault(f"{unit.label}.{flat.name}", self._over(flat.gather_axis))

    def _group_of(self, operator: Any) -> tuple[str, tuple[int, ...]] | None:
        """Returns the axis and the ranks of an operator that communicates."""
        if isinstance(operator, PipelineTransfer):
            return "pp", tuple(self._mesh.pipe.ranks)
        if isinstance(operator, GatherWeights):
            return self._over(operator.flat.gather_axis)
        return self._over(operator.axis) if hasattr(operator, "axis") else None

    def _over(self, axis: Axis) -> tuple[str, tuple[int, ...]] | None:
        mesh = self._mesh
        named = {"tp": mesh.tp, "cp": mesh.cp, "ep": mesh.experts}
        name = next((name for name, known in named.items() if known.group is axis.group), "dp")
        return None if axis.group is None else (name, ranks_of(axis.group))

    def _replicas(self, *groups: dist.ProcessGroup | None) -> tuple[str, tuple[int, ...]] | None:
        """Returns the only group of replicas; None if experts have another one, since labels do not tell them apart."""
        found = {group for group in groups if group is not None}
        return ("dp", ranks_of(found.pop())) if len(found) == 1 else None


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Returns the ranks of a group, in the launcher's group."""
    return tuple(dist.get_process_group_ranks(group))


def _place(label: str) -> str:
    """Returns a label without its pass and micro-batch."""
    return label.partition(".")[2]


def _sizes(unit: Unit, mesh: Mesh) -> str:
    """Returns a mark of this rank's slices of a unit's parameters, whose sizes may differ between ranks."""
    slices = [_slice(cut, mesh.axis_of(cut)) for cut in unit.placements.values()]
    return f"{SIZES}{zlib.crc32(str(slices).encode()) & 0xFFFF:04x}]"


def _slice(cut: Cut, axis: Axis) -> tuple[int, int] | None:
    if cut.dim is None:
        return None
    return cut.dim, sum(end - begin for begin, end in cut.bounds(axis.size, axis.rank))


def operators_of(spans: Iterable[Span], names: Names) -> dict[str, Timed]:
    """Returns the count and a low quantile of the seconds of every computation: the rest have met other processes."""
    times = defaultdict(list)
    for span in spans:
        if span.stream == COMPUTE and names.has_even_work(span):
            times[names[span.label]].append(span.seconds if span.core is None else span.core)
    return {name: Timed(len(found), sorted(found)[int(LOW * (len(found) - 1))]) for name, found in times.items()}


def transfers_of(spans: Iterable[Span], names: Names) -> dict[str, Transfers]:
    """Returns the transfers of every group."""
    by_group: dict[Group, list[Transfer]] = defaultdict(list)
    for span in sorted(spans, key=lambda each: each.start):
        group = None if span.stream == COMPUTE else names.group(span)
        if group is not None:  # ranks with slices of other sizes have the same transfers
            by_group[group].append(Transfer(names[span.label].partition(SIZES)[0], span.start, span.end))
    return {
        f"{group.axis} of {','.join(map(str, group.ranks))} on {group.stream}": Transfers(
            group.axis, len(found), found[:: math.ceil(len(found) / SAMPLE)]
        )
        for group, found in by_group.items()
    }
