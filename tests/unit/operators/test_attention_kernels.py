"""What surrounds the attention kernels of CUDA, with stand-ins for the kernels behind torch's own schemas."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention, functional

from hf_helix.operators.attention.kernels import Cudnn, Efficient, Flash, cuda_kernels, kernel_for
from hf_helix.operators.attention.partial import (
    CAUSAL,
    EVERYTHING,
    Attended,
    AttentionKernel,
    AttentionMask,
    Exact,
    FirstOf,
    TorchCpu,
)
from hf_helix.operators.attention.ring_attention import DOCUMENTS, RingBlock
from hf_helix.operators.base import OperatorContext
from hf_helix.operators.communication.transport import Axis, SilentTransport

HOPPER, SCALE = (9, 0), 0.3


def written_out(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None, bias: Any = None) -> Any:
    """Products [batch, heads, queries, keys], with what is added and hidden; heads of k and v repeated."""
    k, v = (value.repeat_interleave(q.shape[1] // k.shape[1], 1).double() for value in (k, v))
    scores = q.double() @ k.mT * scale
    scores = scores if bias is None else scores + bias
    return (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)), k, v


def attended(q: Tensor, k: Tensor, v: Tensor, *seen: Any) -> tuple[Tensor, Tensor]:
    scores, _, v = written_out(q, k, v, *seen)
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1).float()


def differentiated(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *seen: Any) -> list[Tensor]:
    groups = k.shape[1]
    scores, wide, values = written_out(q, k, v, *seen)
    weights = (scores - lse.double().unsqueeze(-1)).exp()
    delta = (do.double() * o.double()).sum(-1, keepdim=True)
    of_scores = weights * (do.double() @ values.mT - delta) * seen[0]
    dk, dv = ((part @ rows.double()) for part, rows in ((of_scores.mT, q), (weights.mT, do)))
    parts = (of_scores @ wide, *(value.unflatten(1, (groups, -1)).sum(2) for value in (dk, dv)))
    return [part.to(q.dtype) for part in parts]


def below(q: Tensor, k: Tensor, causal: bool, left: int | None = None, right: int | None = None) -> Tensor | None:
    """Hidden as flash attention does: the last query stands at the last key."""
    back = k.shape[2] - q.shape[2] + torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    hidden = back < 0 if causal or right == 0 else torch.zeros_like(back, dtype=torch.bool)
    return hidden if left is None or left < 0 else hidden | (back > left)


def swapped(*values: Tensor) -> list[Tensor]:
    return [value.transpose(1, 2) for value in values]


def flash(q: Tensor, k: Tensor, v: Tensor, *rest: Any, window_size_left: Any = None, **options: Any) -> Any:
    assert rest[:2] == (None, None)
    assert rest[2:5] == (q.shape[1], k.shape[1], 0.0)
    assert q.shape[-1] % 8 == 0
    assert q.stride(-1) == k.stride(-1) == 1
    causal, right = rest[5], options.get("window_size_right")
    q, k, v = swapped(q, k, v)
    o, lse = attended(q, k, v, options["scale"], below(q, k, causal, window_size_left, right))
    none = torch.empty(0, dtype=torch.uint64)
    return o.transpose(1, 2).contiguous(), lse, none, none, none


def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any, **given: Any
) -> Any:
    assert lse.is_contiguous()
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    left, right, causal = given.get("window_size_left"), given.get("window_size_right"), rest[5]
    do, q, k, v, o = swapped(do, q, k, v, o)
    parts = differentiated(do, q, k, v, o, lse, given["scale"], below(q, k, causal, left, right))
    return tuple(value.transpose(1, 2).contiguous() for value in parts)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, with_lse: bool, drop: float = 0.0, causal: bool = False, *, scale: float
) -> Any:
    assert bias is None
    assert with_lse
    assert k.shape[1] == q.shape[1]
    assert q.shape[-1] % 8 == 0
    o, lse = attended(q, k, v, scale, below(q, k, True) if causal else None)
    none = torch.empty((), dtype=torch.long)
    return o, lse.unsqueeze(-1), none, none, q.shape[2], k.shape[2], none, none, none


def cudnn_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    seed: Tensor,
    at: Tensor,
    *rest: Any,
    scale: float,
) -> Any:
    assert do.is_contiguous()
    assert o.is_contiguous()
    assert lse.is_contiguous()
    assert lse.shape == (*q.shape[:3], 1)
    assert rest[3:6] == (q.shape[2], k.shape[2], 0.0)
    return tuple(differentiated(do, q, k, v, o, lse[..., 0], scale, below(q, k, True) if rest[6] else None))


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, with_lse: bool, drop: float = 0.0, causal: bool = False, *, scale: float
) -> Any:
    assert with_lse
    assert k.shape[1] == q.shape[1]
    assert bias is None or (bias.shape == (*q.shape[:3], k.shape[2]) and bias.stride(2) % 16 == 0)
    o, lse = attended(q, k, v, scale, below(q, k, True) if causal else None, bias)
    none = torch.empty((), dtype=torch.long)
    return o, functional.pad(lse, (0, -q.shape[2] % 32), value=torch.inf), none, none


def efficient_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, o: Tensor, lse: Tensor, *rest: Any, scale: float
) -> Any:
    assert o.transpose(1, 2).is_contiguous()  # the kernel for half precision does not ask
    assert lse.shape[2] % 32 == 0
    assert bool((lse[..., q.shape[2] :] == torch.inf).all())
    assert list(rest[3]) == [True, True, True, False]
    causal = len(rest) > 4 and rest[4]
    hidden = below(q, k, True) if causal else None
    return *differentiated(do, q, k, v, o, lse[..., : q.shape[2]], scale, hidden, bias), torch.empty(0)


STAND_INS = {
    "_flash_attention_forward": flash,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
}


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """The kernels on CPU, called through torch's dispatcher, which checks arguments by its schemas."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in STAND_INS.items():
        library.impl(name, function, "CPU")
    yield
    library._destroy()


