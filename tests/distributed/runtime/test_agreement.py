"""What must be equal on several ranks is compared, and where it differs every rank says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_helix.runtime.distributed.agreement import agree_on_number

JOB = "support.more_jobs:agree_on_count_of_rank"


def test_one_process_agrees_with_itself() -> None:
    agree_on_number(3, torch.device("cpu"))


@pytest.mark.parametrize("count", [0, 1, 4])
def test_windows_of_one_length(count: int, cluster_of: Any) -> None:
    assert cluster_of(2).run(JOB, counts=[count, count]) == [None, None]


@pytest.mark.parametrize("counts", [[2, 1], [0, 1], pytest.param([3, 3, 3, 2], marks=pytest.mark.slow)], ids=str)
def test_windows_of_different_length_are_refused_on_every_rank(counts: list[int], cluster_of: Any) -> None:
    """Some ranks would wait for the others in the middle of a step."""
    failures = cluster_of(len(counts)).errors(JOB, counts=counts)
    assert len({failure.message for failure in failures}) == 1
    for failure in failures:
        assert failure.kind == "ValueError"
        assert f"micro-batches by rank: {counts}" in failure.message
        assert "max_steps" in failure.message
