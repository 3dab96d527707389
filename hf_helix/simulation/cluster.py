"""Clusters: what devices compute and links carry, as a file says it.

In:   a YAML file, or the name of one that the package brings.
Out:  a `Cluster`.
Must hold: every number has a unit in its key; a file with a key that is unknown, missing or impossible is refused by
the name of the key; nothing here imports torch.

    name: 8 nodes of 8 A40
    sources: {memory_gb: data sheet, ...}        where the numbers are from, for people
    nodes: 8
    devices_per_node: 8
    device:
      name: A40
      memory_gb: 48                              of which a run may use what `reserved_gb` leaves
      reserved_gb: 2                             the context, communicators and fragments
      peak_tflops: {bf16: 149.7, fp32: 37.4}     dense
      matmul: [[1e9, 0.5], [1e11, 0.9]]          floating-point operations of a product -> share of the peak
      attention: [[1e9, 0.3], [1e11, 0.6]]       likewise, of fused attention
      memory_gb_per_s: 696
      memory_efficiency: [[1e5, 0.3], [1e8, 0.9]]    bytes that a kernel reads and writes -> share
      kernel_us: 2                               between two kernels on the device
      issue_us: 0                                what the host takes for an operator of a graph
      host_runs_ahead: true                      of the device; false on a CPU, where the two add up
    node: {gb_per_s: 20, latency_us: 10}         of a device to others of its node, in each direction
    network: {gb_per_s: 12.5, latency_us: 20, devices_per_link: 8}     of what one link carries, and who shares it
    contention:                                  how many times longer the first takes beside the second
      compute_beside_intra_node: 1.15
      intra_node_beside_compute: 1.15
      ...
    backend: nccl                                or gloo
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.text import shorten_list

NODE, NETWORK = "node", "network"
BACKENDS = ("nccl", "gloo")


@dataclass(frozen=True)
class Curve:
    """An efficiency that depends on a size: straight lines between points, over the logarithm of the size.

    Attributes:
        points: (size, efficiency), sizes growing. Below the first and above the last their values hold.
    """

    points: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    def at(self, size: float) -> float:
        """Returns the efficiency at a size."""
        sizes = [point[0] for point in self.points]
        place = bisect_left(sizes, size)
        if place == 0 or place == len(sizes):
            return self.points[min(place, len(sizes) - 1)][1]
        (low, first), (high, last) = self.points[place - 1 : place + 1]
        share = math.log(size / low) / math.log(high / low)
        return first + share * (last - first)


@dataclass(frozen=True)
class Device:
    """A GPU, or a process on CPU.

    Attributes:
        name: as people call it.
        memory: bytes that a run may use.
        peaks: floating-point operations a second, by type: "bf16", "fp32".
        matmul: share of the peak by the operations of a product.
        attention: likewise, of fused attention.
        bandwidth: bytes a second that pass the memory.
        memory_efficiency: share of the bandwidth by the bytes of a kernel.
        kernel_seconds: between two kernels on the device.
        issue_seconds: what the host takes for an operator of a graph.
        host_runs_ahead: whether the host issues while the device computes.
    """

    name: str
    memory: float
    peaks: Mapping[str, float]
    bandwidth: float
    matmul: Curve = Curve()
    attention: Curve = Curve()
    memory_efficiency: Curve = Curve()
    kernel_seconds: float = 0.0
    issue_seconds: float = 0.0
    host_runs_ahead: bool = True


@dataclass(frozen=True)
class Link:
    """What carries bytes between devices.

    Attributes:
        bandwidth: bytes a second, in each direction.
        latency: seconds of a message.
        devices: how many devices share it.
        efficiency: share of the bandwidth by the bytes of a message.
    """

    bandwidth: float
    latency: float = 0.0
    devices: int = 1
    efficiency: Curve = Curve()

    def seconds(self, count: float, messages: int = 1) -> float:
        """Returns what it takes to carry bytes, sent in so many messages after each other."""
        if count <= 0:
            return 0.0
        return messages * self.latency + count / (self.bandwidth * self.efficiency.at(count / messages))


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
        name: as people call it.
        nodes: how many.
        devices_per_node: how many.
        device: what each of them is.
        node: carries bytes between the devices of a node.
        network: carries bytes between nodes.
        contention: (kind, other kind) -> how many times longer an operator of the first takes beside one of the second.
        backend: "nccl" or "gloo".
        sources: where its numbers are from.
    """

    name: str
    nodes: int
    devices_per_node: int
    device: Device
    node: Link
    network: Link
    contention: Mapping[tuple[Kind, Kind], float] = field(default_factory=dict)
    backend: str = "nccl"
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """All of them."""
        return self.nodes * self.devices_per_node


def shipped_clusters() -> dict[str, Path]:
    """Returns the files that the package brings, by name."""
    folder = Path(str(resources.files("hf_helix.simulation"))) / "clusters"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_cluster(source: str | Path) -> Cluster:
    """Returns the cluster of a file.

    Args:
        source: the path of a YAML file, or the name of one that the package brings, with or without ".yaml".

    Raises:
        ValueError: there is none, or it is malformed; names the key.
    """
    shipped = shipped_clusters()
    path = Path(source)
    if not path.is_file():
        path = shipped.get(str(source).removesuffix(".yaml"), path)
    if not path.is_file():
        raise ValueError(
            f"cluster={str(source)!r} is neither a file nor a cluster that hf_helix brings; use one of "
            f"{', '.join(shipped)}, or write a file for this machine with `hf-helix cluster --output here.yaml`"
        )
    try:
        found = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    return parse_cluster(found, str(path))


