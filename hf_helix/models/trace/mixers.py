"""Recurrent mixers as single operations of a trace: convolutions, delta rules and scans that mix tokens.

In:   a skeleton whose code calls the kernel functions of Transformers, or hides padding from a recurrence.
Out:  a trace with a custom operator for each call, and a `MixerCall` that makes the call again on other tensors.
Must hold: the operator calls the function that stands in the model's file when it runs: kernels of fla, mamba-ssm,
causal-conv1d and the Hub, or the code of Transformers. Values of a mixer have tokens first, [batch, sequence, ...].
"""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function
from transformers.models.qwen3_next.modeling_qwen3_next import apply_mask_to_padding_states

from hf_helix.models.stock.alike import same_code
from hf_helix.models.trace.opaque_calls import OPS, CallKind, OpaqueCalls, PaddingMask, names_of_code, replaced

PACKAGES = ("flash-linear-attention", "fla-core", "mamba-ssm", "causal-conv1d", "kernels")
"""The packages whose kernels Transformers calls if they are installed."""


@dataclass(frozen=True)
class Mixer:
    """The shape of a kernel function.

    Attributes:
        dims: the dimension of heads or channels of each tensor, with tokens first; None for a tensor that all share.
        like: the tensor with the shape of the result.
        tokens_last: the tensors that the function takes and returns as [batch, channels, sequence].
        by_channel: whether channels are independent, so that blocks of channels may lie side by side.
        weight: of a convolution, the tensor whose last dimension is the number of tokens that a result depends on; None
            for a recurrence, whose results depend on all tokens before.
        returns_state: whether the function returns a pair of result and state.
        states: of a recurrence that is linear in its state [batch, heads, features of keys, features of values], the
            arguments for the first state, and for whether the last state is returned; None if a state cannot be
            handed on.
    """

    dims: Mapping[str, int | None]
    like: str
    tokens_last: tuple[str, ...] = ()
    by_channel: bool = False
    weight: str | None = None
    returns_state: bool = False
    states: tuple[str, str] | None = None


_RULE = {"query": 2, "key": 2, "value": 2, "g": 2, "beta": 2}
_STATES = "initial_state", "output_final_state"
_SCAN = {"hidden_states": 2, "dt": 2, "A": 0, "B": 2, "C": 2, "D": 0, "dt_bias": 0}

MIXERS = {
    "causal_conv1d_fn": Mixer(
        {"hidden_states": 2, "weight": 0, "bias": 0},
        "hidden_states",
        ("hidden_states",),
        by_channel=True,
        weight="weight",
    ),
    "torch_chunk_gated_delta_rule": Mixer(_RULE, "value", returns_state=True, states=_STATES),
    "chunk_kimi_delta_attention": Mixer(_RULE, "value", returns_state=True, states=_STATES),
    "mamba2_chunk_scan": Mixer(_SCAN, "hidden_states"),
    "mamba_selective_scan": Mixer(
        {"hidden_states": 2, "dt": 2, "A": 0, "B": None, "C": None, "D": 0, "z": 2, "delta_bias": 0},
        "hidden_states",
        ("hidden_states", "dt", "B", "C", "z"),
    ),
}
"""The kernel functions, by their names in the files of models."""

SHORTCUTS = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
"""Kernel functions over several modules at once. Models do without if they return None."""


