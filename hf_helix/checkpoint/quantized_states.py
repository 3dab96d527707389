"""Quantized optimizer states in checkpoints: bitsandbytes and torchao, in 8 and 4 bits.

In:   an optimizer whose states are codes with a scale for each block of elements.
Out:  for a checkpoint, values in fp32 in the shape of the parameter, which any layout can cut, and the codes, which are
      exact where the same elements form the blocks; from a checkpoint, the states as the optimizer makes them.
Must hold: a run resumed in the same layout has the same bits. In another layout blocks begin anew with each slice, and
values are quantized again.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CODES = "#"
"""Begins the name of an exact part of a quantized state in a checkpoint."""

BLOCK = 256  # elements of a block of bitsandbytes
States = dict[str, Any]


class StateFormat(ABC):
    """The states of a library's optimizers."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @abstractmethod
    def exact(self, states: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the plain tensors of the quantized states, by name."""

    @abstractmethod
    def values(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> States:
        """Returns the states with tensors in fp32 in the shape of the parameter, in place of quantized ones."""

    @abstractmethod
    def made(self, parameter: nn.Parameter, values: States, exact: Mapping[str, Tensor]) -> States:
        """Returns the states of a parameter as the optimizer makes them, from `exact`, or else from `values`."""


class BitsandbytesFormat(StateFormat):
    """States `state1` and `state2`, with codes in uint8 if `absmax1` and `absmax2` are there. AdEMAMix stacks two
    averages in `state1`, which become `state1.0` and `state1.1`."""

    NAMES = ("state1", "state2")

    def exact(self, states: Mapping[str, Any]) -> dict[str, Tensor]:
        names = [name for each in "12" if f"absmax{each}" in states for name in (f"state{each}", f"absmax{each}")]
        return {name: states[name] for name in names}

    def values(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> States:
        found = {key: value for key, value in states.items() if key not in self.NAMES and not _is_of_codes(key)}
        for name in self.NAMES:
            for key, part, scale in _parts(name, states, parameter):
                found[key] = part if scale is None else _dequantized(part, scale, states[f"qmap{name[-1]}"])
        return found

    def made(self, parameter: nn.Parameter, values: States, exact: Mapping[str, Tensor]) -> States:
        self.optimizer.check_overrides()
        for number, group in enumerate(self.optimizer.param_groups):
            for place, each in enumerate(group["params"]):
                if each is parameter:
                    self.optimizer.init_state(group, parameter, number, place)
        states: States = self.optimizer.state[parameter]
        states.update({key: value for key, value in values.items() if key in states and key not in self.NAMES})
        if exact:
            for key, value in exact.items():
                states[key].copy_(value)
            return states
        for name in self.NAMES:
            for key, part, scale in _parts(name, states, parameter):
                if scale is None:
                    part.copy_(values[key])
                else:
                    _quantize(values[key], part, scale, states[f"qmap{name[-1]}"])
        return states


class TorchaoFormat(StateFormat):
    """States that are tensor subclasses, made of plain tensors."""

    def exact(self, states: Mapping[str, Any]) -> dict[str, Tensor]:
        return {
            f"{key}.{part}": getattr(value, part)
            for key, value in states.items()
            if _is_quantized(value)
            for part in value.tensor_attrs
        }

    def values(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> States:
        return {key: value.dequantize() if _is_quantized(value) else value for key, value in states.items()}

    def made(self, parameter: nn.Parameter, values: States, exact: Mapping[str, Tensor]) -> States:
        states = dict(values)
        for key in values.keys() & {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}:
            states[key] = state = self.optimizer._new_buffer(parameter, key == "exp_avg")
            if exact and _is_quantized(state):
                for part in state.tensor_attrs:
                    getattr(state, part).copy_(exact[f"{key}.{part}"])
            else:
                state.copy_(values[key])
        return states


FORMATS: dict[str, type[StateFormat] | None] = {
    "galore_torch": None,  # codes of projections, in the shape of no parameter
    "bitsandbytes": BitsandbytesFormat,
    "torchao": TorchaoFormat,
}


def format_of(optimizer: Any) -> StateFormat | None:
    """Returns the format of an optimizer's states; None for states as torch's optimizers have them."""
    libraries = (kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__)
    kind = next((FORMATS[library] for library in libraries if library in FORMATS), None)
    return kind(optimizer) if kind is not None else None


def _is_quantized(value: Any) -> bool:
    return hasattr(value, "dequantize") and hasattr(value, "tensor_attrs")


def _is_of_codes(key: str) -> bool:
    return key.startswith(("absmax", "qmap"))


def _parts(name: str, states: Mapping[str, Any], parameter: nn.Parameter) -> list[tuple[str, Tensor, Tensor | None]]:
    """Returns the parts of a state in the shape of the parameter: name, codes or values, and the scale of codes."""
    if name not in states:
        return []
    state, scale = states[name], states.get(f"absmax{name[-1]}")
    if state.dim() == parameter.dim():
        return [(name, state, scale)]
    scales = [None] * len(state) if scale is None else list(scale)
    return [(f"{name}.{row}", part, scales[row]) for row, part in enumerate(state)]


def _dequantized(codes: Tensor, scale: Tensor, qmap: Tensor) -> Tensor:
    from bitsandbytes.functional import dequantize_blockwise

    result: Tensor = dequantize_blockwise(codes.contiguous(), absmax=scale, code=qmap, blocksize=BLOCK)
    return result


def _quantize(values: Tensor, codes: Tensor, scale: Tensor, qmap: Tensor) -> None:
    from bitsandbytes.functional import quantize_blockwise

    values = values.to(codes.device, torch.float32).contiguous()
    made, about = quantize_blockwise(values, code=qmap, blocksize=BLOCK)
    codes.copy_(made.view_as(codes))
    scale.copy_(about.absmax.view_as(scale))
