"""What the groups of the kernels piece share: sizes, a device, and ways to tell a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.report import Report
from benchmarks.gpu.timing import Work, device_seconds


@dataclass(frozen=True)
class Shapes:
    """Sizes of Llama-3 8B, and how many tokens."""

    tokens: int = 8192
    hidden: int = 4096
    intermediate: int = 14336
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    square: int = 8192


DRY = Shapes(64, 32, 64, 8, 8, 2, 128, 64)


class Bench:
    """Times work and tells what was found.

    Args:
        shapes: sizes.
        device: to run on.
    """

    def __init__(self, report: Report, shapes: Shapes, device: torch.device) -> None:
        self.report = report
        self.shapes = shapes
        self.device = device
        self.dry = device.type != "cuda"

    def seconds(self, work: Work, repeats: int = 15) -> float:
        """Of the device, for one call."""
        return device_seconds(work, self.device, repeats)

    def random(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal values."""
        return torch.randn(size, device=self.device).to(dtype)

    def attempt(self, name: str, work: Work, expected: str = "") -> float | None:
        """Tell the time of a variant that may not exist; None if it does not."""
        try:
            seconds = self.seconds(work)
        except Exception as error:
            self.report.note(name, f"does not work: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
            return None
        self.report.note(name, us(seconds) + (f" ({expected} expected)" if expected else ""))
        return seconds

    def check(self, name: str, passed: bool, figure: str) -> None:
        """A dry run asks for nothing."""
        self.report.check(name, self.dry or passed, figure)


def us(seconds: float) -> str:
    """Microseconds as text."""
    return f"{seconds * 1e6:.1f} us"
