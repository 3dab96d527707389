"""The granularity of optimizers, checks for cut parameters, and the hand-over of parameters at a first step.

In:   a configuration, and the optimizer of a Trainer or of a loop.
Out:  nothing, or an error with the optimizer, the reason and an alternative.
Must hold: an accepted optimizer updates a slice as the optimizer would update the slice inside the full parameter; of
blocks, which begin anew with each slice, up to the rounding of the states. A matrix is stepped whole, on one rank.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import Adafactor, Trainer

from hf_helix.checkpoint.training_state import named_states
from hf_helix.config import HelixConfig
from hf_helix.engine.engine import Engine
from hf_helix.engine.optimizer_shards import PlainStep, steps_shards
from hf_helix.integrations.steps import before_steps
from hf_helix.runtime.distributed.agreement import agree_on_action
from hf_helix.runtime.failures.heartbeat import watched

ELEMENT, BLOCK, MATRIX, MODEL = GRANULARITIES = ("element", "block", "matrix", "model")
"""What an optimizer reads to update an element: the element alone; the elements of a block with a common scale, as of
states in 8 bits, which as little as kernels for devices alone can step on the host; a matrix, or any parameter;
more than a parameter, or unknown. A class says so by the attribute `granularity`."""

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
    "torch_npu": BLOCK,
    "torch_xla": BLOCK,
    "torchao": BLOCK,
    "torchdistx": ELEMENT,
}
"""The granularity of the optimizers of a package."""

STEP_IN_BACKWARD = ("CPUOffloadOptimizer",)
"""Optimizers of these packages with a step inside of backward."""

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


OUTSIDE_OF_STEPS = ("add_param_group", "load_state_dict", "register_state_dict_pre_hook", "state_dict", "zero_grad")
"""Methods that a subclass may override and keep the granularity: no step calls them. Likewise names with two
underscores, such as `__init__`."""

LIBRARIES_THAT_WRAP = ("accelerate", "hf_helix", "torch", "transformers")
"""The packages whose wrappers around a step read no parameter: hooks, profiles, counters of schedulers."""


def granularity_of(optimizer: Any) -> str:
    """Returns the granularity of an optimizer, or of an optimizer's class: as the class itself declares it, or that of
    a known base if the step is the base's. Raises ValueError for an unknown attribute `granularity`."""
    base, own = _base_and_own_methods(optimizer)
    return MODEL if base is None or own else _known_granularity(base) or MODEL


def _base_and_own_methods(optimizer: Any) -> tuple[Any, list[str]]:
    """Returns the nearest base of known granularity, perhaps the class or the optimizer itself, and the methods that
    stand in place of the base's; None without a known base."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    own: list[str] = []
    for holder in (*([] if kind is optimizer else [optimizer]), *kind.__mro__):
        if _known_granularity(holder) is not None:
            is_declared = "granularity" in vars(holder)
            return holder, [] if is_declared and not own else [*_replaced(own, kind, optimizer, holder)]
        own += getattr(holder, "__dict__", {})
    return None, []


def _replaced(names: list[str], kind: type, optimizer: Any, base: Any) -> Iterator[str]:
    """Yields the names of methods whose code is not the base's: overridden below the base, or replaced in it."""
    inside = base if isinstance(base, type) else kind
    for name in dict.fromkeys(["step", *names]):
        known = getattr(inside, name, None)
        if not callable(known) or name in OUTSIDE_OF_STEPS or name.startswith("__"):
            continue
        code, of_base = _code_of(getattr(optimizer, name)), _code_of(known)
        is_patched = "granularity" not in vars(inside) and _package_of(of_base) != inside.__module__.partition(".")[0]
        if code is not of_base or is_patched:
            yield name


def _known_granularity(holder: Any) -> str | None:
    """Returns the granularity that a class declares, or that is known of the class itself; None without either."""
    given = getattr(holder, "__dict__", {}).get("granularity")
    if given is not None:
        if given not in GRANULARITIES:
            name = getattr(holder, "__name__", type(holder).__name__)
            raise ValueError(f"{name}.granularity={given!r} is unknown; use one of {', '.join(GRANULARITIES)}")
        return str(given)
    if not isinstance(holder, type):
        return None
    if holder in ELEMENTWISE_CLASSES:
        return ELEMENT
    if holder in MATRIXWISE_CLASSES or holder.__name__.startswith(LAYERWISE):
        return MATRIX
    library = holder.__module__.partition(".")[0]
    return None if holder.__name__ in STEP_IN_BACKWARD else LIBRARIES.get(library)


