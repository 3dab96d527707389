"""What must be equal on several ranks is compared, and where it differs every rank says so."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_helix.runtime.distributed.agreement import agree_on_action, agree_on_number, agree_on_window


def agree_on_count_of_rank(counts: list[int]) -> None:
    agree_on_number(counts[dist.get_rank()], torch.device("cpu"))


def test_windows_of_one_length(cluster_of: Any) -> None:
    agree_on_number(3, torch.device("cpu"))
    for count in (0, 4):
        assert cluster_of(2).run(agree_on_count_of_rank, counts=[count, count]) == [None, None]


@pytest.mark.parametrize("counts", [[2, 1], [0, 1]], ids=str)
def test_windows_of_different_length_are_refused_on_every_rank(counts: list[int], cluster_of: Any) -> None:
    """Some ranks would wait for the others in the middle of a step."""
    words = f"micro-batches by rank: {counts}", "max_steps"
    cluster_of(2).assert_raises(agree_on_count_of_rank, *words, alike=True, counts=counts)


FLOATS = torch.zeros(1, 1, 3, 3).masked_fill(torch.eye(3) == 0, float("-inf"))
BATCH = {
    "input_ids": torch.arange(1, 7).view(2, 3),
    "labels": torch.arange(1, 7).view(2, 3),
    "attention_mask": torch.tensor([[1, 0, 0], [1, 1, 1]]),
    "bias": FLOATS,
    "kept": torch.tensor(True),
    "names": ["not", "a", "tensor"],
}
CHANGES: list[dict[str, Any]] = [
    {"input_ids": BATCH["input_ids"].flip(0)},
    {"labels": BATCH["labels"].flip(1)},
    {"attention_mask": torch.tensor([[0, 1, 0], [1, 1, 1]])},
    {"bias": FLOATS.roll(1, -1)},
    {"kept": torch.tensor(False)},
    {"position_ids": torch.arange(3)},
    {"input_ids": BATCH["input_ids"] + 1, "labels": BATCH["labels"] + 1},
    {"labels": BATCH["labels"].int()},
    {"labels": BATCH["labels"].view(3, 2)},
]


def agree_on_changes() -> list[str]:
    """What is said of a window whose second batch has each of the changes on the last rank; of none, nothing."""
    agree_on_window([BATCH, {**BATCH, "names": dist.get_rank()}], dist.group.WORLD)
    said = []
    for change in CHANGES:
        second = {**BATCH, **change} if dist.get_rank() else BATCH
        with pytest.raises(ValueError, match="share every batch") as caught:
            agree_on_window([BATCH, second], dist.group.WORLD)
        said.append(str(caught.value))
    return said


def test_every_tensor_of_a_window_is_compared(cluster_of: Any) -> None:
    for said in cluster_of(2).run(agree_on_changes):
        for change, sentence in zip(CHANGES, said, strict=True):
            assert sentence.startswith("ranks 0 and 1 share every batch, and got different batches: ")
            assert f": {', '.join(change)} differ; " in sentence


def meet_at(places: list[str]) -> tuple[list[bool], str]:
    rank = dist.get_rank()
    shared = agree_on_action("all is well", [rank == 1, False, rank == 0])
    try:
        agree_on_action(places[rank])
    except RuntimeError as error:
        return shared, str(error)
    return shared, ""


@pytest.mark.parametrize("places", [["a is done"] * 2, ["a is done", "b is done"]], ids=["same", "different"])
def test_ranks_meet(places: list[str], cluster_of: Any) -> None:
    differ = len(set(places)) > 1
    said = "a is done on rank 0 while b is done on rank 1: every rank must do so; write it without " if differ else ""
    for shared, error in cluster_of(2).run(meet_at, places=places):
        assert shared == [True, False, True]
        assert error.startswith(said)
        assert bool(error) == differ
