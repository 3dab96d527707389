"""What every operator of a rank computes, moves and keeps: counted, on the meta device, by running it there.

In:   a runner on a mesh on paper, and a micro-batch.
Out:  `Amounts`: kernels, bytes sent and live memory of every operator, and the parameters of every unit.
Must hold: the operators that run are those that train, so that whatever a model, an adapter or recomputation changes in
them is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from hf_helix.doctor.amounts.kept import KeptWeights, flat_names, kept_weights, with_kept_flats
from hf_helix.doctor.amounts.kernels import Kernel, Transfer
from hf_helix.doctor.amounts.lifetimes import Lifetimes, LifetimeTrace, WatchedExecutor, lifetimes_of
from hf_helix.doctor.amounts.meter import FusedKernels, Meter, Metered
from hf_helix.operators.param_shard import EXPERTS
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.window.layout import Layout, Name, named_operators
from hf_helix.runtime.gradients.buckets import by_completion
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams import Event, Streams

Adders = tuple[tuple[int, str], ...]
"""Operators of backward, as (unit, name), that add to a gradient."""


@dataclass(frozen=True)
class OperatorAmounts:
    """What one operator does, once.

    Attributes:
        kernels: what it computes.
        transfers: what it sends.
        delta: bytes that are alive after it and were not before, with what its readers free.
        peak: bytes alive at most while it runs, above those alive before.
        weights: those of `delta` that are gathered weights, or copies of these.
    """

    kernels: Sequence[Kernel] = ()
    transfers: Sequence[Transfer] = ()
    delta: int = 0
    peak: int = 0
    weights: int = 0


@dataclass(frozen=True)
class Weights:
    """The parameters of a unit on a rank, but for those that an earlier unit has, too: the weights that a head shares
    with the embedding are on its rank and count there.

    Attributes:
        trained: elements that get gradients, where every data-parallel rank holds a copy.
        experts: likewise, of experts, which fewer ranks have copies of.
        frozen: elements that get none, where every data-parallel rank holds a copy.
        frozen_experts: likewise, of experts.
        frozen_itemsize: bytes of an element that gets none: the type in which the model was loaded.
    """

    trained: int = 0
    experts: int = 0
    frozen: int = 0
    frozen_experts: int = 0
    frozen_itemsize: int = 4

    @property
    def all_trained(self) -> int:
        """Returns the elements that get gradients, experts or not."""
        return self.trained + self.experts

    @property
    def all_frozen(self) -> int:
        """Returns the elements that get none, experts or not."""
        return self.frozen + self.frozen_experts


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter on a rank.

    Attributes:
        adders: the operators of backward that add to it, as (name of the unit, name there).
        elements: how many it has.
        is_experts: whether it is of experts, which fewer ranks have copies of.
        flat: the name of the flat that its parameter lies in where ranks with copies share weights or the optimizer.
    """

    adders: tuple[tuple[str, str], ...]
    elements: int
    is_experts: bool
    flat: str


@dataclass(frozen=True)
class Model:
    """What a layout needs to know of a model.

    Attributes:
        name: its class.
        units: the names of its units in forward order: the embedding, the layers, the head.
        head_cost: the work of head and loss relative to that of a layer.
        tied: whether embedding and head share their weights, which must be on one rank of a pipeline.
        flops_per_token: floating-point operations of forward and backward of a token without attention.
        attention_flops: those of attention, for a token and every token of the sequence.
    """

    name: str
    units: Sequence[str]
    head_cost: float
    tied: bool
    flops_per_token: float
    attention_flops: float

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return len(self.units) - 2


@dataclass(frozen=True)
class Amounts:
    """What a rank does for a micro-batch.

    Attributes:
        model: the whole model.
        layout: the units that were counted, one of each name.
        operators: of every operator, in the order in which one strand runs them.
        weights: of every unit, by name.
        handed_on: bytes of what a unit hands to the next.
        copies: bytes that a window keeps of copies of weights in the type of matrix products, by unit.
        gradients: by name of the unit that completes them, those of each in the order in which it does.
        lifetimes: of the memory that operators leave.
        kept: what ranks with copies would each step a part of, and gather; nothing where weights are spread.
        spread: the axes that weights are spread over, with their ranks; empty where every rank keeps all weights.
    """

    model: Model
    layout: Layout
    operators: Mapping[Name, OperatorAmounts]
    weights: Mapping[str, Weights]
    handed_on: int
    copies: Mapping[str, int]
    gradients: Mapping[str, Sequence[Gradient]]
    lifetimes: Lifetimes
    kept: Sequence[KeptWeights] = ()
    spread: Mapping[str, int] = field(default_factory=dict)

    def over(self, spread: Mapping[str, int]) -> Amounts:
        """Returns the same with weights that are spread over as many ranks; padding apart, gathers alone differ.

        Args:
            spread: ranks by axis; the axes are those of `self.spread`.
        """
        if spread == self.spread:
            return self
        operators = dict(self.operators)
        for name, counted in self.operators.items():
            if any(each.axis in spread for each in counted.transfers):
                sent = [_over(each, self.spread, spread) for each in counted.transfers]
                operators[name] = replace(counted, transfers=sent)
        return replace(self, operators=operators, spread=dict(spread))

    def completed_gradients(self, layout: Layout, rank: int) -> Iterator[tuple[Gradient, Adders]]:
        """Yields the gradients of a rank in the order in which a micro-batch completes them, each with what adds to it.

        Args:
            layout: of all ranks of a pipeline.
            rank: of the pipeline.
        """
        units = list(layout.units)
        for unit in reversed(layout.units_of(rank)):
            for made in self.gradients.get(units[unit], ()):
                # What another unit adds to is a weight that embedding and head share; there is one of each.
                yield made, tuple((unit if name == units[unit] else units.index(name), op) for name, op in made.adders)