def _code_of(function: Any) -> Any:
    """Returns the function inside the wrappers of known libraries."""
    while True:
        function = getattr(function, "__func__", function)
        inner = getattr(function, "__wrapped__", None)
        if inner is None or _package_of(function) not in LIBRARIES_THAT_WRAP:
            return function
        function = inner


def _package_of(function: Any) -> str:
    """Returns the package with a function's code."""
    names: Mapping[str, Any] = getattr(function, "__globals__", {})
    return str(names.get("__name__", "")).partition(".")[0]


def cuts_of(config: HelixConfig, granularity: str = MODEL) -> str:
    """Returns the reason against optimizers of a granularity; empty without a reason."""
    if granularity in (ELEMENT, MATRIX):
        return ""
    if config.offload:
        return (
            f"with offload={config.offload!r} the host's cores step the weights, and only optimizers that treat every "
            "element or every matrix by itself"
        )
    if granularity == BLOCK:
        return ""
    sizes = {"tp_size": config.tp_size, "ep_size": config.ep_size, "pp_size": config.pp_size}
    given = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    given += [f"{name}=True" for name in ("shard_optimizer", "shard_parameters") if getattr(config, name)]
    if not given:
        return ""
    reads = "it may look at more than single elements or matrices"
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


def _check_optimizer_class(option: str, optimizer: Any, config: HelixConfig) -> None:
    """Refuses an optimizer, or a class of optimizers, that reads more than a rank holds."""
    cuts = cuts_of(config, granularity_of(optimizer))
    if not cuts:
        return
    kind = optimizer if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups") else type(optimizer)
    name = getattr(kind, "__name__", str(kind))
    base, own = _base_and_own_methods(optimizer)
    if base is not None and own:
        known = getattr(base, "__name__", type(base).__name__)
        cuts = f"its {own[0]} is not the one of {known}, so {cuts}"
    raise ValueError(
        f"{option}=({name}, ...): {cuts}; use one of {_ELEMENTWISE_NAMES}, or write `granularity = 'element'` into "
        f"class {name} itself if it treats every element by itself ('block': blocks of elements, 'matrix': every "
        "parameter by itself)"
    )


def _check_new_optimizer(option: str, optimizer: Any, config: HelixConfig) -> None:
    """Refuses an optimizer whose states cannot be cut with the model."""
    name = type(optimizer).__name__
    _check_optimizer_class(option, optimizer, config)
    if not cuts_of(config):
        return
    # Entries under other keys than parameters are the optimizer's own business.
    states = [named_states(states) for key, states in optimizer.state.items() if isinstance(key, torch.Tensor)]
    states = [each for each in states if each]
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


def check_made_optimizer(optimizer: Any, config: HelixConfig) -> None:
    """Refuses the optimizer that a Trainer has made, by `optim` or by a method of a class, if it reads more than a rank
    holds."""
    if not type(optimizer).__module__.startswith("accelerate."):  # checked and prepared by an earlier call of `train()`
        _check_optimizer_class("optimizer", optimizer, config)


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


def hand_over(engine: Engine, optimizer: Any) -> None:
    """Hands this rank's parts of the model to an accepted optimizer, also in Accelerate's wrapper. Collective."""
    inside = unwrapped(optimizer)
    engine.weights.step_shards(inside, reads_matrices=granularity_of(inside) == MATRIX)


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def watch_steps(engine: Engine, meets: bool = False) -> None:
    """Hands this rank's shards to every optimizer of the model's parameters at its first step, while the cut model
    lives.

    Args:
        engine: of the cut model.
        meets: whether ranks meet before every step, since one may still call the model.
    """
    rank_units, config = engine.runner.rank_units, engine.config
    owned = {*rank_units.model_rows, *rank_units.shards.values()}

    def take_over(owner: Engine, optimizer: Any, args: Any, kwargs: Any) -> Any:
        is_handed = steps_shards(optimizer)
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if not (is_handed or any(parameter in owned for parameter in held)):
            return args, kwargs
        if meets:
            with watched():
                agree_on_action("optimizer.step() is called")
        if not is_handed:
            _check_optimizer_class("optimizer", optimizer, config)
            hand_over(owner, optimizer)
            args = _StepArguments(args)  # from the next step on, the optimizer enters the context itself
            args.context = PlainStep.of(optimizer).ending()
            args.context.__enter__()
        return args, kwargs

    before_steps(engine, take_over)  # which refers to the parameters and not to the model, so the model can be freed
