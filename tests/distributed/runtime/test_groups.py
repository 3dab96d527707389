"""Groups of any layout, on torch's fake process group: the same on every rank, in an order without deadlock."""

import functools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (it registers the backend)

from hf_helix.config import HelixConfig
from hf_helix.planning.timing.cluster import load_cluster, shipped_clusters
from hf_helix.runtime.distributed import groups, mesh
from hf_helix.runtime.distributed.environment import CTAS

LAYOUTS = [
    {"tp_size": 2, "pp_size": 2, "cp_size": 2},
    {"tp_size": 2, "pp_size": 2, "ep_size": 2},
    {"tp_size": 1, "pp_size": 3, "cp_size": 2, "ep_size": 2},
]


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts a process group, in the place of an earlier one."""

    def begin(backend: str, rank: int = 0, world: int = 1) -> None:
        stop()
        dist.init_process_group(backend or None, store=dist.HashStore(), rank=rank, world_size=world)

    def stop() -> None:
        mesh.forget_meshes()
        if dist.is_initialized():
            dist.destroy_process_group()

    yield begin
    stop()


@pytest.mark.parametrize(
    ("started", "device", "backend"),
    [
        ("gloo", "cpu", "gloo"),
        ("", "cpu", "gloo"),
        ("cpu:gloo,cuda:fake", "cpu", "gloo"),
        ("cpu:gloo,cuda:fake", "cuda", "fake"),
        ("cpu:fake,cuda:gloo", "cpu", "fake"),
    ],
)
def test_the_backend_is_that_of_the_device(start: Any, started: str, device: str, backend: str) -> None:
    start(started)
    assert groups.backend_of(torch.device(device)) == backend


@pytest.mark.parametrize(
    ("started", "device", "words"),
    [
        ("gloo", "cuda", ("gloo for cuda", "NCCL", "use_cpu=True")),
        ("cpu:fake,cuda:gloo", "cuda", ("fake for cpu, gloo for cuda", "NCCL")),
        ("cuda:fake", "cpu", ("fake for cuda", "on cpu", 'init_process_group("gloo")')),
    ],
)
def test_a_device_without_a_fit_backend_is_refused(start: Any, started: str, device: str, words: tuple[str]) -> None:
    start(started)
    with pytest.raises(ValueError, match="the process group was started with") as error:
        groups.backend_of(torch.device(device))
    assert all(word in str(error.value) for word in words)


def test_what_carries_the_hosts_memory_is_its_own_control_group(start: Any) -> None:
    for started in ("gloo", "cpu:gloo,cuda:fake"):
        start(started)
        assert groups.control_group() is None


ALL, PAIRS, ACROSS = [[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]
MEMBERS: list[tuple[dict[str, int], dict[str, list[list[int]]]]] = [
    # Data parallelism is the outermost dimension, tensor parallelism the innermost.
    ({"tp_size": 2}, {"tp": PAIRS, "dp": ACROSS, "experts": PAIRS, "expert copies": ACROSS}),
    ({"tp_size": 4}, {"tp": ALL, "dp": []}),
    ({"tp_size": 1}, {"tp": [], "dp": ALL}),
    # Whoever shares a pipeline or a tensor-parallel group shares every batch.
    ({"tp_size": 1, "pp_size": 2}, {"tp": [], "pp": PAIRS, "dp": ACROSS, "batch": PAIRS}),
    ({"tp_size": 2, "pp_size": 2}, {"tp": PAIRS, "pp": ACROSS, "dp": [], "batch": ALL}),
    # Tensor-parallel ranks hold experts, too; the rest of data parallelism has copies.
    ({"tp_size": 1, "ep_size": 2}, {"dp": ALL, "experts": PAIRS, "expert copies": ACROSS}),
    ({"tp_size": 2, "ep_size": 2}, {"experts": ALL, "expert copies": []}),
]


@pytest.mark.parametrize(("sizes", "members"), MEMBERS, ids=str)
def test_who_shares_what(sizes: dict[str, int], members: dict[str, list[list[int]]], start: Any) -> None:
    for rank in range(4):
        start("fake", rank, 4)
        built = mesh.mesh_of(HelixConfig(**sizes), "cpu")
        found = {"tp": built.tp.group, "dp": built.dp_group, "batch": built.batch_group}
        found |= {"experts": built.experts.group, "expert copies": built.expert_replica_group}
        shared = {name: group and dist.get_process_group_ranks(group) for name, group in found.items()}
        for name, rows in members.items():
            ranks = built.pipe.ranks if name == "pp" else shared[name]
            assert ranks == next((row for row in rows if rank in row), None), name
        assert (built.tp.rank, built.tp.size) == (rank % sizes["tp_size"], sizes["tp_size"])


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_groups_and_communicators_are_made_in_one_order(sizes: dict[str, int], start: Any, monkeypatch: Any) -> None:
    world = 2 * sizes["tp_size"] * sizes.get("pp_size", 1) * sizes.get("cp_size", 1)
    made: list[list[tuple[int, ...]]] = []  # by rank: the members of the groups it has called for
    used: list[list[tuple[str, tuple[int, ...]]]] = []  # by rank: the groups it has used, with their members
    largest: dict[str, int] = {}  # by group: the bytes of the largest message

    def note_group(stock: Any, ranks: list[int], **options: Any) -> Any:
        made[-1].append(tuple(ranks))
        return stock(ranks, **options)

    def note_use(stock: Any, value: torch.Tensor, *args: Any, group: Any = None) -> Any:
        group = group or dist.group.WORLD
        about = group.group_name, tuple(dist.get_process_group_ranks(group))
        largest[group.group_name] = max(value.nbytes, largest.get(group.group_name, 0))
        if about not in used[-1]:
            used[-1].append(about)
        return stock(value, *args, group=group)

    for name, note in (("new_group", note_group), ("all_reduce", note_use), ("broadcast", note_use)):
        monkeypatch.setattr(dist, name, functools.partial(note, getattr(dist, name)))
    for rank in range(world):
        start("fake", rank, world)
        made.append([])
        used.append([])
        built = mesh.mesh_of(HelixConfig(**sizes), "cpu")
        assert not used[-1]  # only NCCL has communicators to make
        mesh.connect(built)
        assert groups_of(built) <= {name for name, _ in used[-1]}
        assert {largest[name] for name in groups_of(built)} == {2**25}  # algorithms for large messages connect, too
    assert all(rows == made[0] for rows in made)
    assert not waiting_for_ever(used)


class Options:
    """Stands for `ProcessGroupNCCL.Options`, which torch without CUDA lacks."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(max_ctas=None)


