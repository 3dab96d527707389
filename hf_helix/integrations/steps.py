"""Calls before every step of an optimizer, each while its owner lives.

Must hold: an owner may end at any moment. Torch raises an error if a hook of steps is removed while hooks run, as the
garbage collector may do, so torch has one hook of this module, and keeps it.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

Call = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
_calls: weakref.WeakKeyDictionary[Any, Call] = weakref.WeakKeyDictionary()


def before_steps(owner: Any, call: Call) -> None:
    """Calls a function before every step of any optimizer.

    Args:
        owner: without which there are no more calls; has a single function.
        call: takes the owner, the optimizer, and the positional and named arguments of its step, of which the first is
            the optimizer; returns these arguments. Holds no reference to the owner.
    """
    _register()
    _calls[owner] = call


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    for owner, call in list(_calls.items()):
        args, kwargs = call(owner, optimizer, args, kwargs)
    return args, kwargs
