"""How many kernels a layer launches: at most what is written here, so that nobody loses what somebody has saved."""

from __future__ import annotations

import pytest
import torch
from support.models import tiny
from torch.nn import functional

from benchmarks.kernel_count import Kernels, count_layer

MOST = {
    # forward and backward of a layer with tp_size=2, products in bf16
    "gpt2": (19, 41),
    "gpt_neox": (30, 59),
    "llama": (12, 26),
    "mistral": (26, 45),
    "mixtral": (62, 75),
    "phimoe": (78, 83),
    "qwen2": (21, 48),
    "qwen3": (33, 46),
    "qwen3_moe": (73, 74),
}


QUICK = ("gpt2", "llama", "phimoe", "mixtral")  # the declared families and a derived one


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] * (f not in QUICK)) for f in MOST])
def test_of_a_layer(family: str) -> None:
    changes = {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    kernels = count_layer(tiny(family, **changes))
    forward, backward = kernels.total("F."), kernels.total("B.")
    assert forward <= MOST[family][0], kernels.totals()
    assert backward <= MOST[family][1], kernels.totals()
    assert forward + backward + kernels.total("window.") == kernels.total()
    assert forward > 0 < backward


@pytest.mark.slow
def test_of_a_compiled_layer() -> None:
    """What docs/gpu.md says. One layer, since each is compiled anew here, which torch does a few times only."""
    torch.compiler.reset()
    kernels = count_layer(tiny("llama", num_hidden_layers=1), compiles=True)
    assert 0 < kernels.total("F.") + kernels.total("B.") <= 52, kernels.totals()
    assert "compiled" in kernels.counted["B.attn.norm"]


def test_views_and_allocations_do_not_count() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    with Kernels() as kernels, kernels.run("here"):
        value = torch.empty(4, 2, 8).normal_()  # 1
        value = value.transpose(0, 1).reshape(-1, 8)  # 1: it copies
        functional.linear(value, weight).view(2, 4, 8)  # 1
    assert kernels.totals() == {"here": 3}
