"""What runs over NCCL on a GPU, over gloo here: lanes, the ring and collectives give what gloo's own ways give, bit for
bit, without an operation point to point; tensors for files go over the host."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.comparisons import assert_same_bits
from torch import Tensor

from hf_helix.checkpoint.cut_parameters import full_parameter
from hf_helix.config import HelixConfig
from hf_helix.operators.communication.collectives import LaneChannel
from hf_helix.operators.communication.transport import GlooTransport
from hf_helix.operators.parameters.parts import cut_tensor
from hf_helix.planning.parameters import Cut, Parameter
from hf_helix.runtime.distributed import groups, mesh

# What the ranks run

POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


@contextmanager
def as_on_nccl() -> Iterator[list[tuple[str, Any, str]]]:
    """Meshes made within it are those of NCCL; what goes point to point is noted: how, over what group, from where."""
    noted: list[tuple[str, Any, str]] = []

    def noting(name: str) -> Any:
        stock = getattr(dist, name)

        def call(value: Tensor, *args: Any, **options: Any) -> Any:
            noted.append((name, options.get("group"), value.device.type))
            return stock(value, *args, **options)

        return call

    patches = [patch.object(dist, name, noting(name)) for name in POINT_TO_POINT]
    patches.append(patch.object(groups, "backend_of", lambda device: groups.NCCL))
    mesh.forget_meshes()
    for each in patches:
        each.start()
    try:
        yield noted
    finally:
        for each in patches:
            each.stop()
        mesh.forget_meshes()


def over_lanes(what: str, **given: Any) -> Any:
    """What the job `what` finds on such a mesh, and how many operations went point to point over groups of the mesh."""
    module, _, function = what.partition(":")
    with as_on_nccl() as noted:
        result = getattr(importlib.import_module(module), function)(**given)
    return result, sum(group is not groups.control_group() for _, group, _ in noted)


def kinds_of_mesh(sizes: dict[str, int]) -> dict[str, Any]:
    """What a mesh of NCCL is made of."""
    with as_on_nccl():
        made = mesh.mesh_of(HelixConfig(**sizes), "cpu")
        channel = made.pipe.channel(0, 1 - made.pipe.rank, made.pipe.rank == 0)
    return {
        "lanes": isinstance(channel, LaneChannel),
        "plain": not isinstance(made.tp.transport, GlooTransport),
        "members": [dist.get_process_group_ranks(group) for group in made.pipe.lanes.values()],
    }


def whole_over_host(cases: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[Any]:
    """By shape and blocks, a parameter cut over two ranks and one of the other pipeline rank, whole again; what was
    sent, and how."""
    found = []
    with as_on_nccl() as noted:
        tp, pipe = (mesh.mesh_of(HelixConfig(**{axis: 2}), "cpu") for axis in ("tp_size", "pp_size"))
        for shape, blocks in cases:
            noted.clear()
            whole = torch.arange(float(torch.Size(shape).numel())).view(shape).bfloat16()
            row = Parameter("weight", shape, cut=Cut(0, shape[0], blocks=blocks))
            joined = full_parameter(cut_tensor(whole, row.cut, 2, tp.tp.rank), row, tp)
            moved = full_parameter(whole if pipe.pipe.rank == 1 else None, Parameter("weight", shape, owner=1), pipe)
            same = [None if value is None else bool(torch.equal(value, whole)) for value in (joined, moved)]
            found.append((same, [(group is groups.control_group(), device) for _, group, device in noted]))
    return found


# Tests


@pytest.mark.parametrize(
    ("sizes", "schedules"),
    [
        ({"pp_size": 2}, ("folded_1f1b", "dualpipe_v")),
        ({"cp_size": 2}, ("folded_1f1b",)),
        ({"tp_size": 2}, ("folded_1f1b",)),
    ],
    ids=["pp", "cp", "tp"],
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
    result = cluster_of(2).run(over_lanes, what="support.pipeline_jobs:windows", **job)
    for (ours, count), theirs in zip(result, expected, strict=True):
        assert count == 0
        for mine, wanted in zip(ours, theirs, strict=True):
            assert_same_bits(mine, wanted)


def test_every_way_has_a_group_of_its_two_ranks(cluster_of: Any) -> None:
    for result in cluster_of(2).run(kinds_of_mesh, sizes={"tp_size": 1, "pp_size": 2}):
        assert result == {"lanes": True, "plain": True, "members": [[0, 1]] * 4}


def test_whole_matrices_go_over_the_host(cluster_of: Any) -> None:
    cases = [((6, 3), ()), ((5,), ()), ((12, 2), (4, 4, 4)), ((9, 2), (5, 1, 3))]
    for (first, sent), (second, received) in zip(*cluster_of(2).run(whole_over_host, cases=cases), strict=True):
        assert (first, second) == ([True, True], [None, None])
        assert sent == received == [(True, "cpu")] * 2


def test_gloo_does_not_carry_cuda_tensors(cluster_of: Any) -> None:
    words = "gloo for cuda", 'init_process_group("cuda:nccl,cpu:gloo")'
    cluster_of(2).assert_raises(mesh.mesh_of, *words, config=HelixConfig(tp_size=2), device="cuda")
