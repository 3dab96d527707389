"""Counts the kernels, bytes sent and live memory of a rank's operators by running them on the meta device.

In:   a runner on a simulated mesh, and a micro-batch.
Out:  `Amounts`: kernels, bytes sent and live memory of every operator, and the parameters of every unit.
Must hold: the operators are the operators of training, so all changes by a model, an adapter or recomputation are
counted, and graphs over the simulated mesh, whose axes have sizes and send nothing, equal graphs over a real mesh.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_helix.config import PARAMETERS
from hf_helix.doctor.amounts.lifetimes import LifetimeTrace, WatchedExecutor, lifetimes_of
from hf_helix.doctor.amounts.meter import FusedKernels, Meter, tensors_in
from hf_helix.doctor.amounts.records import (
    Amounts,
    Model,
    OperatorAmounts,
    Transfer,
)
from hf_helix.operators.base import TransferFn
from hf_helix.operators.communication.transport import Axis, ReplicaAxes, TransportByName, bytes_moved
from hf_helix.operators.parameters.host_shard import HostLink
from hf_helix.operators.units.rows import parameter_rows
from hf_helix.operators.vocabulary.statistics import counting
from hf_helix.operators.zero.zero1 import apply_zero1
from hf_helix.planning.graph.backward import FIRST, NEXT
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.parameters import Parameter
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES, HOST
from hf_helix.planning.window.layout import Name, named_operators
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.distributed.pipe import Pipe
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams.streams import Event, Streams

META = torch.device("meta")


class SimulatedTransport(TransportByName):
    """Logs transfers, and sends nothing; `sums_in_place`: a reduce-scatter adds up in fp32 at least, like NCCL's."""

    def __init__(self, axis: str, size: int, sums_in_place: bool, log: list[Transfer]) -> None:
        self.size, self.rank = size, 0
        self._axis, self._sums_in_place, self._log = axis, sums_in_place, log

    def prefers_exchange(self, value: Tensor) -> bool:
        return not self._sums_in_place or value.element_size() < 4

    def move(self, name: str, out: Tensor, value: Tensor, *rows: Sequence[int]) -> None:
        both_ways = bytes_moved(name, out, value, self.size, self.rank, rows)
        self._log.append(Transfer(self._axis, name, max(both_ways)))


def simulated_mesh(
    sizes: Mapping[str, int],
    inter_node_axes: Collection[str] = (),
    sums_in_place: bool = True,
    spread: Mapping[str, int] | None = None,
    streams_weights: bool = False,
    log: list[Transfer] | None = None,
) -> Mesh:
    """Returns the mesh of the first rank of a layout, with the full model on one pipeline rank.

    Args:
        sizes: sizes of "tp", "cp" and "ep", 1 by default; and of "vocabulary".
        inter_node_axes: the axes between nodes.
        sums_in_place: see `SimulatedTransport`.
        spread: number of ranks by axis over which weights are sharded; None for full weights.
        streams_weights: whether weights lie on the host.
        log: takes the transfers.
    """
    tp, cp, ep = (sizes.get(name, 1) for name in ("tp", "cp", "ep"))
    log = [] if log is None else log

    def axis(name: str, size: int, *kinds: str) -> Axis:
        crosses = any(kind in inter_node_axes for kind in kinds)
        kind = Kind.INTER_NODE if crosses else Kind.INTRA_NODE
        return Axis(SimulatedTransport(name, size, sums_in_place, log), kind)

    def shard_axes(name: str) -> ReplicaAxes | None:
        size = (spread or {}).get(name, 1)
        if size == 1 and not streams_weights:
            return None
        return ReplicaAxes(axis(name, size, "dp", *["cp"] * (cp > 1)), axis(name, size, "dp"))

    def copy(sent: int, received: int, move: TransferFn) -> None:
        log.append(Transfer(HOST, "up" if received else "down", sent + received))

    over_tp = axis("tp", tp, "tp")
    experts = over_tp if ep == 1 else axis("experts", ep * tp, "ep", *["tp"] * (tp > 1))
    all_sizes = {"dp": ep, "pp": 1, "cp": cp, "tp": tp, "ep": ep}
    return Mesh(
        all_sizes,
        META,
        None,
        over_tp,
        axis("cp", cp, "cp"),
        experts,
        Pipe([0]),
        replica_axes=shard_axes(COPIES),
        expert_replica_axes=shard_axes(EXPERT_COPIES),
        host_link=HostLink(PARAMETERS if streams_weights else None, copy),
        vocabulary=axis("vocabulary", sizes.get("vocabulary", tp)),
    )


