"""ZeRO outside of windows: an optimizer over this rank's shards, and full weights for a while.

In:   an optimizer that has not stepped, made before or after the model was cut; a cut model.
Out:  the same optimizer over this rank's parameters and shards; the same model with full weights on every rank.
Must hold: param groups, their options and their order stay, and so do initial states of optimizers (Adagrad), cut and
sharded as their parameters are. After the context of full weights every sharded value is as before.
"""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_helix.checkpoint.cut_parameters import has_slices
from hf_helix.config import HelixConfig
from hf_helix.models.direct_use import direct_use_allowed
from hf_helix.operators.zero.flat_parameter import FlatParameter
from hf_helix.operators.zero.host_shard import arrived
from hf_helix.operators.zero.zero1 import zero1_flat_parameters
from hf_helix.runtime.distributed.agreement import agree_on_action
from hf_helix.runtime.distributed.mesh import Mesh, world_size
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.executor import issue_copy
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.rank_units import RankUnits
from hf_helix.runtime.streams import Streams


def cut_states(optimizer: Any, rank_units: RankUnits, mesh: Mesh) -> None:
    """Cuts optimizer states of full parameters as the parameters were cut; cut states stay."""
    owners = rank_units.owners
    for parameter, placement in rank_units.all_placements.items():
        axis, states = mesh.axis_of(placement), optimizer.state.get(parameter, {})
        full = placement.full_shape(parameter.shape) if owners[parameter] == rank_units.rank else None
        for key, state in states.items():
            if not isinstance(state, Tensor) or not state.dim():
                continue
            if full is None:
                states[key] = state.new_empty(0)  # as the parameter, which another pipeline rank holds
            elif tuple(state.shape) == full:
                states[key] = placement.cut(state, axis.size, axis.rank)


def step_shards(optimizer: Any, rank_units: RankUnits, streams: Streams) -> None:
    """Replaces sharded parameters by this rank's shards in the param groups of an optimizer, also in later groups.

    The optimizer may be wrapped by Accelerate, and may have the shards already. Where shards lie on the host, a step
    goes by flat parameters, and copies to the device on `streams` run beside it.
    """
    shards, optimizer = rank_units.shards, getattr(optimizer, "optimizer", optimizer)
    if steps_shards(optimizer):  # as at a second `train()`
        return
    if hasattr(optimizer, "check_overrides"):  # bitsandbytes finds options by the parameters of modules
        optimizer.check_overrides()
    on_host = [flat for flat in rank_units.flat_parameters if flat.host is not None and flat.is_trained]
    for name in ("step", "train", "eval"):  # schedule-free optimizers write to weights between modes
        method = getattr(optimizer, name, None)
        if callable(method):
            function = host_threads(rank_units)(plain_parameters()(getattr(method, "__func__", method)))
            if name == "step" and on_host:
                function = HostStep(optimizer, on_host, streams).complete_groups()(function)
            setattr(optimizer, name, MethodType(function, optimizer) if hasattr(method, "__func__") else function)
    optimizer.register_step_post_hook(lambda *_: rank_units.mark_weights_stale())
    optimizer.add_param_group = functools.partial(_add_shards, optimizer.add_param_group, shards)
    for group in optimizer.param_groups:
        group["params"] = [shards.get(parameter, parameter) for parameter in group["params"]]
    counters = {
        key
        for parameter, states in optimizer.state.items()
        for key, state in states.items()
        if parameter.dim() and not getattr(state, "ndim", 0)
    }
    for flat in rank_units.flat_parameters:
        for parameter, shard in flat.shards.items():
            if parameter in optimizer.state:
                states = optimizer.state.pop(parameter).items()
                optimizer.state[shard] = {
                    key: state if key in counters else flat.owned_part(state, parameter) for key, state in states
                }


