"""Backward of operators runs in the thread that issues them. Autograd has a thread of its own for a GPU, and handing
every small graph to it and back costs the host more than the graph."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.models import tiny
from torch import Tensor

from hf_helix.config import HelixConfig
from hf_helix.engine.synthetic import Workload
from hf_helix.operators import autograd_operator


def test_backward_runs_in_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it does so anyway; that autograd may use threads is asked of autograd."""
    ran: list[tuple[int, bool]] = []
    stock = autograd_operator.run_backward

    def noting(edges: Sequence[Any], gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        def note(given: object) -> None:
            ran.append((threading.get_ident(), torch._C._is_multithreading_enabled()))

        edges[0].node.register_prehook(note)
        stock(edges, gradients, inputs)

    monkeypatch.setattr(autograd_operator, "run_backward", noting)
    work = Workload(tiny("llama", num_hidden_layers=1).config, HelixConfig(), torch.device("cpu"))
    work.runner.train_window(work.window(2, 1, 8))
    assert len(ran) > 4
    assert set(ran) == {(threading.get_ident(), False)}