KINDS: dict[str, AttentionKernel] = {
    "cudnn": Cudnn((8, 0)),
    "flash": Flash(HOPPER),
    "efficient": Efficient(HOPPER),
    "filled": TorchCpu(),
}


def of_documents(queries: int, keys: int) -> Tensor:
    """Each sees its own document; the last queries see nothing."""
    mine, theirs = torch.arange(queries) // 5, torch.arange(keys) // 4
    return (mine[:, None] == theirs).expand(2, -1, -1)


SEEN = {
    "everything": (6, 10, EVERYTHING),
    "causal": (9, 9, CAUSAL),
    "window": (12, 12, AttentionMask(True, 4)),
    "apart": (8, 8, AttentionMask(False, 11, 8)),
    "fewer keys": (12, 5, AttentionMask(False, 14, 5)),
    "mask": (17, 9, AttentionMask(mask=of_documents(17, 9))),
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [8, 6])
def test_each_kernel_is_given_what_it_wants(head_dim: int, kind: str, seen: str) -> None:
    """Against `Exact`, in the middle of a longer row; slices of larger tensors, as a ring has them."""
    kernel = KINDS[kind]
    kernel.multiple = 8  # type: ignore[attr-defined]
    queries, keys, what = SEEN[seen]
    dice = torch.Generator().manual_seed(7)
    types = torch.float32 if kind in ("efficient", "filled") else torch.float16

    def random(heads: int, length: int) -> Tensor:
        return torch.randn(2, heads, length + 3, head_dim, generator=dice).to(types)[:, :, 3:]

    q, k, v, do, o = random(4, queries), random(2, keys), random(2, keys), random(4, queries), random(4, queries)
    lse = torch.randn(2, 4, queries + 3, generator=dice)[..., 3:].abs() + 3
    if seen == "mask":
        lse = lse.index_fill(2, torch.tensor([16]), -torch.inf)
    if not (kernel.supports(q, k, what) or (kind == "cudnn" and what.is_plain)):
        assert kind != "efficient"
        return
    close = {"atol": 2e-3, "rtol": 2e-3} if types is torch.float16 else {"atol": 1e-5, "rtol": 1e-5}
    for mine, theirs in zip(kernel.forward(q, k, v, what, SCALE), Exact().forward(q, k, v, what, SCALE), strict=True):
        torch.testing.assert_close(mine, theirs, **close)
    attended = Attended(q, k, v, o, lse)
    parts = kernel.backward(do, attended, what, SCALE)
    for mine, theirs in zip(parts, Exact().backward(do, attended, what, SCALE), strict=True):
        torch.testing.assert_close(mine, theirs, **close)


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("packed", [False, True])
def test_a_ring_over_the_kernels_of_a_gpu(packed: bool, window: int | None) -> None:
    """Blocks of every rank, with windows between parts and documents, in half precision and in fp32."""
    dice = torch.Generator().manual_seed(3)
    documents = (torch.arange(24) >= 10).long().expand(2, -1) if packed else None
    q, k, v, do = (torch.randn(2, heads, 12, 8, generator=dice) for heads in (4, 2, 2, 4))
    for dtype, close in ((torch.float32, 1e-5), (torch.float16, 5e-3)):
        kernel = FirstOf(Flash(HOPPER), Efficient(HOPPER))
        for rank, distance in ((0, 0), (1, 0), (0, 1), (1, 1)):
            ctx, axis = OperatorContext({DOCUMENTS: documents}, 0, True), Axis(SilentTransport(2, rank))
            before = () if distance == 0 else (torch.randn(2, 4, 12, 9, generator=dice),)
            out = torch.randn(12, 2, 32, generator=dice).to(dtype)
            lse = torch.randn(2, 4, 12, generator=dice) + 4
            inputs = [value.to(dtype) for value in (q, torch.stack((k, v)))]
            mine, theirs = (
                [
                    *(block := RingBlock(each, axis, distance, SCALE, window)).forward(ctx, *inputs, *before),
                    *block.backward(ctx, do.to(dtype), *inputs, out, lse)[:2],
                ]
                for each in (kernel, Exact())
            )
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one, other, atol=close, rtol=close)