def parse_cluster(found: Any, where: str) -> Cluster:
    """Returns the cluster that a mapping describes.

    Args:
        found: what the file holds.
        where: the file, for messages.

    Raises:
        ValueError: it is malformed; names the key.
    """
    top = _Section(found, where, "")
    device, node, network = (top.section(name) for name in ("device", NODE, NETWORK))
    nodes, per_node = (int(top.number(key, least=1)) for key in ("nodes", "devices_per_node"))
    cluster = Cluster(
        name=top.text("name"),
        nodes=nodes,
        devices_per_node=per_node,
        device=_device(device),
        node=_link(node, devices=1),
        network=_link(network, devices=per_node),
        contention=_contention(top.section("contention", optional=True)),
        backend=top.choice("backend", BACKENDS),
        sources={str(key): str(value) for key, value in (top.take("sources") or {}).items()},
    )
    for section in (top, device, node, network):
        section.refuse_rest()
    return cluster


def _device(section: _Section) -> Device:
    peaks = section.section("peak_tflops")
    given = {key: peaks.number(key) * 1e12 for key in list(peaks.left)}
    if not given:
        raise ValueError(f"{section.where}: device.peak_tflops names no type; give it as {{bf16: 989}}")
    return Device(
        name=section.text("name"),
        memory=(section.number("memory_gb") - section.number("reserved_gb", 0.0, least=0)) * 1e9,
        peaks=given,
        bandwidth=section.number("memory_gb_per_s") * 1e9,
        matmul=section.curve("matmul"),
        attention=section.curve("attention"),
        memory_efficiency=section.curve("memory_efficiency"),
        kernel_seconds=section.number("kernel_us", 0.0, least=0) * 1e-6,
        issue_seconds=section.number("issue_us", 0.0, least=0) * 1e-6,
        host_runs_ahead=bool(section.take("host_runs_ahead", True)),
    )


def _link(section: _Section, devices: int) -> Link:
    return Link(
        bandwidth=section.number("gb_per_s") * 1e9,
        latency=section.number("latency_us", 0.0, least=0) * 1e-6,
        devices=int(section.number("devices_per_link", devices, least=1)),
        efficiency=section.curve("efficiency"),
    )


def _contention(section: _Section) -> dict[tuple[Kind, Kind], float]:
    kinds = {kind.value: kind for kind in Kind}
    found = {}
    for key in list(section.left):
        first, _, second = key.partition("_beside_")
        if first not in kinds or second not in kinds:
            raise ValueError(
                f"{section.where}: contention.{key} is not known; name two of {', '.join(kinds)}, such as "
                "compute_beside_intra_node: 1.2"
            )
        found[kinds[first], kinds[second]] = section.number(key, least=1)
    return found


class _Section:
    """A mapping of the file, whose keys are taken one by one.

    Args:
        found: what stands in the file.
        where: the file.
        name: of the section; empty for the whole file.
    """

    def __init__(self, found: Any, where: str, name: str) -> None:
        if not isinstance(found, dict):
            raise ValueError(f"{where}: {name or 'the file'} must be a mapping of keys to values, and is {found!r}")
        self.left: dict[str, Any] = {str(key): value for key, value in found.items()}
        self.where = where
        self._name = name

    def take(self, key: str, default: Any = None) -> Any:
        return self.left.pop(key, default)

    def section(self, key: str, optional: bool = False) -> _Section:
        if key not in self.left and not optional:
            raise self._missing(key, "a mapping")
        return _Section(self.left.pop(key, {}), self.where, key)

    def text(self, key: str) -> str:
        if not isinstance(self.left.get(key), str):
            raise self._missing(key, "a text")
        return str(self.left.pop(key))

    def choice(self, key: str, choices: Sequence[str]) -> str:
        found = self.left.pop(key, choices[0])
        if found not in choices:
            raise ValueError(f"{self.where}: {self._full(key)}: {found!r} is not one of {', '.join(choices)}")
        return str(found)

    def number(self, key: str, default: float | None = None, least: float | None = None) -> float:
        if key not in self.left and default is not None:
            return default
        if key not in self.left:
            raise self._missing(key, "a number")
        found = self.left.pop(key)
        try:
            number = float(found)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or (number <= 0 and least is None) or (least is not None and number < least):
            needed = "more than 0" if least is None else f"at least {least:g}"
            raise ValueError(f"{self.where}: {self._full(key)}: {found!r} must be a number, {needed}")
        return number

    def curve(self, key: str) -> Curve:
        found = self.left.pop(key, None)
        if found is None:
            return Curve()
        try:
            points = tuple((float(size), float(share)) for size, share in found)
        except (TypeError, ValueError):
            points = ()
        sizes = [size for size, _ in points]
        if not points or sorted(set(sizes)) != sizes or not all(s > 0 and 0 < share <= 1.5 for s, share in points):
            raise ValueError(
                f"{self.where}: {self._full(key)}: {found!r} must be a list of [size, share of the peak], sizes "
                "growing, such as [[1e9, 0.5], [1e11, 0.9]]"
            )
        return Curve(points)

    def refuse_rest(self) -> None:
        if self.left:
            raise ValueError(f"{self.where}: unknown keys: {shorten_list([self._full(key) for key in self.left])}")

    def _full(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def _missing(self, key: str, what: str) -> ValueError:
        return ValueError(f"{self.where}: {self._full(key)} is missing; it must be {what}")
