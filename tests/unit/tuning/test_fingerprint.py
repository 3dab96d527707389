"""Cases whose operators differ are different cases, though weights have the same shapes."""

from typing import Any

import pytest
from support.models import tiny

from hf_helix import HelixConfig
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