def names(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, seen: AttentionMask = CAUSAL, keys: int = 64
) -> str:
    q = torch.empty(1, 1, 64, head_dim, dtype=dtype)
    kernels = (*cuda_kernels(capability), Exact())
    return type(next(kernel for kernel in kernels if kernel.supports(q, q[:, :, :keys], seen))).__name__


def test_flash_attention_leaves_hidden_tokens_out() -> None:
    """As that of Transformers does, whatever kernel serves where it does not."""
    cpu = torch.device("cpu")
    assert kernel_for("flash_attention_2", cpu).unpads
    assert not any(kernel_for(name, cpu).unpads for name in ("sdpa", "eager"))


def test_flash_attention_3_by_the_switch_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch is turned once; Flash then comes before cuDNN. A registered stand-in loads no package."""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    registry = pytest.importorskip("torch.nn.attention._registry")
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"flash_attn_interface.*use 'sdpa'"):
        kernel_for("flash_attention_3", cpu)
    turned: list[Handle] = []

    def register() -> Handle:
        turned.append(Handle())
        return turned[-1]

    monkeypatch.setitem(registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    try:
        assert names((9, 0), torch.bfloat16, 128) == "Cudnn"
        assert all(kernel_for("flash_attention_3", cpu).unpads for _ in range(2))
        assert len(turned) == 1
        assert names((9, 0), torch.bfloat16, 128) == "Flash"
        assert names((9, 0), torch.float32, 128) == "Efficient"
    finally:
        attention.restore_flash_attention_impl()
    assert turned[0].is_removed
    assert names((9, 0), torch.bfloat16, 128) == "Cudnn"


class Handle:
    """What keeps an implementation of flash attention in torch's dispatcher."""

    is_removed = False

    def remove(self) -> None:
        self.is_removed = True


def test_which_kernel_serves_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    windowed, masked = AttentionMask(True, 3), AttentionMask(mask=torch.ones(1, 64, 64, dtype=torch.bool))
    assert names((9, 0), bf16, 128) == names((10, 0), fp16, 64) == "Cudnn"
    assert names((9, 0), bf16, 128, EVERYTHING, keys=63) == "Flash"
    assert names((9, 0), bf16, 192) == names((9, 0), bf16, 128, windowed) == names((8, 0), bf16, 128) == "Flash"
    assert names((8, 6), bf16, 256) == names((8, 0), bf16, 320) == names((9, 0), fp32, 128) == "Efficient"
    assert names((9, 0), bf16, 128, masked) == names((7, 5), fp16, 64) == "Efficient"
    assert names((7, 5), bf16, 64) == names((9, 0), torch.float64, 64) == "Exact"


def test_deterministic_kernels_and_those_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert names((9, 0), torch.bfloat16, 128) == "Flash"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert names((9, 0), torch.bfloat16, 128) == "Efficient"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert names((9, 0), torch.bfloat16, 128) == "Exact"


def test_attention_written_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    q = torch.empty(1, 2, 4, 40, dtype=torch.float64, device="meta")
    for _ in range(2):
        FirstOf(*cuda_kernels((9, 0))).forward(q, q, q, CAUSAL, SCALE)
    (said,) = [record.message for record in caplog.records]
    assert "written out for torch.float64 and heads of 40" in said
    assert "bf16=True" in said