def of_slices_alone(amounts: Amounts) -> Amounts:
    """Returns the amounts of slices of the vocabulary as of ranks with weights of their own.

    They were counted on one rank, whose slices share their weights. `.first` and `.next` name the slices before the
    last. A rank has a slice of the embedding and a slice of the head: the embedding's first is with the head's last.
    Whatever the slices share is counted once for each rank. Example: slices of 100 trained elements.

                         counted on one rank                   returned
        embedding        .first 100, .next 0, last 0           .first 100, .next 100, last 100
        head             .first 100, .next 0, last 0           .first 100, .next 100, last 100
        gradient         one, all embeddings add to it         three, one embedding adds to each
        tied gradient    one, embeddings and heads add to it   three, an embedding and a head add to each
    """
    embedding, head = amounts.model.units[0], amounts.model.units[-1]
    ends = [[f"{name}{suffix}" for suffix in (FIRST, NEXT, "")] for name in (embedding, head)]
    rank_of = {name: place for names in (ends[0], ends[1][::-1]) for place, name in enumerate(names)}
    ranks = [rank_of.get(name, -1) for name in amounts.layout.units]
    copies = dict(amounts.copies)
    for first, *others in ends:
        copies |= {name: max(copies[name], copies[first]) for name in others if name in copies}
    rows = [each for row in amounts.parameters for each in _of_ranks(row, ranks)]
    return replace(amounts, copies=copies, parameters=sorted(rows, key=lambda row: row.units[0]))


def _of_ranks(row: Parameter, ranks: Sequence[int]) -> list[Parameter]:
    """Returns the rows of a parameter for the ranks with slices of the vocabulary.

    Args:
        row: the parameter, of slices of all ranks.
        ranks: of each unit; negative for units without slices.
    """
    found = sorted({ranks[unit] for unit in row.units if ranks[unit] >= 0})
    if len(row.units) == 1 or not found:
        return [row]
    rows = []
    for rank in found:
        units = tuple(unit for unit in row.units if ranks[unit] == rank)
        adders = tuple(adder for adder in row.adders if ranks[adder[0]] == rank)
        rows.append(replace(row, units=units, adders=adders))
    return rows


class _Done(Event):
    def __init__(self, kind: Kind, label: str) -> None:
        self.kind, self.label = kind, label


class SimulatedStreams(Streams):
    """Streams that run everything when issued, and note transfers by label; `log` is the mesh's list of transfers."""

    slots_ahead = 0

    def __init__(self, log: list[Transfer]) -> None:
        self.sent: dict[str, list[Transfer]] = {}
        self._log = log

    def issue(
        self, kind: Kind, work: Callable[[], object], after: Sequence[Event], label: str, lane: str = ""
    ) -> Event:
        self._log.clear()
        work()
        self.sent.setdefault(label, []).extend(self._log)
        return _Done(kind, label)

    def is_over(self, event: Any) -> bool:
        return True

    def wait(self, event: Any) -> None:
        pass

    def compute(self, work: Callable[[], Any], label: str) -> Any:
        return work()

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


