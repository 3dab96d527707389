"""The meter counts the floating-point operations that torch's flop counter counts, and those of kernels it lacks."""

from collections.abc import Callable

import pytest
import torch
from support.marks import slow
from support.simulated import counted
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from hf_helix.doctor.amounts.meter import FusedKernels, Meter, attention_kernel, mixer_kernel
from hf_helix.engine.synthetic import model_on_meta
from hf_helix.models.small_config import default_config
from hf_helix.models.trace.mixers import MixerCall

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


def test_products() -> None:
    for run in (
        lambda: meta(3, 5) @ meta(5, 7),
        lambda: torch.bmm(meta(2, 3, 5), meta(2, 5, 7)),
        lambda: torch.addmm(meta(7), meta(3, 5), meta(5, 7)),
        lambda: torch.baddbmm(meta(2, 3, 7), meta(2, 3, 5), meta(2, 5, 7)),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        assert metered(run) == counter.get_total_flops() > 0
    # Gradients are added to what is there. Torch 2.13 counts neither, nor `_grouped_mm` and attention on a CPU.
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


def test_views_and_allocations_are_no_kernels() -> None:
    meter = Meter()
    with meter:
        meter.begin("here")
        value = torch.empty(4, 2, 8, device="meta").normal_()  # 1
        value = value.transpose(0, 1).reshape(-1, 8)  # 1: it copies
        functional.linear(value, meta(8, 8)).view(2, 4, 8)  # 1
        meter.begin(None)
    assert len(meter.counted["here"].kernels) == 3


def test_a_norm_inside_of_an_autograd_operator_is_a_kernel_and_two_backward() -> None:
    """Not the steps that torch takes on the meta device, such as of the norms of queries and keys."""
    value, weight = meta(2, 4, 8, 16).requires_grad_(), meta(16).requires_grad_()
    meter = Meter([value, weight])
    with meter, FusedKernels(meter):
        for label in ("F", "B"):
            meter.begin(label)
            if label == "F":
                out = functional.rms_norm(value, (16,), weight, 1e-6)
            else:
                torch.autograd.grad(out, (value, weight), torch.empty_like(out))
        meter.begin(None)
    moved = {label: [kernel.bytes for kernel in each.kernels] for label, each in meter.counted.items()}
    assert moved == {"F": [2 * value.nbytes], "B": [3 * value.nbytes, 2 * value.nbytes]}


RULE = MixerCall(
    modeling_qwen3_next.__name__, "torch_chunk_gated_delta_rule", ("query", "key", "value", "g", "beta"), ()
)
SCAN = MixerCall(
    modeling_mamba2.__name__, "mamba2_chunk_scan", ("hidden_states", "dt", "A", "B", "C"), (("chunk_size", 64),)
)


@pytest.mark.parametrize(
    ("call", "tensors"),
    [
        (RULE, [meta(2, 256, 4, 128)] * 3 + [meta(2, 256, 4)] * 2),
        (SCAN, [meta(2, 256, 8, 64), meta(2, 256, 8), meta(8), *[meta(2, 256, 1, 128)] * 2]),
    ],
    ids=["delta rule", "scan"],
)
def test_products_of_recurrent_mixers_are_about_those_of_transformers(call: MixerCall, tensors: list[Tensor]) -> None:
    """Transformers' code also multiplies the states of all chunks with each other, which is small."""
    with FlopCounterMode(display=False) as counter:
        call.run(*tensors)
    assert mixer_kernel(call, tensors, False).flops == pytest.approx(counter.get_total_flops(), rel=0.04)


@pytest.mark.parametrize("name", ["MambaForCausalLM", slow("Qwen3NextForCausalLM")])
def test_recurrent_mixers_are_one_kernel_at_any_length(name: str) -> None:
    """The code of Transformers loops over tokens or chunks, which once took minutes to count."""
    model = model_on_meta(default_config(name))
    short, long = (counted(model, 1, length) for length in (64, 4096))
    kernels = {key: len(operator.kernels) for key, operator in short.operators.items()}
    assert kernels == {key: len(operator.kernels) for key, operator in long.operators.items()}
    assert max(kernels.values()) < 100
