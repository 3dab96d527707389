"""A flat parameter: parameters in a flat buffer, sharded over their data-parallel replicas (ZeRO, FSDP).

In:   parameters of a unit with equal type and replicas, as this rank holds them (cut over tp or over experts already).
Out:  this rank's shard of the buffer; for every parameter its part of the shard, often empty: a 1-D parameter for an
      optimizer, with the reduced gradient.
Must hold: every rank has the same layout of the buffer. The parts are views of the shard: an optimizer step copies
nothing. Nobody reads a resharded parameter: a placeholder of its shape and type, full of NaN (of packed weights, 0).
The type of a buffer changes no bit of a result.

The buffer, with three parameters over two ranks (`.` is padding between starts, see `FlatLayout`):

    aaaaaaaaaaaaa...bbbbbbbb|bbbbb...ccccc...........
    rank 0                   rank 1
    shards: a[0:13] b[0:8] c[]    a[] b[8:13] c[0:5]

Under autocast, parameters with only matrix products as readers have a buffer in the type of the products. The shard is
the master copy (fp32 masters of bfloat16 weights), the parameters stay placeholders, and products take their weights
from the buffer (`hf_helix.operators.matmul_dtype.CastWeights`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_helix.operators.base import TransferFn
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.parameters.host_shard import HostLink, HostShard
from hf_helix.planning.parameters import Cut, Extent, FlatLayout


@dataclass(eq=False)
class FlatParameter:
    """Parameters in a flat buffer, sharded over ranks.

    Before `shard_in_place`, the parameters are ordinary parameters, and only `name`, `placements` and the axes may be
    used. Afterwards:

    - `unshard` makes all parameters views of a full buffer of their type, `reshard` makes them placeholders again: of
      the right shape and type, without memory, with NaN as values;
    - `shard` [length / ranks] is this rank's shard. `shards` has, for every parameter, a 1-D parameter, a view of
      `shard`: the elements `owned_range(parameter)` of the flattened parameter, none if other ranks own all.
      Optimizers step these views, so all ranks have the same groups; clipping and the gradient norm read their `grad`;
    - `parameter.grad` is this rank's own gradient of the current window, and None between windows.

    Attributes:
        keeps_buffer: whether every rank keeps the full buffer.
        name: of the gathered buffer as a value of a graph, see `Operator.weights`.
        placements: the parameters in order, with their cuts over other axes. All are trained, or none.
        gather_axis: the ranks of the gather.
        reduce_axis: the same ranks, for gradient reduction: another transport, for reductions run on another stream.
        cast_to: the type of the gathered buffer; None for the type of the parameters.
        copies: the ranks with other copies of the same shard, which add to its gradient; None for a single copy.
        host_link: the link to the shard on the host (`offload`); None if it lies on the device.
        shard: this rank's shard.
        shards: its parts, by parameter.
        unsharded: the full buffer for operators in use; None between uses.
        host: the shard on the host and its copy; None if the shard lies on the device.
        device: of buffers.
    """

    keeps_buffer: ClassVar[bool] = False
    name: str
    placements: Mapping[nn.Parameter, Cut]
    gather_axis: Axis
    reduce_axis: Axis
    cast_to: torch.dtype | None = None
    copies: Axis | None = None
    host_link: HostLink | None = None
    shard: Tensor = field(init=False, repr=False)
    shards: dict[nn.Parameter, nn.Parameter] = field(init=False, default_factory=dict, repr=False)
    unsharded: Tensor | None = field(init=False, default=None, repr=False)
    host: HostShard | None = field(init=False, default=None, repr=False)
    device: torch.device = field(init=False, repr=False)
    _layout: FlatLayout | None = field(init=False, default=None, repr=False)
    _numbers: dict[nn.Parameter, int] = field(init=False, default_factory=dict, repr=False)
    _placeholders: dict[nn.Parameter, Tensor] = field(init=False, default_factory=dict, repr=False)

    @property
    def is_trained(self) -> bool:
        """Whether its parameters were trained when they were sharded."""
        return any(shard.requires_grad for shard in self.shards.values())

    @property
    def is_sharded(self) -> bool:
        """Whether `shard_in_place` has been called."""
        return self._layout is not None

    @property
    def length(self) -> int:
        """The elements of the full buffer, padding included; a multiple of the ranks."""
        return self.shard.numel() * self.gather_axis.size

    # -- layout of the buffer --------------------------------------------------------------------------------------

    def shard_in_place(self, device: torch.device) -> None:
        """Copies this rank's shard of the parameters to a device, and makes the parameters placeholders there."""
        shapes = [tuple(parameter.shape) for parameter in self.placements]
        self._layout = FlatLayout.of(shapes, self.gather_axis.size)
        self._numbers = {parameter: number for number, parameter in enumerate(self.placements)}
        dtype, self.device = next(iter(self.placements)).dtype, device
        self.shard = self._make_shard(self._layout.shard, dtype, device)
        nothing = torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
        for parameter in self.placements:
            self._placeholders[parameter] = nothing.expand(self._extent(parameter).shape)
            first, last = self.owned_range(parameter)
            part = self._part(self.shard, parameter)
            part.copy_(parameter.detach().reshape(-1)[first:last])
            self.shards[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        self._show_placeholders()

    def _make_shard(self, owned: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates this rank's shard."""
        if self.host_link is None:
            return torch.zeros(owned, dtype=dtype, device=device)
        copied_as = self.cast_to or dtype
        copy = self._make_copy(owned, copied_as) if not self.host_link.streams_weights else None
        self.host = HostShard(owned, dtype, copied_as, device, self.host_link, copy)
        return self.host.shard

    def _make_copy(self, owned: int, dtype: torch.dtype) -> Tensor:
        """Allocates the device's copy of a shard on the host."""
        return torch.empty(owned, dtype=dtype, device=self.device)

    def _extent(self, parameter: nn.Parameter) -> Extent:
        """The position of a parameter in the full buffer."""
        assert self._layout is not None
        return self._layout.extents[self._numbers[parameter]]

    def owned_range(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Returns the first and the last element, exclusive, of this rank's part of the flattened parameter; two equal
        numbers for none."""
        assert self._layout is not None
        return self._layout.elements(self._numbers[parameter], self.gather_axis.rank)

    def owned_part(self, value: Any, parameter: nn.Parameter) -> Any:
        """Returns a copy of this rank's elements of a tensor of the parameter's shape; any other value unchanged."""
        if not isinstance(value, Tensor) or value.shape != self._extent(parameter).shape:
            return value
        first, last = self.owned_range(parameter)
        return value.reshape(-1)[first:last].clone()

    def views(self, buffer: Tensor) -> dict[nn.Parameter, Tensor]:
        """Returns the parameters in a full buffer [length] of any type."""
        return {parameter: self._view(buffer, parameter) for parameter in self.placements}

    def _view(self, buffer: Tensor, parameter: nn.Parameter) -> Tensor:
        extent = self._extent(parameter)
        return buffer[extent.start : extent.end].view(extent.shape)

    # -- the full buffer -------------------------------------------------------------------------------------------

    def check_resharded(self) -> None:
        """Raises an error if the parameters are unsharded already: their user would lose them."""
        if self.unsharded is not None:
            raise RuntimeError(
                "the model has all weights at present: leave full_weights() before you train, evaluate, save or load"
            )

    def begin_window(self) -> None:
        """Prepares the parameters for a window. Operators unshard flat parameters of this class as needed."""
        self.check_resharded()
        if self.host is not None and not self.host.is_copied:
            self.host.prepare_copy()()

    def mark_stale(self) -> None:
        """Reports a possible step of an optimizer. This class keeps no buffer between windows."""
        if self.host is not None:
            self.host.mark_stale()

    def prepare_gather(self, copy: Tensor | None = None) -> tuple[Tensor, TransferFn]:
        """Returns the buffer for operators, allocated but not filled, and a function to gather it. Collective. `copy`
        is the device's copy of a shard on the host; None for the copy that stays there, and for a shard on the
        device."""
        buffer = self._new_buffer(self.cast_to)
        return buffer, lambda: self._fill(buffer, copy)

    def _new_buffer(self, dtype: torch.dtype | None = None) -> Tensor:
        """Allocates a full buffer, by default in the type of the parameters."""
        return torch.empty(self.length, dtype=dtype or self.shard.dtype, device=self.device)

    def _fill(self, buffer: Tensor, copy: Tensor | None = None) -> None:
        """Gathers the shards of all ranks into a buffer."""
        if self.host is not None:
            copy = self.host.copy if copy is None else copy
            assert copy is not None
            if copy.numel() < buffer.numel():
                self.gather_axis.transport.all_gather(buffer, copy)
            return
        own = self.shard if self.cast_to is None else self._own_part(buffer).copy_(self.shard)
        self.gather_axis.transport.all_gather(buffer, own)

    def _own_part(self, buffer: Tensor) -> Tensor:
        """The part of a buffer for this rank's shard."""
        return buffer.chunk(self.gather_axis.size)[self.gather_axis.rank]

    def gather(self) -> Tensor:
        """Returns the full buffer in the type of the parameters. Collective; for checkpoints, not for windows."""
        buffer = self._new_buffer()
        own = self.shard if self.host is None else self._own_part(buffer).copy_(self.shard)
        self.gather_axis.transport.all_gather(buffer, own)
        return buffer

    def unshard(self, buffer: Tensor) -> None:
        """Makes the parameters views of a full buffer, until `reshard` or another `unshard`. Where the buffer has
        another type, the parameters stay placeholders, and `cast` returns views of the buffer."""
        if self.unsharded is buffer:
            return
        if buffer.dtype is self.shard.dtype:
            for parameter, view in self.views(buffer).items():
                parameter.data = view
        self.unsharded = buffer

    def cast(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns a parameter in the type of matrix products, as a view of the unsharded buffer; None if the buffer
        has another type."""
        return self._view_in(self.unsharded, parameter)

    def _view_in(self, buffer: Tensor | None, parameter: nn.Parameter) -> Tensor | None:
        if buffer is None or buffer.dtype is not self.cast_to:
            return None
        # Detached: the view must not have the buffer as its base, since the buffer may have to keep the view.
        return self._view(buffer.detach(), parameter)

    def reshard(self, buffer: Tensor | None = None) -> None:
        """Makes the parameters placeholders, without memory; with a buffer, only if this is the unsharded one."""
        if buffer is None or self.unsharded is buffer:
            self._show_placeholders()

    def _show_placeholders(self) -> None:
        for parameter, placeholder in self._placeholders.items():
            parameter.data = placeholder
        self.unsharded = None

    # -- gradients -------------------------------------------------------------------------------------------------

    def split_shard(self, shard: Tensor) -> dict[nn.Parameter, Tensor]:
        """Returns, for every parameter, this rank's part of a tensor [length / ranks] with the layout of the shard
        (reduced gradients)."""
        return {parameter: self._part(shard, parameter) for parameter in self.shards}

    def _part(self, shard: Tensor, parameter: nn.Parameter) -> Tensor:
        first, last = self.owned_range(parameter)
        start = max(self._extent(parameter).start - self.gather_axis.rank * self.shard.numel(), 0)
        return shard[start : start + last - first]
