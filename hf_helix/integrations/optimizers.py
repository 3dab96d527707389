"""The granularity of optimizers, checks for cut parameters, and the hand-over of parameters at a first step.

In:   a configuration, and the optimizer of a Trainer or of a loop.
Out:  nothing, or an error with the optimizer, the reason and an alternative.
Must hold: an accepted optimizer updates a slice as the optimizer would update the slice inside the full parameter; of
blocks, which begin anew with each slice, up to the rounding of the states.
"""

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Adafactor, Trainer

from hf_helix.config import HelixConfig
from hf_helix.engine.engine import Engine
from hf_helix.engine.optimizer_shards import steps_shards
from hf_helix.runtime.divided import plain_parameters

ELEMENT, BLOCK, MATRIX, MODEL = GRANULARITIES = ("element", "block", "matrix", "model")
"""What an optimizer reads to update an element: the element alone; the elements of a block with a common scale, as of
states in 8 bits, which as little as kernels for devices alone can step on the host; a matrix; more than a matrix, or
unknown. A class says so by the attribute `granularity`."""

NAMES = {
    ELEMENT: "adamw_torch adamw_torch_fused sgd adagrad rmsprop schedule_free_adamw schedule_free_sgd "
    "schedule_free_radam adamw_anyprecision",
    BLOCK: "adamw_8bit adamw_bnb_8bit adamw_torch_4bit adamw_torch_8bit adamw_torch_npu_fused adamw_torch_xla ademamix "
    "ademamix_8bit lion_32bit lion_8bit paged_adamw_32bit paged_adamw_8bit paged_ademamix_32bit paged_ademamix_8bit "
    "paged_lion_32bit paged_lion_8bit rmsprop_bnb rmsprop_bnb_32bit rmsprop_bnb_8bit",
    MATRIX: "adafactor apollo_adamw galore_adafactor galore_adamw galore_adamw_8bit stable_adamw",
}
"""Values of `TrainingArguments.optim` by granularity; all others are of `MODEL`."""

ELEMENTWISE_CLASSES = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
)

_ELEMENTWISE_NAMES = ", ".join(kind.__name__ for kind in ELEMENTWISE_CLASSES)

MATRIXWISE_CLASSES = (torch.optim.Adafactor, torch.optim.Muon, Adafactor)

LIBRARIES = {
    "apollo_torch": MATRIX,
    "bitsandbytes": BLOCK,
    "galore_torch": MATRIX,
    "optimi": MATRIX,
    "schedulefree": ELEMENT,
    "torchao": BLOCK,
}
"""The granularity of the optimizers of a package."""

LAYERWISE = ("LAMB", "LARS", "PytorchLARS")
"""Optimizers of bitsandbytes that scale the step of a matrix by its norm."""

# Optimizers that step inside autograd's backward, which here runs operator by operator.
FUSED_OPTIMIZERS = (
    "lomo",
    "adalomo",
    "galore_adamw_layerwise",
    "galore_adamw_8bit_layerwise",
    "galore_adafactor_layerwise",
    "apollo_adamw_layerwise",
)


def granularity_of(kind: Any) -> str:
    """Returns the granularity of an optimizer's class. Raises ValueError for an unknown attribute `granularity`."""
    given = getattr(kind, "granularity", None)
    if given is not None:
        if given not in GRANULARITIES:
            raise ValueError(f"{kind.__name__}.granularity={given!r} is unknown; use one of {', '.join(GRANULARITIES)}")
        return str(given)
    for each in getattr(kind, "__mro__", ()):
        if each in ELEMENTWISE_CLASSES:
            return ELEMENT
        if each in MATRIXWISE_CLASSES or each.__name__.startswith(LAYERWISE):
            return MATRIX
        library = each.__module__.partition(".")[0]
        if library in LIBRARIES:
            return LIBRARIES[library]
    return MODEL


def cuts_of(config: HelixConfig, granularity: str = MODEL) -> str:
    """Returns the reason against optimizers of a granularity; empty without a reason."""
    if granularity == ELEMENT:
        return ""
    if config.offload:
        return (
            f"with offload={config.offload!r} the host's cores step the weights, and only optimizers that treat every "
            "element by itself"
        )
    if granularity == BLOCK:
        return ""
    sizes = {"tp_size": config.tp_size, "ep_size": config.ep_size}
    sizes |= {"pp_size": config.pp_size} if granularity == MODEL else {}
    given = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    given += [f"{name}=True" for name in ("shard_optimizer", "shard_parameters") if getattr(config, name)]
    if not given:
        return ""
    reads = "it reads full matrices" if granularity == MATRIX else "it may look at more than single elements"
    return f"{reads}, and with {' and '.join(given)} a rank holds only a part"