@dataclass(frozen=True)
class MixerCall:
    """A call of a kernel function.

    Attributes:
        home: the module of the model's code.
        name: the name of the function there.
        tensors: the names of the tensor arguments.
        options: the other arguments.
    """

    home: str
    name: str
    tensors: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def mixer(self) -> Mixer:
        return MIXERS[self.name]

    @property
    def dims(self) -> list[int | None]:
        """The dimension of heads or channels of each tensor."""
        return [self.mixer.dims[name] for name in self.tensors]

    @property
    def like(self) -> int:
        """The place of the tensor with the shape of the result."""
        return self.tensors.index(self.mixer.like)

    def function(self) -> Callable[..., Tensor]:
        """Returns the call as a function of the tensors, with tokens first. Modes of torch see one function, with this
        call as its attribute `call`."""

        def mix(*tensors: Tensor) -> Tensor:
            if has_torch_function(tensors):
                return handle_torch_function(mix, tensors, *tensors)
            return self.run(*tensors)

        vars(mix)["call"] = self
        return mix

    def run(self, *tensors: Tensor) -> Tensor:
        """Returns the result for tensors with tokens first."""
        given = dict(zip(self.tensors, tensors, strict=True))
        for name in given.keys() & {*self.mixer.tokens_last}:
            given[name] = given[name].transpose(1, 2)
        result = self._function(**given, **dict(self.options))
        mixed: Tensor = result[0] if self.mixer.returns_state else result
        return mixed.transpose(1, 2) if self.mixer.tokens_last else mixed

    def run_part(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the results of parts of sequences, each by itself, and their maps of a state before them.

        Result and last state are linear in the first state, and features of values are independent of each other. So
        one call with values of zero after the values, whose first state is the identity, gives both.

        Args:
            tensors: the operands with tokens first; every row is a part.

        Returns:
            [rows, tokens, heads, values + keys]: the result from no state; then the result that a first state, on the
            right, is multiplied by to be added to the result. [rows, heads, keys, values + keys]: the last state, in
            the same order.
        """
        assert self.mixer.states is not None
        given = dict(zip(self.tensors, tensors, strict=True))
        value, size = given[self.mixer.like], given["key"].shape[-1]
        given[self.mixer.like] = functional.pad(value, (0, size))
        identity = functional.pad(torch.eye(size, device=value.device), (value.shape[-1], 0))
        first = identity.expand(len(value), value.shape[2], *identity.shape).contiguous()
        starts, ends = self.mixer.states
        wide, last = self._function(**given, **{**dict(self.options), starts: first, ends: True})
        return wide, last

    @property
    def _function(self) -> Callable[..., Any]:
        """The function that stands in the model's file now."""
        function: Callable[..., Any] = vars(sys.modules[self.home])[self.name]
        return function


@contextlib.contextmanager
def mixers_as_operators(skeleton: nn.Module, opaque_calls: OpaqueCalls) -> Iterator[None]:
    """Returns the context of a trace in which kernel functions, and hiding of padding, are custom operators."""
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for home, name, function in names_of_code(skeleton):
        if name in SHORTCUTS:
            made: Any = _nothing
        elif name in MIXERS:
            made = _as_operator(home, name, function, opaque_calls)
        elif same_code(function, apply_mask_to_padding_states):
            made = _hiding(opaque_calls)
        else:
            continue
        changed.append((vars(sys.modules[home]), {name: made}))
    with replaced(changed):
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _hiding(opaque_calls: OpaqueCalls) -> Callable[..., Tensor]:
    def hide(hidden_states: Tensor, attention_mask: Any) -> Tensor:
        if not isinstance(attention_mask, PaddingMask):
            return hidden_states if attention_mask is None else hidden_states * attention_mask[:, :, None]
        value: Tensor = OPS.unary(hidden_states, opaque_calls.add(CallKind.HIDE, opaque_calls.path_of_frame()))
        return value

    return hide


def _as_operator(home: str, name: str, function: Callable[..., Any], opaque_calls: OpaqueCalls) -> Callable[..., Any]:
    signature, mixer = inspect.signature(function), MIXERS[name]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        options = {**given.pop("kwargs", {}), **given}
        tensors = {key: options.pop(key) for key in mixer.dims if isinstance(options.get(key), Tensor)}
        states = [key for key, value in options.items() if isinstance(value, Tensor) and key in signature.parameters]
        if states:
            raise ValueError(f"its {name}() takes {', '.join(states)}, which is not built")
        plain = tuple((key, value) for key, value in options.items() if not isinstance(value, Tensor))
        call = MixerCall(home, name, tuple(tensors), plain)
        values = [v.transpose(1, 2) if key in mixer.tokens_last else v for key, v in tensors.items()]
        number = opaque_calls.add(CallKind.MIXER, opaque_calls.path_of_frame(), call=call)
        result = OPS.mixer(values, call.like, number)
        result = result.transpose(1, 2) if mixer.tokens_last else result
        return (result, None) if mixer.returns_state else result

    return run


def hide_padding(value: Tensor, seen: Tensor | None, rank: int = 0) -> Tensor:
    """Returns a value [tokens of a rank, batch, ...] with zeros for hidden tokens; `seen` has 1 for visible and 0 for
    hidden tokens [tokens of all ranks, batch], None if none is hidden."""
    if seen is None:
        return value
    here = seen[rank * len(value) :][: len(value)]
    return (value * here.view(*here.shape, *[1] * (value.dim() - 2))).to(value.dtype)


def shares_of(value: Tensor, dim: int | None, count: int) -> tuple[Tensor, ...]:
    """Returns the shares of a number of ranks in an operand of a mixer, along its dimension of heads, of groups that
    several heads share, or of channels; None for what all share. The ranks divide the heads; a group of heads on
    several ranks is in each share."""
    if dim is None:
        return (value,) * count
    copies = math.lcm(value.shape[dim], count) // value.shape[dim]
    return (value if copies == 1 else value.repeat_interleave(copies, dim)).chunk(count, dim)
