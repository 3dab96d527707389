"""Units of one name have equal graphs."""

from support.graphs import compute, pair

from hf_helix.models.derived.family import number_distinct_graphs
from hf_helix.operators.units.unit import Unit


def unit(name: str, operator: str) -> Unit:
    return Unit(label="", graphs=pair(name, compute(operator, "x")), operators={}, placements={})


def test_graphs_that_differ_have_names_of_their_own():
    units = [unit("layer", "a"), unit("layer", "b"), unit("head", "a"), unit("layer", "a"), unit("layer", "b")]
    assert [made.name for made in number_distinct_graphs(units)] == ["layer", "layer.2", "head", "layer", "layer.2"]


def test_a_number_that_is_taken_is_left_out():
    """Such as where layers that have numbers already differ once more in what is gathered for them."""
    units = [unit("layer", "a"), unit("layer.2", "b"), unit("layer", "c"), unit("layer.2", "b"), unit("layer", "c")]
    result = number_distinct_graphs(units)
    assert [made.name for made in result] == ["layer", "layer.2", "layer.3", "layer.2", "layer.3"]
    assert [made.graphs.forward.operators for made in result] == [made.graphs.forward.operators for made in units]
