"""Flats: parameters in one piece, of which every rank that has copies of them owns one stretch.

In:   the parameters of a unit that have one type and the same ranks with copies, as this rank holds them (cut over tp
      or over experts already).
Out:  this rank's stretch of the piece, and for every parameter its part of that stretch, often an empty one: a 1-D
      parameter that an optimizer steps and that carries the summed gradient.
Must hold: every rank lays the piece out alike. The parts are views of the stretch, so that stepping them needs no copy.
Nobody reads a parameter while it is not unsharded: it then is a stand-in of its shape and type, full of NaN. The type of a
piece changes no bit of what is computed.

The piece, with three parameters over two ranks (`.` is padding; a parameter begins at a multiple of `ALIGNMENT`):

    aaaaaaaaaaaaa...bbbbbbbb|bbbbb...ccccc...........
    rank 0                   rank 1
    shards: a[0:13] b[0:8] c[]    a[] b[8:13] c[0:5]

Under autocast, parameters that matrix products alone read have pieces in the type of the products: then a stretch is
what the piece is cast from (the fp32 master of bfloat16 weights), the parameters stay stand-ins while it is unsharded, and
products take their weights from the piece (`hf_helix.operators.matmul_dtype.CastWeights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hf_helix.operators.base import TransferFn
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.param_shard import Placement

ALIGNMENT = 32
"""Elements, so that whatever lies in a piece begins at a multiple of 64 bytes in half precision."""


@dataclass(frozen=True)
class Extent:
    """Where a parameter lies in a piece.

    Attributes:
        start: its first element.
        shape: of what this rank holds of the parameter, before it is spread.
    """

    start: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The element behind its last one."""
        return self.start + prod(self.shape)

    def view(self, whole: Tensor) -> Tensor:
        """Returns the parameter in a whole piece."""
        return whole[self.start : self.end].view(self.shape)


