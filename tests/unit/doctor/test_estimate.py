"""Times by hand: kernels, collectives inside a node and between nodes, shared links, contention, waiting."""

import math
from dataclasses import replace
from typing import Any

import pytest
from support.simulated import case_of, cluster_with, counted, on_meta

from hf_helix.doctor.amounts.records import ATTENTION, MATMUL, OTHER, Kernel, OperatorAmounts, Transfer
from hf_helix.doctor.case import FLASH1, FLASH2, HELIX, MEGATRON, Software
from hf_helix.doctor.estimate import (
    Ring,
    Sizes,
    estimate_profile,
    inter_node_axes,
    kernel_seconds,
    operator_seconds,
    ring_of,
    rings,
    transfer_seconds,
)
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import IN_PAIRS
from hf_helix.planning.window.layout import named_operators

GB = 10**9


@pytest.mark.parametrize(
    ("kernel", "device", "expected"),
    [
        (Kernel(MATMUL, 1e12, GB), {}, 0.01),
        (Kernel(MATMUL, 1e12, GB), {"peak_tflops": {"bf16": 50}}, 0.02),
        (Kernel(MATMUL, 1e12, 100 * GB), {}, 0.1),
        (Kernel(OTHER, 0.0, GB), {}, 0.001),
        (Kernel(OTHER, 0.0, GB), {"memory_efficiency": [[1e3, 0.5]]}, 0.002),
        (Kernel(MATMUL, 1e12, GB), {"matmul": [[1e12, 0.5]]}, 0.02),
        (Kernel(OTHER, 0.0, GB, exponentials=4e6), {"exponentials_per_ns": 1}, 0.004),
        (Kernel(OTHER, 0.0, 0), {"kernel_us": 2}, 2e-6),
        (Kernel(ATTENTION, 1e12, GB, (512, 512, 64)), {"attention": [[512, 0.5]]}, 0.02),
        # A causal mask spares whole blocks alone: of 4 x 4 blocks 10 are computed, not 8.
        (Kernel(ATTENTION, 1e12, GB, (512, 512, 64), causal=True), {"attention_block": 128}, 0.0125),
    ],
)
def test_a_kernel_takes_what_its_operations_or_its_bytes_take(kernel: Kernel, device: dict[str, Any], expected: float):
    assert kernel_seconds(kernel, cluster_with(device=device), "bf16") == pytest.approx(expected)


ATTENDED = Kernel(ATTENTION, 1e12, GB, (512, 512, 64))
OTHERS: dict[str, Any] = {"attention": [[512, 0.5]], "attention_kernels": {"flash2": [[512, 0.25]]}}


@pytest.mark.parametrize(
    ("kernel", "software", "expected"),
    [
        (ATTENDED, Software(attention=FLASH2), 0.04),
        (ATTENDED, Software(attention=FLASH1), 0.02),  # of which the device says nothing
        (Kernel(MATMUL, 1e12, GB), Software(products=0.5), 0.02),
        (Kernel(OTHER, 0.0, GB), Software(memory=0.5), 0.002),
    ],
)
def test_other_software_has_other_kernels(kernel: Kernel, software: Software, expected: float):
    assert kernel_seconds(kernel, cluster_with(device=OTHERS), "bf16", software) == pytest.approx(expected)


def test_collectives_of_hf_helix_have_kernels_and_rows_may_go_once_to_a_node():
    cluster, axes = cluster_with(**TWO_NODES), {"experts": Ring(8, (1, 4))}
    counted = OperatorAmounts(
        kernels=[Kernel(OTHER, 0.0, GB)], transfers=[Transfer("experts", "exchange_rows", 6 * GB)]
    )
    sent = transfer_seconds(counted.transfers[0], axes["experts"], cluster)
    half = transfer_seconds(Transfer("experts", "exchange_rows", 3 * GB), axes["experts"], cluster)
    ways = {HELIX: sent + 0.001, MEGATRON: sent, replace(MEGATRON, once_a_node=0.5): half}
    for software, expected in ways.items():
        taken = operator_seconds(counted, Kind.INTER_NODE, axes, cluster, "bf16", software)
        assert taken == pytest.approx(expected)


