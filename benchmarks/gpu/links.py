"""Links that one GPU plays by itself: what a group of ranks would send over one, and how long it would take.

In:   the collectives of one rank of a group whose other ranks do not exist.
Out:  buffers with finite values, after the time that a link of a given rate needs for the bytes.
Must hold: whatever takes the time runs on the stream that the collective is issued to, and never keeps the host.

What keeps the stream busy differs, since it decides what computation beside it loses:

- `spin`: one block that waits. Nothing is moved, so it shows what the plan and the host can hide.
- `copy`: copy engines. As many bytes are written as would arrive, then host memory is read for the rest of the time.
- `blocks 16`, `blocks 32`: a kernel that holds so many multiprocessors for the whole time and writes as many bytes as
  would arrive, which is what the kernels of NCCL do.

Except for `spin`, a reduce-scatter of bf16 is an exchange and a local sum, as over NCCL.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.timing import device_seconds
from hf_helix.operators.communication.transport import SilentTransport, bytes_moved

SOURCE = """
extern "C" __global__ void __launch_bounds__(1024, 1)
hold(uint4* out, const uint4* value, int num_out, int num_value, int nanoseconds) {
  unsigned long long start, now;
  unsigned int kept[40], sum = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  #pragma unroll
  for (int k = 0; k < 40; ++k) asm volatile("mov.u32 %0, %clock;" : "=r"(kept[k]));
  int step = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < num_out; i += step) {
    int source = i % num_value;
    out[i] = value[source];
  }
  do {
    __nanosleep(200);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
  #pragma unroll
  for (int k = 0; k < 40; ++k) sum += kept[k];
  if (nanoseconds < 0) out[threadIdx.x].x = sum;
}
"""
"""Holds a multiprocessor with each block: 1024 threads that keep 40 values and more in registers leave no room for a
matrix product, as the kernels of NCCL do. `%globaltimer` counts nanoseconds whatever the clock rate is."""

THREADS = 1024


@dataclass(frozen=True)
class Rate:
    """Of a link: bytes a second each way, and seconds that every collective takes besides.

    The default is what all-gathers of this size reach between the eight H100 of a host, whose NVLink carries 450 GB/s
    each way by the data sheet.
    """

    bytes_per_second: float = 350e9
    latency: float = 10e-6

    def seconds(self, count: int) -> float:
        """For so many bytes."""
        return self.latency + count / self.bytes_per_second


class LoneTransport(SilentTransport):
    """One rank of a group whose other ranks do not exist. Nothing is moved and nothing takes time.

    Outputs share one buffer of random values for each shape, so nothing is written.
    """

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size, rank)
        self._pool: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def all_gather(self, out: Tensor, value: Tensor) -> None:
        self._carry("all_gather", out, value)

    def exchange(self, out: Tensor, value: Tensor) -> None:
        self._carry("exchange", out, value)

    def reduce_scatter(self, out: Tensor, value: Tensor) -> None:
        self._carry("reduce_scatter", out, value)

    def _carry(self, name: str, out: Tensor, value: Tensor) -> None:
        key = out.shape, out.dtype
        if key not in self._pool:
            self._pool[key] = torch.randn(out.shape, device=out.device).to(out.dtype)
        out.set_(self._pool[key])  # type: ignore[call-overload]


class PacedTransport(LoneTransport):
    """The same, with every collective taking the time of a link.

    Args:
        hold: keeps the stream busy.
        rate: of the link.
    """

    def __init__(self, size: int, rank: int, hold: Hold, rate: Rate) -> None:
        super().__init__(size, rank)
        self._hold = hold
        self._rate = rate

    def prefers_exchange(self, value: Tensor) -> bool:
        return self._hold.moves and value.element_size() < 4

    def _carry(self, name: str, out: Tensor, value: Tensor) -> None:
        _, received = bytes_moved(name, out, value, self.size, self.rank)
        if not self._hold.moves:
            super()._carry(name, out, value)
        self._hold(out, value, self._rate.seconds(received))


class Hold(ABC):
    """Keeps the current stream busy for a time. `moves`: it also fills the output."""

    moves = True

    @abstractmethod
    def __call__(self, out: Tensor, value: Tensor, seconds: float) -> None: ...


class Kernel(Hold):
    """A kernel of so many blocks, each of which holds a multiprocessor.

    Args:
        blocks: 1 for a wait that moves nothing.
    """

    def __init__(self, blocks: int) -> None:
        self.moves = blocks > 1
        self._blocks = blocks
        compile_kernel = getattr(torch.cuda, "_compile_kernel", None) or torch.cuda.compile_kernel  # type: ignore[attr-defined]
        self._launch = compile_kernel(SOURCE, "hold")

    def __call__(self, out: Tensor, value: Tensor, seconds: float) -> None:
        num_out, num_value = (tensor.nbytes // 16 if self.moves else 0 for tensor in (out, value))
        args = [out, value, num_out, max(1, num_value), int(seconds * 1e9)]
        threads = THREADS if self.moves else 32
        self._launch(grid=(self._blocks, 1, 1), block=(threads, 1, 1), args=args)


class Copies(Hold):
    """Copies on the device, then from pinned host memory for what is left of the time."""

    def __init__(self, device: torch.device, most: int = 1 << 28) -> None:
        self._host = torch.empty(most, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(most, dtype=torch.uint8, device=device)
        self.from_host = _copy_rate(lambda: self._device.copy_(self._host, non_blocking=True), most)
        half = most // 2
        self.on_device = _copy_rate(lambda: self._device[:half].copy_(self._device[half:]), half)

    def __call__(self, out: Tensor, value: Tensor, seconds: float) -> None:
        if out.numel() > value.numel():
            for block in out.view(-1, *value.shape):
                block.copy_(value)
        else:
            out.copy_(value[: out.shape[0]])
        rest = int(self.from_host * (seconds - out.nbytes / self.on_device))
        if rest > 0:
            self._device[:rest].copy_(self._host[:rest], non_blocking=True)


class Naps(Hold):
    """For a dry run on the CPU, whose collectives run in threads: sleeps."""

    moves = False

    def __call__(self, out: Tensor, value: Tensor, seconds: float) -> None:
        time.sleep(seconds)


def holds(device: torch.device) -> dict[str, Callable[[], Hold]]:
    """What makes each kind of link, by name."""
    if device.type != "cuda":
        return {"naps": Naps}
    return {
        "spin": lambda: Kernel(1),
        "copy": lambda: Copies(device),
        "blocks 16": lambda: Kernel(16),
        "blocks 32": lambda: Kernel(32),
    }


def _copy_rate(copy: Callable[[], object], count: int) -> float:
    """Bytes a second."""
    return count / device_seconds(copy, torch.device("cuda"), repeats=5)
