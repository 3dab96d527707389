"""Embedding and head in slices of the vocabulary, one for each pipeline rank (`spread_vocabulary`).

In:   the units of a whole model, with the table and the head cut over the ranks of tensor parallelism and of the
      pipeline together.
Out:  units with an embedding and a head for each pipeline rank, which run one after the other as virtual stages.
Must hold: the loss equals a single head's: the last slice has the statistics of all. On every rank, the slices of
other ranks have parameters without memory, so that all ranks describe the same units.

    rank      2               1                    0                                        1               2
              lookup -> x     x + lookup -> x      x + lookup   layers   norm -> h, s       h, s -> h, s    h, s -> loss

The value `s` has the statistics of the slices so far. Backward, every slice adds to the gradient of `h`, and passes the
gradients of the statistics of earlier slices on.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_helix.operators.autograd_operator import Add, AutogradOperator
from hf_helix.operators.base import Communication, Method, TensorOperator
from hf_helix.operators.communication.collectives import AllGatherReplicated, MakeBuffers
from hf_helix.operators.units.unit import Unit
from hf_helix.operators.vocabulary.loss import TokenStatistics
from hf_helix.planning.graph.backward import slice_names
from hf_helix.planning.graph.operator import Kind, Operator, Part
from hf_helix.planning.parameters import VOCABULARY

PARTIAL, GIVEN, PASSED, JOINED = "partial", "given", "passed", "joined"
LIGHT = 0.5


class Elsewhere(nn.Parameter):
    """A slice of a parameter on another pipeline rank: the shape of the full parameter, and no memory."""


class _OnOtherRank(TensorOperator):
    """An operator of another pipeline rank."""

    def __init__(self, operator: TensorOperator, there: Mapping[Any, nn.Parameter]) -> None:
        self._operator, self._there = operator, there

    def _of(self, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self._there[parameter] for parameter in parameters)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self._of(self._operator.parameters)

    def weights_read_by(self, part: Part) -> tuple[Tensor, ...]:
        return self._of(self._operator.weights_read_by(part))

    @property
    def cast_parameters(self) -> tuple[Tensor, ...]:
        return self._of(self._operator.cast_parameters)

    def method_of(self, part: Part) -> Method:
        return self._operator.method_of(part)


def spread_units(
    units: Sequence[Unit], table: nn.Parameter, head: nn.Parameter, dtype: torch.dtype, rank: int | None, size: int
) -> list[Unit]:
    """Returns the units of a model with slices of the embedding and of the head for each pipeline rank.

    Args:
        units: of the whole model: the embedding, the layers, the head.
        table, head: the weights of the embedding and of the head.
        dtype: of the head's input, from slice to slice.
        rank: this rank of the pipeline; None to have all slices here.
        size: of the pipeline, at least 2.

    Raises:
        ValueError: the embedding or the head cannot be cut like this.
    """
    first, *layers, last = units
    embedding, last = (_over_vocabulary(unit, each) for unit, each in ((first, table), (last, head)))
    there: dict[int, dict[nn.Parameter, nn.Parameter]] = {each: {} for each in range(size) if rank not in (None, each)}
    places = [*range(size - 1, -1, -1)], [*range(size)]
    return [
        *(
            _placed(unit, each, there)
            for unit, each in zip(_embeddings(embedding, table, size), places[0], strict=True)
        ),
        *layers,
        *(_placed(unit, each, there) for unit, each in zip(_heads(last, head, dtype, size), places[1], strict=True)),
    ]


def slice_buffers(
    make_buffers: MakeBuffers, tp_size: int, count: int, dtype: torch.dtype
) -> Callable[[int], MakeBuffers]:
    """Returns a function from the number of a slice of the head to the buffers of its outputs: the input of the
    head [sequence / tp_size, batch, hidden], and the statistics of the slices so far.

    Args:
        make_buffers: the buffers of a layer's outputs.
        tp_size: how many ranks share a slice.
        count: how many statistics there are.
        dtype: of the input of the head.
    """

    def of_slice(number: int) -> MakeBuffers:
        def make(side: Mapping[str, Any]) -> tuple[Tensor, ...]:
            hidden, ids = make_buffers(side)[0], side["ids"]
            shape = (1 + number) * tp_size, count, *ids.shape
            return hidden.to(dtype), torch.empty(shape, dtype=torch.float32, device=ids.device)

        return make

    return of_slice


def _embeddings(unit: Unit, table: nn.Parameter, size: int) -> Iterator[Unit]:
    """Yields the slices of the embedding in their order: each adds its rows, and the last runs the operators after
    it."""
    operators = unit.graphs.forward.operators
    end = 1 + next(place for place, op in enumerate(operators) if table in {*unit.operators[op.name].parameters})
    if end < len(operators) and isinstance(unit.operators[operators[end].name], Communication):
        end += 1  # the sum over the ranks of tensor parallelism
    own, rest = operators[:end], operators[end:]
    (x,) = own[-1].writes
    _check_cut(unit, own, rest, {x})
    added: dict[str, TensorOperator] = {"add": Add()}
    add = Operator(name="add", kind=Kind.COMPUTE, reads=(x, PARTIAL), writes=(JOINED,), relative_cost=LIGHT)
    outputs = tuple(JOINED if value == x else value for value in unit.graphs.forward.outputs)
    first, *between, last = slice_names(unit.name, size)
    yield unit.part(first, own, (), (x,))
    for name in between:
        yield unit.part(name, [*own, add], (PARTIAL,), (JOINED,), added)
    yield _with_idle(unit, unit.part(last, [*own, add, *_renamed(rest, {x: JOINED})], (PARTIAL,), outputs, added))


def _over_vocabulary(unit: Unit, weight: nn.Parameter) -> Unit:
    """Returns a unit whose parameters with rows of the vocabulary lie on all pipeline ranks."""
    read = {p for operator in unit.operators.values() if weight in {*operator.parameters} for p in operator.parameters}
    if any(placed.dim != 0 for parameter, placed in unit.placements.items() if parameter in read):
        raise ValueError(
            f"spread_vocabulary=True: the {unit.label} has a low-rank adapter, which no vocabulary divides; use "
            "spread_vocabulary=False, or leave the embedding and the head out of the adapters' target_modules"
        )
    placements = {
        p: replace(placed, mesh_axis=VOCABULARY) if p in read else placed for p, placed in unit.placements.items()
    }
    return replace(unit, placements=placements)


def _heads(unit: Unit, head: nn.Parameter, dtype: torch.dtype, size: int) -> Iterator[Unit]:
    """Yields the slices of the head in their order: the first runs what precedes them, the last computes the loss."""
    graph = unit.graphs.forward
    operators = graph.operators
    begin = next(place for place, op in enumerate(operators) if head in {*unit.operators[op.name].parameters})
    if begin > 0 and isinstance(unit.operators[operators[begin - 1].name], Communication):
        begin -= 1  # the gather over the ranks of tensor parallelism
    end = 1 + next(place for place, op in enumerate(operators) if isinstance(unit.operators[op.name], TokenStatistics))
    if isinstance(unit.operators[operators[end].name], AllGatherReplicated):
        end += 1
    front, own, rest = operators[:begin], operators[begin:end], operators[end:]
    (hidden,), (statistics,) = own[0].reads, own[-1].writes
    _check_cut(unit, front, (*own, *rest), {hidden})
    _check_cut(unit, own, rest, {statistics})
    kept = Operator(name="pass", kind=Kind.COMPUTE, reads=(hidden,), writes=(PASSED,), relative_cost=LIGHT)
    join = Operator(name="join", kind=Kind.COMPUTE, reads=(GIVEN, statistics), writes=(JOINED,), relative_cost=LIGHT)
    added: dict[str, TensorOperator] = {
        "pass": AutogradOperator(lambda value: value.to(dtype).view_as(value)),
        "join": AutogradOperator(lambda given, own: torch.cat((given, own))),
    }
    first, *between, last = slice_names(unit.name, size)
    yield unit.part(first, [*front, kept, *own], graph.inputs, (PASSED, statistics), added)
    for name in between:
        yield unit.part(name, [kept, *own, join], (hidden, GIVEN), (PASSED, JOINED), added)
    ending = [*own, join, *_renamed(rest, {statistics: JOINED})]
    yield _with_idle(unit, unit.part(last, ending, (hidden, GIVEN), graph.outputs, added))


def _with_idle(whole: Unit, last: Unit) -> Unit:
    """Returns the last slice of a unit, with the parameters that no operator reads."""
    read = {parameter for operator in whole.operators.values() for parameter in operator.parameters}
    idle = {parameter: placed for parameter, placed in whole.placements.items() if parameter not in read}
    return replace(last, placements={**last.placements, **idle})


def _check_cut(unit: Unit, before: Sequence[Operator], after: Sequence[Operator], known: Collection[str]) -> None:
    """Raises ValueError unless operators read nothing of earlier ones but known values."""
    written = {value for op in before for value in op.writes}
    read = {value for op in after for value in op.depends_on} | {*unit.graphs.forward.outputs}
    if not (read & written <= {*known}) or len(unit.graphs.forward.inputs) > 1:
        raise ValueError(
            f"spread_vocabulary=True: the {unit.label} of this model hands several values on, and one can go from "
            "slice to slice; use spread_vocabulary=False"
        )


def _renamed(operators: Sequence[Operator], names: Mapping[str, str]) -> list[Operator]:
    def new(values: Sequence[str]) -> tuple[str, ...]:
        return tuple(names.get(value, value) for value in values)

    return [
        replace(
            op, reads=new(op.reads), saved_for_backward=new(op.saved_for_backward), control_deps=new(op.control_deps)
        )
        for op in operators
    ]


def _placed(unit: Unit, rank: int, there: Mapping[int, dict[nn.Parameter, nn.Parameter]]) -> Unit:
    """Returns the slice of a rank, with parameters of other ranks in place of a vocabulary's."""
    sliced = {parameter: placed for parameter, placed in unit.placements.items() if placed.mesh_axis == VOCABULARY}
    unit = replace(unit, label=f"{unit.label}.{rank}")
    if rank not in there:
        return unit
    for parameter in sliced:
        if parameter not in there[rank]:
            empty = torch.empty_like(parameter, device="meta")
            there[rank][parameter] = Elsewhere(empty, requires_grad=parameter.requires_grad)
    known = {parameter: there[rank].get(parameter, parameter) for parameter in unit.placements}
    operators = {
        name: _OnOtherRank(each, known) if any(p in sliced for p in each.parameters) else each
        for name, each in unit.operators.items()
    }
    placements = {known[parameter]: placed for parameter, placed in unit.placements.items()}
    return replace(unit, operators=operators, placements=placements)