def test_float8_of_other_software_multiplies_weight_gradients_and_frozen_weights():
    case = case_of(1, 2, 256, float8="tensorwise")
    amounts = counted(on_meta(hidden_size=512, intermediate_size=1024), bf16=True, batch=2, length=256)
    device = {"peak_tflops": {"bf16": 0.001, "fp8": 0.002}}  # nothing else takes time
    cluster = cluster_with(device=device)
    seconds = [
        estimate_profile(amounts, amounts.layout, replace(case, software=software), cluster).times
        for software in (HELIX, MEGATRON)
    ]
    ours, theirs = (sum(times[name] for name in amounts.operators if name[0] == "layer") for times in seconds)
    assert ours > 1.8 * theirs, "counted without fp8, of which only linears are multiplied"
    (head,) = (name for name in amounts.operators if name[0] == "head" and name[1].endswith(".W"))
    assert seconds[0][head] == seconds[1][head]


@pytest.mark.parametrize(("ranks", "links"), [(4, IN_PAIRS), (2, 1 / 3)])
def test_devices_without_a_switch_have_a_part_of_their_links_to_each_other(ranks: int, links: float):
    whole, pairs = (cluster_with(devices_per_node=4, node={"gb_per_s": 100, "switch": each}) for each in (True, False))
    sent, ring = Transfer("tp", "all_gather", 6 * GB), Ring(ranks, (1, ranks))
    expected = transfer_seconds(sent, ring, whole) / links
    assert transfer_seconds(sent, ring, pairs) == pytest.approx(expected)


LINKS: dict[str, Any] = {
    "node": {"gb_per_s": 100, "latency_us": 100},
    "network": {"gb_per_s": 10, "latency_us": 1000, "devices_per_link": 2},
}
TWO_NODES = {"nodes": 2, "devices_per_node": 4, **LINKS}


@pytest.mark.parametrize(
    ("method", "ring", "expected"),
    [
        # Inside a node: the bytes of a rank over its own link, with a latency for every message.
        ("all_gather", Ring(4, (1, 4)), 3 * 1e-4 + 0.06),
        ("reduce_scatter", Ring(4, (1, 4)), 3 * 1e-4 + 0.06),
        ("all_reduce", Ring(4, (1, 4)), 6 * 1e-4 + 0.06),
        ("exchange", Ring(4, (1, 4)), 3 * 1e-4 + 0.06),
        ("shift", Ring(4, (1, 4)), 1e-4 + 0.06),
        # A ring over both nodes passes an edge once; the node has two links, and one such group.
        # Of its seven hops one leaves the node: so NCCL counts.
        ("all_gather", Ring(8, (1, 4)), 6 * 1e-4 + 1e-3 + 6 / (2 * 10)),
        ("all_reduce", Ring(8, (1, 4)), 2 * (6 * 1e-4 + 1e-3) + 6 / (2 * 10)),
        ("all_gather", Ring(8, (1, 1)), 7 * 1e-3 + 4 * 6 / (2 * 10)),
        ("shift_back", Ring(8, (1, 4)), 1e-3 + 6 / (2 * 10)),
        # With one rank of a group on a node, four groups share its two links.
        ("all_gather", Ring(2, (1, 1)), 1e-3 + 4 * 6 / (2 * 10)),
        ("send", Ring(2, (1, 1)), 1e-3 + 4 * 6 / (2 * 10)),
        # An exchange has something of its own for each of the four ranks on the other node.
        ("exchange", Ring(8, (1, 4)), 4 * 1e-3 + 4 * (6 / 7 * 4) / (2 * 10)),
        ("exchange_rows", Ring(8, (1, 4)), 4 * 1e-3 + 4 * (6 / 7 * 4) / (2 * 10)),
        ("all_gather", Ring(1, (1, 1)), 0.0),
    ],
)
def test_what_a_transfer_of_6_gb_takes(method: str, ring: Ring, expected: float):
    cluster = cluster_with(**TWO_NODES)
    assert transfer_seconds(Transfer("tp", method, 6 * GB), ring, cluster) == pytest.approx(expected)
    assert transfer_seconds(Transfer("tp", method, 0), ring, cluster) == 0.0


