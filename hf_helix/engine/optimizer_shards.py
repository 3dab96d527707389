"""ZeRO outside of windows: an optimizer over this rank's shards, and full weights for a while.

In:   an optimizer that has not stepped, made before or after the model was cut; a cut model.
Out:  the same optimizer over this rank's parameters and shards; the same model with full weights on every rank.
Must hold: param groups, their options and their order stay, and so do initial states of optimizers (Adagrad), cut and
sharded as their parameters are; the states of a part are quantized if the full parameter's are. Hooks of a step
see full parameters, the step itself this rank's elements. After the context of full weights every sharded value is as
before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_helix.checkpoint.cut_parameters import has_slices
from hf_helix.checkpoint.training_state import entry_of, format_of, named_states
from hf_helix.config import HelixConfig
from hf_helix.models.direct_use import direct_use_allowed
from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.parameters.host_shard import arrived
from hf_helix.operators.parameters.parts import cut_tensor
from hf_helix.operators.zero.zero1 import zero1_flat_parameters
from hf_helix.planning.parameters import Part
from hf_helix.runtime.distributed.agreement import agree_on_action, on_all_ranks
from hf_helix.runtime.distributed.host import usable_cores
from hf_helix.runtime.distributed.mesh import Mesh, ranks_of_host
from hf_helix.runtime.divided import elements_of, full_of, plain_parameters
from hf_helix.runtime.executor import issue_copy
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.rank_units import RankUnits
from hf_helix.runtime.streams.streams import Streams


def cut_states(optimizer: Any, rank_units: RankUnits, mesh: Mesh) -> None:
    """Cuts optimizer states of full parameters as the parameters were cut; cut states stay. States that an optimizer
    has made of divided parameters become this rank's elements."""

    def cut(state: Any, part: Part) -> Any:
        if not isinstance(state, Tensor) or not state.dim():
            return state
        if (elements := elements_of(state)) is not None:
            return elements
        if not part.is_here:
            return state.new_empty(0)  # as the parameter, which another pipeline rank holds
        return cut_tensor(state, part.row.cut, *part.ranks) if tuple(state.shape) == part.row.shape else state

    for parameter, row in rank_units.model_rows.items():
        if parameter in optimizer.state:
            states, part = named_states(optimizer.state[parameter]), Part(row, mesh.place)
            made = {key: cut(state, part) for key, state in states.items()}
            optimizer.state[parameter] = entry_of(made)


def join_states(optimizer: Any) -> None:
    """Joins the states that an optimizer has made of divided parameters; full states stay. Collective."""
    for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
        if parameter in optimizer.state:
            states = named_states(optimizer.state[parameter]).items()
            made = {key: full_of(state) if isinstance(state, Tensor) else state for key, state in states}
            optimizer.state[parameter] = entry_of(made)


def keep_quantization(optimizer: Any, parts: Mapping[nn.Parameter, Part]) -> None:
    """Has an optimizer with quantized states decide by full parameters, of which it has parts. Collective.

    Args:
        optimizer: over this rank's parts.
        parts: of the parameters that this rank steps, by these, see `RankUnits.parts`.

    Raises:
        ValueError: on every rank: a part cannot be quantized as the full parameter.
    """
    form = format_of(optimizer)
    if form is not None:
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        full = {each: (part.row.name, prod(part.row.shape)) for each, part in parts.items() if each in held}
        on_all_ranks(lambda: form.quantize_as_full(full))


def step_shards(optimizer: Any, rank_units: RankUnits, streams: Streams, reads_matrices: bool = False) -> None:
    """Replaces sharded parameters by this rank's shards in the param groups of an optimizer, also in later groups.

    If shards lie on the host, a step goes by flat parameters, and copies to the device on `streams` overlap with it.

    Args:
        optimizer: has not stepped.
        rank_units: the units of this rank.
        streams: of copies.
        reads_matrices: whether the optimizer reads whole matrices, see `MatrixStep`: states stay full.
    """
    shards = rank_units.shards
    if hasattr(optimizer, "check_overrides"):  # bitsandbytes finds options by the parameters of modules
        optimizer.check_overrides()
    trained = [] if reads_matrices else [flat for flat in rank_units.flat_parameters if flat.is_trained]
    on_host = [flat for flat in trained if flat.host is not None]
    plain_step = PlainStep.of(optimizer)
    for name in ("step", "train", "eval"):  # schedule-free optimizers write to weights between modes
        method = getattr(optimizer, name, None)
        if callable(method):
            context = plain_step.ending if name == "step" else plain_parameters
            if name == "step" and on_host:
                HostStep(optimizer, on_host, streams, plain_step)
            function = host_threads(rank_units)(context()(getattr(method, "__func__", method)))
            setattr(optimizer, name, MethodType(function, optimizer) if hasattr(method, "__func__") else function)
    plain_step.at_end(rank_units.mark_weights_stale)
    optimizer.add_param_group = functools.partial(_add_shards, optimizer.add_param_group, shards)
    for group in optimizer.param_groups:
        group["params"] = [shards.get(parameter, parameter) for parameter in group["params"]]
    counters = {
        key
        for parameter, states in optimizer.state.items()
        if isinstance(parameter, Tensor) and parameter.dim()  # others are the optimizer's own entries
        for key, state in named_states(states).items()
        if not getattr(state, "ndim", 0)
    }
    for flat in rank_units.flat_parameters:
        for parameter, shard in flat.shards.items():
            if parameter in optimizer.state:
                states = named_states(optimizer.state.pop(parameter)).items()
                stays = counters if not reads_matrices else dict(states)
                owned = {key: state if key in stays else flat.owned_part(state, parameter) for key, state in states}
                optimizer.state[shard] = entry_of(owned)
    for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
        optimizer.state[key] = optimizer.state.pop(key)  # after parameters, as before: Adagrad reads the first entry


