"""A shard on the host: fp32 masters in the host's memory. The device has a copy of them between windows
(`offload="optimizer"`), or only while operators read it (`offload="parameters"`).

In:   a shard in the host's memory, which an optimizer steps; the device's memory for its copy, in the type for
      operators.
Out:  the copy, after each step or at each use; memory on the host for gradients.
Must hold: everything that crosses between host and a GPU is pinned, so copies overlap with
computation. A shard is cast on the host, before it crosses: 2 bytes an element instead of 4.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_helix.config import PARAMETERS
from hf_helix.operators.base import Communication, OperatorContext, Tensors, TransferFn
from hf_helix.planning.graph.operator import Part

Carry = Callable[[int, int, TransferFn], object]
"""Runs a transfer at the speed of an emulated link: bytes that leave the device, bytes that reach it, the transfer."""


class HostLink:
    """The link between the memory of the host and a device, which carries both directions at once.

    Args:
        holds: the option `HelixConfig.offload`; None if the host holds nothing between windows.
        carry: of an emulated link whose speed copies keep to; None for no emulation.
    """

    def __init__(self, holds: str | None, carry: Carry | None = None) -> None:
        self.holds = holds
        self._carry = carry

    @property
    def streams_weights(self) -> bool:
        """Whether every use of weights copies them from the host (`offload="parameters"`)."""
        return self.holds == PARAMETERS

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


class KeptOnHost(Communication):
    """A value that lies on the host between forward and backward: F copies it down, R up to the device."""

    def __init__(self, link: HostLink, device: torch.device) -> None:
        self._link, self._device = link, device

    def prepare(self, ctx: OperatorContext, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        (value,) = inputs
        if part is Part.F:
            on_host = host_memory(value.shape, value.dtype, self._device)
            return (on_host,), lambda: self._link.down(on_host, value)
        copy = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        return (copy,), lambda: self._link.up(copy, value)


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns memory on the host for copies to or from a device.

    Args:
        shape: of the tensor.
        dtype: of the memory.
        device: at the other end of the copies: pinned memory for a GPU, none for the meta device.
    """
    if device.type == "meta":
        return torch.empty((), dtype=dtype, device=device).expand(shape)
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


@dataclass
class OnHost:
    """A gradient on the host.

    Attributes:
        version: torch's counter after the copy.
        norm: of the gradient, which the device has taken.
        wait: makes the host wait for the copy; None once it is there.
    """

    version: int
    norm: Tensor
    wait: Callable[[], object] | None = None


on_host: Any = WeakTensorKeyDictionary()
"""An `OnHost` for every gradient that was copied to the host."""


def arrived(gradients: Iterable[Tensor | None]) -> None:
    """Makes the host wait until copies of gradients to it have ended, before anything reads them."""
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
        copied_as: the type of copies, for operators.
        device: of copies.
        link: between host and device.
        copy: the device's memory for a copy [length] that stays; None if every use has a copy of its own.

    Attributes:
        shard: [length] on the host.
        crossing: [length] on the host, as it is copied: the shard itself, or its cast.
        copy, link: as given.
        copied: the event of the last copy to the device that a stream of its own has run; None before the first.
        is_followed: whether every step reports itself by `cast`, so that no other code has to suppose one.
    """

    copied: Any = None
    is_followed = False

    def __init__(
        self,
        length: int,
        dtype: torch.dtype,
        copied_as: torch.dtype,
        device: torch.device,
        link: HostLink,
        copy: Tensor | None = None,
    ) -> None:
        self.copy, self.link = copy, link
        self.crossing = host_memory((length,), copied_as, device)
        of_device = torch.device("meta" if device.type == "meta" else "cpu")
        self.shard = self.crossing if dtype is copied_as else torch.empty(length, dtype=dtype, device=of_device)
        self.shard.zero_()
        self._cast_at, self._copied_at = -1, -1  # versions of the shard

    @property
    def is_copied(self) -> bool:
        """Whether the copy, or the copies of each use, equal the shard, but for steps that only `mark_stale`
        reports."""
        return self._copied_at == self.shard._version

    def mark_stale(self) -> None:
        """Reports a possible step of an optimizer: fused ones leave torch's version counter as it is."""
        if not self.is_followed:
            self._copied_at = -1

    def cast(self) -> None:
        """Casts the shard to the type of its copy, after a step."""
        if self.crossing is not self.shard:
            self.crossing.copy_(self.shard)
        self._cast_at, self._copied_at = self.shard._version, -1

    def prepare_copy(self) -> TransferFn:
        """Returns a function to copy the shard to the device, if a copy stays there."""
        if self._cast_at != self.shard._version:  # written by something else than a step
            self.cast()
        self._copied_at = self._cast_at
        return lambda: None if self.copy is None else self.up(self.copy)

    def up(self, copy: Tensor) -> None:
        """Copies the shard to the device's memory for it, in the type for operators."""
        self.link.up(copy, self.crossing)
