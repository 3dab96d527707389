"""The state of a cut model that a call reads besides its arguments.

In:   the cut model on this rank, and the state of another rank's model.
Out:  the state, which other ranks can take over for a call: modes, autocast, `generation_config`, active adapters, and
      buffers that were written since the cut.
Must hold: ranks with equal states have equal numbers (`compared`). After a call for another rank everything is as
before. Merged adapters are in the weights, which no rank takes over, so they must be alike.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_helix.engine.cut.snapshot import mark
from hf_helix.models.stock.peft import base_of
from hf_helix.runtime.deferred_backward import modes_kept

_GENERATION = "generation_config"
_OF_ADAPTERS = "_disable_adapters", "_active_adapter", "scaling"


class CallState:
    """The state of a model for calls.

    Args:
        model: the cut model, perhaps a `PeftModel`.
        device: of the ranks.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._base, self._device = model, base_of(model), device
        self._adapted = {path: each for path, each in model.named_modules() if hasattr(each, _OF_ADAPTERS[0])}
        self._buffers = {name: mark(buffer) for name, buffer in model.named_buffers()}

    def compared(self) -> dict[str, Any]:
        """Returns the state that changes results: calls with equal arguments and equal states are alike."""
        buffers = {name: each for name, each in self._model.named_buffers() if mark(each) != self._buffers.get(name)}
        adapters = {path: self._adapters_of(module) for path, module in self._adapted.items()}
        return {_GENERATION: getattr(self._base, _GENERATION, None), "adapters": adapters, "buffers": buffers}

    def _adapters_of(self, module: Any) -> dict[str, Any]:
        return {name: getattr(module, name) for name in _OF_ADAPTERS if hasattr(module, name)}

    def all(self) -> dict[str, Any]:
        """Returns the whole state, for another rank."""
        kinds = {kind: _autocast_of(kind) for kind in dict.fromkeys(("cpu", self._device.type))}
        modes = {path: module.training for path, module in self._model.named_modules()}
        return {**self.compared(), "modes": modes, "autocast": kinds}

    def merged(self) -> dict[str, list[str]]:
        """Returns the adapters that are merged into weights, by the path of their module."""
        merged = ((path, getattr(module, "merged_adapters", ())) for path, module in self._adapted.items())
        return {path: list(names) for path, names in merged if names}

    @contextlib.contextmanager
    def taken_over(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Returns the context in which this rank's model has the state of another rank's."""
        with contextlib.ExitStack() as restored:
            restored.enter_context(modes_kept(self._model.modules()))
            for kind, (is_on, dtype) in state["autocast"].items():
                restored.enter_context(torch.autocast(kind, dtype, enabled=is_on))
            for path, module in self._model.named_modules():
                module.training = state["modes"].get(path, module.training)
            if state[_GENERATION] is not None:
                restored.enter_context(_changed(self._base, _GENERATION, state[_GENERATION]))
            for path, values in state["adapters"].items():
                for name, value in values.items():
                    restored.enter_context(_changed(self._adapted[path], name, value))
            for name, buffer in state["buffers"].items():
                owner, _, key = name.rpartition(".")
                held: Any = self._model.get_submodule(owner)._buffers
                restored.callback(held.__setitem__, key, held.get(key))
                held[key] = buffer
            yield


@contextlib.contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Returns the context in which an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _autocast_of(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
