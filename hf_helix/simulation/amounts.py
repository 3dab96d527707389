"""What every operator of a rank computes, moves and keeps: counted, on the meta device, by running it there.

In:   a runner on a mesh on paper, and a micro-batch.
Out:  `Amounts`: kernels, bytes sent and live memory of every operator, and the parameters of every unit.
Must hold: the operators that run are those that train, so that whatever a model, an adapter or recomputation changes in
them is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hf_helix.operators.unit import EXPERTS
from hf_helix.planning.graph.operator import Graph, Kind
from hf_helix.planning.graph.pair import GraphPair
from hf_helix.planning.layout import Layout
from hf_helix.planning.profile import Name, named_operators
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams import Event, Streams
from hf_helix.runtime.trace import Trace
from hf_helix.simulation.kernels import Kernel, Transfer
from hf_helix.simulation.meter import FusedAttention, Meter, Metered


@dataclass(frozen=True)
class OperatorAmounts:
    """What one operator does, once.

    Attributes:
        kernels: what it computes.
        transfers: what it sends.
        delta: bytes that are alive after it and were not before, with what its readers free.
        peak: bytes alive at most while it runs, above those alive before.
    """

    kernels: Sequence[Kernel] = ()
    transfers: Sequence[Transfer] = ()
    delta: int = 0
    peak: int = 0


@dataclass(frozen=True)
class Weights:
    """The parameters of a unit on a rank.

    Attributes:
        trained: elements that get gradients, where every data-parallel rank holds a copy.
        experts: likewise, of experts, which fewer ranks have copies of.
        frozen: elements that get none.
    """

    trained: int = 0
    experts: int = 0
    frozen: int = 0


@dataclass(frozen=True)
class Amounts:
    """What a rank does for a micro-batch.

    Attributes:
        about: what was counted, as text.
        layout: the units that were counted, one of each name.
        operators: of every operator.
        weights: of every unit, by name.
        handed_on: bytes of what a unit hands to the next.
        copies: bytes of the copies of weights in the type of matrix products, which a window keeps.
    """

    about: Mapping[str, str]
    layout: Layout
    operators: Mapping[Name, OperatorAmounts]
    weights: Mapping[str, Weights]
    handed_on: int
    copies: int = 0


class _Done(Event):
    def __init__(self, kind: Kind, label: str) -> None:
        self.kind, self.label = kind, label


class _Labels(Trace):
    """Tells a meter which operator is about to run."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def note(self, verb: str, label: str) -> None:
        if verb != "wait":
            self._meter.begin(label)


class PaperStreams(Streams):
    """Runs everything at once, and notes what is sent under which label.

    Args:
        log: where the transports of the mesh note what they send.
    """

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


def count_amounts(runner: Runner, batch: MicroBatch, handed_on: int, about: Mapping[str, str]) -> Amounts:
    """Returns what the operators of a runner do for a micro-batch.

    Args:
        runner: of one rank, on a mesh on paper, with `PaperStreams`, under the plan `sequential`.
        batch: a micro-batch on the meta device.
        handed_on: bytes of what a unit hands to the next.
        about: what the caller knows of the case.
    """
    streams = runner.executor.streams
    assert isinstance(streams, PaperStreams)
    side = batch.prepare()
    batch = replace(batch, prepare=lambda: dict(side))
    with runner.precision.weights.kept():  # as in a window, in which they are cast once
        first = Meter()
        _run(runner, batch, streams, first)  # makes the gradients
        copies = first.live() - sum(p.grad.nbytes for p in runner.stage.placements if p.grad is not None)
        streams.sent.clear()
        held = [tensor for p in runner.stage.placements for tensor in (p, p.grad) if tensor is not None]
        meter = Meter(held + [value for value in side.values() if isinstance(value, Tensor)])
        _run(runner, batch, streams, meter)
    layout = runner.layout
    labels = {
        (layout.units[index], f"{letter}.{op.name}"): runner.executor.label(batch.key[1], index, op)
        for index in layout.units_of(0)
        for letter, graph in _halves(layout.graphs[layout.units[index]])
        for op in graph.operators
    }
    operators = {name: _operator(meter.found.get(label), streams.sent.get(label, ())) for name, label in labels.items()}
    assert operators.keys() == {name for name, _ in named_operators(layout)}
    return Amounts(about, layout, operators, _weights(runner), handed_on, copies)


def _halves(pair: GraphPair) -> list[tuple[str, Graph]]:
    return [("F", pair.forward), ("B", pair.backward)]


def _run(runner: Runner, batch: MicroBatch, streams: PaperStreams, meter: Meter) -> None:
    streams.trace = _Labels(meter)
    with meter, FusedAttention(meter):
        runner.executor.run(runner.program(1), [batch], runner.sources(), training=True)
        meter.begin(None)


def _operator(metered: Metered | None, sent: Sequence[Transfer]) -> OperatorAmounts:
    metered = metered or Metered()
    return OperatorAmounts(tuple(metered.kernels), tuple(sent), metered.delta, metered.peak)


def _weights(runner: Runner) -> dict[str, Weights]:
    found = {}
    for unit in runner.stage.model.values():
        trained = experts = frozen = 0
        for parameter, placement in unit.placements.items():
            if not parameter.requires_grad:
                frozen += parameter.numel()
            elif placement.over == EXPERTS:
                experts += parameter.numel()
            else:
                trained += parameter.numel()
        found[unit.name] = Weights(trained, experts, frozen)
    return found
