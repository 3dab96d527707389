"""A model on paper: layers that are alike are declared once for each layout, and stand for all of them."""

from collections.abc import Callable
from typing import Any

import pytest
from support.marks import slow
from support.simulated import case_of, cluster_with, counted, on_meta

from hf_helix.config import HelixConfig
from hf_helix.doctor.amounts.amounts import simulated_mesh
from hf_helix.doctor.counting import kinds_of
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.engine.cut.build import cut_units
from hf_helix.models.families.llama import Llama
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.window.layout import named_operators

LAYERS = 3


def alike() -> Any:
    return on_meta(num_hidden_layers=LAYERS)


def partly_frozen() -> Any:
    model = alike()
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    return model


def with_dense_layers() -> Any:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    return on_meta("qwen3_moe", num_hidden_layers=LAYERS, mlp_only_layers=[1], **sizes)


def with_windows() -> Any:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return on_meta("gpt_oss", num_hidden_layers=LAYERS, layer_types=types, **sizes)


@pytest.mark.parametrize(
    ("make", "expected", "recompute"),
    [
        (alike, [0, 0, 0], "none"),
        (partly_frozen, [0, 0, 1], "full"),
        slow(with_dense_layers, [0, 1, 0], "none"),
        slow(with_windows, [0, 1, 0], "full"),
    ],
)
def test_one_layer_of_each_kind_stands_for_all(make: Callable[[], Any], expected: list[int], recompute: str):
    helix: dict[str, Any] = {"tp_size": 2, "recompute": recompute}
    model, config = make(), HelixConfig(**helix)
    kinds = kinds_of(model)
    assert list(kinds.kinds) == expected
    mesh = simulated_mesh({"tp": 2})
    whole = cut_units(model, config, mesh, [config.recompute or "none"] * LAYERS).rank_units
    result = counted(model, **helix)
    assert list(result.model.units) == list(whole.layout.units)
    assert result.layout.graphs == {name: whole.layout.graphs[name] for name in dict.fromkeys(whole.layout.units)}


def test_only_one_layer_of_each_kind_is_declared_for_a_layout(monkeypatch: pytest.MonkeyPatch):
    model = partly_frozen()
    kinds = kinds_of(model)
    declared: list[Any] = []
    original = Llama.layer
    monkeypatch.setattr(Llama, "layer", lambda self, b, layer: declared.append(layer) or original(self, b, layer))
    counted(model, kinds=kinds, tp_size=2)
    assert declared == [model.model.layers[0], model.model.layers[2]]


def test_what_the_whole_model_hides_is_refused():
    """A layer that stands for none is checked all the same."""
    model = alike()
    model.model.layers[2].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"model\.model\.layers\.2 has a forward hook"):
        counted(model, tp_size=2)
    # What leaves a node is of another kind and counts the same.
    paper = SimulatedModel(with_dense_layers(), cluster_with(nodes=2, devices_per_node=2))
    inside, across = (paper.amounts(case_of(ep=2, pp=pp, dp=2, length=32)) for pp in (1, 2))
    result = [
        {name for name, op in named_operators(each.layout) if op.kind is Kind.INTER_NODE} for each in (inside, across)
    ]
    assert result[0] == set()
    assert result[1] == {name for name, each in across.operators.items() if each.transfers} != set()
    assert inside.operators == across.operators
