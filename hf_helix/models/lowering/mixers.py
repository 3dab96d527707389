"""The declaration of recurrent mixers, and of zeros for hidden tokens.

In:   the segment plan of a unit, and the builder for its operators.
Out:  an operator for each mixer, with the segment before it; over a sequence shared by context-parallel ranks, before a
      convolution an all-gather of the few tokens before each part of the sequence (its halo); around a recurrence an
      all-to-all from parts of the sequence to shares of the heads or channels, and the way back.
Must hold: a mixer sees the tokens of a row in their order; a recurrence, without the padding that makes the sequence
divide, which stands after all others. So the result equals the unsplit model's, wherever rows are padded or packed.

    convolution, 4 taps   ends [2 * 3 tokens of a rank, batch, channels] -> all-gather -> each part after 3 tokens

    operands [tokens of a rank, batch, heads] -> exchange -> [tokens of all ranks, batch, heads of a rank] -> mixer
    result   [tokens of a rank, batch, heads] <- exchange <- [tokens of all ranks, batch, heads of a rank] <-
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hf_helix.models.graph.context import ATTENTION, HEADS, LIGHT, STATES, TRANSFER
from hf_helix.models.lowering.experts import ValueNames
from hf_helix.models.lowering.segment_plan import BatchFirstSegment
from hf_helix.models.placement.value_placement import FREE, FULL, SHARD
from hf_helix.models.stock.batch_inputs import SequenceCut
from hf_helix.models.trace.mixers import MixerCall, hide_padding, shares_of
from hf_helix.models.trace.opaque_calls import OpaqueCall
from hf_helix.models.trace.trace import SEEN, Underivable, args_of
from hf_helix.operators.attention.ring_attention import parts_of
from hf_helix.operators.base import Tensors
from hf_helix.operators.communication.collectives import AllGather, Exchange


class Mixers(ValueNames):
    """Declares recurrent mixers."""

    def _mixer(self, node: Node, opaque: OpaqueCall) -> None:
        """Declares a mixer, with the segment before it."""
        call: MixerCall = opaque.details["call"]
        name = self._free(".".join(filter(None, (opaque.path, call.name))))
        if self.b.cp.size > 1:
            by_states = self.b.sharing.cp_recurrence == STATES
            recurrence = self._states_of_parts if by_states else self._shared_mixer
            shared = recurrence if call.mixer.weight is None else self._shared_convolution
            self._set(node, shared(name, node, call))
            return
        segment, inputs = self.plan.segment([node])
        function, side = self._function(segment, [node], inputs, mixes=True)
        names = [self.value(value, FULL) for value in inputs]
        used = self._used_by(segment)
        self._set(node, self.b.autograd(name, function, *names, side=side, **used, **_fields(call)))

    def _shared_convolution(self, name: str, node: Node, call: MixerCall) -> str:
        """Declares a convolution over a sequence shared by ranks: each convolves its own tokens, each of its parts of
        the sequence after the tokens before."""
        b, plan, cp, cut = self.b, self.plan, self.b.cp, SequenceCut.of(self.b.tp, self.b.cp)
        operands, like = args_of(node)[:2]
        value, weight = operands[like], operands[call.tensors.index(call.mixer.weight)]
        count = self.trace.shape(weight)[-1] - 1

        segment, inputs = plan.segment([node])
        before, _ = plan.segment([value], inputs)
        behind, _ = plan.segment([node], [value])
        if segment.side:
            raise Underivable(f"cp_size={cp.size}: what {call.name}() convolves depends on more than its tokens")
        given, convolved = before.bind(self.module), behind.bind(self.module)
        names = [self.value(each, FULL) for each in inputs]

        def ends_of(*values: Tensor) -> Tensor:
            return given(*[cut.ends(each, count) for each in values])

        ends = b.autograd(
            f"{name}.ends", ends_of, *names, **self._used_by(before), on_shard=True, relative_cost=LIGHT / 2
        )
        (halo,) = b.declare(f"{name}.halo", AllGather(cp), (ends,), kind=cp.kind, relative_cost=LIGHT)

        def convolve(*values: Tensor) -> Tensor:
            *own, ends = values
            return _as_tokens(convolved(_as_rows(cut.behind_ends(given(*own), ends, count)))[:, count:])

        return b.autograd(name, convolve, *names, halo, **self._used_by(segment), **_fields(call))

    def _states_of_parts(self, name: str, node: Node, call: MixerCall) -> str:
        """Declares a recurrence over a sequence shared by ranks: each runs its parts of the sequence, and gathers what
        all parts do to a state; then the states before its parts add to its results."""
        b, plan, cp, cut = self.b, self.plan, self.b.cp, SequenceCut.of(self.b.tp, self.b.cp)
        operands, like = args_of(node)[:2]
        if call.mixer.states is None or any(plan.placement(value).where == FREE for value in operands):
            raise Underivable(
                f"cp_recurrence={STATES!r}: {call.name}() hands no state from part to part of a shared sequence; use "
                f"cp_recurrence={HEADS!r}"
            )
        segment, inputs = plan.segment(operands)
        bound, side = self._function(segment, operands, inputs)

        def run_parts(*values: Tensor, **given: Any) -> Tensors:
            wide, last = call.run_part(*[_as_rows(value) for value in bound(*values, **given)])
            return _as_tokens(wide), last.unflatten(0, (2, -1))

        wide, last = b.autograd_outputs(
            name,
            run_parts,
            [f"{name}.parts", f"{name}.last"],
            *[self.value(value, FULL) for value in inputs],
            side=side,
            **self._used_by(segment),
            **_fields(call),
        )
        (states,) = b.declare(f"{name}.states", AllGather(cp), (last,), kind=cp.kind, relative_cost=TRANSFER)
        size = self.trace.shape(operands[like])[-1]

        def carry(wide: Tensor, states: Tensor) -> Tensor:
            with torch.autocast(wide.device.type, enabled=False):
                of_parts = states_before(cut.join(states), size)
                before = torch.cat([of_parts[part] for part in parts_of(cp.size, cp.rank)])
                result, weights = _as_rows(wide).split((size, wide.shape[-1] - size), -1)
                carried = (weights.transpose(1, 2).to(before.dtype) @ before).transpose(1, 2)
                return _as_tokens(result + carried.to(result.dtype))

        return b.autograd(f"{name}.carried", carry, wide, states, on_shard=True)

    def _shared_mixer(self, name: str, node: Node, call: MixerCall) -> str:
        """Declares a mixer over a sequence shared by ranks: each mixes all tokens of its share of heads or channels."""
        b, plan, cp = self.b, self.plan, self.b.cp
        operands, like = args_of(node)[:2]
        dims = dict(zip(operands, call.dims, strict=True))
        moved = [value for value in dims if plan.placement(value).where != FREE]
        fixed = [value for value in dims if value not in moved]
        dim = self._check_heads(operands[like], call)

        inputs = plan.inputs_of([node])
        before, _ = plan.segment(moved, inputs)
        bound, side = self._function(before, moved, inputs)

        def split(*values: Tensor, **given: Any) -> Tensors:
            results = zip(moved, _as_tuple(bound(*values, **given)), strict=True)
            return tuple([torch.cat(shares_of(value, dims[key], cp.size)) for key, value in results])

        parts = b.autograd_outputs(
            f"{name}.split",
            split,
            [f"{name}.{value.name}.shares" for value in moved],
            *[self.value(value, FULL) for value in inputs],
            side=side,
            **self._used_by(before),
            on_shard=True,
        )
        whole = [f"{name}.{value.name}" for value in moved]
        there = b.declare(f"{name}.exchange", Exchange(cp), parts, whole, kind=cp.kind, relative_cost=TRANSFER)

        own, _ = plan.segment(fixed, moved)
        parameters, mix, cut = own.bind(self.module), call.function(), SequenceCut.of(b.tp, cp)

        def of_parameters(*values: Tensor) -> dict[Node, Tensor]:
            results = zip(fixed, _as_tuple(parameters(*values)), strict=True)
            return {key: shares_of(value, dims[key], cp.size)[cp.rank] for key, value in results}

        def mix_share(*values: Tensor) -> Tensor:
            given = {**dict(zip(moved, values, strict=True)), **of_parameters(*values)}
            return mix(*(given[value] for value in operands))

        def mix_in_order(*values: Tensor, length: int) -> Tensor:
            in_order = [cut.join(value) for value in values]
            return cut.parted(BatchFirstSegment(mix_share)(*in_order, length=length))

        mixed = b.autograd(name, mix_in_order, *there, side=("length",), **self._used_by(own), **_fields(call))
        (back,) = b.declare(f"{name}.return", Exchange(cp), (mixed,), kind=cp.kind, relative_cost=TRANSFER)
        return b.join_features(f"{name}.joined", back, cp, dim)

    def _check_heads(self, like: Node, call: MixerCall) -> int:
        """Returns the dimension of heads or channels, which must divide among the context-parallel ranks."""
        placement, dim, size = self.plan.placement(like), call.mixer.dims[call.mixer.like], self.b.cp.size
        assert dim is not None
        here = self.trace.shape(like)[dim] if placement.dim is None else sum(self.plan.share.of(placement.blocks))
        if here % size:
            raise Underivable(
                f"cp_size={size}: {call.name}() has {here} heads or channels on a rank, and each rank of a shared "
                f"sequence mixes a share of them; use a cp_size that divides {here}, or cp_size=1 with pp_size"
            )
        return dim

    def _hide(self, node: Node, opaque: OpaqueCall) -> None:
        """Declares zeros for hidden tokens."""
        where = self.plan.placement(node).where
        rank = self.b.tp.rank if where == SHARD else 0

        def hidden(value: Tensor, **side: Tensor | None) -> Tensor:
            return hide_padding(value, side[SEEN], rank)

        value = self.value(args_of(node)[0], where)
        self._set(node, self.b.autograd(self._name(node, "hide"), hidden, value, side=(SEEN,), compiles=False))


def _fields(call: MixerCall) -> dict[str, Any]:
    """Returns the fields of a mixer's operator."""
    cost = LIGHT if call.mixer.by_channel else ATTENTION
    return {"on_shard": True, "compiles": False, "relative_cost": cost}


def states_before(states: Tensor, size: int) -> list[Tensor]:
    """Returns the states before the parts of a sequence, each [batch, heads, keys, values], from the states of the
    parts in order [parts, batch, heads, keys, values + keys], see `MixerCall.run_part`; `size` is the number of
    values."""
    own, kept = states.split((size, states.shape[-1] - size), -1)
    before = [torch.zeros_like(own[0])]
    for part in range(len(states) - 1):
        before.append(own[part] + kept[part] @ before[-1])
    return before


def _as_rows(value: Tensor) -> Tensor:
    """Returns the two parts of a rank's tokens [n, batch, ...] as rows [2 * batch, n / 2, ...]."""
    return value.unflatten(0, (2, -1)).transpose(1, 2).flatten(0, 1)


def _as_tokens(rows: Tensor) -> Tensor:
    """Returns a rank's tokens [n, batch, ...], from rows [2 * batch, n / 2, ...]."""
    return rows.unflatten(0, (2, -1)).transpose(1, 2).flatten(0, 1)


def _as_tuple(value: Any) -> Tensors:
    return value if isinstance(value, tuple) else (value,)
