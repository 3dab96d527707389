"""Agreement: what must be equal on several ranks is compared before anything hangs on it.

In:   a text (plan, schedule), the inputs of a window, or what one rank alone can find out.
Out:  nothing or the same result, or the same error, on every rank that compared.
Must hold: ranks never issue collectives that do not match.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.planning.text import first_difference
from hf_helix.runtime.distributed.groups import broadcast_object, control_group
from hf_helix.runtime.failures.endings import describe, told_by

T = TypeVar("T")


def all_gather_object(mine: T, ranks: Sequence[int] | None = None) -> list[T]:
    """Returns what each of several ranks brings, in their order. Collective over these ranks.

    Args:
        mine: what this rank brings; anything that can be pickled.
        ranks: in the launcher's group; None for all of them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    if ranks is not None:
        return [broadcast_object(mine, source, ranks) for source in ranks]
    gathered = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine, group=control_group())
    return gathered


def check_same_on_all_ranks(text: str, what: str) -> None:
    """Compares a text over all ranks. Collective.

    Raises:
        ValueError: on every rank, naming the ranks and the first line that differs.
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
        ValueError: that of another rank, which it names.
    """
    errors = all_gather_object(f"{type(error).__name__}: {error}" if error else "")
    if error is not None:
        raise error
    failed = next((rank for rank, text in enumerate(errors) if text), None)
    if failed is not None:
        raise told_by(ValueError(f"on rank {failed}: {errors[failed]}"), f"rank {failed} failed: {errors[failed]}")


def on_all_ranks(step: Callable[[], T]) -> T:
    """Runs a step that communicates nothing, and raises on every rank if it fails on any. Collective.

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
    """What rank 0 finds, on every rank. Collective.

    Raises:
        ValueError: on every rank, as rank 0 has raised it.
        RuntimeError: on the others, with any other error that rank 0 has raised.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
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
            decision[1] = told_by(again, describe(error, 0))
    dist.broadcast_object_list(decision, src=0, group=control_group())
    if decision[1] is not None:
        raise error or decision[1]
    return decision[0]


def agree_on_window(inputs: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Compares the token ids of a window over the ranks that share it. Collective.

    Raises:
        ValueError: on every rank of the group, if their batches differ in number, shape or content.
    """
    if group is None:
        return
    mine = torch.stack(
        [_fingerprint(inputs), torch.tensor(float(len(inputs)), dtype=torch.float64, device=inputs[0].device)]
    )
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    sums = torch.stack(gathered).tolist()  # one wait for the device, however many ranks there are
    if any(other != sums[0] for other in sums):
        lines = ", ".join(f"{int(other[1])} micro-batches with checksum {other[0]:.0f}" for other in sums)
        raise ValueError(
            f"ranks of one tensor-parallel or pipeline group got different batches ({lines}); they must share every "
            "batch. Shuffle with the same seed on every rank, TrainingArguments(seed=..., data_seed=...), and leave "
            "out split_dataset_by_node"
        )


def agree_on_number(count: int, device: torch.device, states: Tensor | None = None) -> list[list[int]]:
    """Compares the number of micro-batches of a window over all ranks. Collective.

    Args:
        states: whole numbers that the ranks tell each other on this occasion, as many on every rank.

    Returns:
        The states of every rank.

    Raises:
        ValueError: on every rank, if they differ: the dataset of a rank has ended before the others'.
    """
    mine = torch.tensor([count], device=device)
    if states is not None:
        mine = torch.cat((mine, states))
    table = mine[None]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        table = torch.stack(gathered)
    rows = table.tolist()
    counts = [row[0] for row in rows]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the ranks have windows of different length (micro-batches by rank: {counts}): the dataset of some ranks "
            "ends before that of the others. Give every data-parallel rank as many samples, or stop before the "
            "shortest ends with TrainingArguments(max_steps=...)"
        )
    return [row[1:] for row in rows]


def sum_over_ranks(numbers: Sequence[int]) -> list[int]:
    """The sums of whole numbers over all ranks, over the host's memory. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(numbers)
    total = torch.tensor(numbers, dtype=torch.long)
    dist.all_reduce(total, group=control_group())
    return total.tolist()


def _fingerprint(inputs: Sequence[Tensor]) -> Tensor:
    """A checksum over shapes and contents, exact in float64."""
    total = torch.zeros((), dtype=torch.float64, device=inputs[0].device)
    for place, ids in enumerate(inputs):
        flat = ids.reshape(-1).to(torch.float64)
        weights = torch.arange(flat.numel(), device=flat.device) % 8191 + (1 + 13 * place + ids.shape[-1] % 8191)
        total = total + (flat * weights).sum()
    return total
