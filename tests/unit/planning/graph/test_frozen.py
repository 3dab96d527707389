"""Linears that train nothing, or little: no W in graphs and plans, memory given back with B."""

from dataclasses import replace

import pytest
from support.graphs import LLAMA, layout_of, llama_layer
from support.programs import build_programs

from hf_helix.config import RULES
from hf_helix.planning.graph.backward import GraphPair, derive_backward
from hf_helix.planning.graph.operator import Graph, Part
from hf_helix.planning.plan import search
from hf_helix.planning.plan.precedence import activation_memory, shares_of
from hf_helix.planning.plan.program import validate_program
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.schedule.named import build_schedule
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.planning.timing.recompute import recomputed
from hf_helix.planning.window.layout import named_operators
from hf_helix.planning.window.window import pattern_of

LINEARS = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")


def trained(share: float, *names: str) -> Graph:
    """A layer of which these linears, or all, train so much."""
    graph = llama_layer()
    operators = (replace(op, wgrad_fraction=share) if op.name in (names or LINEARS) else op for op in graph.operators)
    return replace(graph, operators=tuple(operators))


def test_a_frozen_linear_has_a_backward_of_the_size_of_an_input_gradient() -> None:
    whole = derive_backward(llama_layer())
    backward = derive_backward(trained(0, "mlp.up"))
    assert [op.name for op in backward.operators] == [
        op.name.removesuffix(".I") if op.forward_name == "mlp.up" else op.name
        for op in whole.operators
        if op.name != "mlp.up.W"
    ]
    up, of_whole = backward["mlp.up"], whole["mlp.up.I"]
    assert up.part is Part.B
    assert (up.reads, up.writes, up.relative_cost) == (of_whole.reads, of_whole.writes, of_whole.relative_cost)


def test_nothing_is_kept_or_runs_again_for_frozen_linears_and_adapters_have_a_small_weight_gradient() -> None:
    """Unless others need it: W alone reads what forward read."""

    def repeats(graph: Graph) -> set[str]:
        backward = derive_backward(recomputed(graph, "selective"))
        return {op.forward_name for op in backward.operators if op.part is Part.R}

    assert set(derive_backward(llama_layer()).saved_values) == {"attn.gather", "attention", "mlp.gather", "mlp.act"}
    assert set(derive_backward(trained(0, "attn.qkv", "mlp.up")).saved_values) == {"attention", "mlp.act"}
    assert repeats(trained(0)) < repeats(llama_layer())
    backward = derive_backward(trained(0.1))
    for name in LINEARS:
        assert backward[f"{name}.W"].relative_cost == pytest.approx(0.1 * backward[f"{name}.I"].relative_cost)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_plans_without_weight_gradients(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen layers below trained ones, under names of their own."""
    monkeypatch.setattr(search, "MAX_STEPS", 10)
    frozen = replace(trained(0), name="layer.2")
    graphs = {**LLAMA, "layer.2": GraphPair.of(frozen)}
    layout = layout_of(graphs, 4)
    units = [("layer.2" if name == "layer" and place < 3 else name) for place, name in enumerate(layout.units)]
    profile = rough_profile(replace(layout, units=units))
    assert not [op for (unit, _), op in named_operators(profile.layout) if unit == "layer.2" and op.part is Part.W]
    plan = make_plan(rule, profile, model="m", mesh={"tp_size": 2})
    (program,) = build_programs(build_schedule("folded_1f1b", 1, 3), profile.layout, plan)
    validate_program(program, [(len(units) - 1, "d.loss")])


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("frozen", [LINEARS, ("attn.qkv", "mlp.down")])
def test_a_frozen_layer_gives_back_all_that_it_takes(frozen: tuple[str, ...], mode: str) -> None:
    graphs = {**LLAMA, "layer": GraphPair.of(recomputed(trained(0, *frozen), mode))}
    layout = layout_of(graphs, 3)
    pattern = pattern_of(layout)
    memory = activation_memory(pattern, layout, {"layer": shares_of(graphs["layer"])})
    for again, result in zip((False, True), memory, strict=True):
        assert (sum(result.alloc) > 0) == (not again or mode != "none")
        assert sum(result.alloc) == pytest.approx(sum(result.free))
