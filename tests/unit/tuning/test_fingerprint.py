"""Cases whose operators differ are different cases, though weights have the same shapes."""

from typing import Any

import pytest
from support.models import tiny

from hf_helix import HelixConfig
from hf_helix.models.graph.context import LossTweaks
from hf_helix.runtime.distributed.mesh import mesh_of
from hf_helix.tuning.cache import fingerprint

Case = tuple[str, dict[str, Any], dict[str, Any]]
"""A family, changes of its configuration, and options."""


def fingerprint_of(family: str, changes: dict[str, Any], options: dict[str, Any]) -> dict[str, str]:
    config = HelixConfig(**options)
    return fingerprint(tiny(family, **changes), mesh_of(HelixConfig(), "cpu"), config)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("mixtral", {"num_experts_per_tok": 2}, {}), ("mixtral", {"num_experts_per_tok": 1}, {})),
        (("mixtral", {}, {}), ("mixtral", {}, {"expert_capacity_factor": 1.25})),
        (("mistral", {"sliding_window": 4}, {}), ("mistral", {"sliding_window": 2000}, {})),
        (("llama", {"attention_dropout": 0.0}, {}), ("llama", {"attention_dropout": 0.1}, {})),
        (("llama", {}, {}), ("llama", {}, {"fused_kernels": False})),
    ],
)
def test_other_operators(one: Case, other: Case) -> None:
    assert fingerprint_of(*one) == fingerprint_of(*one)
    assert fingerprint_of(*one) != fingerprint_of(*other)
    assert fingerprint_of(*one)["operators"] != fingerprint_of(*other)["operators"] or one[2] != other[2]


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 5}, {"eos_token_id": 5}, {"initializer_range": 0.5}],
)
def test_models_of_a_family_share_operators(changes: dict[str, Any]) -> None:
    """Another number of equal layers, and other tokens: another case, the same operators."""
    one, other = (fingerprint_of("llama", each, {}) for each in ({}, changes))
    assert one["operators"] == other["operators"]
    assert one["configuration"] != other["configuration"]


@pytest.mark.parametrize("changes", [{"intermediate_size": 58}, {"vocab_size": 77}, {"rms_norm_eps": 1e-3}])
def test_other_sizes_are_other_operators(changes: dict[str, Any]) -> None:
    one, other = (fingerprint_of("llama", each, {}) for each in ({}, changes))
    assert one["operators"] != other["operators"]


def test_another_loss_is_another_case() -> None:
    model, mesh, config = tiny("llama"), mesh_of(HelixConfig(), "cpu"), HelixConfig()
    usual = fingerprint(model, mesh, config)
    assert fingerprint(model, mesh, config, loss=LossTweaks()) == usual
    smoothed = fingerprint(model, mesh, config, loss=LossTweaks(label_smoothing=0.1))
    assert smoothed == {**usual, "loss": "label_smoothing=0.1"}
    called = fingerprint(model, mesh, config, loss=LossTweaks(ends_at_decoder=True))
    assert called["loss"] == "ends_at_decoder=True"
