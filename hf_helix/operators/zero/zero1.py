"""ZeRO-1: every rank keeps the full weights, and steps its shard (`shard_optimizer`).

In:   the trained parameters of a unit with equal type, replicas and kind of reader.
Out:  a full buffer, gathered once a window; this rank's shard for an optimizer.
Must hold: between windows the parameters are placeholders, as in every flat parameter: the steps of other ranks have
not arrived yet.

A buffer in the type of the parameters contains this rank's shard, and the parameters are views of the buffer during a
window. A buffer in the type of matrix products contains a cast of the shard.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_helix.operators.base import TransferFn
from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.parameters.host_shard import HostLink
from hf_helix.operators.units.unit import Unit
from hf_helix.operators.zero.grouping import ShardAxes, make_flat_parameters


@dataclass(eq=False)
class Zero1FlatParameter(FlatParameter):
    """A flat parameter whose full buffer every rank keeps; each rank steps its shard.

    Attributes:
        buffer: the full buffer [length], in the type for operators.
    """

    keeps_buffer: ClassVar[bool] = True
    buffer: Tensor = field(init=False, repr=False)
    _gathered_at: int | None = field(init=False, default=None, repr=False)  # the version of the shard

    @property
    def is_current(self) -> bool:
        """Whether the buffer equals the shards of all ranks. `mark_stale` reports steps of optimizers; other writes to
        shards, for example by schedule-free optimizers between training and evaluation, change torch's version
        counter."""
        return self._gathered_at == self.shard._version

    def _make_shard(self, owned: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.buffer = torch.zeros(owned * self.gather_axis.size, dtype=self.cast_to or dtype, device=device)
        return self._own_part(self.buffer) if self.has_shard else super()._make_shard(owned, dtype, device)

    def _make_copy(self, owned: int, dtype: torch.dtype) -> Tensor:
        return self._own_part(self.buffer)

    @property
    def has_shard(self) -> bool:
        """Whether the shard is a part of the buffer."""
        return self.cast_to is None and self.host_link is None

    def cast(self, parameter: nn.Parameter) -> Tensor | None:
        return self._view_in(self.buffer, parameter)

    def begin_window(self) -> None:
        self.check_resharded()
        if self.cast_to is None:
            self.unshard(self.buffer)

    def mark_stale(self) -> None:
        self._gathered_at = None

    def prepare_gather_in_place(self) -> TransferFn:
        """Returns a function to gather the shards of all ranks into the buffer, or the copies of shards that the host
        has. Collective."""

        def gather() -> None:
            self._fill(self.buffer)
            self._gathered_at = self.shard._version  # after the gather: the shard may lie in the buffer

        return gather

    def gather(self) -> Tensor:
        if self.cast_to is not None:
            return super().gather()
        if self.host is not None:
            self.host.prepare_copy()()
        self.prepare_gather_in_place()()
        return self.buffer


def apply_zero1(
    units: Sequence[Unit], shard_axes: ShardAxes, autocast_dtype: torch.dtype | None, host_link: HostLink | None = None
) -> list[Unit]:
    """Returns the units with their trained parameters in ZeRO-1 flat parameters, unless in others already; graphs stay
    as they are.

    Args:
        units: of the whole model, in forward order.
        shard_axes: see `ShardAxes`.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.
        host_link: the link to shards on the host; None if these lie on the device.
    """
    by_unit = make_flat_parameters(units, shard_axes, autocast_dtype, Zero1FlatParameter, host_link, frozen=False)
    return [
        replace(unit, flat_parameters={**unit.flat_parameters, **{flat.name: flat for flat in own}}) if own else unit
        for unit, own in zip(units, by_unit, strict=True)
    ]


def zero1_flat_parameters(flats: Iterable[FlatParameter]) -> Iterator[Zero1FlatParameter]:
    """Yields the ZeRO-1 flat parameters among flat parameters."""
    return (flat for flat in flats if isinstance(flat, Zero1FlatParameter))
