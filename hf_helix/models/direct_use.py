"""Refuses direct use of a cut model: calls, and saving by the model's own methods.

In:   a cut model, held by scripts as an ordinary Transformers or PEFT model.
Out:  the same model; methods that would save or use only a rank's slices raise and name the call to use.
Must hold: copies of the model also refuse. Parameters and `state_dict()` of the model can be read and written, see
`hf_helix.runtime.divided`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import TransformersKwargs

from hf_helix.models.trace.calls import stock_forward


class Instead(NamedTuple):
    """The calls to use in place of a cut model and its methods.

    Attributes:
        calling: runs the model.
        saving: saves the model, called by every rank with a folder.
    """

    calling: str
    saving: str


Call = Callable[[Callable[..., Any], Any, Any], Any]
"""Runs a function of the model with its arguments, see `hf_helix.engine.calls`."""


def refuse_calls(model: nn.Module, instead: Instead, call: Call) -> None:
    """Makes calls of a model with gradients an error; without gradients its own code runs, by `call`."""

    def forward(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _use_allowed:
            return stock(*args, **kwargs)
        if not torch.is_grad_enabled():
            return call(stock, args, kwargs)
        raise RuntimeError(
            "this model's weights are cut over several ranks, so it cannot be called directly with gradients; use "
            f"{instead.calling}, or save it with {instead.saving} and load it with from_pretrained(folder)"
        )

    replace_method(model, "forward", forward)


def run_calls(model: Any, name: str, call: Call) -> None:
    """Makes calls of a method of a model run by `call`."""
    if not hasattr(model, name):
        return

    def method(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs) if _use_allowed else call(stock, args, kwargs)

    replace_method(model, name, method)


_OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments with the ends of documents, which positions also give."""


def leave_out_unread(decoder: nn.Module) -> None:
    """Makes calls of a decoder leave out arguments that it hands on and none of its code reads, such as columns of a
    batch and `logits_to_keep`, and the ends of documents, if there are positions."""
    if not _takes_any(type(decoder).forward):
        return
    functions: list[Any] = [stock_forward(module) for module in decoder.modules()]
    configs = [getattr(module, "config", None) for module in decoder.modules()]
    chosen = {getattr(config, "_attn_implementation", None) for config in configs}
    functions += [ALL_ATTENTION_FUNCTIONS[name] for name in chosen & {*ALL_ATTENTION_FUNCTIONS}]
    read = {"return_dict", *TransformersKwargs.__annotations__, *_names_read_by(functions)}

    def forward(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        repeated = () if kwargs.get("position_ids") is None else _OF_DOCUMENTS
        return stock(*args, **{name: kwargs[name] for name in kwargs.keys() & read - {*repeated}})

    replace_method(decoder, "forward", forward)


def _names_read_by(functions: Iterable[Any]) -> set[str]:
    """Returns the names by which functions can read an argument: of their parameters, and their texts. So do functions
    inside them, and functions of their files that take arguments of any name."""
    names: set[str] = set()
    known: set[int] = set()
    waiting = list(functions)
    while waiting:
        function = waiting.pop()
        waiting += [inner for name in ("func", "__wrapped__") if (inner := getattr(function, name, None)) is not None]
        codes = [function.__code__] if hasattr(function, "__code__") and id(function.__code__) not in known else []
        known.update(map(id, codes))
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            names.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
            names.update(each for each in code.co_consts if isinstance(each, str))
            called = (inspect.unwrap(function).__globals__.get(name) for name in code.co_names)
            waiting += [each for each in called if isinstance(each, FunctionType) and _takes_any(each)]
    return names


def _takes_any(function: Callable[..., Any]) -> bool:
    """Returns whether a function takes keywords of any name."""
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())


def replace_method(module: nn.Module, name: str, run: Callable[..., Any]) -> None:
    """Replaces a method of a module by `run`, called with the stock method and the arguments of a call. The signature
    stays: the Trainer uses the signature of `forward` to choose columns. In deep copies of the module, whose calls
    would use the weights of the module itself, the method raises.
    """
    stock = getattr(module, name)

    @functools.wraps(stock)
    def method(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if called is not module:
            raise RuntimeError(
                "this is a copy of the model that hf_helix trains, and cannot be called; put its weights into the "
                "model, by model.load_state_dict(copy.state_dict()), and call the model"
            )
        return run(stock, *args, **kwargs)

    signature, me = inspect.signature(stock), inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    replaced: Any = method
    replaced.__signature__ = signature.replace(parameters=[me, *signature.parameters.values()])
    replaced.is_refusal = True  # no patch by the user
    setattr(module, name, MethodType(method, module))


def refuse_saving(model: nn.Module, instead: Instead) -> None:
    """Makes the saving methods of a model an error: every rank would write the same files."""
    for module in model.modules():
        for name in ("save_pretrained", "push_to_hub"):
            if hasattr(type(module), name):
                setattr(module, name, _Refusal(f"{name}()", instead.saving))


@contextlib.contextmanager
def saving_copies(model: nn.Module, folder: Path) -> Iterator[None]:
    """Makes `model.save_pretrained` copy the files of a folder, which all ranks have written together."""

    def save(save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        shutil.copytree(folder, save_directory, dirs_exist_ok=True)

    with patch.object(model, "save_pretrained", save):
        yield


class _Refusal:
    """A refused method: a call raises. Copies of the model share the method; pickling raises as well."""

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
    before, _use_allowed = _use_allowed, True
    try:
        yield
    finally:
        _use_allowed = before


_use_allowed = False
