"""Drawing the weights of a model touches no generator but that of the CPU, and sets that one back."""

import pytest
import torch
from support.models import tiny

from hf_helix.config import HelixConfig
from hf_helix.engine.synthetic import Workload


def test_weights_are_drawn_without_seeding_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script draws on its GPU afterwards is what it would have drawn without us."""
    config = tiny("llama", num_hidden_layers=1).config
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    torch.manual_seed(0)
    assert seeded == [0]  # that is the way in which torch seeds GPUs
    torch.set_rng_state(before)
    Workload(config, HelixConfig(), torch.device("cpu"))
    assert seeded == [0]
    assert torch.equal(torch.get_rng_state(), before)