ISLANDS: dict[str, Any] = {
    **TWO_NODES,
    "island": {"devices": 2, "gb_per_s": 200},
    "node": {"gb_per_s": 30, "latency_us": 100, "devices_per_link": 2},
}


@pytest.mark.parametrize(
    ("method", "ranks", "expected"),
    [
        # Inside an island over the device's own link; over a node's edge as without islands.
        ("all_gather", (2, 1), 6 / 200),
        ("all_gather", (8, 1), 2 * 1e-4 + 1e-3 + 6 / (2 * 10)),
        # A ring over both islands passes the one link between them once, neighbours two devices apart twice.
        ("all_gather", (4, 1), 1e-4 + 6 / 30),
        ("shift", (2, 2), 1e-4 + 2 * 6 / 30),
        # An exchange has something of its own for each of the two ranks on the other island, from both of this one.
        ("exchange", (4, 1), 2 * 1e-4 + 2 * (6 / 3 * 2) / 30),
    ],
)
def test_islands_of_a_node_share_what_joins_them(method: str, ranks: tuple[int, int], expected: float):
    cluster = cluster_with(**ISLANDS)
    taken = transfer_seconds(Transfer("tp", method, 6 * GB), ring_of(cluster, ranks), cluster)
    assert taken == pytest.approx(expected)


def test_one_island_has_its_links_and_efficiency_goes_by_the_bytes_of_a_message():
    cluster = cluster_with(**{**ISLANDS, "devices_per_node": 2, "network": {"gb_per_s": 10}})
    assert ring_of(cluster, (4, 1)) == Ring(4, (1, 2))
    assert transfer_seconds(Transfer("tp", "all_gather", 6 * GB), ring_of(cluster, (2, 1)), cluster) == 6 / 200
    node = {"gb_per_s": 100, "efficiency": [[1e9, 0.25], [2e9, 0.5]]}
    cluster = cluster_with(devices_per_node=4, node=node)
    taken = transfer_seconds(Transfer("tp", "all_gather", 6 * GB), Ring(4, (1, 4)), cluster)
    assert taken == pytest.approx(6 / 50), "three messages of 2 GB"


def test_axes_stand_as_the_mesh_numbers_its_ranks():
    cluster = cluster_with(nodes=4, devices_per_node=8)
    assert ring_of(cluster, (8, 1)) == Ring(8, (1, 8))
    assert ring_of(cluster, (2, 8)) == Ring(2, (1, 1))
    assert ring_of(cluster, (16, 1)) == Ring(16, (1, 8))
    # tp 2 and cp 2 of a node, then the two stages of the pipeline, and data parallelism between the nodes.
    result = rings(cluster, Sizes(tp=2, cp=2, pp=2, dp=4))
    assert result["tp"] == result["cp"] == result["pp"] == Ring(2, (1, 2))
    assert result["dp"] == Ring(4, (1, 1))
    assert result["copies"] == Ring(8, (1, 2)), "neighbours of a sequence are on a node, other batches are not"
    assert rings(cluster, Sizes(tp=2, dp=16))["copies"] == Ring(16, (1, 4))


def test_experts_stand_over_tensor_and_data_parallelism():
    cluster = cluster_with(nodes=4, devices_per_node=8)
    result = rings(cluster, Sizes(tp=2, pp=4, dp=4, ep=2))
    assert result["experts"] == Ring(4, (1, 2)), "two ranks of a node, and two of the next"
    assert result["expert_copies"] == Ring(2, (1, 1))
    assert inter_node_axes(cluster, Sizes(tp=2, pp=4, dp=4, ep=2)) == ["ep"]
    assert inter_node_axes(cluster, Sizes(tp=2, dp=16, ep=2)) == []
    assert inter_node_axes(cluster, Sizes(tp=8, cp=2, dp=2)) == ["cp"]
    assert inter_node_axes(cluster, Sizes(dp=32)) == []