LIMITS = [
    # what a group connects, of two ranks each, and the most blocks that its kernels may take; tp, cp and the groups
    # that are made with the device mesh are in the second case
    ({"tp_size": 2, "pp_size": 2, "cp_size": 2, "ep_size": 2}, {"experts": 16, "replicas": 8, "expert_replicas": 8}),
    ({"tp_size": 2, "pp_size": 2, "cp_size": 2}, {"tp": 16, "cp": 16, "replicas": 8}),
]


@pytest.mark.parametrize(("sizes", "limits"), LIMITS, ids=["experts", "dense"])
def test_which_group_takes_how_many_blocks_from_computation(
    sizes: dict[str, int], limits: dict[str, int | None], start: Any, monkeypatch: Any
) -> None:
    """Lanes and sums of gradients take few, what is waited for soon takes more."""
    world, made, overridden = 32, [], []

    def note_group(stock: Any, ranks: list[int], pg_options: Any = None, **options: Any) -> Any:
        made.append((tuple(ranks), pg_options and pg_options.config.max_ctas))
        return stock(ranks, **options)

    def note_mesh(stock: Any, *given: Any, backend_override: Any = None, **options: Any) -> Any:
        overridden.append({name: each.config.max_ctas for name, each in (backend_override or {}).items()})
        return stock(*given, **options)

    start("fake", 0, world)
    monkeypatch.setattr(dist, "new_group", functools.partial(note_group, dist.new_group))
    monkeypatch.setattr(mesh, "init_device_mesh", functools.partial(note_mesh, mesh.init_device_mesh))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(groups, "backends", lambda: {"cpu": "nccl"})
    monkeypatch.setattr(groups, "multiprocessors", lambda: 132)
    built = mesh.mesh_of(HelixConfig(**sizes), "cpu")
    assert overridden == [{"dp_replicate": 8, "tp": 16}]
    rows = mesh._rows_of(built.sizes)
    for name, limit in limits.items():
        members = {tuple(row) for row in rows[name].reshape(-1, rows[name].shape[-1]).tolist()}
        assert {taken for ranks, taken in made if ranks in members} == {limit}, name
    pairs = {tuple(row) for row in rows["pp"].reshape(-1, 2).tolist()}
    result = [taken for ranks, taken in made if ranks in pairs]
    assert sorted(map(str, result)) == sorted(map(str, [4] * 4 * len(pairs) + [16] * len(pairs)))


def groups_of(built: mesh.Mesh) -> set[str]:
    """The names of all groups that a window communicates over."""
    pipe = built.pipe
    result = [built.dp_group, built.replica_group, built.expert_replica_group, built.batch_group, pipe.group]
    result += [*(axis.group for axis in built.axes), *pipe.lanes.values(), dist.group.WORLD]
    return {group.group_name for group in result if group is not None}