def _over(transfer: Transfer, counted: Mapping[str, int], spread: Mapping[str, int]) -> Transfer:
    """What a gather sends where weights are spread over other numbers of ranks than it was counted with."""
    before, now = counted.get(transfer.axis, 1), spread.get(transfer.axis, 1)
    whole = transfer.bytes * before // max(1, before - 1)
    return replace(transfer, bytes=whole * (now - 1) // now) if transfer.axis in spread else transfer


class _Done(Event):
    def __init__(self, kind: Kind, label: str) -> None:
        self.kind, self.label = kind, label


class SimulatedStreams(Streams):
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


def count_amounts(
    runner: Runner, batch: MicroBatch, handed_on: int, model: Model, spread: Mapping[str, int] | None = None
) -> Amounts:
    """Returns what the operators of a runner do for a micro-batch.

    Args:
        batch: a micro-batch on the meta device.
        handed_on: bytes of what a unit hands to the next.
    """
    streams = runner.executor.streams
    assert isinstance(streams, SimulatedStreams)
    first, second, watch = _counted(runner, batch, streams)
    stage, layout = runner.stage, runner.layout
    labels = {
        (layout.units[index], entry): runner.executor.label(batch.key[1], index, op)
        for index in layout.units_of(0)
        for entry, op in layout.graphs[layout.units[index]].entries()
    }
    names = {label: name for name, label in labels.items()}
    places = {label: (layout.units.index(unit), entry) for (unit, entry), label in labels.items()}
    unsharded = {(index, name) for index, unit in stage.model.items() for name in unit.flat_parameters}
    lifetimes = lifetimes_of(second, watch, places, layout, unsharded)
    ran = [names[label] for label in second.counted]  # in the order in which they ran, which memory depends on
    assert set(ran) == {name for name, _ in named_operators(layout)}
    gathered = lifetimes.weights()
    operators = {
        name: _operator(second.counted[labels[name]], streams.sent.get(labels[name], ()), gathered.get(name, 0))
        for name in ran
    }
    copies = {unit.name: 0 for unit in stage.model.values()}
    for name, label in labels.items():
        if name[1].startswith("F."):
            copies[name[0]] += max(0, first.counted[label].delta - second.counted[label].delta)
    units = list(stage.model.values())
    if not spread:
        units = with_kept_flats(units, runner.precision.autocast_dtype)
    return Amounts(
        model,
        layout,
        operators,
        _weights(runner),
        handed_on,
        copies,
        _gradients(runner, flat_names(units)),
        lifetimes,
        kept_weights(units),
        dict(spread or {}),
    )


def _counted(runner: Runner, batch: MicroBatch, streams: SimulatedStreams) -> tuple[Meter, Meter, LifetimeTrace]:
    """What was counted in a first window and in a further one, and what lived how long in the latter."""
    side = batch.prepare()
    batch = replace(batch, prepare=lambda: dict(side))
    stage = runner.stage
    with runner.precision.weights.kept():  # as in a window, in which they are cast once
        # The first window makes gradients and copies of weights, which are there in every further one.
        first = Meter([*stage.placements, *stage.stepped], counts=False)
        _run(runner, batch, streams, first)
        streams.sent.clear()
        held = [tensor for p in stage.placements for tensor in (p, p.grad) if tensor is not None]
        held += [value for value in (*stage.stepped, *side.values()) if isinstance(value, Tensor)]
        second = Meter(held, first)
        watch = _run(runner, batch, streams, second)
    return first, second, watch


def _run(runner: Runner, batch: MicroBatch, streams: SimulatedStreams, meter: Meter) -> LifetimeTrace:
    streams.trace = watch = LifetimeTrace(meter)
    executor = WatchedExecutor(watch, runner.executor.units, streams, runner.seed, runner.precision)
    with meter, FusedKernels(meter):
        executor.run(runner.program(1), [batch], runner.sources(), training=True)
        watch.end()
    return watch


def _operator(metered: Metered, sent: Sequence[Transfer], weights: int) -> OperatorAmounts:
    return OperatorAmounts(tuple(metered.kernels), tuple(sent), metered.delta, metered.peak, weights)


def _weights(runner: Runner) -> dict[str, Weights]:
    weights = {}
    seen: set[nn.Parameter] = set()
    for _, unit in sorted(runner.stage.model.items()):
        elements: Counter[tuple[bool, bool]] = Counter()
        itemsize = 0
        for parameter, placement in unit.placements.items():
            if parameter in seen:
                continue
            seen.add(parameter)
            elements[parameter.requires_grad, placement.over == EXPERTS] += parameter.numel()
            if not parameter.requires_grad:
                itemsize = max(itemsize, parameter.itemsize)
        weights[unit.name] = Weights(
            trained=elements[True, False],
            experts=elements[True, True],
            frozen=elements[False, False],
            frozen_experts=elements[False, True],
            frozen_itemsize=itemsize or Weights.frozen_itemsize,
        )
    return weights


def _gradients(runner: Runner, flats: Mapping[nn.Parameter, str]) -> dict[str, list[Gradient]]:
    model = runner.stage.model
    gradients: dict[str, list[Gradient]] = {unit.name: [] for unit in model.values()}
    for made in by_completion(model):
        adders = tuple((model[index].name, name) for index, name in made.adders)
        last = model[min(index for index, _ in made.adders)].name
        is_experts = made.placement.over == EXPERTS
        gradients[last].append(Gradient(adders, made.parameter.numel(), is_experts, flats.get(made.parameter, "")))
    return gradients
