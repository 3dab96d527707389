"""What runs over NCCL on a GPU, over gloo here: lanes, the ring and collectives give what gloo's own ways give, bit for
bit, without an operation point to point; tensors for files go over the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("sizes", "schedules"),
    [
        ({"pp_size": 2}, ("folded_1f1b", "dualpipe_v")),
        ({"pp_size": 2}, ("1f1b",)),
        ({"cp_size": 2}, ("folded_1f1b",)),
        ({"tp_size": 2}, ("folded_1f1b",)),
    ],
    ids=["fold", "linear", "cp", "tp"],
)
def test_the_same_bits_as_over_gloo(
    sizes: dict[str, int], schedules: tuple[str, ...], cluster_of: Any, tmp_path: Any
) -> None:
    job = {
        "folder": str(tmp_path),
        "helix": {**sizes, "plan": "sequential", "schedule": schedules[0]},
        "model": {"num_hidden_layers": 4, "tie_word_embeddings": False},
        "cases": [(rule, schedule, 3) for rule in ("sequential", "greedy") for schedule in schedules],
        "lengths": (9, 5, 8),
    }
    expected = cluster_of(2).run("support.pipeline_jobs:windows", **job)
    found = cluster_of(2).run("support.lane_jobs:over_lanes", what="support.pipeline_jobs:windows", **job)
    for (ours, count), theirs in zip(found, expected, strict=True):
        assert count == 0
        for mine, wanted in zip(ours, theirs, strict=True):
            assert mine["losses"] == wanted["losses"]
            for name, gradient in wanted["gradients"].items():
                np.testing.assert_array_equal(mine["gradients"][name], gradient, err_msg=name)


def test_every_way_has_a_group_of_its_two_ranks(cluster_of: Any) -> None:
    for found in cluster_of(2).run("support.lane_jobs:kinds_of_mesh", sizes={"tp_size": 1, "pp_size": 2}):
        assert found == {"lanes": True, "plain": True, "members": [[0, 1]] * 4}


@pytest.mark.parametrize(("shape", "blocks"), [((6, 3), 1), ((5,), 1), ((12, 2), 3)])
def test_whole_parameters_go_over_the_host(shape: tuple[int, ...], blocks: int, cluster_of: Any) -> None:
    (first, sent), (second, received) = cluster_of(2).run(
        "support.lane_jobs:whole_over_host", shape=shape, blocks=blocks
    )
    assert (first, second) == ([True, True], [None, None])
    assert sent == received == [(True, "cpu")] * 2


def test_gloo_does_not_carry_cuda_tensors(cluster_of: Any) -> None:
    for failure in cluster_of(2).errors("support.lane_jobs:refused", device="cuda"):
        assert failure.kind == "ValueError"
        assert "gloo for cuda" in failure.message
        assert 'init_process_group("cuda:nccl,cpu:gloo")' in failure.message


def test_small_parameters_are_broadcast_together(cluster_of: Any) -> None:
    steps, large = 3, 1
    assert cluster_of(2).run("support.lane_jobs:sharded_steps") == [(True, steps * large)] * 2
