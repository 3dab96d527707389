"""The code of a model: refuses code that would never run; a declared model with foreign code is derived.

In:   a model, and the submodules that its operators call as they are (norms, activations, routers).
Out:  nothing, or an error that names every hook, patch or class that would never run, and the remedy.
Must hold: a submodule called by operators may be anybody's code, hooks included. All other modules run operator by
operator: the `forward` must be the declared or the traced function. Of linears and experts only the weights are used,
and the model itself computes the loss: these forwards must be the code of Transformers or PEFT.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from hf_helix.models.derived.family import Family
from hf_helix.models.graph.experts import is_experts
from hf_helix.models.stock.copies import as_made
from hf_helix.models.trace.opaque_calls import is_projection
from hf_helix.planning.text import shorten_lines

OWN = ("transformers", "torch", "peft", "bitsandbytes")
"""Packages whose classes a declaration describes."""

TRL = "trl"

PATCHING = (*OWN, TRL)
"""Packages that may replace a `forward` on an instance. TRL's fused head computes the same loss, in a method of its
trainers that is never called, and passes every other call on."""

REMOVE = "remove it (handle.remove())"
IN_FP32 = (
    "it casts the output of a table that is also the head, and is in fp32: use cast_lm_head_to_fp32=False, or load the "
    "model with dtype=torch.float32, where it changes nothing"
)

KERNELS = "kernels"
"""The package of the Hub's kernels, which Transformers puts in the place of its own forwards if asked to."""

MAX_SHOWN = 5
"""The number of problems that an error shows."""

_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}


def check_forwards(
    model: Any, base: Any, family: Family, modules_run_as_is: Iterable[nn.Module], ends_at_decoder: bool = False
) -> None:
    """Refuses hooks and code that would never run.

    Args:
        model: the given model, perhaps a `PeftModel`.
        base: the Transformers model inside a `PeftModel`, or the model.
        family: the family of the model.
        modules_run_as_is: the submodules that operators call.
        ends_at_decoder: whether the model is called, so that all code above its decoder runs.

    Raises:
        ValueError: names the hooks and code, and the remedy.
    """
    runs = {id(module) for given in modules_run_as_is for module in given.modules()}
    if ends_at_decoder:
        runs |= {id(module) for module in model.modules()} - {id(module) for module in family.decoder(base).modules()}
    is_own = getattr(transformers, family.model_class, None) is None
    by_weights = set(map(id, _by_weights(base)))
    inside = {id(module) for module in base.modules()}
    problems = [] if ends_at_decoder else [*_problems_of_loss(base, is_own)]
    for name, module in model.named_modules():
        if id(module) not in runs:
            where = f"model.{name}" if name else "model"
            problems += _problems_of_hooks(where, module)
            problems += _problems_of_calls(where, module)
            if family.traced and module is not base and id(module) in inside - by_weights:
                problems += _problems_of_change(where, module, family.traced.get(id(module)))
            else:
                problems += _problems_of_forward(where, module, is_own, bool(getattr(base, "use_kernels", False)))
    for name, parameter in model.named_parameters():
        num_own = getattr(parameter, "num_hooks_of_helix", 0)
        if len(parameter._backward_hooks or ()) > num_own or getattr(parameter, "_post_accumulate_grad_hooks", None):
            problems.append(
                f"model.{name} has a hook on its gradient: remove it (handle.remove()); gradients are those of parts "
                "of a weight, and complete only when training_step returns"
            )
    if problems:
        raise ValueError(
            f"{type(model).__name__} has code that would never run, as its operators run one by one: "
            + shorten_lines(problems)
        )


def other_code(base: Any, is_own: bool = False) -> str:
    """Returns the foreign code found in place of code that is declared and run operator by operator; "" for none.

    Submodules without a linear or experts inside, such as norms, activations and routers, may have any code.
    """
    kernels = bool(getattr(base, "use_kernels", False))
    for name, module in base.named_modules():
        for problem in _problems_of_forward(f"model.{name}", module, is_own, kernels) if module is not base else ():
            used = set(map(id, _by_weights(module)))
            if used and id(module) not in used:
                return problem
    return ""


