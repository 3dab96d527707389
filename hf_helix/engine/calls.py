"""Calls of a cut model by a script: every rank gets the answers to its own arguments, as from a full model.

In:   calls of the model, of its `generate` and of its decoder, by any of the ranks, with any arguments.
Out:  the results of the full model, on the rank that calls.
Must hold: a call with the same arguments on every rank runs once. Otherwise the ranks take turns: those that share a
batch run each other's calls, and ranks without a call take part until every rank has reached the same action.

    rank 0            rank 1
    generate(a)       generate(b)       both run a, then b; rank 0 keeps a's tokens, rank 1 keeps b's
    generate(c)       gather_object     both run c; rank 1 takes part while it waits for rank 0
    gather_object

A rank waits in `agree_on_action`, before whatever ranks do together, and before the script's own collectives.
"""

import contextlib
import functools
import inspect
import io
import itertools
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_helix.engine.call_state import CallState
from hf_helix.models.direct_use import is_direct_use_allowed
from hf_helix.runtime.distributed import agreement
from hf_helix.runtime.distributed.agreement import agree_on_action, all_gather_object, error_text, meet
from hf_helix.runtime.distributed.contents import arguments_number
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.distributed.random_state import State, read_random, write_random
from hf_helix.runtime.divided import full_parameters, is_recording, is_running_model_code
from hf_helix.runtime.failures.heartbeat import watched

STREAMER = "streamer"
"""The argument of `generate` that stays on its rank: it shows tokens, and changes none."""

SYNCED = "synced_gpus"
"""The argument of `generate` for weights that are gathered token by token; here they are gathered for all tokens."""


class Request(NamedTuple):
    """A call of one rank, for the others.

    Attributes:
        model: the number of the model, see `Calls`.
        name: of the function that is called.
        number: of the arguments; equal on ranks that share a batch if their arguments are equal.
        content: the pickled arguments, and the state of the model, see `CallState`.
        random: the random state of the rank.
        unsent: the argument that other ranks cannot get; empty if they can get all.
    """

    model: int
    name: str
    number: int
    content: bytes
    random: State
    unsent: str


