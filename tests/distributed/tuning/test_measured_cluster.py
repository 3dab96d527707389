"""`hf-helix cluster`: two processes measure themselves and the links between them."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from support.cluster import Cluster

from hf_helix.cli.cluster import written
from hf_helix.config import HelixConfig
from hf_helix.measure import cluster_file, device
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import load_cluster
from hf_helix.runtime.distributed.mesh import forget_meshes, mesh_of
from hf_helix.runtime.streams.streams import make_streams

LEAST = {
    (device, "SIDES"): (32, 64),
    (device, "KEYS"): (128,),
    (device, "ELEMENTS"): (4096, 65536),
    (device, "OPERANDS"): {"cpu": 1 << 20},
    (cluster_file, "SIZES"): (256, 65536, 262144),
    (cluster_file, "SECONDS"): {"cpu": 0.01},
    (cluster_file, "SKEW_ROUNDS"): 3,
    (cluster_file, "BYTES"): {"cpu": (2048, 65536)},
    (cluster_file, "BUDGET"): {"cpu": 0.001},
}
"""As little as can be measured."""


def measure(link: str | None, apart: bool) -> dict[str, Any]:
    """What each rank finds; `apart` from each other on hosts of their own."""
    host = f"host-{dist.get_rank()}" if apart else "host"
    patches = [mock.patch.object(module, name, value) for (module, name), value in LEAST.items()]
    forget_meshes()
    with mock.patch.dict(os.environ, NCCL_HOSTID=host):
        for patch in patches:
            patch.start()
        try:
            return cluster_file.measure_cluster(torch.device("cpu"), link)
        finally:
            mock.patch.stopall()
            forget_meshes()


@pytest.mark.slow
def test_an_emulated_link_is_found_and_the_file_can_be_used(cluster_of: Callable[[int], Cluster], tmp_path: Path):
    first, second = cluster_of(2).run(measure, link="50mbit,2ms", apart=False)
    assert first == second
    file = tmp_path / "here.yaml"
    file.write_text(written(first))
    result = load_cluster(file)
    assert (result.nodes, result.devices_per_node, result.backend) == (1, 2, "gloo")
    # A busy machine adds to the latency, which is taken from what large messages take.
    assert 0.3 * 50e6 / 8 < result.node.bandwidth < 1.3 * 50e6 / 8
    assert 2e-3 <= result.node.latency < 30e-3
    assert not result.device.host_runs_ahead
    assert result.device.issue_seconds > 0
    assert set(result.device.peaks) == {"fp32", "bf16"}
    assert all(factor >= 1 for curve in result.contention.values() for _, factor in curve.points)
    assert [sent for sent, _ in result.contention[Kind.COMPUTE, Kind.INTRA_NODE].points] == [2048, 65536]
    assert "emulated link of 50mbit,2ms" in yaml.safe_load(file.read_text())["sources"]["node"]


@pytest.mark.slow
def test_ranks_on_hosts_of_their_own_are_joined_by_the_network(cluster_of: Callable[[int], Cluster]):
    first, _ = cluster_of(2).run(measure, link=None, apart=True)
    assert (first["nodes"], first["devices_per_node"]) == (2, 1)
    assert "node" not in first
    assert first["network"]["devices_per_link"] == 1
    assert {"compute_beside_inter_node", "inter_node_beside_compute"} == set(first["contention"])
    assert first["waiting_us"] >= 0


def waiting(least: float, most: float) -> float:
    """What ranks wait behind a second of computation whose parts take any time between two bounds, in seconds."""
    drawn = random.Random(dist.get_rank())
    streams = make_streams(torch.device("cpu"))
    try:
        work = mock.Mock(side_effect=lambda: time.sleep(drawn.uniform(least, most)))
        with mock.patch.object(cluster_file, "decoder_work", return_value=work):
            return cluster_file.measure_waiting(mesh_of(HelixConfig(tp_size=2), "cpu").tp, streams, torch.device("cpu"))
    finally:
        streams.close()
        forget_meshes()


@pytest.mark.slow
def test_ranks_wait_for_the_slower_of_them(cluster_of: Callable[[int], Cluster]):
    cluster = cluster_of(2)
    even, uneven = (max(cluster.run(waiting, least=least, most=40e-3)) for least in (40e-3, 0.0))
    # The larger of two numbers between 0 and 40 ms is 6.7 ms more than one of them on average, which is 20 ms.
    assert even < 0.02 < uneven < 0.1, "6.7 ms behind 20 ms are 47 ms behind a second"


def test_a_link_without_a_rate_is_refused(cluster_of: Callable[[int], Cluster]):
    said = "link='even' has no rate to describe; give one, such as '300mbit'"
    cluster_of(2).assert_raises(measure, said, link="even", apart=False)
    with pytest.raises(ValueError, match="no rate"):
        cluster_file.measure_cluster(torch.device("cpu"), "even")
