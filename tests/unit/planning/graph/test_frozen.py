"""Linears that train nothing, or little: no W in graphs and plans, memory given back with B, other fingerprints."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.graphs import LLAMA, layout_of, llama_layer, random_times

from hf_helix.config import RULES
from hf_helix.planning.graph.backward import GraphPair, derive_backward
from hf_helix.planning.graph.operator import Graph, Part, digest
from hf_helix.planning.graph.recompute import recomputed
from hf_helix.planning.plan import search
from hf_helix.planning.plan.baselines.intra_batch import tile_pair
from hf_helix.planning.plan.precedence import activation_memory, shares_of
from hf_helix.planning.plan.registry import make_plan
from hf_helix.planning.schedule.named import build_schedule
from hf_helix.planning.timing.profile import Profile, rough_profile
from hf_helix.planning.timing.profile_file import load_profile, save_profile
from hf_helix.planning.window.layout import named_operators
from hf_helix.planning.window.program import build_programs, validate_program
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


def test_nothing_is_kept_for_a_frozen_linear() -> None:
    """Unless others need it: W alone reads what forward read."""
    assert set(derive_backward(llama_layer()).saved_values) == {"attn.gather", "attention", "mlp.gather", "mlp.act"}
    assert set(derive_backward(trained(0, "attn.qkv", "mlp.up")).saved_values) == {"attention", "mlp.act"}


def test_what_frozen_linears_read_does_not_run_again() -> None:
    def repeats(graph: Graph) -> set[str]:
        backward = derive_backward(recomputed(graph, "selective"))
        return {op.forward_name for op in backward.operators if op.part is Part.R}

    assert repeats(trained(0)) < repeats(llama_layer())


def test_adapters_have_a_small_weight_gradient() -> None:
    backward = derive_backward(trained(0.1))
    for name in LINEARS:
        assert backward[f"{name}.W"].relative_cost == pytest.approx(0.1 * backward[f"{name}.I"].relative_cost)


def test_graphs_that_train_other_weights_are_told_apart() -> None:
    graphs = [llama_layer(), trained(0), trained(0.1), trained(0, "mlp.up")]
    assert len({digest([graph]) for graph in graphs}) == len(graphs)


def test_tiles_of_a_frozen_linear_are_frozen() -> None:
    tiled = tile_pair(GraphPair.of(trained(0)), 2).backward
    assert not [op for op in tiled.operators if op.part is Part.W]
    assert {"mlp.up.0", "mlp.up.1", "mlp.down.0", "mlp.down.1"} <= {op.name for op in tiled.operators}


@pytest.mark.parametrize("share", [0, 0.1])
def test_profiles_keep_it(share: float, tmp_path: Path) -> None:
    graphs = {**LLAMA, "layer": GraphPair.of(trained(share))}
    layout = layout_of(graphs, 3)
    save_profile(Profile({"model": "m"}, layout, random_times(layout, 0), {}, {}), tmp_path / "profile.json")
    loaded = load_profile(tmp_path / "profile.json", about={"model": "m"}, layout=layout)
    assert loaded.layout.graphs["layer"] == graphs["layer"]
    with pytest.raises(ValueError, match=r"other operators.*wgrad_fraction"):
        load_profile(tmp_path / "profile.json", about={"model": "m"}, layout=layout_of(LLAMA, 3))


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
    layout = plan.profile_for(profile).layout
    (program,) = build_programs(build_schedule("folded_1f1b", 1, 3), layout, plan)
    validate_program(program, [(len(units) - 1, "d.loss")])


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("frozen", [LINEARS, ("attn.qkv", "mlp.down")])
def test_a_frozen_layer_gives_back_all_that_it_takes(frozen: tuple[str, ...], mode: str) -> None:
    graphs = {**LLAMA, "layer": GraphPair.of(recomputed(trained(0, *frozen), mode))}
    layout = layout_of(graphs, 3)
    pattern = pattern_of(layout)
    for again in (False, True):
        result = activation_memory(pattern, layout, {"layer": shares_of(graphs["layer"])}, again)
        assert (sum(result.alloc) > 0) == (not again or mode != "none")
        assert sum(result.alloc) == pytest.approx(sum(result.free))