class PlainStep:
    """The part of an optimizer's step between its hooks, in which parameters are ordinary parameters with this rank's
    elements. Hooks that a script has registered run outside, and see full parameters.

    Torch has no context around that part: it begins with the last hook before it, and ends with the first hook after
    it, or with the step, if an error ends the step.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._depth = 0  # above 1 in the step of a base, if a step calls it: torch runs hooks there as well
        self._context: contextlib.AbstractContextManager[None] | None = None
        self.has_closure = False
        self._at_begin: list[Callable[[], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._at_close: list[Callable[[], None]] = []
        self._surround("pre", self._close, self._begin)
        self._surround("post", self._leave, self._return)

    def _surround(self, kind: str, first: Callable[[], None], last: Callable[..., None]) -> None:
        """Registers the first and the last of all hooks before a step (`pre`), or after it (`post`)."""
        name, hooks = REGISTERS_OF_STEPS[kind], getattr(self._optimizer, HOOKS_OF_STEPS[kind])
        register = getattr(self._optimizer, name)
        hooks.move_to_end(register(lambda *_: first()).id, last=False)
        at_end = register(lambda *given: last(*given)).id

        def register_before(hook: Callable[..., Any]) -> Any:
            handle = register(hook)
            hooks.move_to_end(at_end)
            return handle

        setattr(self._optimizer, name, register_before)

    @classmethod
    def of(cls, optimizer: Any) -> PlainStep:
        """Returns the one of an optimizer."""
        known = vars(optimizer).get(_PLAIN_STEP)
        if known is None:
            known = vars(optimizer)[_PLAIN_STEP] = cls(optimizer)
        return known

    def at_begin(self, function: Callable[[], None]) -> None:
        """Adds a function that runs at the begin of every step."""
        self._at_begin.append(function)

    def at_end(self, function: Callable[[], None]) -> None:
        """Adds a function that runs at the end of every step without an error."""
        self._at_end.append(function)

    def at_close(self, function: Callable[[], None]) -> None:
        """Adds a function that runs after every step, also after one with an error."""
        self._at_close.append(function)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Returns a context around a step, at whose end the parameters are as they were before."""
        depth = self._depth
        has_hooks = getattr(type(self._optimizer).step, "hooked", False)
        try:
            if not has_hooks:  # a script has replaced the step of the class
                self._enter()
            yield
            if not has_hooks:
                self._leave()
        finally:
            self._depth = depth
            if not depth:
                for function in self._at_close:
                    function()
                self._close()

    def _begin(self, _: Any, given: Any, named: Mapping[str, Any]) -> None:
        """Begins the part of a step with the arguments of the step: the optimizer, and perhaps a closure."""
        self.has_closure = any(each is not None for each in (*given[1:], *named.values()))
        self._enter()

    def _enter(self) -> None:
        self._depth += 1
        self._open()
        if self._depth == 1:
            for function in self._at_begin:
                function()

    def _leave(self) -> None:
        if self._depth == 1:
            for function in self._at_end:
                function()
        self._close()
        self._depth -= 1

    def _return(self, *_: Any) -> None:
        if self._depth:
            self._open()

    def _open(self) -> None:
        if self._context is None:
            self._context = plain_parameters()
            self._context.__enter__()

    def _close(self) -> None:
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)


REGISTERS_OF_STEPS = {"pre": "register_step_pre_hook", "post": "register_step_post_hook"}
HOOKS_OF_STEPS = {"pre": "_optimizer_step_pre_hooks", "post": "_optimizer_step_post_hooks"}
"""The methods that register hooks of an optimizer before its steps and after them, and the hooks."""

_PLAIN_STEP = "plain_step_of_helix"


@contextlib.contextmanager
def host_threads(rank_units: RankUnits) -> Iterator[None]:
    """Returns the context in which torch's work on the host, if shards lie there, takes this rank's share of the
    cores: torchrun gives a process one thread. Also decorates functions."""
    before = torch.get_num_threads()
    if rank_units.host_shards:
        torch.set_num_threads(max(before, usable_cores() // ranks_of_host()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class HostStep:
    """A step of an optimizer over shards on the host, shard by shard: the shard of a flat parameter waits for its own
    gradients, and its new weights are on their way to the device while the host steps the next; if copies are slower
    than steps, the next window copies the rest, in the order of use. The step itself takes parameters on the device,
    and its hooks run once; the shards follow.

    An optimizer of torch counts the steps of every parameter by itself, so it can be called for a few of them. Others
    step all at once.
    """

    def __init__(self, optimizer: Any, flats: Sequence[FlatParameter], streams: Streams, plain_step: PlainStep) -> None:
        self._optimizer, self._streams = optimizer, streams
        self._steps_parts = type(optimizer).__module__.startswith("torch.optim.")
        # Weights in the order of their first use. The gradients of the first come last, so its turn is later.
        self._first = flats[0]
        self._flats = [*flats[1:-1], *flats[:1], *flats[1:][-1:]]
        for flat in flats:
            assert flat.host is not None
            flat.host.is_followed = True
        self._groups: list[tuple[dict[str, Any], list[Any]]] = []  # with all of their parameters
        plain_step.at_begin(self._begin)
        plain_step.at_end(self._end)
        plain_step.at_close(self._complete)

    def _complete(self) -> None:
        """Gives the param groups all of their parameters."""
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
        """Leaves only chosen parameters in the param groups."""
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
    """Has an optimizer step in a single pass over the host's memory, if it can and the user has not chosen otherwise:
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
