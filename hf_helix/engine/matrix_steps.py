"""The step of an optimizer that reads whole matrices (Muon, Adafactor, GaLore), in layouts that divide them.

In:   an optimizer over this rank's slices and shards, whose class steps a parameter by the full value and gradient.
Out:  the step of the class itself: each parameter on one rank, whole; new values in the slices and shards of all.
Must hold: the optimizer, its groups and its states keep the same parameters as keys. During a step, a parameter that
this rank steps has its full shape, and all others have no gradient. States are on the rank that steps their
parameter, and in checkpoints they are states of the full parameter, so any layout reads them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_helix.checkpoint.training_state import entry_of, named_states
from hf_helix.engine.optimizer_shards import PlainStep
from hf_helix.operators.torch_functions import map_tensors
from hf_helix.planning.parameters import Part
from hf_helix.runtime.distributed.agreement import agree_on_action, all_gather_object
from hf_helix.runtime.distributed.groups import control_group
from hf_helix.runtime.distributed.mesh import Mesh, world_size
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.streams.streams import Streams
from hf_helix.runtime.whole_matrices import Exchange, Holding, Member, Whole, assign, rounds_of

Parts = Mapping[nn.Parameter, Part]

_MATRIX_STEP = "matrix_step_of_helix"


class MatrixStep:
    """The step of an optimizer by whole parameters, each on one rank.

    Args:
        optimizer: over this rank's slices and shards. It may have states of full parameters.
        parts: of the parameters that this rank steps, by these, see `RankUnits.parts`.
        mesh: the layout of the ranks.
        streams: of the transfers.
    """

    def __init__(self, optimizer: Any, parts: Parts, mesh: Mesh, streams: Streams) -> None:
        self._optimizer, self._parts, self._mesh, self._streams = optimizer, parts, mesh, streams
        self._members: dict[str, Member] = {}
        self._gradients: dict[Tensor, Tensor] = {}  # of all parameters, during a step
        self._held: dict[nn.Parameter, Tensor] = {}  # of parameters that are whole now, this rank's elements
        self._rounds: list[list[Member]] = []
        self._num_assigned = 0
        self._plain_step = PlainStep.of(optimizer)

    @classmethod
    def install(cls, optimizer: Any, parts: Parts, mesh: Mesh, streams: Streams) -> None:
        """Has an optimizer step whole parameters, if ranks hold parts of them. Collective."""
        made = cls(optimizer, parts, mesh, streams)
        made._assign()
        if made._divides:
            vars(optimizer)[_MATRIX_STEP] = made
            made._keep_own_states()
            made._plain_step.at_begin(made._begin)
            made._plain_step.at_end(made._end)
            made._plain_step.at_close(made._restore)

    @classmethod
    def of(cls, optimizer: Any) -> MatrixStep | None:
        """Returns the one of an optimizer; None if the optimizer steps this rank's elements."""
        return vars(optimizer).get(_MATRIX_STEP)

    @functools.cached_property
    def _exchange(self) -> Exchange:
        return Exchange(self._mesh.all_ranks, self._mesh.device, self._streams)

    # -- the assignment ------------------------------------------------------------------------------------------

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _assign(self) -> None:
        """Assigns new parameters of the optimizer to ranks. Collective."""
        self._num_assigned = len(self._parameters)
        mine = {self._parts[each].row.name: each for each in self._parameters if each in self._parts}
        held = {name: Holding.of(self._parts[each]) for name, each in mine.items()}
        of_ranks = all_gather_object(held)
        names = dict.fromkeys(name for holdings in of_ranks for name in holdings)
        known = {name: member.whole for name, member in self._members.items()}
        wholes = assign({name: [holdings.get(name) for holdings in of_ranks] for name in names}, known)
        self._divides = any(not each.is_full for holdings in of_ranks for each in holdings.values())
        for name, whole in wholes.items():
            if name in mine:
                self._members[name] = Member(whole, mine[name], self._parts[mine[name]], held[name].is_full)
            else:  # of another pipeline rank
                self._members[name] = Member(whole, nn.Parameter(torch.empty(0)))

    def _is_mine(self, whole: Whole) -> bool:
        return whole.rank == self._exchange.rank

    def _keep_own_states(self) -> None:
        """Drops the states of parameters that other ranks step."""
        for member in self._members.values():
            if not self._is_mine(member.whole):
                self._optimizer.state.pop(member.parameter, None)

    # -- a step --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Makes the parameters of the first round whole. The class itself then steps these."""
        if self._plain_step.has_closure:
            raise ValueError(
                f"step(closure) of {type(self._optimizer).__name__}: it reads whole matrices, whose gradients are "
                "gathered before the step; call the closure, and then step() without it"
            )
        with watched(), self._streams.window():
            self._meet()
            self._options = _Options(self._optimizer)
            self._next = self._gather(0)
            self._make_whole(0)

    def _end(self) -> None:
        """Steps the other rounds. Each round's new values, and the gradients of the round after the next, travel while
        the class steps the next."""
        step = type(self._optimizer).step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        with watched(), self._streams.window(), torch.no_grad():
            finish = None
            for number in range(len(self._rounds)):
                if number:
                    self._make_whole(number)
                    if any(self._is_mine(member.whole) for member in self._rounds[number]):
                        self._options.restore()
                        self._streams.compute(lambda: step(self._optimizer), "gradients.update")
                scattered = self._scatter(number)
                if finish is not None:
                    finish()
                finish = scattered
            if finish is not None:
                finish()
        self._restore()

    def _meet(self) -> None:
        """Finds the rounds of parameters with a gradient on any rank, and takes the gradients aside. Collective."""
        is_new = len(self._parameters) != self._num_assigned
        if any(agree_on_action("an optimizer takes a step", [is_new])):
            self._assign()
        members = list(self._members.values())
        has_gradient = torch.tensor([member.parameter.grad is not None for member in members], dtype=torch.uint8)
        if world_size() > 1:
            dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=control_group())
        taken = [each for each, has in zip(members, has_gradient.tolist(), strict=True) if has]
        for member in taken:
            if member.parameter.grad is not None:
                self._gradients[member.parameter] = member.parameter.grad
                member.parameter.grad = None
        numbers = rounds_of((number, member.whole) for number, member in enumerate(taken))
        self._rounds = [[taken[number] for number in numbers_of_round] for numbers_of_round in numbers]

    def _gather(self, number: int) -> Any:
        return self._exchange.gather(self._rounds[number], self._gradients) if number < len(self._rounds) else None

    def _make_whole(self, number: int) -> None:
        """Gives the parameters of a round that this rank steps their full values and gradients."""
        if number >= len(self._rounds):
            return
        arrived, self._next = self._next, self._gather(number + 1)
        members = self._rounds[number]
        full = self._exchange.full(members, self._gradients, arrived())
        for member in members:
            parameter = member.parameter
            if parameter in full:
                self._held[parameter] = parameter.detach()
                parameter.data, parameter.grad = full[parameter]
                self._move_states(parameter, self._mesh.device)
            elif self._is_mine(member.whole):
                parameter.grad = self._gradients[parameter]

    def _scatter(self, number: int) -> Any:
        """Starts to send the new values of a round; its parameters are parts again."""
        members = self._rounds[number]
        full = {each.parameter: each.parameter.detach() for each in members if self._is_mine(each.whole)}
        for member in members:
            member.parameter.grad = None
        self._make_parts()
        return self._exchange.scatter(members, full)

    def _make_parts(self) -> None:
        for parameter, held in self._held.items():
            parameter.grad = None
            parameter.data = held
            self._move_states(parameter, held.device)
        self._held.clear()

    def _restore(self) -> None:
        """Leaves every parameter and gradient as before the step, also after an error."""
        self._make_parts()
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._gradients.clear()
        self._rounds = []

    def _move_states(self, parameter: nn.Parameter, device: torch.device) -> None:
        """Moves the states of a parameter, which lie with its elements (`offload`), to the device of a step."""
        if parameter not in self._optimizer.state or self._held[parameter].device == self._mesh.device:
            return
        move = lambda state: state.to(device) if state.dim() else state  # noqa: E731
        states = named_states(self._optimizer.state[parameter])
        self._optimizer.state[parameter] = entry_of(map_tensors(dict(states), move))

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_shapes(self) -> Iterator[Parts]:
        """Yields the parameters that this rank steps, as full parameters; they have full shapes in the context, and no
        values."""
        mine = [each for each in self._members.values() if each.part is not None and self._is_mine(each.whole)]
        parts = {each.parameter: each.part.full for each in mine if each.part is not None}
        before = {each.parameter: (each.parameter.detach(), each.parameter.grad) for each in mine if not each.is_full}
        try:
            for member in mine:
                if not member.is_full:
                    parameter = member.parameter
                    parameter.grad, parameter.data = None, parameter.new_zeros(()).expand(member.whole.shape)
            yield parts
        finally:
            for parameter, (held, gradient) in before.items():
                parameter.data, parameter.grad = held, gradient


class _Options:
    """The plain values in the groups, attributes and state of an optimizer before a step. A class that counts its
    steps there counts them once, also if its step is called for a few parameters at a time."""

    def __init__(self, optimizer: Any) -> None:
        self._places: Sequence[dict[Any, Any]] = [*optimizer.param_groups, vars(optimizer), optimizer.state]
        self._before = [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in place.items()}
            for place in self._places
        ]

    def restore(self) -> None:
        """Sets the values again, and removes those that a step has added."""
        for place, before in zip(self._places, self._before, strict=True):
            for key, value in list(place.items()):
                if key not in before:
                    if isinstance(value, _PLAIN):
                        del place[key]
                elif isinstance(value, Tensor) and isinstance(before[key], Tensor):
                    value.copy_(before[key])
                elif isinstance(before[key], _PLAIN):
                    place[key] = before[key]


_PLAIN = (int, float, str, tuple, Tensor, type(None))
