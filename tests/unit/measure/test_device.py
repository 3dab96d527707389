"""What is written into a cluster file gives back the times that it was made from."""

import time
from typing import Any

import pytest
import torch

from hf_helix.doctor.amounts.meter import attention_kernel
from hf_helix.doctor.amounts.records import MATMUL, OTHER, Kernel, Transfer
from hf_helix.doctor.estimate import Ring, kernel_seconds, transfer_seconds
from hf_helix.measure import device, timing
from hf_helix.measure.cluster_file import (
    METHODS,
    TimedCollective,
    attention_curve,
    count_nodes,
    efficiency_curve,
    link_entry,
)
from hf_helix.measure.device import HEAD_SIZE, HEADS, attention_work
from hf_helix.planning.timing.cluster import Cluster, parse_cluster
from hf_helix.runtime.streams.streams import CpuStreams


def cluster_of(device: dict[str, Any], node: dict[str, Any], ranks: int = 4) -> Cluster:
    about = {"name": "X", "memory_gb": 1, "peak_tflops": {"fp32": 0.1}, "memory_gb_per_s": 20}
    result = {"name": "here", "nodes": 1, "devices_per_node": ranks, "backend": "gloo", "node": node}
    return parse_cluster({**result, "device": {**about, **device}}, "here")


@pytest.mark.parametrize("block", [128, 512])
def test_attention_takes_forward_and_backward_what_was_measured(block: int):
    measured = [(128.0, 4e-3), (512.0, 40e-3), (1024.0, 120e-3)]
    curve = attention_curve(measured, 0.1e12, block, exponentials=1e9)
    cluster = cluster_of({"attention": curve, "attention_block": block, "exponentials_per_ns": 1}, {"gb_per_s": 1})
    for keys, seconds in measured:
        q, k, v = (torch.empty(1, HEADS, int(keys), HEAD_SIZE, device="meta") for _ in range(3))
        parts = [attention_kernel(q, k, v, causal=True, backward=backward) for backward in (False, True)]
        result = sum(kernel_seconds(part, cluster, "fp32") for part in parts)
        assert result == pytest.approx(seconds, rel=1e-3)
        operations, exponentials = attention_work(keys, block)
        assert operations >= sum(part.flops for part in parts), "a mask spares whole blocks only"
        assert exponentials >= sum(part.exponentials for part in parts)


def test_products_and_element_wise_kernels_take_what_was_measured():
    products, memory = [(1e6, 0.5e11), (1e9, 0.8e11)], [(1e5, 8e9), (1e7, 20e9)]
    device = {
        "matmul": efficiency_curve(products, 0.1e12),
        "memory_efficiency": efficiency_curve(memory, 20e9),
        "kernel_us": 5,
    }
    cluster = cluster_of(device, {"gb_per_s": 1})
    for operations, rate in products:
        kernel = Kernel(MATMUL, operations, 100)
        assert kernel_seconds(kernel, cluster, "fp32") == pytest.approx(5e-6 + operations / rate, rel=1e-3)
    for moved, rate in memory:
        kernel = Kernel(OTHER, 0.0, int(moved))
        assert kernel_seconds(kernel, cluster, "fp32") == pytest.approx(5e-6 + moved / rate, rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_take_what_was_measured(ranks: int):
    """Of a link of 1 GB/s and 100 us, of which large messages get all, and small ones half."""

    def seconds(sent: int, messages: int) -> float:
        return messages * 100e-6 + sent / (1e9 if sent / messages > 1e6 else 0.5e9)

    timed = []
    for method in METHODS:
        messages = 1 if method == "shift" else ranks - 1
        sizes = [messages * size for size in (8, 100_000, 800_000, 4_000_000, 64_000_000)]
        timed += [TimedCollective(method, sent, messages, seconds(sent, messages)) for sent in sizes]
    cluster = cluster_of({}, link_entry(timed), ranks)
    for each in timed:
        result = transfer_seconds(Transfer("tp", each.method, each.bytes), Ring(ranks, (1, ranks)), cluster)
        assert result == pytest.approx(each.seconds, rel=0.02), each


def test_nodes_are_read_from_the_names_of_hosts():
    assert count_nodes(["a 1", "a 1", "b 2", "b 2"]) == (2, 2)
    assert count_nodes(["a 1"]) == (1, 1)
    with pytest.raises(ValueError, match=r"here are 2 on a, 1 on b\. Start equally many on each"):
        count_nodes(["a 1", "a 1", "b 2"])
    with pytest.raises(ValueError, match="that follow each other"):
        count_nodes(["a 1", "b 2", "a 1", "b 2"])


class Watch:
    """A stopwatch that counts kernels: each takes the device 2 us and the host 10 us, an operator the host 50 us more.

    A GPU is held for a millisecond and a half before works that are timed on the device.
    """

    device = torch.device("cuda")

    def seconds(self, work: tuple[int, int]) -> float:
        kernels, operators = work
        issuing = 10e-6 * kernels + 50e-6 * operators
        return max(2e-6 * kernels, issuing - 1.5e-3)

    def host_seconds(self, work: tuple[int, int]) -> float:
        kernels, operators = work
        return 10e-6 * kernels + 50e-6 * operators


def test_the_host_of_a_gpu_is_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch):
    """An operator costs its kernels and its own work, without the time for which the device is held."""
    count = 2 * device.CHAIN
    monkeypatch.setattr(device, "_chain", lambda _, kernels: (count * kernels, count))
    monkeypatch.setattr(device, "_elementwise", lambda *_: (3, 0))
    watch: Any = Watch()
    kernel, operator = device.measure_calls(watch)
    assert kernel == pytest.approx(2e-6)
    assert operator == pytest.approx(50e-6 + 10e-6 * device.USUAL_KERNELS)


def test_a_stopwatch_of_the_host_has_no_hold(monkeypatch: pytest.MonkeyPatch):
    streams, held, works = CpuStreams(), [], []
    monkeypatch.setattr(timing, "hold", lambda *given: held.append(given))
    watch = timing.Stopwatch(streams, torch.device("cpu"), 0.01)
    assert watch.host_seconds(lambda: works.append(time.sleep(1e-3))) >= 1e-3
    assert len(works) >= timing.FEWEST
    assert not held
    watch.seconds(lambda: None)
    assert held
