"""The parallel sizes of a layout, and their names for people.

In:   nothing.
Out:  `Sizes`, and their text.
Must hold: nothing here imports more than the standard library: every run reads the name of its layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COPIES, EXPERT_COPIES = "copies", "expert_copies"
"""The axes of data-parallel replicas: of ranks with equal parameters, or equal experts, and different tokens."""

HOST = "host"
"""The axis between a device and the memory of its host."""


@dataclass(frozen=True)
class Sizes:
    """The parallel sizes of a layout; tensor parallelism is the innermost dimension, data parallelism the outermost."""

    tp: int = 1  # tensor parallelism
    cp: int = 1  # context parallelism
    pp: int = 1  # the pipeline
    dp: int = 1  # data parallelism
    ep: int = 1  # experts
    # whether the pipeline is the outermost dimension instead, as in Megatron-LM; never here
    stages_outermost: bool = False

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Sizes:
        """Returns the sizes of a mesh, by the names of its axes."""
        return cls(sizes["tp"], sizes["cp"], sizes["pp"], sizes["dp"], sizes["ep"])

    @property
    def devices(self) -> int:
        """All ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def copies(self) -> int:
        """The number of ranks with equal parts of a parameter and different tokens."""
        return self.dp * self.cp

    @property
    def expert_copies(self) -> int:
        """The number of ranks with equal experts and different tokens."""
        return self.copies // self.ep

    def spread(self) -> dict[str, int]:
        """Returns the axes of several replicas, with their numbers of ranks: axes to shard over."""
        copies = {COPIES: self.copies, EXPERT_COPIES: self.expert_copies}
        return {name: size for name, size in copies.items() if size > 1}


def size_text(sizes: Sizes) -> str:
    """Returns parallel sizes above 1, for example "tp 8 x pp 2 x dp 4"."""
    named = {"tp": sizes.tp, "cp": sizes.cp, "pp": sizes.pp, "dp": sizes.dp}
    text = " x ".join(f"{name} {size}" for name, size in named.items() if size > 1) or "one device"
    return text + (f" (ep {sizes.ep})" if sizes.ep > 1 else "")


def is_named(sizes: Sizes, text: str) -> bool:
    """Returns whether a text names parallel sizes, with or without spaces: "tp 8 x pp 2", "tp8xpp2"."""
    return "".join(text.lower().split()) == size_text(sizes).replace(" ", "")


FULL_GRADIENTS = 0.25
"""The part of a device's memory that full gradients of shards may take under `reduce_gradients="auto"`."""
