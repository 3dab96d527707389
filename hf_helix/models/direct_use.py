"""Refuses direct use of a cut model: calling it, and saving it by its own methods.

In:   a cut model, which scripts hold as an ordinary Transformers or PEFT model.
Out:  the same model, whose methods raise and say what to call where they would work on one rank's slices.
Must hold: copies of the model refuse, too. Its parameters and `state_dict()` can be read and written, see
`hf_helix.runtime.divided`.
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


def refuse_saving(model: nn.Module, instead: Instead) -> None:
    """Makes the methods of a model that save it an error: every rank would write the same files."""
    for module in model.modules():
        for name in ("save_pretrained", "push_to_hub"):
            if hasattr(type(module), name):
                setattr(module, name, _Refusal(f"{name}()", instead.saving))


class _Refusal:
    """A method that raises. Copies of the model share it, and it cannot be pickled."""

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