class Calls:
    """The calls of a cut model. Made on every rank together.

    Args:
        model: the cut model.
        mesh: the layout of the ranks.
        running: the context in which the model's own code runs over this rank's slices. Collective.
        are_shared: whether several ranks run a call together.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, running: Callable[[], AbstractContextManager[object]], are_shared: bool
    ) -> None:
        self.number, self.are_shared = max(all_gather_object(next(_numbers))), are_shared
        self._state, self._mesh, self._running = CallState(model, mesh.device), mesh, running
        self._functions: dict[str, Callable[..., Any]] = {}
        _known[self.number] = self
        if are_shared and world_size() > 1:
            agreement.take_part = take_turns
            _meet_in_script()

    def run(
        self, name: str, stock: Callable[..., Any], args: Any, kwargs: Any, alike: Callable[..., Any] | None = None
    ) -> Any:
        """Returns the result of a function of the model on this rank. Collective.

        Args:
            name: of the function, on every rank the same.
            stock: the function, which runs the model's own code.
            args, kwargs: its arguments.
            alike: runs calls that are alike on all ranks that share a batch; None for `stock` in the context.
        """
        if is_running_model_code():
            return stock(*args, **kwargs)
        if not self.are_shared or is_direct_use_allowed():
            return (alike or stock)(*args, **kwargs)
        if kwargs.get(SYNCED):
            kwargs = {**kwargs, SYNCED: False}
        mesh, shown = self._mesh, {key: value for key, value in kwargs.items() if key != STREAMER}
        number = arguments_number([args, shown, self._state.compared()]) if mesh.ranks_per_batch > 1 else 0
        with watched():
            what = "generate() is called" if name == "generate" else "the model is called without gradients"
            meeting = meet(f"{what} (model {self.number})", (), True, mesh, number) if world_size() > 1 else None
        if meeting is not None and not (meeting.is_alike and meeting.is_given_alike):
            mine = self._request(name, number, args, shown)
            return take_turns(mine, functools.partial(stock, *args, **kwargs))
        agreement.awaited = ""
        if meeting is not None and not meeting.is_random_alike:
            mesh.share_random_state()
        with together() if alike is not None else self._running():
            return (alike or stock)(*args, **kwargs)

    def _request(self, name: str, number: int, args: Any, kwargs: Mapping[str, Any]) -> Request:
        """Returns a call of this rank for the others."""
        content, unsent = _pickled([args, kwargs, self._state.all()]), ""
        if content is None:
            named = {**{f"argument {place}": each for place, each in enumerate(args)}, **kwargs}
            unsent = next((each for each, value in named.items() if _pickled(value) is None), name)
        return Request(self.number, name, number, content or b"", read_random(self._mesh.device), unsent)

    def merged(self) -> dict[str, list[str]]:
        """Returns the merged adapters of this rank's model."""
        return self._state.merged()

    def take_turns(self, asked: Sequence[Request | None], mine: Request | None, call: Callable[[], Any] | None) -> Any:
        """Runs the calls of the ranks that share this rank's batch; returns the result of this rank's own. Collective.

        Args:
            asked: the calls of all ranks.
            mine: the call of this rank, if it calls this model.
            call: runs it.
        """
        device, first = self._mesh.device, rank() // self._mesh.ranks_per_batch * self._mesh.ranks_per_batch
        calls = [each if each is not None and each.model == self.number else None for each in asked]
        here = [each for each in calls[first : first + self._mesh.ranks_per_batch] if each is not None]
        if self._mesh.sizes["ep"] > 1:  # ranks with other batches hold other experts, and gather them all
            here = here or [each for each in calls if each is not None][:1]
        result: Any = None
        own: Exception | None = None
        texts = []
        turns: dict[tuple[str, int], Request] = {}
        for each in here:
            turns.setdefault((each.name, each.number), each)
        with self._running():
            for key, request in turns.items():
                is_mine, error = mine is not None and (mine.name, mine.number) == key, None
                try:
                    if is_mine and call is not None:
                        write_random(request.random, device)
                        result = call()
                    else:
                        self._run_for_another(request)
                except Exception as raised:
                    error = raised
                own = error if is_mine else own
                texts.append(error_text(error))
        self._check_errors(all_gather_object(texts))
        if own is not None:
            raise own
        return result

    def _check_errors(self, of_ranks: Sequence[Sequence[str]]) -> None:
        """Raises RuntimeError on every rank if a call failed on some of the ranks that ran it: then the fault is not in
        its arguments, of which the rank with the call raises an error.

        Args:
            of_ranks: for every rank and every call that it ran the error; empty without one.
        """
        size = self._mesh.ranks_per_batch
        for first in range(0, len(of_ranks), size):
            for texts in zip(*of_ranks[first : first + size], strict=True):
                failed = [(first + place, text) for place, text in enumerate(texts) if text]
                if 0 < len(failed) < size:
                    place, text = failed[0]
                    raise RuntimeError(
                        f"a call of the model that ranks run together failed on rank {place} only: {text}"
                    )

    def _run_for_another(self, request: Request) -> None:
        """Runs a call of another rank, in the state of that rank."""
        device, before = self._mesh.device, read_random(self._mesh.device)
        args, kwargs, state = pickle.loads(request.content)
        with self._state.taken_over(state), torch.no_grad():
            write_random(request.random, device)
            try:
                self._functions[request.name](*args, **kwargs)
            finally:
                write_random(before, device)

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """Names a function of the model, so that ranks can run it for others before they call it themselves."""
        self._functions[name] = function


_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, Calls] = weakref.WeakValueDictionary()


def take_turns(mine: Request | None = None, call: Callable[[], Any] | None = None) -> Any:
    """Runs the calls of all ranks, each on the ranks that share its batch; returns the result of this rank's own.
    Collective over all ranks, of which some have no call.

    Args:
        mine: the call of this rank, if any.
        call: runs it.

    Raises:
        ValueError: on every rank, names an argument that other ranks cannot get.
    """
    with watched(), full_parameters():
        of_ranks = all_gather_object((mine, {number: calls.merged() for number, calls in _known.items()}))
        asked = [request for request, _ in of_ranks]
        _refuse_unsent(asked)
        _refuse_merged(asked, [merged for _, merged in of_ranks])
        agreement.awaited = ""
        result = None
        for number in sorted({each.model for each in asked if each is not None}):
            is_mine = mine is not None and mine.model == number
            outcome = _known[number].take_turns(asked, *((mine, call) if is_mine else (None, None)))
            result = outcome if is_mine else result
    return result


