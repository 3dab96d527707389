"""Cluster files: those that the package brings load; what is wrong with others is said by the name of the key."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import Curve, Link, load_cluster, parse_cluster, shipped_clusters

LEAST: dict[str, Any] = {
    "name": "two",
    "nodes": 2,
    "devices_per_node": 4,
    "device": {"name": "X", "memory_gb": 10, "peak_tflops": {"bf16": 100}, "memory_gb_per_s": 1000},
    "node": {"gb_per_s": 100},
    "network": {"gb_per_s": 10},
}


def with_key(path: str, value: object) -> dict[str, Any]:
    """The smallest cluster file with a key, "device.name" for one of a section, set to a value; None removes it."""
    result = copy.deepcopy(LEAST)
    *sections, key = path.split(".")
    place = result
    for section in sections:
        place = place.setdefault(section, {})
    if value is None:
        del place[key]
    else:
        place[key] = value
    return result


@pytest.mark.parametrize("name", shipped_clusters())
def test_every_file_of_the_package_loads_and_says_where_its_numbers_are_from(name: str):
    cluster = load_cluster(name)
    result = yaml.safe_load(shipped_clusters()[name].read_text())
    said = " ".join(result["sources"])
    numbers = result["device"].keys() - {"name", "host_runs_ahead"}
    for key in numbers if "device" not in result["sources"] else {"memory_gb", "reserved_gb", "attention_block"}:
        assert re.search(rf"\b{key}\b", said), f"{name} does not say where device.{key} is from"
    assert "cluster" in result["sources"] or "nodes, devices_per_node" in result["sources"]
    for link in {"node", "network"} & result.keys():
        assert link in said
    assert "contention" in said
    assert cluster.devices == result["nodes"] * result["devices_per_node"]
    # Nothing is faster than the peak.
    for curve in (*cluster.device.matmul.values(), *cluster.device.attention.values()):
        assert all(share <= 1 for _, share in curve.points)


def test_the_clusters_of_the_paper_are_those_of_its_section_6_1():
    a40, a800, h100 = (load_cluster(name) for name in ("a40x64", "a800x64", "h100x32"))
    assert [cluster.devices for cluster in (a40, a800, h100)] == [64, 64, 32]
    # Bytes a second that the network carries for a device: 100 Gbit/s, 4 x 200 and 8 x 400 for a node of 8.
    shares = [cluster.network.bandwidth / cluster.network.devices for cluster in (a40, a800, h100)]
    assert shares == [12.5e9 / 8, 12.5e9, 50e9]
    assert a40.island is not None
    assert [link.bandwidth for link in (a40.island.link, a800.node, h100.node)] == [32e9, 200e9, 450e9]


def test_what_is_left_out_has_a_default():
    cluster = parse_cluster(LEAST, "here")
    assert cluster.backend == "nccl"
    assert cluster.network.devices == 4, "the devices of a node share its link"
    assert cluster.waiting == 0
    assert cluster.device.memory == 10e9
    assert cluster.device.host_runs_ahead
    assert math.isinf(cluster.device.exponentials)
    assert cluster.device.matmul["bf16"].at(1e9) == 1.0


def test_curves_may_be_given_by_type():
    result = with_key("device.matmul", {"bf16": [[1e9, 0.5]], "fp32": [[1e9, 0.9]]})
    result["device"]["peak_tflops"] = {"bf16": 100, "fp32": 50}
    matmul = parse_cluster(result, "here").device.matmul
    assert (matmul["bf16"].at(1), matmul["fp32"].at(1)) == (0.5, 0.9)
    del result["device"]["peak_tflops"]["fp32"]
    with pytest.raises(ValueError, match=r"unknown keys: device.matmul.fp32; the types of device.peak_tflops are bf16"):
        parse_cluster(result, "here")


def test_contention_names_two_kinds_and_may_depend_on_what_is_sent():
    cluster = parse_cluster(with_key("contention.compute_beside_inter_node", 1.2), "here")
    assert list(cluster.contention) == [(Kind.COMPUTE, Kind.INTER_NODE)]
    assert [cluster.slowdown(Kind.COMPUTE, Kind.INTER_NODE, sent) for sent in (0, 1e9)] == [1.2, 1.2]
    assert cluster.slowdown(Kind.INTER_NODE, Kind.COMPUTE, 1e6) == 1
    assert cluster.slowdown(Kind.COMPUTE, Kind.INTRA_NODE, 1e6) == 1
    cluster = parse_cluster(with_key("contention.compute_beside_inter_node", [[1e4, 3], [1e6, 1.0]]), "here")
    for sent, factor in {1e3: 3, 1e4: 3, 1e5: 2, 1e6: 1, 1e8: 1}.items():
        assert cluster.slowdown(Kind.COMPUTE, Kind.INTER_NODE, sent) == pytest.approx(factor)


def test_ranks_wait_by_the_root_of_what_they_compute():
    cluster = parse_cluster(with_key("waiting_us", 300), "here")
    for milliseconds, waited in {0: 0, 1: 300e-6, 4: 600e-6, 25: 1500e-6}.items():
        assert cluster.waiting_seconds(milliseconds * 1e-3) == pytest.approx(waited)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("name", None, "name is missing; it must be a text"),
        ("nodes", 1.5, "nodes: 1.5 must be a whole number, at least 1"),
        ("nodes", 0, "nodes: 0 must be a number, at least 1"),
        ("device", None, "device is missing; it must be a mapping"),
        ("device", [1], r"device must be a mapping of keys to values, and is \[1\]"),
        ("device.name", 40, "device.name: 40 must be a text"),
        ("device.memory_gb", None, "device.memory_gb is missing; it must be a number"),
        ("device.memory_gb", "much", "device.memory_gb: 'much' must be a number, more than 0"),
        ("device.memory_gb", True, "device.memory_gb: True must be a number, more than 0"),
        ("device.reserved_gb", 10, "device.reserved_gb: 10 leaves nothing of memory_gb: 10"),
        ("device.peak_tflops", {}, r"device.peak_tflops names no type; give it as \{bf16: 989\}"),
        ("device.peak_tflops", {"bf17": 1}, "device.peak_tflops.bf17; name one or more of bf16, fp16, fp32"),
        ("device.matmul", [[1e9, 2]], r"device.matmul: \[\[1000000000.0, 2\]\] must be a list of \[size, share"),
        ("device.matmul", [[2, 0.5], [1, 0.6]], "device.matmul: .* must be a list of .* sizes growing"),
        ("device.matmul", 0.5, "device.matmul: 0.5 must be a list"),
        ("device.host_runs_ahead", "yes", "device.host_runs_ahead: 'yes' must be one of true, false"),
        ("node.devices_per_link", 2, "unknown keys: node.devices_per_link"),
        ("network.latency_us", -1, "network.latency_us: -1 must be a number, at least 0"),
        (
            "network.devices_per_link",
            3,
            "devices_per_link: 3 must divide devices_per_node: 4; values that work: 1, 2, 4",
        ),
        ("island.devices", 3, "island.devices: 3 must divide devices_per_node: 4; values that work: 1, 2, 4"),
        ("contention.compute_beside_pcie", 1.2, "contention.compute_beside_pcie is not known; name two of compute"),
        ("contention.compute_beside_intra_node", 0.5, "compute_beside_intra_node: 0.5 must be .* at least 1"),
        (
            "contention.compute_beside_intra_node",
            [[1e5, 2], [1e6, 0.5]],
            r"list of \[bytes, times as long\], .* below 1",
        ),
        ("backend", "mpi", "backend: 'mpi' must be one of nccl, gloo"),
        ("sources", "a data sheet", "sources must be a mapping of keys to values"),
    ],
)
def test_what_is_wrong_is_said_by_the_name_of_the_key(path: str, value: object, message: str):
    with pytest.raises(ValueError, match=f"here.yaml: .*{message}"):
        parse_cluster(with_key(path, value), "here.yaml")


def test_a_key_in_other_letters_is_named_and_one_without_a_value_is_no_default():
    data = with_key("device.kernel_us", 1)
    data["device"]["kernel_us"] = None  # as YAML reads "kernel_us:"
    with pytest.raises(ValueError, match=r"here: device.kernel_us: None must be a number, at least 0"):
        parse_cluster(data, "here")
    data = with_key("device.memory_gb", None)
    data["device"]["memory_GB"] = 80
    with pytest.raises(ValueError, match=r"device.memory_gb is missing, and 'memory_GB' is given; it must be a number"):
        parse_cluster(data, "here.yaml")


def test_a_name_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path):
    with pytest.raises(
        ValueError,
        match=r"cluster='a41x64' is neither a file nor .* \(did you mean 'a40x64'\?\); use one of a100-.*hf-helix",
    ):
        load_cluster("a41x64")
    file = tmp_path / "mine.yaml"
    for content in (b"name: [unclosed", b"\xff\xfe\xff"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"mine.yaml: not YAML"):
            load_cluster(file)
    file.write_text(yaml.safe_dump(LEAST))
    assert load_cluster(file).name == "two"
    assert load_cluster("h100x8.yaml") == load_cluster("h100x8")


def test_a_curve_is_straight_over_the_logarithm_of_the_size():
    curve = Curve(((1e6, 0.2), (1e8, 0.6)))
    assert [curve.at(size) for size in (1.0, 1e6, 1e7, 1e8, 1e12)] == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.6])


def test_a_link_takes_its_latency_for_every_message():
    link = Link(bandwidth=1e9, latency=1e-3)
    assert link.seconds(1e6, messages=3) == pytest.approx(4e-3)
    assert link.seconds(0) == 0
