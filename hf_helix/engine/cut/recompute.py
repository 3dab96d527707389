"""The recomputed layers, by the options of Transformers and of `HelixConfig` together.

In:   training arguments, the option `recompute`, and a model that may have checkpointing switched on.
Out:  a mode for every layer, see `hf_helix.planning.timing.recompute`.
Must hold: no request is dropped: contradictions and options that are not built are refused by name.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_helix.config import OFFLOAD, HelixConfig
from hf_helix.operators.parameters.host_shard import KeptOnHost
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.timing.recompute import FULL, NONE
from hf_helix.runtime.distributed.mesh import Mesh

EVERY = "every_n_layers"
_NAMES = ("activation_checkpointing", "gradient_checkpointing")  # the second is the older name of the first

# Options of `torch.utils.checkpoint` and Transformers that change nothing here.
_WITHOUT_EFFECT: Mapping[str, Sequence[Any]] = {
    "use_reentrant": (True, False),  # there is no checkpoint function: operators run again by themselves
    "preserve_rng_state": (True,),
    "offload": (False,),
}


def asked_by(args: Any) -> dict[str, Any] | None:
    """Returns the options of activation checkpointing, if training arguments ask for it under either of its names."""
    for name in _NAMES:
        if getattr(args, name, None):
            return dict(getattr(args, f"{name}_kwargs", None) or {})
    return None


def problems_of(args: Any, config: HelixConfig) -> list[str]:
    """Returns the reasons against training arguments, a text each."""
    given = asked_by(args)
    if given is None:
        return []
    name = next(name for name in _NAMES if getattr(args, name, None))
    problems = []
    if config.recompute == NONE:
        problems.append(
            f"{name}=True: use {name}=False, or leave out recompute='none' of HelixConfig, which contradicts it"
        )
    problems += [f"{name}_kwargs={given!r}: use {name}_kwargs=None: {why}" for why in _problems_of_options(given)]
    return problems


def modes_of(layers: Sequence[nn.Module], given: Mapping[str, Any] | None, config: HelixConfig) -> list[str]:
    """Returns the recompute mode of every layer.

    Args:
        layers: the decoder layers, marked by `model.gradient_checkpointing_enable()`.
        given: the options of activation checkpointing, see `asked_by`; None without a request.
        config: the options of the run.

    Raises:
        ValueError: checkpointing of the model contradicts the configuration, or is not built.
    """
    marked = [bool(getattr(layer, "gradient_checkpointing", False)) for layer in layers]
    if given is not None:
        every = int(given.get(EVERY, 1))
        marked = [place % every == 0 for place in range(len(layers))]
    elif any(marked):
        _check_marks(layers, config)
    elif config.recompute is not None:
        marked = [True] * len(layers)
    return [(config.recompute or FULL) if mark else NONE for mark in marked]


def recompute_units(units: Sequence[Unit], modes: Sequence[str], mesh: Mesh) -> list[Unit]:
    """Returns the units of a model with every layer recomputed by its mode; `mesh` has the device and its host.

    Where modes differ, recomputed layers get a name of their own, since units of the same name have equal graphs.
    """
    left, on_host = iter(modes), KeptOnHost(mesh.host_link, mesh.device)
    suffix = "_again" if len(set(modes)) > 1 else ""
    return [
        unit.recomputed(mode := next(left), suffix, on_host if mode == OFFLOAD else None)
        if unit.graphs.forward.repeats
        else unit
        for unit in units
    ]


def _check_marks(layers: Sequence[nn.Module], config: HelixConfig) -> None:
    how = "gradient checkpointing was switched on in the model (model.gradient_checkpointing_enable())"
    if config.recompute == NONE:
        raise ValueError(f"{how}, and recompute='none' contradicts it; use recompute=None, or do not switch it on")
    for layer in layers:
        function = getattr(layer, "_gradient_checkpointing_func", checkpoint)
        options = dict(function.keywords) if isinstance(function, partial) else {}
        plain = (function.func if isinstance(function, partial) else function) is checkpoint
        problems = _problems_of_options(options) if plain else ["its function is not torch's checkpoint"]
        if problems:
            raise ValueError(
                f"{how} in a way that is not built: {'; '.join(problems)}; leave it out and use "
                "TrainingArguments(gradient_checkpointing=True)"
            )


def _problems_of_options(given: Mapping[str, Any]) -> list[str]:
    every = given.get(EVERY, 1)
    problems = []
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        problems.append(f"{EVERY} must be a whole number of at least 1, got {every!r}")
    for key, value in given.items():
        if key != EVERY and value not in _WITHOUT_EFFECT.get(key, ()):
            problems.append(
                f"{key}={value!r} is not built: operators run again by themselves, with the same random numbers; give "
                f"{EVERY} and use_reentrant only"
            )
    return problems