def _refuse_unsent(asked: Sequence[Request | None]) -> None:
    for place, each in enumerate(asked):
        if each is not None and each.unsent:
            raise ValueError(
                f"rank {place} calls the model ({each.name}) with other arguments than the ranks that hold the rest of "
                f"the model, so they run the call for each other, and {each.unsent} cannot be handed to them (it "
                "cannot be pickled): give every rank the same arguments, or use a function of a module for it"
            )


def _refuse_merged(asked: Sequence[Request | None], of_ranks: Sequence[Mapping[int, Mapping[str, Any]]]) -> None:
    """Refuses calls of a model whose adapters are merged into the weights on some ranks."""
    for model in {each.model for each in asked if each is not None}:
        merged = [of_rank.get(model) for of_rank in of_ranks]
        other = next((place for place, each in enumerate(merged) if each != merged[0]), None)
        if other is not None:
            raise ValueError(
                f"the model is called while its adapters are merged on rank {other if merged[other] else 0} only, and "
                "other ranks hold the rest of its weights: merge on every rank, as in model.merge_adapter() without "
                "`if trainer.is_world_process_zero():`"
            )


# -- together -------------------------------------------------------------------------------------------------------

_num_together = 0


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Returns the context in which every rank that shares a batch calls the model alike: in a step, in an evaluation,
    and inside of a call. The decoder compares its arguments."""
    global _num_together
    _num_together += 1
    try:
        yield
    finally:
        _num_together -= 1


def is_together() -> bool:
    """Returns whether ranks call the model alike, see `together`."""
    return _num_together > 0 or is_recording() or is_running_model_code()


# -- arguments for other ranks --------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Writes tensors by their bytes: a view would take its whole storage along, and a device its number."""

    def reducer_override(self, value: Any) -> Any:
        """Returns how a tensor is made anew; other values are written as usual."""
        if type(value) is not Tensor or value.device.type == "meta":
            return NotImplemented
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (content, value.dtype, tuple(value.shape), value.device.type)


def _tensor(content: bytes, dtype: torch.dtype, shape: Sequence[int], device: str) -> Tensor:
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.view(shape).to(device)


def _pickled(value: Any) -> bytes | None:
    """Returns a value for other ranks; None if it cannot be pickled."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RecursionError):
        return None
    return buffer.getvalue()


# -- collectives of the script ---------------------------------------------------------------------------------------

_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
)
_CARRIERS = "torch.", "accelerate.", "contextlib", "functools"
_OF_LIBRARY = "hf_helix.", "transformers.trainer"


def _meet_in_script() -> None:
    """Makes functions of `torch.distributed` wait for the calls of other ranks, if a script calls them, perhaps by
    way of Accelerate."""
    for name in _COLLECTIVES:
        stock = getattr(dist, name, None)
        if stock is not None and not hasattr(stock, "waits_for_calls"):
            setattr(dist, name, _waiting(name, stock))


def _waiting(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def collective(*args: Any, **kwargs: Any) -> Any:
        is_inside = is_recording() or is_running_model_code()
        if not is_inside and _is_of_script(sys._getframe(1)) and _is_over_all(stock, args, kwargs):
            with watched():
                agree_on_action(f"torch.distributed.{name}() is called")
        return stock(*args, **kwargs)

    collective.waits_for_calls = True  # type: ignore[attr-defined]
    return collective


def _is_of_script(frame: FrameType | None) -> bool:
    """Returns whether a frame is of a script, or of a library that a script calls."""
    while frame is not None and _module_of(frame).startswith(_CARRIERS):
        frame = frame.f_back
    is_main = threading.current_thread() is threading.main_thread()
    return frame is not None and is_main and not _module_of(frame).startswith(_OF_LIBRARY)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_over_all(stock: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a collective is one of all ranks."""
    try:
        given = inspect.signature(stock).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return False
    group = given.get("group")
    return world_size() > 1 and (group is None or group is dist.group.WORLD)
