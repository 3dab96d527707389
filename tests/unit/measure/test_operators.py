"""The profiler on a GPU measures the GPU: what a host needs to launch kernels does not show in any time.

The GPU is a clock: kernels run when they have been launched and what is before them on their stream is over. Values
are computed on CPU meanwhile.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import tiny
from support.units import StandInGroup

from hf_helix.config import HelixConfig
from hf_helix.engine.synthetic import Workload
from hf_helix.measure import machine, operators, timing
from hf_helix.measure.timing import time_in_a_row
from hf_helix.operators.communication.transport import Axis, ReplicaAxes, SilentTransport
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.layout import named_operators, named_traffic
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.distributed.pipe import Pipe
from hf_helix.runtime.gradients import reduce
from hf_helix.runtime.streams.streams import CudaStreams, stream_name
from hf_helix.runtime.streams.trace import Span

LAUNCHING, COMPUTATION, COLLECTIVE = 1e-4, 1e-5, 4e-5  # seconds: of the host, of the device
CYCLES = 2e9  # of the GPU in a second
SLOWDOWN = 1.5  # of a computation beside a collective


class Moment:
    """An event: when it is over, and its work."""

    def __init__(self, label: str, kind: Kind, end: float) -> None:
        self.label, self.kind, self.end = label, kind, end


class SlowHost(CudaStreams):
    """A GPU that is ten times as fast as the host which launches its kernels."""

    def __init__(self) -> None:
        self.late = []
        self.host = 0.0
        self.free: dict[str, float] = {}
        self.collectives: list[tuple[float, float]] = []

    def window(self) -> AbstractContextManager[None]:
        return nullcontext()

    def launch(self, stream: str, label: str, work: Callable[[], Any], ready: float, takes: float) -> Any:
        """The first kernel is launched when the host begins with an operator, the last when it has finished."""
        start = max(ready, self.host)
        result = work()
        self.host += LAUNCHING
        if stream == "compute" and any(a <= start < b for a, b in self.collectives):
            takes *= SLOWDOWN
        end = max(start + takes, self.host)
        self.free[stream] = end
        if stream != "compute":
            self.collectives.append((start, end))
        if self.trace is not None:
            self.trace.spans.append(Span(stream, label, start, end))
        return result

    def issue(self, kind: Kind, work: Callable[[], Any], after: Sequence[Any], label: str, lane: str = "") -> Any:
        name = stream_name(kind, lane)
        ready = max([self.free.get(name, 0.0), self.free.get("compute", 0.0), *(event.end for event in after)])
        self.launch(name, label, work, ready, COLLECTIVE)
        return Moment(label, kind, self.free[name])

    def compute(self, work: Callable[[], Any], label: str) -> Any:
        return self.launch("compute", label, work, self.free.get("compute", 0.0), COMPUTATION)

    def wait(self, event: Any) -> None:
        self.free["compute"] = max(self.free.get("compute", 0.0), event.end)

    def synchronize(self) -> None:
        self.host = max([self.host, *self.free.values()])
        self.collectives.clear()

    def sleep(self, cycles: int) -> None:
        self.free["compute"] = max(self.free.get("compute", 0.0), self.host) + cycles / CYCLES


COPIES = StandInGroup(2)
"""Stands for the group of two ranks that hold copies of the weights."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SlowHost:
    made = SlowHost()
    monkeypatch.setattr(torch.cuda, "_sleep", made.sleep)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2 if group is COPIES else 1)
    monkeypatch.setattr(reduce, "all_reduce", lambda total, group, link: None)
    return made


def measured(gpu: SlowHost, layers: int = 2, tp: int = 2, dp: int = 1, **options: Any) -> Profile:
    """Rank 0 of two tensor-parallel ranks, or of some other layout."""
    sizes = {"dp": dp, "pp": 1, "cp": 1, "tp": tp, "ep": 1}
    axis, single = Axis(SilentTransport(tp, 0)), Axis.single()
    group: Any = COPIES if dp > 1 else None
    mesh = Mesh(sizes, torch.device("cpu"), None, axis, single, axis, Pipe([0]), group, group, group, None)
    if options:
        sums = Axis(SilentTransport(dp, 0), Kind.GRADIENTS)
        mesh = replace(mesh, replica_axes=ReplicaAxes(sums, sums), expert_replica_axes=ReplicaAxes(sums, sums))
    config = tiny("llama", num_hidden_layers=layers).config
    work = Workload(config, HelixConfig(tp_size=tp, **options), mesh.device, mesh)
    work.runner.executor.streams = gpu
    return operators.measure_profile(work.runner, work.window(2, 1, 8))


def test_times_are_those_of_the_device(gpu: SlowHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beside a collective is slowed by it; without the hold the host would be measured."""
    result = measured(gpu)
    kinds = {name: operator.kind for name, operator in named_operators(result.layout)}
    for name, kind in kinds.items():
        assert result.times[name] == pytest.approx(COMPUTATION if kind is Kind.COMPUTE else COLLECTIVE), name
    beside = {tuple(kinds[name] for name in names): pair for names, pair in result.pairs.items()}
    assert beside
    for (one, other), pair in beside.items():
        # Two computations would write the same gradients from two streams at once.
        assert one is not Kind.COMPUTE or other is not Kind.COMPUTE
        assert one is other or pair.first == pytest.approx(SLOWDOWN * COMPUTATION, rel=0.1)
    monkeypatch.setattr(timing, "CLOCK", 0.0)
    result = measured(gpu)
    assert list(result.times.values()) == pytest.approx([LAUNCHING] * len(result.times))


OF_WINDOWS: dict[str, dict[str, Any]] = {
    "sums": {"tp": 1, "dp": 2},
    "gathers, and sums that leave parts": {"tp": 1, "dp": 2, "shard_optimizer": True},
}


@pytest.mark.parametrize("case", OF_WINDOWS)
def test_what_a_window_has_once_takes_what_the_device_takes(
    case: str, gpu: SlowHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = measured(gpu, **OF_WINDOWS[case])
    names = [name for name, _ in named_traffic(result.layout)]
    assert {name[1].partition(".")[0] for name in names}
    assert [result.times[name] for name in names] == pytest.approx([COLLECTIVE] * len(names))
    monkeypatch.setattr(timing, "CLOCK", 0.0)
    result = measured(gpu, **OF_WINDOWS[case])
    assert [result.times[name] for name in names] == pytest.approx([LAUNCHING] * len(names))


def test_a_transfer_takes_what_the_device_takes_for_it(gpu: SlowHost) -> None:
    seconds = time_in_a_row(gpu, Kind.PIPELINE, lambda: None, 4, "0F")
    assert seconds == pytest.approx([COLLECTIVE] * 4)


def test_a_gpu_is_known_by_what_times_depend_on(gpu: SlowHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured with other settings of NCCL is another case of the cache; its log files change nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(machine.dist, "is_nccl_available", lambda: True)
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    assert machine.describe_device(torch.device("cuda")) == "a GPU"
    plain = machine.describe_gpus()
    assert plain | {"devices_per_host": "8", "nccl": "2.28.9", "nccl_settings": ""} == plain
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert machine.describe_gpus() == plain
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    assert machine.describe_gpus()["nccl_settings"] == "NCCL_MAX_CTAS=8"
