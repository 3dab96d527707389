"""Products of half precision are added to float32 gradients by the GEMM itself where the device can do that."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_helix.operators.linears import accumulate

aten = torch.ops.aten


class GemmsOfCuda(TorchDispatchMode):
    """Stands for the kernels of CUDA that CPU does not have, and lists every kernel that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.called.append(str(func).removeprefix("aten."))
        if func is aten.mm.dtype:
            left, right, dtype = args
            return left.to(dtype) @ right.to(dtype)
        if func in (aten.addmm.dtype_out, aten.baddbmm.dtype_out):
            total, left, right, dtype = args
            out = kwargs["out"]
            assert out is total  # otherwise CUDA copies the total first
            assert (left.dtype, out.dtype) == (torch.bfloat16, dtype)
            return out.copy_(total + left.to(dtype) @ right.to(dtype))
        return func(*args, **kwargs)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[GemmsOfCuda]:
    def in_one_gemm(factor: Tensor, dtype: torch.dtype) -> bool:
        return factor.dtype is torch.bfloat16 and dtype is torch.float32

    monkeypatch.setattr(accumulate, "in_one_gemm", in_one_gemm)
    with GemmsOfCuda() as kernels:
        yield kernels


def factors(*batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((*batch, 4, 5), (*batch, 5, 3))
    left, right = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
    return left, right


def test_on_cuda_every_micro_batch_is_one_kernel(on_cuda: GemmsOfCuda) -> None:
    weight = nn.Parameter(torch.zeros(4, 3))
    left, right = factors()
    on_cuda.called.clear()
    with torch.no_grad():
        accumulate.add_to_gradients([weight], left, right)
        first = weight.grad
        accumulate.add_to_gradients([weight], left, right)
    assert [name for name in on_cuda.called if "mm" in name] == ["mm.dtype", "addmm.dtype_out"]
    assert not any("add." in name or "add_" in name for name in on_cuda.called)
    assert weight.grad is first
    torch.testing.assert_close(weight.grad, 2 * (left.float() @ right.float()))


def test_on_cuda_stacks_are_added_in_place(on_cuda: GemmsOfCuda) -> None:
    left, right = factors(2)
    total = torch.ones(2, 4, 3)
    on_cuda.called.clear()
    accumulate.add_product(total, left, right)
    assert "baddbmm.dtype_out" in on_cuda.called
    torch.testing.assert_close(total, 1 + left.float() @ right.float())


@pytest.mark.parametrize("batch", [(), (2,)])
def test_elsewhere_the_product_is_rounded_first(batch: tuple[int, ...]) -> None:
    left, right = factors(*batch)
    assert not accumulate.in_one_gemm(left, torch.float32)
    total = torch.ones(*batch, 4, 3)
    accumulate.add_product(total, left, right)
    assert torch.equal(total, 1 + (left @ right).float())
