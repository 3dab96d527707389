"""Refuses direct use of a cut model: calls, and saving by the model's own methods.

In:   a cut model, held by scripts as an ordinary Transformers or PEFT model.
Out:  the same model; methods that would save or use only a rank's slices raise and name the call to use.
Must hold: copies of the model refuse, too. Parameters and `state_dict()` of the model can be read and written, see
`hf_helix.runtime.divided`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn


class Instead(NamedTuple):
    """The calls to use in place of a cut model and its methods.

    Attributes:
        calling: runs the model.
        saving: saves the model, called by every rank with a folder.
    """

    calling: str
    saving: str


def refuse_calls(model: nn.Module, instead: Instead, running: Callable[[], AbstractContextManager[object]]) -> None:
    """Makes calls of a model with gradients an error. The signature stays: the Trainer uses it to choose columns.

    Args:
        model: the model.
        instead: see `Instead`.
        running: the context in which the model's own code runs without gradients.
    """

    stock = model.forward

    @functools.wraps(stock)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if _use_allowed:
            return stock(*args, **kwargs)
        if not torch.is_grad_enabled():
            with running():
                return stock(*args, **kwargs)
        raise RuntimeError(
            "this model's weights are cut over several ranks, so it cannot be called directly with gradients; use "
            f"{instead.calling}, or save it with {instead.saving} and load it with from_pretrained(folder)"
        )

    refuse.is_refusal = True  # type: ignore[attr-defined]  # no patch by the user
    model.forward = refuse


def run_generation(model: Any, running: Callable[[], AbstractContextManager[object]]) -> None:
    """Makes `model.generate` run in a context, entered once for all tokens."""
    if not hasattr(model, "generate"):
        return
    stock = model.generate

    @functools.wraps(stock)
    def generate(*args: Any, **kwargs: Any) -> Any:
        with running():
            return stock(*args, **kwargs)

    model.generate = generate


def refuse_saving(model: nn.Module, instead: Instead) -> None:
    """Makes the saving methods of a model an error: every rank would write the same files."""
    for module in model.modules():
        for name in ("save_pretrained", "push_to_hub"):
            if hasattr(type(module), name):
                setattr(module, name, _Refusal(f"{name}()", instead.saving))


class _Refusal:
    """A refused method: a call raises. Copies of the model share the method; pickling raises, too."""

    def __init__(self, what: str, saving: str) -> None:
        self._what = what
        self._saving = saving

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"this model's weights are cut over several ranks, and {self._what} would write the same files on every "
            f"rank; call {self._saving} on every rank, and load it with from_pretrained(folder)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Refusal:
        return self

    def __reduce__(self) -> NoReturn:
        _Refusal("torch.save(model)", self._saving)()


def is_direct_use_allowed() -> bool:
    """Returns whether calls of models are allowed, see `direct_use_allowed`."""
    return _use_allowed


@contextlib.contextmanager
def direct_use_allowed() -> Iterator[None]:
    """Allows calls of models, while all weights are in them."""
    global _use_allowed
    _use_allowed = True
    try:
        yield
    finally:
        _use_allowed = False


_use_allowed = False