@pytest.fixture(scope="module")
def amounts() -> Any:
    return counted(on_meta(), batch=8, tp_size=2)


def test_a_profile_covers_every_operator_and_a_host_of_a_cpu_adds_what_it_takes(amounts: Any):
    def profile_on(**keys: Any) -> Any:
        return estimate_profile(amounts, amounts.layout, case_of(tp=2), cluster_with(**keys))

    profile, up, gather = profile_on(), ("layer", "F.mlp.up"), ("layer", "F.mlp.gather")
    kinds = {name: op.kind for name, op in named_operators(amounts.layout)}
    assert profile.times.keys() == kinds.keys()
    assert profile.bytes.keys() == {name for name, kind in kinds.items() if kind.communicates}
    assert profile.times[gather] == pytest.approx(amounts.operators[gather].transfers[0].bytes / 100e9)
    ahead, beside = (profile_on(device={"issue_us": 50, "host_runs_ahead": each}) for each in (True, False))
    assert beside.times[up] == pytest.approx(ahead.times[up] + 50e-6)
    assert beside.times[gather] == ahead.times[gather]
    cluster = cluster_with(device={"peak_tflops": {"bf16": 100}})
    with pytest.raises(ValueError, match=r"no device.peak_tflops for fp32; it has bf16: add fp32 to its file"):
        estimate_profile(amounts, amounts.layout, case_of(tp=2, dtype="fp32"), cluster)


def test_contention_holds_for_operators_of_two_kinds_and_for_what_they_send(amounts: Any):
    """From half of what a collective of a layer sends to all of it, factors fall to 1, and stay there."""
    (usual,) = {each.bytes for each in amounts.operators["layer", "F.mlp.gather"].transfers}
    contention = {
        "compute_beside_intra_node": [[usual // 2, 3.0], [usual, 1.0]],
        "intra_node_beside_compute": [[usual // 2, 2.0], [usual, 1.0]],
    }
    profile = estimate_profile(amounts, amounts.layout, case_of(tp=2), cluster_with(contention=contention))
    kinds = {name: op.kind for name, op in named_operators(amounts.layout)}
    for moving in (name for name, kind in kinds.items() if kind is Kind.INTRA_NODE):
        faster = min(1.0, max(0.0, math.log2(2 * profile.bytes[moving] / usual)))
        for computing in (name for name, kind in kinds.items() if kind is Kind.COMPUTE):
            assert profile.slowdown(computing, moving) == pytest.approx(3 - 2 * faster, rel=1e-3)
            assert profile.slowdown(moving, computing) == pytest.approx(2 - faster, rel=1e-3)
    assert {profile.bytes[name] == usual for name, kind in kinds.items() if kind is Kind.INTRA_NODE} == {True, False}
    assert not estimate_profile(amounts, amounts.layout, case_of(tp=2), cluster_with()).pairs


def test_ranks_wait_at_each_collective_behind_an_even_part_of_the_computation(amounts: Any):
    clusters = (cluster_with(waiting_us=waiting) for waiting in (0, 250))
    alike, apart = (estimate_profile(amounts, amounts.layout, case_of(tp=2), each) for each in clusters)
    kinds = {name: op.kind for name, op in named_operators(amounts.layout)}
    for unit in amounts.layout.graphs:
        for letter in "FB":
            names = [name for name in kinds if name[0] == unit and name[1].startswith(letter)]
            computing = 1e3 * sum(alike.times[name] for name in names if kinds[name] is Kind.COMPUTE)
            meetings = [name for name in names if kinds[name] is Kind.INTRA_NODE]
            for name in names:
                added = 250e-6 * math.sqrt(computing / len(meetings)) if name in meetings else 0
                assert apart.times[name] - alike.times[name] == pytest.approx(added)
