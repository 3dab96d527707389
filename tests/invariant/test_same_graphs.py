"""What is derived from the classes that are declared is what is declared for them: operators and cuts."""

from dataclasses import replace
from typing import Any

import pytest
from support.models import tiny

from hf_helix.models.derived.derived import DerivedFamily
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.registry import family_of
from hf_helix.operators.autograd_operator import Add
from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.parameters import Cut


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


def placements(model: Any, units: list[Unit]) -> dict[str, Cut]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: placed for unit in units for parameter, placed in unit.placements.items()}


@pytest.mark.parametrize("name", ["gpt2", "llama", "phimoe"])
def test_operators_and_cuts(name: str) -> None:
    model, axis = tiny(name, num_hidden_layers=2), Axis(SilentTransport(2, 0))
    context = ParallelContext(axis, experts=axis)
    declared, derived = (family.units(model, context) for family in (family_of(model), DerivedFamily(model)))
    assert [unit.label for unit in derived] == [unit.label for unit in declared]
    for one, other in zip(derived, declared, strict=True):
        assert form(one) == form(other), one.label
    assert placements(model, derived) == placements(model, declared)