class WindowCounter:
    """Counts windows of one micro-batch, of any sizes.

    Args:
        runner: of a rank on a simulated mesh, with `SimulatedStreams`.
        model: the properties of the model.
        spread: number of ranks by axis over which weights are sharded.
    """

    def __init__(self, runner: Runner, model: Model, spread: Mapping[str, int] | None = None) -> None:
        self._runner, self._model, self._spread = runner, model, dict(spread or {})
        self._casts: dict[tuple[object, ...], Any] = {}  # of weights, kept between windows
        self._first: Meter | None = None
        self._copies: Mapping[str, int] | None = None

    def amounts(self, batch: MicroBatch, handed_on: int) -> Amounts:
        """Returns the amounts of a micro-batch; `handed_on` are the bytes of the values between units."""
        runner, streams = self._runner, self._runner.executor.streams
        assert isinstance(streams, SimulatedStreams)
        rank_units, layout = runner.rank_units, runner.layout
        second, watch = self._counted(batch, streams)
        labels = {
            (layout.units[index], entry): runner.executor.label(batch.key[1], index, op)
            for index in layout.units_of(0)
            for entry, op in layout.graphs[layout.units[index]].entries()
        }
        names = {label: name for name, label in labels.items()}
        entries = {label: (layout.units.index(unit), entry) for (unit, entry), label in labels.items()}
        unsharded = {(index, name) for index, unit in rank_units.all_units.items() for name in unit.flat_parameters}
        lifetimes = lifetimes_of(second, watch, entries, layout, unsharded)
        ran = [names[label] for label in second.counted]  # in execution order, which decides memory
        assert set(ran) == {name for name, _ in named_operators(layout)}
        gathered = lifetimes.weights()
        operators = {}
        for name in ran:
            metered, sent = second.counted[labels[name]], tuple(streams.sent.get(labels[name], ()))
            operators[name] = OperatorAmounts(metered.delta, metered.peak, gathered.get(name, 0), metered.kernels, sent)
        if self._copies is None:
            self._copies = self._copies_of(names)
        place = runner.mesh.place
        return Amounts(
            self._model,
            layout,
            operators,
            self._parameters,
            {axis: sharers.slices.size for axis, sharers in place.axes.items()},
            handed_on,
            self._copies,
            lifetimes,
            self._spread,
        )

    def _counted(self, batch: MicroBatch, streams: SimulatedStreams) -> tuple[Meter, LifetimeTrace]:
        """Returns the meter of a window, and the trace of its values. A first window of the runner makes gradients and
        copies of weights, which further windows reuse."""
        runner, side = self._runner, batch.prepare()
        batch, rank_units = replace(batch, prepare=lambda: dict(side)), runner.rank_units
        with runner.precision.weights.within(self._casts), runner.precision.in_window():
            if self._first is None:
                self._first = Meter([*rank_units.own_rows, *rank_units.stepped], counts=False)
                _run(runner, batch, streams, self._first)
            streams.sent.clear()
            held = [tensor for p in rank_units.own_rows for tensor in (p, p.grad) if tensor is not None]
            held += [value for value in (*rank_units.stepped, *side.values()) if isinstance(value, Tensor)]
            second = Meter(held, self._first)
            watch = _run(runner, batch, streams, second)
        return second, watch

    def _copies_of(self, names: Mapping[str, Name]) -> dict[str, int]:
        """Returns the bytes of copies of weights, by the name of the unit that made them in the first window.

        Args:
            names: of operators, by their labels.
        """
        assert self._first is not None
        copies = {unit.name: 0 for unit in self._runner.rank_units.all_units.values()}
        kept = {self._first.allocation_of(tensor) for value in self._casts.values() for tensor in tensors_in(value)}
        for allocated in kept:
            if allocated is not None and allocated.maker is not None:
                copies[names[allocated.maker][0]] += allocated.bytes
        return copies

    @cached_property
    def _parameters(self) -> list[Parameter]:
        """The parameters of the rank, without spread weights in the buffers of `shard_optimizer`, made as in training:
        these do not depend on the number of replicas."""
        units = list(self._runner.rank_units.all_units.values())
        if not self._spread:
            several = simulated_mesh({}, spread={COPIES: 2, EXPERT_COPIES: 2})
            units = apply_zero1(units, several.shard_axes, self._runner.precision.autocast_dtype)
        return list(parameter_rows(dict(enumerate(units))).values())


def _run(runner: Runner, batch: MicroBatch, streams: SimulatedStreams, meter: Meter) -> LifetimeTrace:
    streams.trace = watch = LifetimeTrace(meter)
    executor = WatchedExecutor(watch, runner, streams)
    with meter, FusedKernels(meter), counting(meter.few_parts):
        executor.run(runner.program(1), [batch], runner.sources(), saves_for_backward=True)
        watch.end()
    return watch