@dataclass(eq=False)
class FlatParameter:
    """Parameters in one piece, spread over ranks.

    Until `spread` has been called, the parameters are ordinary ones, and only `name`, `placements`, `axis` and `sums`
    may be used. From then on:

    - between its uses a parameter is a stand-in: its shape and type are right, it takes no memory, and its values are
      NaN. `unshard` makes all parameters views of a whole piece of their type, `reshard` makes them stand-ins again;
    - `shard` [length / ranks] is what this rank owns. `shards` has, for every parameter, a 1-D parameter that is a view
      of `shard`: the flattened parameter from `part(parameter)[0]` to `[1]`, empty where the parameter lies elsewhere.
      Optimizers step these, so all ranks have the same groups; their `grad` is what clipping and the gradient norm
      look at;
    - `parameter.grad` is what this rank has found in the window that runs, and None between windows.

    Attributes:
        name: of the value of a graph that holds the gathered piece, see `Operator.weights`.
        placements: the parameters in their order, with how they are cut over other axes. All are trained, or none.
        axis: the ranks that the piece is gathered over.
        sums: the same ranks, for sums of gradients: another transport, since sums run on another stream.
        cast_to: the type of what operators read, where it is not that of the parameters.
        shard: what this rank owns.
        shards: its parts, by parameter.
        unsharded: the whole piece that operators read at present; None for none.
    """

    name: str
    placements: Mapping[nn.Parameter, Placement]
    axis: Axis
    sums: Axis
    cast_to: torch.dtype | None = None
    shard: Tensor = field(init=False, repr=False)
    shards: dict[nn.Parameter, nn.Parameter] = field(init=False, default_factory=dict, repr=False)
    unsharded: Tensor | None = field(init=False, default=None, repr=False)
    _extents: dict[nn.Parameter, Extent] = field(init=False, default_factory=dict, repr=False)
    _stand_ins: dict[nn.Parameter, Tensor] = field(init=False, default_factory=dict, repr=False)

    @property
    def is_sharded(self) -> bool:
        """Whether `spread` has been called."""
        return bool(self._extents)

    @property
    def length(self) -> int:
        """The elements of the whole piece, padding included; a multiple of the ranks."""
        return self.shard.numel() * self.axis.size

    # -- how the piece lies ----------------------------------------------------------------------------------------

    def spread(self, device: torch.device) -> None:
        """Keeps this rank's stretch of the parameters, on a device, and makes the parameters stand-ins.

        Args:
            device: of the stretch and of the stand-ins. The parameters may be on another one.
        """
        shapes = [tuple(parameter.shape) for parameter in self.placements]
        starts = list(accumulate((_aligned(prod(shape)) for shape in shapes), initial=0))
        extents = map(Extent, starts, shapes)  # the last start is where the piece ends
        self._extents = dict(zip(self.placements, extents, strict=True))
        owned = _aligned(-(-starts[-1] // self.axis.size))
        dtype = next(iter(self.placements)).dtype
        self.shard = self._make_shard(owned, dtype, device)
        nothing = torch.full((), torch.nan, dtype=dtype, device=device)
        for parameter, extent in self._extents.items():
            self._stand_ins[parameter] = nothing.expand(extent.shape)
            first, last = self.part(parameter)
            place = self._place(self.shard, parameter)
            place.copy_(parameter.detach().reshape(-1)[first:last])
            self.shards[parameter] = nn.Parameter(place, requires_grad=parameter.requires_grad)
        self._empty()

    def _make_shard(self, owned: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates this rank's stretch."""
        return torch.zeros(owned, dtype=dtype, device=device)

    @property
    def _begin(self) -> int:
        """The first element of the piece that this rank owns."""
        return self.axis.rank * self.shard.numel()

    def part(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Returns the first and the last element, exclusive, of a flattened parameter that this rank owns; two equal
        numbers where it owns none."""
        extent = self._extents[parameter]
        first, last = (
            min(max(bound, extent.start), extent.end) - extent.start
            for bound in (self._begin, self._begin + self.shard.numel())
        )
        return first, last

    def part_of(self, value: Any, parameter: nn.Parameter) -> Any:
        """Returns this rank's part of something of a parameter's shape, with memory of its own; other things as they
        are."""
        if not isinstance(value, Tensor) or value.shape != self._extents[parameter].shape:
            return value
        first, last = self.part(parameter)
        return value.reshape(-1)[first:last].clone()

    def views(self, whole: Tensor) -> dict[nn.Parameter, Tensor]:
        """Returns the parameters in a whole piece [length], of any type."""
        return {parameter: extent.view(whole) for parameter, extent in self._extents.items()}

    # -- the whole piece -------------------------------------------------------------------------------------------

    def check_resharded(self) -> None:
        """Raises an error where somebody has unsharded the parameters already, who would lose them."""
        if self.unsharded is not None:
            raise RuntimeError(
                "the model has all weights at present: leave whole_weights() before you train, evaluate, save or load"
            )

    def begin_window(self) -> None:
        """Prepares the parameters for a window. Pieces of this kind are unsharded operator by operator."""
        self.check_resharded()

    def mark_stale(self) -> None:
        """Says that stretches may have been stepped. No piece of this kind is older than what it was gathered from."""

    def prepare_gather(self) -> tuple[Tensor, TransferFn]:
        """Allocates the piece that operators read; returns it, not yet filled, and the work that gathers it.
        Collective."""
        piece = self.shard.new_empty(self.length, dtype=self.cast_to)
        return piece, lambda: self._fill(piece)

    def _fill(self, piece: Tensor) -> None:
        """Gathers a piece where it lies, from the stretches of all ranks."""
        own = self.shard if self.cast_to is None else self._own_place(piece).copy_(self.shard)
        self.axis.transport.all_gather(piece, own)

    def _own_place(self, piece: Tensor) -> Tensor:
        """The place of this rank's stretch in a piece."""
        return piece.chunk(self.axis.size)[self.axis.rank]

    def gather(self) -> Tensor:
        """Returns the whole piece in the type of the parameters. Collective; for checkpoints, not for windows."""
        whole = self.shard.new_empty(self.length)
        self.axis.transport.all_gather(whole, self.shard)
        return whole

    def keep(self, whole: Tensor) -> None:
        """Keeps this rank's stretch of a whole piece that was written to, such as by a checkpoint that is loaded."""
        self.shard.copy_(whole[self._begin : self._begin + self.shard.numel()])

    def unshard(self, whole: Tensor) -> None:
        """Makes the parameters views of a whole piece, until `reshard` or until another piece is unsharded. Of a piece in
        another type they stay stand-ins, and `casts` are views of it."""
        if self.unsharded is whole:
            return
        if whole.dtype is self.shard.dtype:
            for parameter, extent in self._extents.items():
                parameter.data = extent.view(whole)
        self.unsharded = whole

    def cast(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns a parameter in the type of matrix products: a view of what is unsharded; None where that has another
        type."""
        return self._view_in(self.unsharded, parameter)

    def _view_in(self, piece: Tensor | None, parameter: nn.Parameter) -> Tensor | None:
        if piece is None or piece.dtype is not self.cast_to:
            return None
        return self._extents[parameter].view(piece.detach())  # not based on the piece, which may have to keep it

    def reshard(self, whole: Tensor | None = None) -> None:
        """Makes the parameters stand-ins, so that they keep no memory alive.

        Args:
            whole: does nothing unless this piece is unsharded; None for whatever the parameters are at present.
        """
        if whole is None or self.unsharded is whole:
            self._empty()

    def _empty(self) -> None:
        for parameter, stand_in in self._stand_ins.items():
            parameter.data = stand_in
        self.unsharded = None

    # -- gradients -------------------------------------------------------------------------------------------------

    def split_shard(self, stretch: Tensor) -> dict[nn.Parameter, Tensor]:
        """Returns, for every parameter, the part that this rank owns of it in a stretch [length / ranks] of something
        that lies as the piece does, such as the summed gradients."""
        return {parameter: self._place(stretch, parameter) for parameter in self.shards}

    def _place(self, stretch: Tensor, parameter: nn.Parameter) -> Tensor:
        first, last = self.part(parameter)
        start = max(self._extents[parameter].start - self._begin, 0)
        return stretch[start : start + last - first]


def _aligned(count: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT
