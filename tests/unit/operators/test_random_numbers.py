"""Draws of operators have seeds of their own, and leave all other generators as they are."""

import pytest
import torch

from hf_helix.operators.random_numbers import seeded


def test_a_draw_on_the_cpu_leaves_other_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of GPUs, too, which are not set back."""
    gpus: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", gpus.append)
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    gpus.clear()
    draws = []
    for _ in range(2):
        with seeded(torch.device("cpu"), 3):
            draws.append(torch.rand(4))
    assert torch.equal(*draws)
    assert torch.equal(torch.rand(4), expected)
    assert gpus == []
