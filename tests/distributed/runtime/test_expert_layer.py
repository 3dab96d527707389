"""Experts of every form, spread over two ranks, give what the module's own forward gives on one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.cluster import Cluster
from support.expert_modules import (
    CHOICES,
    NUM_EXPERTS,
    by_itself,
    cases_of,
    experts_of,
    side_of,
    tokens_of,
    unit_of_experts,
)
from support.units import run_unit
from torch import Tensor

from hf_helix.config import HelixConfig
from hf_helix.models.graph.context import ParallelContext
from hf_helix.operators.experts.moe import SHARD_TOKENS
from hf_helix.operators.parameters.parts import cut_tensor
from hf_helix.planning.parameters import EXPERTS
from hf_helix.runtime.distributed.mesh import mesh_of

FORMS = {
    "gpt_oss": "GptOssExperts",
    "aria": "AriaExperts",
    "nemotron_h": "NemotronHExperts",
    "muse_spark": "MuseSparkExperts",
    "deepseek_v3": "DeepseekV3Experts",
}
ROWS, BATCH = {"ep": (7, 5), "tp": (6, 6)}, 3


def tokens_on(axis: str, rank: int) -> dict[str, Tensor]:
    """What each of two ranks brings: of sequences of its own (ep), or of its part of the same ones (tp)."""
    return tokens_of(ROWS[axis][rank], BATCH, seed=rank)


def spread(family: str, axis: str, capacity: float | None) -> dict[str, Any]:
    """On every rank: as `by_itself`, with the gradients of this rank's experts."""
    mesh = mesh_of(HelixConfig(**{f"{axis}_size": 2}), "cpu")
    sharing = ParallelContext(mesh.tp, mesh.cp, mesh.experts, capacity_factor=capacity)
    module, given = experts_of(family, FORMS[family]), tokens_on(axis, mesh.experts.rank)
    unit = unit_of_experts(module, sharing)
    for parameter, cut in unit.placements.items():
        if cut.mesh_axis == EXPERTS:
            parameter.data = cut_tensor(parameter.data, cut, 2, mesh.experts.rank)
    side = side_of(given, mesh.tp.size) | {SHARD_TOKENS: ROWS[axis][0] * BATCH}
    inputs = {name: given[name] for name in ("x", "weights")}
    outputs, gradients = run_unit(unit, inputs, side, {"experts.out": given["gradient"]})
    result = {"out": outputs["experts.out"], "d.x": gradients["x"], "d.weights": gradients["weights"]}
    result |= {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return {name: value.numpy().copy() for name, value in result.items()}


def distance(result: Any, expected: Tensor) -> float:
    return float(np.linalg.norm(result - expected.numpy()) / np.linalg.norm(expected.numpy()))


@pytest.mark.parametrize("family", cases_of(FORMS))
@pytest.mark.parametrize("axis", ["ep", "tp"])
def test_two_ranks_give_what_one_gives(cluster_of: Callable[[int], Cluster], family: str, axis: str) -> None:
    """Without a capacity, and with one that has room for every token."""
    module = experts_of(family, FORMS[family])
    expected = [by_itself(module, tokens_on(axis, rank)) for rank in range(2)]
    for capacity in (None, NUM_EXPERTS / CHOICES):
        result = cluster_of(2).run(spread, family=family, axis=axis, capacity=capacity)
        for rank in range(2):
            for name in ("out", "d.x", "d.weights"):
                assert distance(result[rank][name], expected[rank][name]) < 1e-5, name
        for name, parameter in module.named_parameters():
            total = expected[0][name] + expected[1][name]
            is_cut = len(result[0][name]) < len(parameter)
            both = [part[name] for part in result]
            assert distance(np.concatenate(both) if is_cut else sum(both), total) < 1e-5, name
