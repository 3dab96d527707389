"""A shard on the host: fp32 masters in the host's memory, and a copy of them on the device (`offload="optimizer"`).

In:   a shard in the host's memory, which an optimizer steps; the device's memory for its copy, in the type for
      operators.
Out:  the copy, after each step; memory on the host for gradients.
Must hold: everything that crosses between host and device is pinned where the device is a GPU, so copies run beside
computation. A shard is cast on the host, before it crosses: 2 bytes an element instead of 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_helix.operators.base import TransferFn

Carry = Callable[[int, int, TransferFn], object]
"""Runs a transfer at the speed of an emulated link: bytes that leave the device, bytes that reach it, the transfer."""


class HostLink:
    """The link between the memory of the host and a device, which carries both directions at once.

    Args:
        carry: of an emulated link whose speed copies keep to; None for no emulation.
    """

    def __init__(self, carry: Carry | None = None) -> None:
        self._carry = carry

    def up(self, to: Tensor, source: Tensor) -> None:
        """Copies a tensor to the device."""
        self._copy(to, source, 0, to.nbytes)

    def down(self, to: Tensor, source: Tensor) -> None:
        """Copies a tensor to the host."""
        self._copy(to, source, to.nbytes, 0)

    def _copy(self, to: Tensor, source: Tensor, sent: int, received: int) -> None:
        if self._carry is None:
            to.copy_(source, non_blocking=True)
        else:
            self._carry(sent, received, lambda: to.copy_(source))


def host_memory(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns memory on the host for copies to or from a device.

    Args:
        like: a tensor of the shape.
        dtype: of the memory.
        device: at the other end of the copies; pinned memory for a GPU.
    """
    return torch.empty(like.shape, dtype=dtype, pin_memory=device.type == "cuda")


@dataclass
class OnHost:
    """A gradient on the host.

    Attributes:
        version: torch's counter after the copy.
        norm: of the gradient, which the device has taken.
        wait: lets the host wait for the copy; None once it is there.
    """

    version: int
    norm: Tensor
    wait: Callable[[], object] | None = None


on_host: Any = WeakTensorKeyDictionary()
"""An `OnHost` for every gradient that was copied to the host."""


def arrived(gradients: Iterable[Tensor | None]) -> None:
    """Lets the host wait until copies of gradients to it have ended, before anything reads them."""
    for gradient in gradients:
        known = on_host.get(gradient) if gradient is not None else None
        if known is not None and known.wait is not None:
            known.wait()
            known.wait = None


class HostShard:
    """A shard on the host and its copy on the device.

    Args:
        length: elements of the shard.
        dtype: of the shard.
        copy: the device's memory for the copy [length], in the type for operators.
        link: between host and device.

    Attributes:
        shard: [length] on the host.
        copy, link: as given.
        copied: the event of the last copy to the device that a stream of its own has run; None before the first.
        is_followed: whether every step reports itself by `cast`, so that no other code has to suppose one.
    """

    copied: Any = None
    is_followed = False

    def __init__(self, length: int, dtype: torch.dtype, copy: Tensor, link: HostLink) -> None:
        self.copy, self.link = copy, link
        self._crossing = host_memory(copy, copy.dtype, copy.device)  # what crosses: the shard itself, or its cast
        self.shard = self._crossing if dtype is copy.dtype else torch.empty(length, dtype=dtype)
        self.shard.zero_()
        self._cast_at, self._copied_at = -1, -1  # versions of the shard

    @property
    def is_copied(self) -> bool:
        """Whether the copy equals the shard, but for steps that only `mark_stale` reports."""
        return self._copied_at == self.shard._version

    def mark_stale(self) -> None:
        """Reports a possible step of an optimizer: fused ones leave torch's version counter as it is."""
        if not self.is_followed:
            self._copied_at = -1

    def cast(self) -> None:
        """Casts the shard to the type of its copy, after a step."""
        if self._crossing is not self.shard:
            self._crossing.copy_(self.shard)
        self._cast_at, self._copied_at = self.shard._version, -1

    def refresh(self) -> TransferFn:
        """Returns a function to copy the shard to the device."""
        if self._cast_at != self.shard._version:  # written by something else than a step
            self.cast()
        self._copied_at = self._cast_at
        return lambda: self.link.up(self.copy, self._crossing)