def waiting_for_ever(used: list[list[tuple[str, tuple[int, ...]]]]) -> list[Any]:
    """What ranks still wait for at the end, where making a communicator takes all of its members at the same time."""
    left = [list(calls) for calls in used]
    while True:
        heads = {calls[0] for calls in left if calls}
        ready = [head for head in heads if all(left[member][:1] == [head] for member in head[1])]
        if not ready:
            return [calls for calls in left if calls]
        for calls in left:
            if calls and calls[0] in ready:
                calls.pop(0)


def test_ranks_that_take_two_groups_in_turn_would_wait() -> None:
    one, other = ("a", (0, 1)), ("b", (0, 1))
    assert waiting_for_ever([[one, other], [other, one]])
    assert not waiting_for_ever([[one, other], [one, other]])


def test_hosts_with_the_same_name_are_told_apart(monkeypatch: Any) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    mine = groups.host_name()
    assert mine == groups.host_name()
    assert len(mine.split()) == 2
    monkeypatch.setattr(groups.Path, "read_text", lambda self: "another boot\n")
    assert groups.host_name() != mine
    monkeypatch.setenv("NCCL_HOSTID", "first")
    assert groups.host_name() == "first"


SMS = {  # of the data sheets of the GPUs in cluster files
    "A100": 108, "A40": 84, "A6000": 84, "A800": 108, "B200": 148, "H100": 132, "H200": 132, "L4": 58, "L40S": 142,
    "MI300X": 304, "RTX 4090": 128, "RTX 5090": 170,
}  # fmt: skip
STREAMS = [groups.COLLECTIVE] * 2 + [groups.GRADIENTS] + [groups.LANE] * 8
"""The uses of the streams of a rank that run at the same time: a rank amid a pipeline has eight lanes."""
GPCS, CLUSTER = 8, 4
"""Parts of an H100 or B200 that an NCCL kernel's cluster of blocks lies in, and the blocks of a cluster."""


def gpus() -> list[str]:
    files = [load_cluster(name) for name in shipped_clusters()]
    return sorted({each.device.name for each in files if each.backend == "nccl"})


@pytest.mark.parametrize("gpu", gpus())
def test_kernels_of_all_streams_fit_on_the_gpu_together(gpu: str) -> None:
    """So no kernel that others wait for lacks room, in whatever order the ranks issue them."""
    (sms,) = {count for name, count in SMS.items() if f" {name} " in f"{gpu} ".replace("-", " ")}
    taken = [groups.max_ctas(use, sms) for use in STREAMS]
    assert sum(taken) <= 0.75 * sms
    assert all(blocks & (blocks - 1) == 0 for blocks in taken)  # NCCL rounds the blocks of a send up to a power of 2
    if sms >= 128:  # H100, B200: a cluster finds no room where every GPC has fewer free SMs than it has blocks
        assert sms - (sum(taken) - min(taken)) > GPCS * (CLUSTER - 1)
        assert taken[0] == 16


def test_small_gpus_have_smaller_limits() -> None:
    assert [groups.max_ctas(use, 132) for use in (groups.COLLECTIVE, groups.GRADIENTS, groups.LANE)] == [16, 8, 4]
    assert [groups.max_ctas(use, 58) for use in (groups.COLLECTIVE, groups.GRADIENTS, groups.LANE)] == [8, 4, 2]
    assert groups.max_ctas(groups.LANE, 8) == 1


@pytest.mark.parametrize(("given", "streams"), [("32", 3), ("8", 11), ("", 11), ("none", 11)])
def test_a_limit_of_the_user_that_fits_is_kept(given: str, streams: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(groups, "multiprocessors", lambda: 132)
    monkeypatch.setenv(CTAS, given)
    groups.check_launches(streams, True)
    assert os.environ[CTAS] == given


def test_settings_of_nccl_that_could_hang_are_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(groups, "multiprocessors", lambda: 132)
    monkeypatch.setenv(CTAS, "32")
    with pytest.raises(ValueError, match=r"NCCL_MAX_CTAS=32 could hang.* 352 SMs of 132.* at most NCCL_MAX_CTAS=12"):
        groups.check_launches(11, True)
    monkeypatch.setenv(CTAS, "12")
    groups.check_launches(11, True)
    monkeypatch.setenv(groups.LAUNCH_ORDER, "1")
    groups.check_launches(11, False)
    with pytest.raises(ValueError, match="NCCL_LAUNCH_ORDER_IMPLICIT=1 could hang with pp_size"):
        groups.check_launches(11, True)
