"""The meter counts the floating-point operations that torch's flop counter counts, and those of kernels it lacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from hf_helix.doctor.amounts.meter import Meter, attention_kernel

aten = torch.ops.aten


def meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


def metered(run: Callable[[], object]) -> float:
    meter = Meter()
    with meter:
        meter.begin("run")
        kept = run()
        meter.begin(None)
    del kept
    return sum(kernel.flops for kernel in meter.counted["run"].kernels)


@pytest.mark.parametrize(
    "run",
    [
        lambda: meta(3, 5) @ meta(5, 7),
        lambda: torch.bmm(meta(2, 3, 5), meta(2, 5, 7)),
        lambda: torch.addmm(meta(7), meta(3, 5), meta(5, 7)),
        lambda: torch.baddbmm(meta(2, 3, 7), meta(2, 3, 5), meta(2, 5, 7)),
    ],
    ids=["mm", "bmm", "addmm", "baddbmm"],
)
def test_products(run: Callable[[], object]) -> None:
    with FlopCounterMode(display=False) as counter:
        run()
    assert metered(run) == counter.get_total_flops() > 0


def test_products_into_a_sum_that_torch_does_not_count() -> None:
    """Gradients are added to what is there. Torch 2.13 counts neither, nor `_grouped_mm` and attention on a CPU."""
    assert metered(lambda: meta(3, 7).addmm_(meta(3, 5), meta(5, 7))) == 2 * 3 * 5 * 7
    assert metered(lambda: meta(2, 3, 7).baddbmm_(meta(2, 3, 5), meta(2, 5, 7))) == 2 * 2 * 3 * 5 * 7


def test_attention_and_half_of_it_where_it_is_causal() -> None:
    """Torch counts all products of causal attention, of which a kernel leaves out half."""
    q, k, v = meta(2, 4, 8, 16), meta(2, 4, 8, 16), meta(2, 4, 8, 12)
    gradient = meta(2, 4, 8, 12)
    forward = flop_registry[aten._scaled_dot_product_flash_attention](q, k, v)
    backward = flop_registry[aten._scaled_dot_product_flash_attention_backward](gradient, q, k, v)
    for is_backward, torchs in ((False, forward), (True, backward)):
        assert attention_kernel(q, k, v, False, is_backward).flops == torchs
        assert attention_kernel(q, k, v, True, is_backward).flops == torchs / 2