def check_traceable(model: Any) -> None:
    """Refuses models that cannot be traced: compiled modules, and hooks of Accelerate.

    Raises:
        ValueError: names the modules, and the remedy.
    """
    named = ((f"model.{name}" if name else "model", module) for name, module in model.named_modules())
    problems = [problem for where, module in named for problem in _problems_of_calls(where, module)]
    if problems:
        raise ValueError(f"{type(model).__name__} cannot be traced: " + "\n  ".join(problems[:MAX_SHOWN]))


def _by_weights(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules whose weights are used, and whose forwards are never run nor traced."""
    for module in model.modules():
        if is_projection(module) or is_experts(module):
            yield from module.modules()


def _problems_of_loss(base: Any, is_own: bool) -> Iterator[str]:
    """Yields problems with the loss: only the loss of causal language models is built."""
    given = vars(base).get("_loss_function")
    of_type = LOSS_MAPPING.get(str(getattr(base, "loss_type", None)), ForCausalLMLoss)
    owner = _owner(type(base), "loss_function")
    if given not in (None, ForCausalLMLoss):
        yield (
            f"model.loss_function is {_named(given)}: the loss is computed over a cut vocabulary, and is "
            "Transformers' ForCausalLMLoss; leave model.loss_function as it is, or use the stock Trainer"
        )
    elif given is None and of_type is not ForCausalLMLoss:
        yield (
            f"model.loss_type={base.loss_type!r} asks for {_named(of_type)}: the loss is computed over a cut "
            "vocabulary, and is Transformers' ForCausalLMLoss; use loss_type='ForCausalLM'"
        )
    elif owner is not None and not is_own and _root(owner.__module__) not in OWN:
        yield f"{owner.__name__}.loss_function overrides that of Transformers: remove the override"
    runs: Any = _owner(type(base), "forward")
    code = inspect.unwrap(runs.forward)
    if _home(code).startswith("transformers.") and "loss_function" not in code.__code__.co_names:
        yield (
            f"{runs.__name__}.forward has a loss of its own in place of Transformers' ForCausalLMLoss: use "
            "HelixTrainer, which calls the model for its loss"
        )


def has_stock_loss(base: Any) -> bool:
    """Returns whether the loss of a model is Transformers' loss of the next token."""
    return not any(_problems_of_loss(base, getattr(transformers, type(base).__name__, None) is None))


def has_head_beside(base: Any) -> bool:
    """Returns whether a class of a user's own has a forward of its own and more parameters than the Transformers class
    below it: another head, which the loss reads."""
    kind: Any = type(base)
    owner = _owner(kind, "forward")
    if owner is None or _root(owner.__module__) in OWN:
        return False
    above: list[Any] = [each for each in kind.__mro__ if getattr(transformers, each.__name__, None) is each]
    if not above:
        return False
    plain = {name for name, _ in as_made(base, above[0]).named_parameters()}
    return not plain.issuperset(name for name, _ in base.named_parameters())


def _problems_of_hooks(where: str, module: nn.Module) -> Iterator[str]:
    for kind, words in _HOOKS.items():
        for hook in vars(module)[kind].values():
            package = _root(_home(hook))
            if package not in OWN and not (package == TRL and _is_idle(hook, module)):
                yield f"{where} has a {words}, {_named(hook)}: {IN_FP32 if package == TRL else REMOVE}"


def _is_idle(hook: Callable[..., Any], module: nn.Module) -> bool:
    """Returns whether TRL's hook on the output of an embedding leaves values in the type of its table as they are."""
    if not isinstance(module, nn.Embedding):
        return False
    probe = torch.empty(0, dtype=module.weight.dtype, device="meta")
    found = hook(module, (), probe)
    return found is None or found is probe


def _problems_of_forward(where: str, module: nn.Module, is_own: bool, kernels: bool) -> Iterator[str]:
    """Yields code in place of a `forward`: on the instance, in its class, or in a class of another package. `is_own`
    means that the model's class is outside Transformers, so that the family declares the user's own code, and `kernels`
    that Transformers was asked to use kernels of the Hub."""
    kind = type(module)
    named = f"{kind.__module__}.{kind.__qualname__}"
    if hasattr(module, "_hf_hook"):
        return
    given = vars(module).get("forward")
    if given is not None:
        of_hub = kernels and hasattr(kind, "kernel_layer_name")
        if not of_hub and not getattr(given, "is_refusal", False) and _root(_home(given)) not in PATCHING:
            yield (
                f"{where}.forward was replaced by {_named(given)}: pass the model without the patch, or declare what "
                "it computes in a family of your own (docs/adding_a_model.md)"
            )
        return
    owner = _owner(kind, "forward")
    if owner in (None, nn.Module):
        return
    assert owner is not None
    if not is_own and _root(owner.__module__) not in OWN:
        yield (
            f"{where} is a {named} with a forward of its own: use the class of Transformers, or declare this one in a "
            "family of your own (docs/adding_a_model.md)"
        )
    elif not _is_written_there(vars(owner)["forward"], owner):
        yield (
            f"{owner.__module__}.{owner.__qualname__}.forward was replaced by {_named(vars(owner)['forward'])}: load "
            "the model without the patch, or declare what it computes in a family of your own (docs/adding_a_model.md)"
        )


def forward_of(module: nn.Module) -> Any:
    """Returns the function run by a call of a module, unbound if the function is a method of the class."""
    return vars(module).get("forward", type(module).forward)


def _problems_of_change(where: str, module: nn.Module, traced: Any) -> Iterator[str]:
    """Yields a `forward` replaced after the trace."""
    if traced not in (None, forward_of(module)) and not getattr(forward_of(module), "is_refusal", False):
        yield (
            f"{where}.forward was replaced by {_named(forward_of(module))} after it was traced: replace it before the "
            "trainer is made"
        )


def _problems_of_calls(where: str, module: nn.Module) -> Iterator[str]:
    """Yields hooks and patches between a call of a module and its `forward`."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        yield f"{where} was compiled: leave out .compile(), operators are issued one by one"
    if hasattr(module, "_hf_hook"):
        yield (
            f"{where} has a hook of Accelerate ({type(module._hf_hook).__name__}): load the model without device_map, "
            "or call accelerate.hooks.remove_hook_from_submodules(model)"
        )


def _is_written_there(function: Any, owner: type) -> bool:
    """Returns whether a method is the function in the class's source, under decorators of known packages only.

    `functools.wraps` copies names, so the file of each wrapper's code decides.
    """
    known = {*OWN, _root(owner.__module__), KERNELS}
    while _root(_home(function)) in known:
        if not hasattr(function, "__wrapped__"):
            home = _home(function)
            return home == owner.__module__ or (_root(home) == KERNELS and hasattr(owner, "kernel_layer_name"))
        function = function.__wrapped__
    return False


def _owner(kind: type, name: str) -> type | None:
    """Returns the class that defines a method."""
    return next((base for base in kind.__mro__ if name in vars(base)), None)


def _plain(function: Any) -> Any:
    """Returns the function without `functools.partial` and binding."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _home(function: Callable[..., Any]) -> str:
    """Returns the name of the module with the code of a function or of a callable object."""
    plain = _plain(function)
    return str(plain.__globals__["__name__"] if hasattr(plain, "__globals__") else type(plain).__module__)


def _root(module: str) -> str:
    return module.partition(".")[0]


def _named(function: Any) -> str:
    plain = _plain(function)
    return f"{_home(plain)}.{getattr(plain, '__qualname__', type(plain).__qualname__)}"
