"""What must be equal on several ranks is compared, and where it differs every rank says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import arguments

from hf_helix.runtime.distributed.agreement import agree_on_number


def agree_on_count_of_rank(counts: list[int]) -> None:
    assert arguments("unused").world_size == len(counts)  # which makes the process group
    agree_on_number(counts[dist.get_rank()], torch.device("cpu"))


def test_one_process_agrees_with_itself() -> None:
    agree_on_number(3, torch.device("cpu"))


@pytest.mark.parametrize("count", [0, 1, 4])
def test_windows_of_one_length(count: int, cluster_of: Any) -> None:
    assert cluster_of(2).run(agree_on_count_of_rank, counts=[count, count]) == [None, None]


@pytest.mark.parametrize("counts", [[2, 1], [0, 1], pytest.param([3, 3, 3, 2], marks=pytest.mark.slow)], ids=str)
def test_windows_of_different_length_are_refused_on_every_rank(counts: list[int], cluster_of: Any) -> None:
    """Some ranks would wait for the others in the middle of a step."""
    failures = cluster_of(len(counts)).errors(agree_on_count_of_rank, counts=counts)
    assert len({failure.message for failure in failures}) == 1
    for failure in failures:
        assert failure.kind == "ValueError"
        assert f"micro-batches by rank: {counts}" in failure.message
        assert "max_steps" in failure.message
