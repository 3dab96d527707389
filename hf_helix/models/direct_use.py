"""Refuses direct use of a cut model: calling it, and saving, loading or reading its state.

In:   a cut model, which scripts hold as an ordinary Transformers or PEFT model.
Out:  the same model, whose methods raise and say what to call where they would work on one rank's slices.
Must hold: no slice is returned as if it were the whole tensor; single parameters can still be read. Copies of the model
refuse, too, and it cannot be pickled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from torch import nn


class Instead(NamedTuple):
    """What to call instead of a cut model and its methods.

    Attributes:
        calling: what runs the model.
        saving: what saves it; every rank calls it with a folder.
    """

    calling: str
    saving: str


def refuse_calls(model: nn.Module, instead: Instead) -> None:
    """Makes calls of a model an error. The signature stays: the Trainer chooses columns of the data set by it."""

    stock = model.forward

    @functools.wraps(stock)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if _use_allowed:
            return stock(*args, **kwargs)
        raise RuntimeError(
            "this model's weights are cut over several ranks, so it cannot be called directly; use "
            f"{instead.calling}, or save it with {instead.saving} and load it with from_pretrained(folder)"
        )

    refuse.is_refusal = True  # type: ignore[attr-defined]  # it is ours, and no patch of the user's
    model.forward = refuse


def refuse_parts(model: nn.Module, instead: Instead) -> None:
    """Makes saving, loading and reading the state of a model and of its modules an error.

    These methods do not gather the whole instead: they would wait for ever for a rank that does not call them.
    """
    for module in model.modules():
        module.register_state_dict_pre_hook(_RefusalOfNames("state_dict()", instead.saving))
        module.register_load_state_dict_pre_hook(_Refusal("load_state_dict()", instead.saving))
        for name in ("save_pretrained", "push_to_hub"):
            if hasattr(type(module), name):
                setattr(module, name, _Refusal(f"{name}()", instead.saving))


@contextlib.contextmanager
def names_allowed() -> Iterator[None]:
    """Allows `state_dict()` of modules, for PEFT, which reads only its names where it is given the tensors."""
    global _names_allowed
    _names_allowed = True
    try:
        yield
    finally:
        _names_allowed = False


@contextlib.contextmanager
def direct_use_allowed() -> Iterator[None]:
    """Allows calls of models and `state_dict()`, while all weights are in them."""
    global _use_allowed
    _use_allowed = True
    try:
        yield
    finally:
        _use_allowed = False


_use_allowed = False


_names_allowed = False


class _Refusal:
    """A method or hook that raises. Copies of the model share it, and it cannot be pickled."""

    def __init__(self, what: str, saving: str) -> None:
        self._what = what
        self._saving = saving

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise self._error(self._what)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Refusal:
        return self

    def __reduce__(self) -> NoReturn:
        raise self._error("pickling it, as torch.save(model) does,")

    def _error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"this model's weights are cut over several ranks, and {what} would be about one rank's part; call "
            f"{self._saving} on every rank, and load the whole with from_pretrained(folder)"
        )


class _RefusalOfNames(_Refusal):
    """The refusal of `state_dict()`, see `names_allowed` and `direct_use_allowed`."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not (_names_allowed or _use_allowed):
            super().__call__()