@contextlib.contextmanager
def host_threads(rank_units: RankUnits) -> Iterator[None]:
    """Returns the context in which torch's work on the host, where shards lie there, takes this rank's share of the
    cores: torchrun gives a process one thread. Also decorates functions."""
    before = torch.get_num_threads()
    if rank_units.host_shards:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(before, cores // int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class HostStep:
    """A step of an optimizer over shards on the host, shard by shard: the shard of a flat parameter waits for its own
    gradients, and its new weights are on their way to the device while the host steps the next; where copies are slower
    than steps, the next window copies the rest, in the order of use. The step itself takes parameters on the device,
    and its hooks run once; the shards follow.

    An optimizer of torch counts the steps of every parameter by itself, so it can be called for a few of them. Others
    step all at once.
    """

    def __init__(self, optimizer: Any, flats: Sequence[FlatParameter], streams: Streams) -> None:
        self._optimizer, self._streams = optimizer, streams
        self._steps_parts = type(optimizer).__module__.startswith("torch.optim.")
        # Weights in the order of their first use. The gradients of the first come last, so its turn is later.
        self._first = flats[0]
        self._flats = [*flats[1:-1], *flats[:1], *flats[1:][-1:]]
        for flat in flats:
            assert flat.host is not None
            flat.host.is_followed = True
        self._groups: list[tuple[dict[str, Any], list[Any]]] = []  # with all of their parameters
        optimizer.register_step_pre_hook(lambda *_: self._begin())
        optimizer.register_step_post_hook(lambda *_: self._end())

    @contextlib.contextmanager
    def complete_groups(self) -> Iterator[None]:
        """Returns the context after which the param groups have all of their parameters, also if a step has failed."""
        try:
            yield
        finally:
            self._complete()

    def _complete(self) -> None:
        for group, parameters in self._groups:
            group["params"] = parameters
        self._groups = []

    def _begin(self) -> None:
        self._complete()
        _fuse(self._optimizer)
        self._groups = [(group, group["params"]) for group in self._optimizer.param_groups]
        on_host = {shard for flat in self._flats for shard in flat.shards.values()}
        if self._steps_parts:
            self._take(lambda parameter: parameter not in on_host)
        else:
            arrived(shard.grad for shard in on_host)

    def _take(self, chosen: Callable[[Any], bool]) -> None:
        """Leaves chosen parameters alone in the param groups."""
        for group, parameters in self._groups:
            group["params"] = [each for each in parameters if chosen(each)]

    def _end(self) -> None:
        step, before = inspect.unwrap(type(self._optimizer).step), None
        for flat in self._flats:
            assert flat.host is not None
            if self._steps_parts:
                shards = set(flat.shards.values())
                self._take(shards.__contains__)
                arrived(shard.grad for shard in shards)
                with torch.no_grad():
                    self._streams.compute(lambda: step(self._optimizer), "gradients.update")
            flat.host.cast()
            if flat is self._first or before is None or self._streams.is_over(before):
                issue_copy(self._streams, flat.host, "gradients.up")
                before = flat.host.copied
        self._complete()


def _fuse(optimizer: Any) -> None:
    """Has an optimizer step in a single pass over the host's memory, where it can and the user has not said otherwise:
    on a CPU, torch's default is a loop over tensors with a pass for each operation."""
    for group in optimizer.param_groups:
        if group.get("fused", False) is None and not group.get("foreach") and not group.get("differentiable"):
            group["fused"] = True


def steps_shards(optimizer: Any) -> bool:
    """Returns whether `step_shards` was called for an optimizer."""
    return getattr(optimizer.add_param_group, "func", None) is _add_shards


def _add_shards(add: Any, shards: Mapping[nn.Parameter, nn.Parameter], param_group: dict[str, Any]) -> None:
    """Calls `add`, the `add_param_group` of an optimizer, with this rank's shards of sharded parameters."""
    given = param_group["params"]
    if not isinstance(given, set):  # the method refuses sets
        given = [given] if isinstance(given, Tensor) else given
        given = [
            (each[0], shards.get(each[1], each[1])) if isinstance(each, tuple) else shards.get(each, each)
            for each in given
        ]
    add({**param_group, "params": given})


# -- full weights ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_weights(model: Any, rank_units: RankUnits, mesh: Mesh, config: HelixConfig) -> Iterator[Any]:
    """Yields the model with full weights, see `Engine.full_weights`."""
    if has_slices(rank_units, mesh):
        sizes = [f"{name}={size}" for name, size in config.option_sizes.items() if size > 1]
        raise ValueError(
            f"full_weights() with {' and '.join(sizes)}: every rank has slices of the model, even with all that "
            "data-parallel ranks have spread; save the model, and load it with from_pretrained(folder)"
        )
    with watched():
        agree_on_action("full_weights() is entered")
    with plain_parameters(), unsharded(rank_units), direct_use_allowed():
        yield model


@contextlib.contextmanager
def unsharded(rank_units: RankUnits) -> Iterator[None]:
    """Returns the context in which every rank has the full weights that replicas shard. Collective."""
    with plain_parameters():
        for flat in rank_units.flat_parameters:
            flat.check_resharded()
        # Some full buffers include the shard that ranks step, so writes to their parameters would stay.
        before = {
            flat: flat.shard.clone() for flat in zero1_flat_parameters(rank_units.flat_parameters) if flat.has_shard
        }
        with watched():
            for flat in rank_units.flat_parameters:
                flat.unshard(flat.gather())
    try:
        yield
    finally:
        with plain_parameters():
            for flat in rank_units.flat_parameters:
                flat.reshard()
            for flat, shard in before.items():
                flat.shard.copy_(shard)
            rank_units.mark_weights_stale()