def check_trainers_optimizer(trainer: Any) -> None:
    """Refuses an optimizer of a Trainer that reads more than a rank holds."""
    config, given = trainer.helix_config, trainer.optimizer_cls_and_kwargs
    cuts = cuts_of(config)
    makers = [kind for kind in type(trainer).__mro__ if "create_optimizer" in vars(kind)]
    if cuts and any(kind is not Trainer and not kind.__module__.startswith("hf_helix.") for kind in makers):
        raise ValueError(
            f"{type(trainer).__name__} overrides create_optimizer: {cuts}; remove the override, and use "
            f"optimizers=(...) or optimizer_cls_and_kwargs=(...) with one of {_ELEMENTWISE_NAMES}"
        )
    if given:
        _check_optimizer_class("optimizer_cls_and_kwargs", given[0], config)
    if trainer.optimizer is not None:
        _check_new_optimizer("optimizers", trainer.optimizer, config)


def _check_optimizer_class(option: str, kind: Any, config: HelixConfig) -> None:
    cuts = cuts_of(config, granularity_of(kind))
    if cuts:
        raise ValueError(
            f"{option}=({getattr(kind, '__name__', kind)}, ...): {cuts}; use one of {_ELEMENTWISE_NAMES}, or say "
            "`granularity = 'element'` in the class if it treats every element by itself ('block': blocks of elements, "
            "'matrix': matrices, for pp_size alone)"
        )


def _check_new_optimizer(option: str, optimizer: Any, config: HelixConfig) -> None:
    """Refuses an optimizer whose states cannot be cut with the model."""
    name = type(optimizer).__name__
    _check_optimizer_class(option, type(optimizer), config)
    if not cuts_of(config):
        return
    states = [states for states in optimizer.state.values() if states]
    if any(getattr(state, "is_meta", False) for each in states for state in each.values()):
        raise ValueError(
            f"{option}=({name}, ...) starts with states, which are on the meta device with the model and have no "
            "values; make the model with from_pretrained(folder), or use an optimizer that starts without, such as "
            "AdamW"
        )
    # Some optimizers (Adagrad) have states before their first step; these states are cut with the parameters.
    if any(float(each.get("step", 1)) > 0 for each in states):
        raise ValueError(
            f"{option}=({name}, ...) has taken steps on the whole model, and its averages are not taken over; give a "
            "new one"
        )


def check_optimizer(optimizer: Any, model: Any, config: HelixConfig) -> None:
    """Refuses an optimizer of a loop that cannot continue with a part of the model.

    Args:
        model: the model whose parameters the optimizer must hold; None if the script gives no model.

    Raises:
        ValueError: names optimizers that work.
    """
    _check_new_optimizer("optimizer", optimizer, config)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if model is None or not held <= {id(parameter) for parameter in model.parameters()}:
        raise ValueError(
            f"optimizer=({type(optimizer).__name__}, ...) holds parameters that are not the model's; make it from "
            "model.parameters(), and give both to one call of HelixPlugin.prepare"
        )


class _StepArguments(tuple[Any, ...]):
    """The arguments of an optimizer's step, which hold the context of the step: the context is left when torch lets go
    of the arguments, at the end of the step or of its error. Torch has no hook for a step that fails."""

    context: Any


def watch_steps(engine: Engine) -> None:
    """Hands this rank's shards to every optimizer of the model's parameters at its first step, while the cut model
    lives."""
    rank_units, config = engine.runner.rank_units, engine.config
    owned, alive = {*rank_units.all_placements, *rank_units.shards.values()}, weakref.ref(engine)

    def take_over(optimizer: Any, args: Any, kwargs: Any) -> Any:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owner = alive()
        if owner is not None and not steps_shards(optimizer) and not owned.isdisjoint(held):
            _check_optimizer_class("optimizer", type(optimizer), config)
            owner.step_shards(optimizer)
            args = _StepArguments(args)  # from the next step on, the optimizer enters the context itself
            args.context = plain_parameters()
            args.context.__enter__()
        return args, kwargs

    # The hook refers to the parameters and not to the model, so the model can be freed.
    weakref.finalize(engine, register_optimizer_step_pre_hook(take_over).remove)
