"""Clusters: the rates of devices and links, from a file.

In:   a YAML file, or the name of a file of the package.
Out:  a `Cluster`.
Must hold: every number has a unit in its key; an unknown, missing or impossible key is refused by name; nothing
here imports torch.

    name: 8 nodes of 8 A40
    sources: {memory_gb: data sheet, ...}        the origin of the numbers, for people
    nodes: 8
    devices_per_node: 8
    device:
      name: A40
      memory_gb: 48                              of which `reserved_gb` is not for a run
      reserved_gb: 2                             the context, communicators and fragments
      peak_tflops: {bf16: 149.7, fp32: 37.4}     dense; fp8 too, with sums in fp32, where the device has it
      matmul: [[1e9, 0.5], [1e11, 0.9]]          floating-point operations of a product -> share of the peak
      attention: [[512, 0.3], [4096, 0.6]]       keys of fused attention -> share of the peak
      attention_kernels: {flash2: [[8192, 0.35]]}    of other kernels than the one of hf_helix, by name: flash1,
                                                 flash2 (of torch's attention), flash3; left out, as `attention`
      attention_block: 128                       keys at once; a causal mask spares whole blocks
      exponentials_per_ns: 1000                  of softmax and activations; left out, no time of their own
      memory_gb_per_s: 696
      memory_efficiency: [[1e5, 0.3], [1e8, 0.9]]    bytes of a kernel, read and written -> share
      kernel_us: 2                               between two kernels on the device
      issue_us: 0                                time of the host for an operator of a graph
      replay_us: 0                               time of the host for a window from a CUDA graph
      host_runs_ahead: true                      of the device; false on a CPU, where the two add up
    island: {devices: 4, gb_per_s: 25}           of a device to others of its island, in each direction: devices of a
                                                 node with better links, by a bridge or a socket
    node: {gb_per_s: 20, latency_us: 10}         of a device to others of its node, in each direction; with islands, of
                                                 a link between them, which may have devices_per_link; switch: false
                                                 for devices that are joined in pairs
    network: {gb_per_s: 12.5, latency_us: 20, devices_per_link: 8}     of a link, and how many devices share it
    host: {gb_per_s: 20, memory_gb_per_s: 150}   between the memory of a node's host and each device, in each direction;
                                                 of the host's memory, for all its cores; left out, as here, see `Host`
    contention:                                  how many times longer the first takes with the second
      compute_beside_intra_node: 1.15
      intra_node_beside_compute: [[1e5, 2], [1e7, 1.15]]   by the bytes of a rank in the collective
      ...
    waiting_us: 300                              of ranks for each other at a collective behind a millisecond of
                                                 computation, growing with its root; left out, every rank takes the same
                                                 time every time
    backend: nccl                                or gloo

`matmul` and `attention` may be given by type, {bf16: [[...]], fp32: [[...]]}; links may have an `efficiency` by the
bytes of a message. A single node needs no network, nodes of one device no `node`; without `island` all devices of a
node are joined alike.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from hf_helix.config import nearest
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.text import shorten_list

T = TypeVar("T")

ISLAND, NODE, NETWORK = "island", "node", "network"
IN_PAIRS = 0.5
"""Of the links between devices that are joined in pairs, the part that a ring of NCCL uses; fitted on published runs of
KempnerForge on boards of four H200 (docs/doctor.md#fitted-rates)."""

BACKENDS = ("nccl", "gloo")
FP8 = "fp8"
TYPES = ("bf16", "fp16", "fp32", FP8)
ATTENTION_KERNELS = ("flash1", "flash2", "flash3", "ring")
MOST_EFFICIENT = 1.5
"""The largest share of a curve: a peak may be for large sizes, and data in a cache faster."""
EFFICIENCY = "[size, share of the peak], sizes growing, such as [[1e9, 0.5], [1e11, 0.9]]"
SLOWDOWNS = "[bytes, times as long], bytes growing and no factor below 1, such as [[1e5, 2], [1e7, 1.2]]"


@dataclass(frozen=True)
class Curve:
    """A share or a factor by size: straight lines between points, over the logarithm of the size.

    Attributes:
        points: (size, value), sizes growing. Below the first and above the last their values hold.
    """

    points: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    def at(self, size: float) -> float:
        """Returns the value at a size."""
        place = bisect_left(self._sizes, size)
        if place == 0 or place == len(self.points):
            return self.points[min(place, len(self.points) - 1)][1]
        (low, first), (high, last) = self.points[place - 1 : place + 1]
        share = math.log(size / low) / math.log(high / low)
        return first + share * (last - first)

    @cached_property
    def _sizes(self) -> list[float]:
        return [size for size, _ in self.points]


@dataclass(frozen=True)
class Device:
    """A GPU, or a process on CPU: the section `device` of a file in bytes, seconds, and operations or bytes a second.

    Attributes:
        memory: without the reserved part.
        peaks, matmul, attention: by type, see `TYPES`.
        exponentials: infinity for no time of their own.
        attention_kernels: of other kernels than the one of `attention`, by name.
        issue_seconds: time of the host for an operator of a graph.
        replay_seconds: time of the host for a window from a CUDA graph.
    """

    name: str
    memory: float
    peaks: Mapping[str, float]
    bandwidth: float
    matmul: Mapping[str, Curve]
    attention: Mapping[str, Curve]
    attention_kernels: Mapping[str, Curve] = field(default_factory=dict)
    attention_block: int = 1
    exponentials: float = math.inf
    memory_efficiency: Curve = Curve()
    kernel_seconds: float = 0.0
    issue_seconds: float = 0.0
    replay_seconds: float = 0.0
    host_runs_ahead: bool = True

    def moving_seconds(self, count: float, kernel: float | None = None) -> float:
        """Returns the seconds of moving bytes through the memory, in kernels of `kernel` bytes; None for one kernel."""
        return count / (self.bandwidth * self.memory_efficiency.at(max(1.0, count if kernel is None else kernel)))


@dataclass(frozen=True)
class Link:
    """A link shared by some devices: bytes a second in each direction, seconds of a message, and the share of the
    bandwidth by the bytes of a message."""

    bandwidth: float
    latency: float = 0.0
    devices: int = 1
    efficiency: Curve = Curve()
    joined: int = 0  # devices that are joined in pairs, without a switch; 0 with a switch

    def share_of(self, ranks: int) -> float:
        """Returns the part of the bandwidth that a ring of ranks uses: without a switch a device has equal links to
        each other device, and a ring of more than two ranks uses half of the links between them (`IN_PAIRS`)."""
        used = 1.0 if ranks == 2 else IN_PAIRS
        return used * (ranks - 1) / (self.joined - 1) if self.joined > 1 else 1.0

    def seconds(self, count: float, messages: int = 1) -> float:
        """Returns the seconds of carrying bytes, in a number of messages after each other."""
        return messages * self.latency + self.carrying_seconds(count, messages) if count > 0 else 0.0

    def carrying_seconds(self, count: float, messages: int = 1) -> float:
        """Returns the same without the latencies."""
        return count / (self.bandwidth * self.efficiency.at(count / messages))


@dataclass(frozen=True)
class Island:
    """Devices of a node with better links among them."""

    devices: int
    link: Link  # carries bytes between them


@dataclass(frozen=True)
class Host:
    """The host of a node: its memory, and the links of its devices to this memory. The defaults are assumptions: of a
    PCIe 4.0 x16 slot (32 GB/s), pinned copies of all devices at once get about 20 GB/s each; of eight channels of
    DDR4-3200 (205 GB/s), an update of weights gets about three quarters.

    Attributes:
        bandwidth: bytes a second between the memory and a device, in each direction.
        memory: bytes a second of the memory, for all cores together.
    """

    bandwidth: float = 20e9
    memory: float = 150e9


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes."""

    name: str
    nodes: int
    devices_per_node: int
    device: Device
    node: Link  # carries bytes between the devices of a node; with islands, between the islands of a node
    network: Link  # carries bytes between nodes
    # (kind, other kind) -> how many times longer an operator of the first takes with another of the second, by the
    # bytes of a rank in a collective
    contention: Mapping[tuple[Kind, Kind], Curve] = field(default_factory=dict)
    island: Island | None = None  # devices of a node with better links among them; None if all links are alike
    host: Host = Host()  # of each node
    waiting: float = 0.0  # seconds that ranks wait for each other at a collective, after a second of computation
    backend: str = "nccl"  # "nccl" or "gloo"
    sources: Mapping[str, str] = field(default_factory=dict)  # the origin of its numbers

    @property
    def devices(self) -> int:
        """All of them."""
        return self.nodes * self.devices_per_node

    def slowdown(self, first: Kind, second: Kind, sent: float) -> float:
        """Returns how many times longer an operator of the first kind takes with another of the second.

        Args:
            first, second: kinds of operators.
            sent: bytes of a rank in the collective, the first of two collectives.
        """
        curve = self.contention.get((first, second))
        return curve.at(max(1.0, sent)) if curve is not None else 1.0

    def slowdowns(self, first: Kind, second: Kind, sent: tuple[float, float]) -> tuple[float, float]:
        """Returns how many times longer two operators take together.

        Args:
            first, second: their kinds.
            sent: bytes of a rank in each of them; 0 in a computation, slowed by the bytes of the other.
        """
        mine, other = sent
        return self.slowdown(first, second, mine or other), self.slowdown(second, first, other or mine)

    def waiting_seconds(self, computing: float) -> float:
        """Returns the seconds of ranks waiting for each other at a collective after so many seconds of computation:
        delays come by chance, so that their spread grows with the root of the time."""
        return self.waiting * math.sqrt(computing)

    @property
    def levels(self) -> list[tuple[int, Link]]:
        """The links from the nearest to the farthest: the devices of a block, and the link from this block to others
        of the next larger block."""
        if self.island is None:
            return [(1, self.node), (self.devices_per_node, self.network)]
        if self.island.devices >= self.devices_per_node:  # a part of a node is used, which is one island
            return [(1, self.island.link), (self.devices_per_node, self.network)]
        return [(1, self.island.link), (self.island.devices, self.node), (self.devices_per_node, self.network)]


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, the smallest first."""
    return [each for each in range(1, number + 1) if number % each == 0]


def shipped_clusters() -> dict[str, Path]:
    """Returns the cluster files of the package, by name."""
    folder = Path(str(resources.files("hf_helix.planning.timing"))) / "clusters"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def cluster_file(source: str | Path) -> Path:
    """Returns the path of a cluster's file.

    Raises:
        ValueError: there is none.
    """
    shipped, path = shipped_clusters(), Path(source)
    if not path.is_file():
        path = shipped.get(str(source).lower().removesuffix(".yaml"), path)
    if not path.is_file():
        raise ValueError(
            f"cluster={str(source)!r} is neither a file nor a cluster that hf_helix brings"
            f"{nearest(str(source).lower(), shipped)}; use one of "
            f"{', '.join(shipped)}, or a file of your own: `hf-helix cluster --show h100x8` prints one to copy and "
            "change (docs/doctor.md#clusters), `hf-helix cluster --output here.yaml` measures this machine"
        )
    return path


def load_cluster(source: str | Path) -> Cluster:
    """Returns the cluster of a file, see `cluster_file`.

    Raises:
        ValueError: the file is missing or malformed; names the key.
    """
    path = cluster_file(source)
    import yaml  # here, so that planning runs on only the standard library

    try:
        data = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    return parse_cluster(data, str(path))


def parse_cluster(data: Any, where: str) -> Cluster:
    """Returns the cluster of a mapping.

    Raises:
        ValueError: a key is malformed; names the key.
    """
    top = _Section(data, where)
    nodes, per_node = (top.count(key) for key in ("nodes", "devices_per_node"))
    device = top.section("device")
    node, network = top.section(NODE, optional=per_node == 1), top.section(NETWORK, optional=nodes == 1)
    near = top.section(ISLAND, optional=True)
    island, sources = _island(near, per_node), top.section("sources", optional=True)
    host, switched = top.section("host", optional=True), node.choice("switch", (True, False))
    cluster = Cluster(
        name=top.text("name"),
        nodes=nodes,
        devices_per_node=per_node,
        device=_device(device),
        node=_link(
            node, _sharing(node, "island.devices", island.devices) if island else 1, 0 if switched else per_node
        ),
        network=_link(network, _sharing(network, "devices_per_node", per_node)),
        island=island,
        host=Host(*(host.number(key, usual) * 1e9 for key, usual in (("gb_per_s", 20.0), ("memory_gb_per_s", 150.0)))),
        contention=_contention(top.section("contention", optional=True)),
        waiting=top.number("waiting_us", 0.0, least=0) * 1e-6 / math.sqrt(1e-3),
        backend=top.choice("backend", BACKENDS),
        sources={key: sources.text(key) for key in list(sources.left)},
    )
    for section in (top, device, near, node, network, host):
        section.refuse_rest()
    return cluster


def _device(section: _Section) -> Device:
    memory, reserved = section.number("memory_gb"), section.number("reserved_gb", 0.0, least=0)
    if reserved >= memory:
        raise ValueError(f"{section.where}: device.reserved_gb: {reserved:g} leaves nothing of memory_gb: {memory:g}")
    peaks = _peaks(section.section("peak_tflops"))
    return Device(
        name=section.text("name"),
        memory=(memory - reserved) * 1e9,
        peaks=peaks,
        bandwidth=section.number("memory_gb_per_s") * 1e9,
        matmul=_curves(section, "matmul", peaks),
        attention=_curves(section, "attention", peaks),
        attention_kernels=_attention_kernels(section.section("attention_kernels", optional=True)),
        attention_block=section.count("attention_block", 1),
        exponentials=section.number("exponentials_per_ns", math.inf) * 1e9,
        memory_efficiency=section.curve("memory_efficiency"),
        kernel_seconds=section.number("kernel_us", 0.0, least=0) * 1e-6,
        issue_seconds=section.number("issue_us", 0.0, least=0) * 1e-6,
        replay_seconds=section.number("replay_us", 0.0, least=0) * 1e-6,
        host_runs_ahead=section.choice("host_runs_ahead", (True, False)),
    )


def _attention_kernels(section: _Section) -> dict[str, Curve]:
    curves = {key: section.curve(key) for key in ATTENTION_KERNELS if key in section.left}
    section.refuse_rest(f"; the kernels are {', '.join(ATTENTION_KERNELS)}")
    return curves


def _peaks(section: _Section) -> dict[str, float]:
    peaks = {key: section.number(key) * 1e12 for key in TYPES if key in section.left}
    section.refuse_rest(f"; name one or more of {', '.join(TYPES)}")
    if not peaks:
        raise ValueError(f"{section.where}: device.peak_tflops names no type; give it as {{bf16: 989}}")
    return peaks


def _link(section: _Section, devices: int = 1, joined: int = 0) -> Link:
    if section.is_empty:  # there is nothing to carry
        return Link(math.inf)
    return Link(
        bandwidth=section.number("gb_per_s") * 1e9,
        latency=section.number("latency_us", 0.0, least=0) * 1e-6,
        devices=devices,
        efficiency=section.curve("efficiency"),
        joined=joined,
    )


def _island(section: _Section, per_node: int) -> Island | None:
    if section.is_empty:
        return None
    return Island(_divisor(section, "devices", section.count("devices"), "devices_per_node", per_node), _link(section))


def _sharing(section: _Section, block: str, devices: int) -> int:
    return _divisor(section, "devices_per_link", section.count("devices_per_link", devices), block, devices)


def _divisor(section: _Section, key: str, divisor: int, whole: str, number: int) -> int:
    if number % divisor:
        raise ValueError(
            f"{section.where}: {section.name}.{key}: {divisor} must divide {whole}: {number}; values that work: "
            f"{', '.join(map(str, divisors(number)))}"
        )
    return divisor


def contention_key(first: Kind, second: Kind) -> str:
    """Returns the key of the slowdown of an operator of the first kind by another of the second."""
    return "_".join((first.value, "beside", second.value))


def _contention(section: _Section) -> dict[tuple[Kind, Kind], Curve]:
    keys = {contention_key(first, second): (first, second) for first in Kind for second in Kind}
    factors = {}
    for key in list(section.left):
        if key not in keys:
            raise ValueError(
                f"{section.where}: contention.{key} is not known; name two of "
                f"{', '.join(kind.value for kind in Kind)}, such as compute_beside_intra_node: 1.2"
            )
        if isinstance(section.left[key], list):
            factors[keys[key]] = section.curve(key, SLOWDOWNS, 1.0, math.inf)
        else:
            factors[keys[key]] = Curve(((1.0, section.number(key, least=1, works=f", or a list of {SLOWDOWNS}")),))
    return factors


def _curves(section: _Section, key: str, types: Collection[str]) -> dict[str, Curve]:
    """By type: one curve for all of them, or one for each."""
    if not isinstance(section.left.get(key), dict):
        return dict.fromkeys(types, section.curve(key))
    by_type = section.section(key)
    curves = {name: by_type.curve(name) for name in types}
    by_type.refuse_rest(f"; the types of device.peak_tflops are {', '.join(types)}")
    return curves


class _Section:
    """A mapping of a file, whose keys are taken out in turn.

    Args:
        name: of the section; empty for the whole file.

    Attributes:
        left: keys not yet taken.
        is_empty: whether the mapping has no keys.
    """

    def __init__(self, data: Any, where: str, name: str = "") -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: {name or 'the file'} must be a mapping of keys to values, and is {data!r}")
        self.left: dict[str, Any] = {str(key): value for key, value in data.items()}
        self.where, self.name, self.is_empty = where, name, not data

    def _take(self, key: str, default: Any, what: str) -> Any:
        """Returns the value of a key; the key must be there if the default is None."""
        if key in self.left:
            return self.left.pop(key)
        if default is None:
            spelled = "".join(f", and {each!r} is given" for each in self.left if each.lower().replace("-", "_") == key)
            raise ValueError(f"{self.where}: {self.full(key)} is missing{spelled}; it must be {what}")
        return default

    def section(self, key: str, optional: bool = False) -> _Section:
        return _Section(self._take(key, {} if optional else None, "a mapping"), self.where, self.full(key))

    def text(self, key: str) -> str:
        value = self._take(key, None, "a text")
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def choice(self, key: str, choices: Sequence[T]) -> T:
        value = self._take(key, choices[0], "")
        if value not in choices or type(value) is not type(choices[0]):
            works = ", ".join(str(each).lower() if isinstance(each, bool) else str(each) for each in choices)
            raise self._wrong(key, value, f"one of {works}")
        return value

    def number(self, key: str, default: float | None = None, least: float | None = None, works: str = "") -> float:
        """Returns a number: at least `least`, or more than 0."""
        if key not in self.left and default is not None:
            return default
        value = self._take(key, None, "a number")
        number = _number(value)
        if number is None or (number <= 0 if least is None else number < least):
            bound = "more than 0" if least is None else f"at least {least:g}"
            raise self._wrong(key, value, f"a number, {bound}{works}")
        return number

    def count(self, key: str, default: int | None = None) -> int:
        number = self.number(key, default, least=1)
        if number != int(number):
            raise self._wrong(key, number, "a whole number, at least 1")
        return int(number)

    def curve(self, key: str, what: str = EFFICIENCY, least: float = 1e-9, most: float = MOST_EFFICIENT) -> Curve:
        """Returns (size, value) with growing sizes and values from `least` to `most`; 1 everywhere if none is given."""
        if key not in self.left:
            return Curve()
        given = self.left.pop(key)
        pairs = given if isinstance(given, list) and all(isinstance(p, list) and len(p) == 2 for p in given) else []
        points = [(size, value) for size, value in (map(_number, pair) for pair in pairs) if size and value]
        sizes = [size for size, _ in points]
        possible = all(size > 0 and least <= value <= most for size, value in points)
        if not points or len(points) < len(pairs) or sorted(set(sizes)) != sizes or not possible:
            raise self._wrong(key, given, f"a list of {what}")
        return Curve(tuple(points))

    def refuse_rest(self, works: str = "") -> None:
        if self.left:
            unknown = shorten_list([self.full(key) for key in self.left])
            raise ValueError(f"{self.where}: unknown keys: {unknown}{works}")

    def full(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def _wrong(self, key: str, value: Any, needed: str) -> ValueError:
        return ValueError(f"{self.where}: {self.full(key)}: {value!r} must be {needed}")


def _number(value: Any) -> float | None:
    """The finite number that a value is, also one that YAML takes for a text, such as 1e9."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
