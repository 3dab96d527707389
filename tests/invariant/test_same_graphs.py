"""What is derived from the classes that are declared is what is declared for them: operators, cuts and bits."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.marks import slow
from support.models import sequences, tiny
from support.rank_threads import Meeting, ThreadTransport, on_ranks
from support.small_traces import whole_gradients
from support.units import run_units
from torch import Tensor

from hf_helix.models.batch_inputs import SequenceCut
from hf_helix.models.derived import DerivedFamily
from hf_helix.models.family import Family
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.registry import family_of
from hf_helix.operators.autograd_operator import Add
from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.operators.param_shard import Placement
from hf_helix.operators.unit import Unit

DECLARED = ("gpt2", "llama", "phimoe")

LAYERS = {"num_hidden_layers": 2}


def units_of(family: Family, model: Any, axis: Axis) -> list[Unit]:
    return family.units(model, ParallelContext(axis, experts=axis))


def form(unit: Unit) -> list[tuple[Any, ...]]:
    """The operators of a unit, without names: values are numbered in the order in which they are written."""
    graph = unit.graphs.forward
    numbers: dict[str, int] = {}
    for value in graph.inputs:
        numbers[value] = len(numbers)
    rows: list[tuple[Any, ...]] = []
    for op in graph.operators:
        for value in op.writes:
            numbers[value] = max(numbers.values(), default=-1) + 1
        operator, reads = unit.operators[op.name], [numbers[value] for value in op.reads]
        told = replace(op, name="", forward_name="-", reads=(), writes=(), ordered_after=(), saved_for_backward=())
        kept = [numbers[value] for value in op.saved_for_backward]
        explicit = type(getattr(operator, "explicit", None)).__name__
        ordered = sorted(reads) if isinstance(operator, Add) else reads  # a + b has the bits of b + a
        plain = [numbers[value] for value in op.non_differentiable]
        told = replace(told, non_differentiable=(), host_read_sizes=())
        rows.append((type(operator).__name__, explicit, ordered, [numbers[v] for v in op.writes], kept, plain, told))
    return [*rows, ("leaves", *(numbers[value] for value in graph.outputs))]


def placements(model: Any, units: list[Unit]) -> dict[str, Placement]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: placed for unit in units for parameter, placed in unit.placements.items()}


@pytest.mark.parametrize("name", DECLARED)
def test_operators_and_cuts(name: str) -> None:
    model, axis = tiny(name, **LAYERS), Axis(SilentTransport(2, 0))
    declared, derived = (units_of(family, model, axis) for family in (family_of(model), DerivedFamily(model)))
    assert [unit.label for unit in derived] == [unit.label for unit in declared]
    for one, other in zip(derived, declared, strict=True):
        assert form(one) == form(other), one.label
    assert placements(model, derived) == placements(model, declared)


def gradients(families: list[Family], models: list[Any]) -> dict[str, Tensor]:
    """All gradients of one batch from ranks that are threads, made whole again."""
    size = len(models)
    meeting, batch = (
        Meeting(size),
        {key: torch.stack([row[key] for row in sequences(2)]) for key in ("input_ids", "labels")},
    )
    axes = [Axis(ThreadTransport(meeting, rank)) if size > 1 else Axis.single() for rank in range(size)]
    sides = [
        family.side_inputs(model, batch, SequenceCut(size), torch.tensor(0.1))
        for family, model in zip(families, models, strict=True)
    ]
    units = [units_of(*given) for given in zip(families, models, axes, strict=True)]
    for rank, of_rank in enumerate(units):
        for parameter, placement in placements(models[rank], of_rank).items():
            value = models[rank].get_parameter(parameter)
            value.data = placement.cut(value.data, size, rank)
    on_ranks(meeting, lambda rank: run_units(units[rank], [], sides[rank], [torch.ones(())]))
    placed = {parameter: placement for unit in units[0] for parameter, placement in unit.placements.items()}
    return whole_gradients(models, placed)


@pytest.mark.parametrize("size", [slow(1), 2])
@pytest.mark.parametrize("name", ["llama", *(slow(n) for n in ("gpt2", "phimoe"))])
def test_gradients_have_the_same_bits(name: str, size: int) -> None:
    model = tiny(name, **LAYERS).train()
    models = [[copy.deepcopy(model) for _ in range(size)] for _ in range(2)]
    declared = gradients([family_of(model)] * size, models[0])
    assert sum(value.count_nonzero() for value in declared.values()) > 0
    derived = gradients([DerivedFamily(each) for each in models[1]], models[1])
    for key, value in declared.items():
        assert torch.equal(derived[key], value), key
