"""Agreement: ranks compare texts, batches and actions before a collective depends on equality.

In:   a text (plan, schedule), the batches of a window, the next action of a rank, or a result of a single rank.
Out:  nothing, the same result, or the same error, on every rank of the comparison.
Must hold: ranks never issue mismatched collectives.
"""

from __future__ import annotations

import hashlib
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_helix.planning.text import first_difference
from hf_helix.runtime.distributed.groups import broadcast_object, control_group
from hf_helix.runtime.distributed.mesh import forget_meshes, world_size
from hf_helix.runtime.failures.endings import describe, mark_remote_error

T = TypeVar("T")

NUM_FLAGS = 8
TOGETHER = "every rank must do so; write it without `if trainer.is_world_process_zero():`"

awaited = ""  # the action that this rank is about to take, while it waits for the others


def agree_on_action(what: str, flags: Sequence[bool] = ()) -> list[bool]:
    """Waits until every rank is about to take the same action. Collective, before any other collective of the action:
    the message has one size for all actions, so ranks with different actions find out, and do not communicate by
    mistake.

    Args:
        what: a clause for the action, such as "trainer.save_model() is called".
        flags: up to `NUM_FLAGS`, as many on every rank.

    Returns:
        For every flag whether any rank has set it.

    Raises:
        RuntimeError: on every rank, names two of the ranks and their actions.
    """
    global awaited
    if world_size() == 1:
        return list(flags)
    awaited, mark = what + _script_line(), zlib.crc32(what.encode())
    most = torch.tensor([mark, -mark, *flags, *[0] * (NUM_FLAGS - len(flags))])
    of_ranks = [torch.empty_like(most) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(most, of_ranks, dst=0, group=control_group())  # with a broadcast: fewer turns than an all-reduce
    if of_ranks is not None:
        most = torch.stack(of_ranks).amax(0)
    dist.broadcast(most, src=0, group=control_group())
    highest, lowest, *shared = most.tolist()
    if highest != -lowest:
        said = all_gather_object((what, awaited))
        odd = next(rank for rank, (text, _) in enumerate(said) if text != said[0][0])
        forget_meshes()  # on every rank: the action of one may have been watched, the action of another not
        raise RuntimeError(f"{said[0][1]} on rank 0 while {said[odd][1]} on rank {odd}: {TOGETHER}")
    awaited = ""  # after failed communication the text stays, for the error message
    return [bool(flag) for flag in shared[: len(flags)]]


def _script_line() -> str:
    """Returns where the script is, such as " (train.py:31)"; nothing where no file is the script."""
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
    errors = all_gather_object(f"{type(error).__name__}: {error}" if error else "")
    if error is not None:
        raise error
    failed = next((rank for rank, text in enumerate(errors) if text), None)
    if failed is not None:
        raise mark_remote_error(
            ValueError(f"on rank {failed}: {errors[failed]}"), f"rank {failed} failed: {errors[failed]}"
        )


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


def agree_on_window(batches: Sequence[Mapping[str, Any]], group: dist.ProcessGroup | None) -> None:
    """Compares the tensors of a window, and their names, over the ranks that share it. Collective.

    Raises:
        ValueError: on every rank of the group, names the tensors that differ.
    """
    if group is None:
        return
    mine = torch.stack([(2 * place + 1) * _fingerprint(batch) for place, batch in enumerate(batches)]).sum()
    if len({number for (number,) in gather_numbers(mine[None], group)}) > 1:
        _name_difference(batches, dist.get_process_group_ranks(group))


def _fingerprint(batch: Mapping[str, Any]) -> Tensor:
    """A number from the names, types, shapes and bytes of the tensors of a batch; 64 bits, which may overflow."""
    tensors = [(name, value) for name, value in sorted(batch.items()) if isinstance(value, Tensor)]
    about = zlib.crc32(repr([(name, value.dtype, value.shape) for name, value in tensors]).encode())
    content = torch.cat([value.detach().contiguous().view(-1).view(torch.uint8) for _, value in tensors])
    words = nn.functional.pad(content, (0, -len(content) % 8)).view(torch.int64)
    weights = torch.arange(1, len(words) + 1, device=words.device) * 0x1E3779B97F4A7C15
    return ((words * (weights ^ weights >> 29 | 1)).sum() + 1) * (2 * about + 1)


def _name_difference(batches: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    tensors = [{name: value for name, value in batch.items() if isinstance(value, Tensor)} for batch in batches]
    mine = [{name: int(_fingerprint({name: batch[name]})) for name in batch} for batch in tensors]
    seen = all_gather_object(mine, ranks)
    odd = next(place for place, windows in enumerate(seen) if windows != seen[0])
    one, other = next((one, other) for one, other in zip(seen[0], seen[odd], strict=True) if one != other)
    names = sorted({name for name in one.keys() | other.keys() if one.get(name) != other.get(name)})
    raise ValueError(
        f"ranks {ranks[0]} and {ranks[odd]} share every batch, and got different batches: {', '.join(names)} differ; "
        "shuffle and draw with the same seed on every rank, as TrainingArguments(seed=..., data_seed=...) does, and "
        "leave out split_dataset_by_node and the like, since every rank gets its part of the data from Accelerate"
    )


def agree_on_number(count: int, device: torch.device, states: Tensor | None = None) -> list[list[int]]:
    """Compares the number of micro-batches of a window over all ranks. Collective.

    Args:
        count: of this rank.
        device: of the message.
        states: whole numbers to exchange in the same message, as many on every rank.

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
