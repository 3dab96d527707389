"""An optimizer of the whole model's parameters, on a rank that has a part of them.

In:   an optimizer that has not stepped, made before the model was cut or afterwards.
Out:  the same optimizer, over what this rank steps.
Must hold: groups, their options and the order of what is in them stay, and so do the states that some optimizers start
with (Adagrad), cut and spread as their parameters are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

from torch import Tensor, nn

from hf_helix.checkpoint.shard import has_slices
from hf_helix.models.direct_use import direct_use_allowed
from hf_helix.operators.zero.zero1 import zero1_flat_parameters
from hf_helix.runtime.distributed.agreement import meet
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.stage import Stage


def cut_states(optimizer: Any, stage: Stage, mesh: Mesh) -> None:
    """Cuts states of whole parameters as the parameters were cut. Those that are cut already stay as they are.

    Args:
        optimizer: of the model's parameters.
        stage: what this rank holds of the model, cut.
        mesh: the layout of the ranks.
    """
    owners = stage.owners
    for parameter, placement in stage.all_placements.items():
        axis, states = mesh.axis_of(placement), optimizer.state.get(parameter, {})
        whole = placement.full_shape(parameter.shape) if owners[parameter] == stage.rank else None
        for key, state in states.items():
            if not isinstance(state, Tensor) or not state.dim():
                continue
            if whole is None:
                states[key] = state.new_empty(0)  # as the parameter, which another pipeline rank holds
            elif tuple(state.shape) == whole:
                states[key] = placement.cut(state, axis.size, axis.rank)


def step_shards(optimizer: Any, stage: Stage) -> None:
    """Lets an optimizer step what this rank holds of the parameters, and of those that are spread this rank's parts in
    place of them; also of those that it is given later.

    Args:
        optimizer: of the model's parameters, or of these parts already; also as Accelerate wraps it.
        stage: what this rank holds of the model.
    """
    shards, optimizer = stage.shards, getattr(optimizer, "optimizer", optimizer)
    if steps_shards(optimizer):  # as at a second `train()`
        return
    for name in ("step", "train", "eval"):  # schedule-free optimizers have modes, between which they write to weights
        method = getattr(optimizer, name, None)
        if callable(method):
            function = plain_parameters()(getattr(method, "__func__", method))
            setattr(optimizer, name, MethodType(function, optimizer) if hasattr(method, "__func__") else function)
    optimizer.register_step_post_hook(lambda *_: stage.mark_weights_stale())
    optimizer.add_param_group = functools.partial(_add_shards, optimizer.add_param_group, shards)
    for group in optimizer.param_groups:
        group["params"] = [shards.get(parameter, parameter) for parameter in group["params"]]
    counters = {
        key
        for parameter, states in optimizer.state.items()
        for key, state in states.items()
        if parameter.dim() and not getattr(state, "ndim", 0)
    }
    for flat in stage.flat_parameters:
        for parameter, shard in flat.shards.items():
            if parameter in optimizer.state:
                states = optimizer.state.pop(parameter).items()
                optimizer.state[shard] = {
                    key: state if key in counters else flat.owned_part(state, parameter) for key, state in states
                }


def steps_shards(optimizer: Any) -> bool:
    """Whether `step_shards` has been called for an optimizer."""
    return getattr(optimizer.add_param_group, "func", None) is _add_shards


def _add_shards(add: Any, shards: Mapping[nn.Parameter, nn.Parameter], param_group: dict[str, Any]) -> None:
    """Does what `add_param_group` of an optimizer does, with this rank's parts of the parameters that are spread.

    Args:
        add: the method itself.
        shards: see `Stage.shards`.
        param_group: as for the method: options and `params`, which may come with their names.
    """
    given = param_group["params"]
    if not isinstance(given, set):  # the method refuses sets
        given = [given] if isinstance(given, Tensor) else given
        given = [
            (each[0], shards.get(each[1], each[1])) if isinstance(each, tuple) else shards.get(each, each)
            for each in given
        ]
    add({**param_group, "params": given})


# -- whole weights -------------------------------------------------------------------------------------------------
# All weights in the model for a while, where data-parallel ranks have spread them.
#
# In:   a cut model.
# Out:  the same model as an ordinary one, whose parameters hold their values on every rank.
# Must hold: afterwards everything that ranks have spread is as before; a rank that would have slices of the model
# even
# then gets an error.


@contextlib.contextmanager
def full_weights(model: Any, stage: Stage, mesh: Mesh) -> Iterator[Any]:
    """Returns the context of `Engine.full_weights`.

    Args:
        model: the cut model.
        stage: its units on this rank.
        mesh: the layout of the ranks.

    Yields:
        The model.

    Raises:
        ValueError: this rank has slices of the model even then.
        RuntimeError: it is within such a context already.
    """
    if has_slices(stage, mesh):
        sizes = [f"{name}={size}" for name, size in mesh.option_sizes.items() if size > 1]
        raise ValueError(
            f"full_weights() with {' and '.join(sizes)}: every rank has slices of the model, even with all that "
            "data-parallel ranks have spread; save the model, and load it with from_pretrained(folder)"
        )
    with plain_parameters():
        for flat in stage.flat_parameters:
            flat.check_resharded()
        # Some pieces are what ranks keep and step, so what is written to their parameters would stay.
        before = {
            flat: flat.shard.clone() for flat in zero1_flat_parameters(stage.flat_parameters) if flat.cast_to is None
        }
        with watched():
            meet("full_weights() is entered")
            for flat in stage.flat_parameters:
                flat.unshard(flat.gather())
        try:
            with direct_use_allowed():
                yield model
        finally:
            for flat in stage.flat_parameters:
                flat.reshard()
            for flat, stretch in before.items():
                flat.shard.copy_(stretch)
                flat.mark_stale()
