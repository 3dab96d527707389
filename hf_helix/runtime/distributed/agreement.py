"""Agreement: ranks compare texts, batches and actions before a collective depends on equality.

In:   a text (plan, schedule), the batches of a window, the next action of a rank, or a result of a single rank.
Out:  nothing, the same result, or the same error, on every rank of the comparison.
Must hold: ranks never issue mismatched collectives. A rank that waits for an action takes part in calls of the model
that others still make, see `hf_helix.engine.calls`.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.planning.text import first_difference
from hf_helix.runtime.distributed.contents import tensor_numbers, window_number
from hf_helix.runtime.distributed.endings import describe, mark_remote_error
from hf_helix.runtime.distributed.groups import broadcast_object, control_group
from hf_helix.runtime.distributed.mesh import Mesh, forget_meshes, world_size
from hf_helix.runtime.distributed.random_state import random_number

T = TypeVar("T")

NUM_FLAGS = 12
TOGETHER = "every rank must do so; write it without `if trainer.is_world_process_zero():`"

num_meetings = 0  # equal on all ranks between two of their common actions
awaited = ""  # the action that this rank is about to take, while it waits for the others


take_part: Callable[[], object] = bool  # nothing to do
"""Takes part in calls of a model that other ranks make; set by `hf_helix.engine.calls`."""


class Meeting(NamedTuple):
    """What ranks that are each about to take an action know of each other.

    Attributes:
        is_alike: whether the action is the same on every rank.
        has_calls: whether a rank is about to call a model.
        flags: for every flag whether any rank has set it.
        is_random_alike: whether ranks that share a batch have the same random state.
        is_given_alike: whether ranks that share a batch were given the same.
    """

    is_alike: bool
    has_calls: bool
    flags: list[bool]
    is_random_alike: bool
    is_given_alike: bool


def meet(
    what: str, flags: Sequence[bool] = (), is_call: bool = False, mesh: Mesh | None = None, given: int = 0
) -> Meeting:
    """Waits until every rank is about to take an action. Collective: the message has one size for all actions, so ranks
    with different actions find out, and do not communicate by mistake.

    Args:
        what: a clause for the action.
        flags: up to `NUM_FLAGS`, the same count on every rank.
        is_call: whether the action is a call of a model.
        mesh: the mesh with the ranks that share a batch; None for an action without a comparison.
        given: the number of what this rank was given, see `hf_helix.runtime.distributed.contents`.
    """
    global awaited, num_meetings
    num_meetings += 1
    awaited, mark = what + _script_line(), zlib.crc32(what.encode())
    size = 1 if mesh is None else mesh.ranks_per_batch
    compared = [random_number(mesh.device), given] if mesh is not None and size > 1 else [0, 0]
    mine = torch.tensor([size, *compared, mark, -mark, is_call, *flags, *[0] * (NUM_FLAGS - len(flags))])
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(mine, of_ranks, dst=0, group=control_group())  # with a broadcast: fewer turns than an all-reduce
    if of_ranks is not None:
        rows = torch.stack(of_ranks)
        mine = rows.amax(0)
        blocks = rows[:, 1:3].unflatten(0, (-1, int(mine[0])))
        mine[1:3] = (blocks != blocks[:, :1]).flatten(0, 1).any(0)
    dist.broadcast(mine, src=0, group=control_group())
    _, random_differs, given_differs, highest, lowest, has_calls, *shared = mine.tolist()
    marks = [bool(flag) for flag in shared[: len(flags)]]
    return Meeting(highest == -lowest, bool(has_calls), marks, not random_differs, not given_differs)


def agree_on_action(
    what: str, flags: Sequence[bool] = (), mesh: Mesh | None = None, given: Sequence[Any] | None = None
) -> list[bool]:
    """Waits until every rank is about to take the same action. Collective, before any other collective of the action.
    Meanwhile this rank takes part in calls of a model that other ranks make.

    Args:
        what: a clause for the action, such as "trainer.save_model() is called".
        flags: up to `NUM_FLAGS`, the same count on every rank.
        mesh: the mesh whose ranks that share a batch go on with the random state of the first of them; None for an
            action that needs no random numbers.
        given: batches, equal on ranks that share a batch.

    Returns:
        For every flag whether any rank has set it.

    Raises:
        RuntimeError: on every rank, names two of the ranks and their actions.
        ValueError: on every rank, names the tensors that differ.
    """
    global awaited
    if world_size() == 1:
        return list(flags)
    number = int(shared_number(given, mesh)) if given is not None and mesh is not None else 0
    while (meeting := meet(what, flags, False, mesh, number)).has_calls:
        take_part()
    if not meeting.is_alike:
        said = all_gather_object((what, awaited))
        odd = next(rank for rank, (text, _) in enumerate(said) if text != said[0][0])
        forget_meshes()  # on every rank: the action of one may have been watched, the action of another not
        raise RuntimeError(f"{said[0][1]} on rank 0 while {said[odd][1]} on rank {odd}: {TOGETHER}")
    if mesh is not None and not meeting.is_random_alike:
        mesh.share_random_state()
    if mesh is not None and given is not None and not meeting.is_given_alike:
        _name_difference(given, mesh.ranks_per_batch)
    awaited = ""  # after failed communication the text stays, for the error message
    return meeting.flags


def _script_line() -> str:
    """Returns the place in the script, such as " (train.py:31)"; nothing if no file is the script."""
    frame: FrameType | None = sys._getframe()
    script = vars(sys.modules["__main__"])
    while frame is not None and frame.f_globals is not script:
        frame = frame.f_back
    return f" ({Path(script['__file__']).name}:{frame.f_lineno})" if frame is not None and "__file__" in script else ""


def all_gather_object(mine: T, ranks: Sequence[int] | None = None) -> list[T]:
    """Returns the objects of several ranks, on each of them, through the host's memory. Collective over these ranks.

    Args:
        mine: a small object that can be pickled.
        ranks: in the launcher's group; None for all of them.
    """
    if world_size() == 1:
        return [mine]
    if ranks is not None:
        return [broadcast_object(mine, source, ranks) for source in ranks]
    gathered = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine, group=control_group())
    return gathered


def check_same_on_all_ranks(text: str, what: str) -> None:
    """Compares a text over all ranks. Collective.

    Args:
        text: the text of this rank.
        what: a name for the text in the error.

    Raises:
        ValueError: on every rank, names the ranks and the first different line.
    """
    digests = all_gather_object(hashlib.sha256(text.encode()).hexdigest())
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return
    texts = all_gather_object(text)
    raise ValueError(
        f"rank 0 and rank {odd} have different {what}: {first_difference(texts[0], texts[odd])}. "
        "Give every rank the same configuration, model and plan file"
    )


def agree_on_success(error: Exception | None) -> None:
    """Raises on every rank if any has an error. Collective.

    Raises:
        Exception: this rank's own error.
        ValueError: the error of another rank, with its number.
    """
    errors = all_gather_object(error_text(error))
    if error is not None:
        raise error
    failed = next((rank for rank, text in enumerate(errors) if text), None)
    if failed is not None:
        raise remote_error(failed, errors[failed])


def error_text(error: Exception | None) -> str:
    """Returns an error as text, for other ranks; empty for none."""
    return f"{type(error).__name__}: {error}" if error is not None else ""


def remote_error(rank: int, text: str) -> Exception:
    """Returns the error with which this rank follows another one that has failed."""
    return mark_remote_error(ValueError(f"on rank {rank}: {text}"), f"rank {rank} failed: {text}")


def on_all_ranks(step: Callable[[], T]) -> T:
    """Runs a step without communication, and raises on every rank if it fails on any. Collective.

    Raises:
        Exception: see `agree_on_success`.
    """
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(step())
    except Exception as raised:
        error = raised
    agree_on_success(error)
    return result[0]


def decide_on_rank_0(decide: Callable[[], T]) -> T:
    """Returns rank 0's decision on every rank. Collective.

    Raises:
        ValueError: on every rank, as rank 0 has raised it.
        RuntimeError: on the others, for any other error of rank 0.
    """
    if world_size() == 1:
        return decide()
    decision: list[Any] = [None, None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            decision[0] = decide()
        except Exception as raised:
            error = raised
            is_for_users = isinstance(error, ValueError)
            again = ValueError(str(error)) if is_for_users else RuntimeError(f"rank 0 failed: {error!r}")
            decision[1] = mark_remote_error(again, describe(error, 0))
    dist.broadcast_object_list(decision, src=0, group=control_group())
    if decision[1] is not None:
        raise error or decision[1]
    return decision[0]


def exchange_on_rank_0(mine: T, exchange: Callable[[list[T]], list[T]]) -> T:
    """Returns this rank's object of those that rank 0 makes of the objects of all ranks. Collective.

    Raises:
        Exception: see `decide_on_rank_0`.
    """
    if world_size() == 1:
        return exchange([mine])[0]
    is_first, received = dist.get_rank() == 0, [mine]
    objects = [mine] * world_size() if is_first else None
    dist.gather_object(mine, objects, dst=0, group=control_group())

    def decide() -> None:
        nonlocal objects
        objects = exchange(objects or [])

    decide_on_rank_0(decide)
    dist.scatter_object_list(received, objects, src=0, group=control_group())
    return received[0]


def agree_on_window(batches: Sequence[Mapping[str, Any]], group: dist.ProcessGroup | None) -> None:
    """Compares the tensors of a window, and their names, over the ranks that share it. Collective over these ranks.

    Raises:
        ValueError: on every rank of the group, names the tensors that differ.
    """
    if group is None:
        return
    if len({number for (number,) in gather_numbers(window_number(batches)[None], group)}) > 1:
        ranks = dist.get_process_group_ranks(group)
        _name_difference(batches, len(ranks), ranks)


def shared_number(batches: Sequence[Any], mesh: Mesh) -> Tensor:
    """Returns the number of a window that ranks which share batches compare; 0 if every rank has its own batches."""
    return window_number(batches) if mesh.ranks_per_batch > 1 else torch.tensor(0)


def check_windows(batches: Sequence[Any], numbers: Sequence[int], mesh: Mesh) -> None:
    """Compares the tensors of a window by a number of every rank. Collective if they differ.

    Args:
        batches: of this rank.
        numbers: of every rank, see `shared_number`.
        mesh: the mesh with the ranks that share a batch.

    Raises:
        ValueError: on every rank, names the tensors that differ.
    """
    size = mesh.ranks_per_batch
    if any(number != numbers[rank // size * size] for rank, number in enumerate(numbers)):
        _name_difference(batches, size)


def _name_difference(batches: Sequence[Any], size: int, ranks: Sequence[int] | None = None) -> None:
    """Raises the error of ranks that share batches and got different ones.

    Args:
        batches: of this rank.
        size: the number of ranks that share a batch.
        ranks: those that compare; None for all.
    """
    seen = all_gather_object([tensor_numbers(batch) for batch in batches], ranks)
    odd = next(place for place, windows in enumerate(seen) if windows != seen[place // size * size])
    mate = odd // size * size
    windows = [[numbers.items() for numbers in seen[place]] for place in (mate, odd)]
    differing = next(
        one ^ other for one, other in itertools.zip_longest(*windows, fillvalue={}.items()) if one != other
    )
    names = sorted({name for name, _ in differing})
    one, other = (place if ranks is None else ranks[place] for place in (mate, odd))
    raise ValueError(
        f"ranks {one} and {other} share every batch, and got different batches: {', '.join(names)} differ; "
        "shuffle and draw with the same seed on every rank, as TrainingArguments(seed=..., data_seed=...) does, and "
        "leave out split_dataset_by_node and the like, since every rank gets its part of the data from Accelerate"
    )


def agree_on_number(count: int, device: torch.device, states: Tensor | None = None) -> list[list[int]]:
    """Compares the number of micro-batches of a window over all ranks. Collective.

    Args:
        count: of this rank.
        device: of the message.
        states: whole numbers to exchange in the same message, the same count on every rank.

    Returns:
        The states of every rank.

    Raises:
        ValueError: on every rank, if the numbers differ: the dataset of a rank has ended before the others'.
    """
    mine = torch.tensor([count], device=device)
    rows = gather_numbers(mine if states is None else torch.cat((mine, states)))
    counts = [row[0] for row in rows]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the ranks have windows of different length (micro-batches by rank: {counts}): the dataset of some ranks "
            "ends before that of the others. Give every data-parallel rank as many samples, or stop before the "
            "shortest ends with TrainingArguments(max_steps=...)"
        )
    return [row[1:] for row in rows]


def gather_numbers(mine: Tensor, group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Returns the whole numbers of every rank, with a single wait for the device. Collective.

    Args:
        mine: [n] of this rank, on the device of the message.
        group: the ranks; None for all of them.
    """
    if world_size() == 1:
        return [mine.tolist()]
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return torch.stack(gathered).tolist()


def sum_over_ranks(numbers: Sequence[int]) -> list[int]:
    """Returns the sums of whole numbers over all ranks, through the host's memory. Collective."""
    if world_size() == 1:
        return list(numbers)
    total = torch.tensor(numbers, dtype=torch.long)
    dist.all_reduce(total, group=control_group())
    return total.tolist()
