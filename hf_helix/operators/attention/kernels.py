"""The attention kernels of CUDA that return the log-sum-exp, and their limits.

In:   the inputs of `hf_helix.operators.attention.partial`, on a CUDA device.
Out:  the same; memory grows with the number of tokens, and not with its square.
Must hold: a kernel takes only cases that it computes right, forward and backward. A user who switches off a kernel of
torch (`torch.nn.attention.sdpa_kernel`), or asks for deterministic kernels, gets no other.

Limits of each kernel, the fastest first (signatures of torch 2.11 to 2.13):

    kernel      types             heads up to  masks                                    GPUs
    Cudnn       bf16, fp16        128          full, causal; 64 tokens or more          compute capability 9 and 10
    Flash       bf16, fp16        256 (192)    also windows                             8.0 and more (8.6, 8.9, 12: 192)
    Efficient   fp32, fp16, bf16  any          any mask, read from memory               7.0 and more (bf16: 8.0)
    Exact       any               any          any; all products of queries and keys    any

`attn_implementation="flash_attention_2"` begins with Flash, which is FlashAttention 2 as torch carries it. With
FlashAttention 3 under torch's own switch (`torch.nn.attention.activate_flash_attention_impl("FA3")`), which
`attn_implementation="flash_attention_3"` turns, Flash runs it, and comes before Cudnn.

The backward passes of Flash and Efficient add with atomics unless `torch.use_deterministic_algorithms(True)` is called;
Cudnn's may always, so it does not serve then.
"""

import torch
from torch import Tensor
from torch.nn import attention, functional

from hf_helix.operators.attention.partial import (
    Attended,
    AttentionKernel,
    AttentionMask,
    Exact,
    FirstOf,
    Fused,
    TorchCpu,
)
from hf_helix.operators.base import Tensors

aten = torch.ops.aten

Capability = tuple[int, int]
HALF = (torch.float16, torch.bfloat16)

SHORTEST = 64
"""The least tokens for cuDNN's attention: below, it gains nothing, and it refuses some short sequences, which crashes
torch."""

ROWS, COLUMNS = 32, 16
"""Padded multiples of `Efficient`: of a log-sum-exp, and of the rows of a mask."""


class Cudnn(Fused):
    """The kernel of cuDNN, for Hopper and Blackwell."""

    multiple = 8

    def __init__(self, capability: Capability) -> None:
        self._serves = capability[0] in (9, 10) and torch.backends.cudnn.is_available()

    def supports(self, q: Tensor, k: Tensor, seen: AttentionMask) -> bool:
        return (
            self._serves
            and seen.is_plain
            and q.dtype in HALF
            and q.shape[-1] <= 128
            and min(q.shape[2], k.shape[2]) >= SHORTEST
            and torch.backends.cuda.cudnn_sdp_enabled()
            and not torch.are_deterministic_algorithms_enabled()
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: AttentionMask, scale: float) -> tuple[Tensor, Tensor]:
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, seen.causal, False, scale=scale)
        return o, lse.view(q.shape[:3])

    def _differentiate(self, gradient: Tensor, of: Attended, seen: AttentionMask, scale: float) -> Tensors:
        q, k, v, o, lse = of
        # torch finds a graph of cuDNN only by the strides of q, k and v, so the other strides must not vary.
        gradient, o, lse = (value.contiguous() for value in (gradient, o, lse.unsqueeze(-1)))
        seed = q.new_empty((), dtype=torch.long)  # of absent dropout
        return tuple(
            aten._scaled_dot_product_cudnn_attention_backward(
                gradient, q, k, v, o, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, seen.causal,
                scale=scale,
            )
        )  # fmt: skip


class Flash(Fused):
    """The flash attention of torch, with windows."""

    multiple = 8
    grouped = True

    def __init__(self, capability: Capability, unpads: bool = False) -> None:
        self.unpads = unpads
        self._max_head_dim = (
            0 if capability < (8, 0) else 192 if capability[0] == 12 or (8, 6) <= capability < (9, 0) else 256
        )

    def supports(self, q: Tensor, k: Tensor, seen: AttentionMask) -> bool:
        return (
            q.dtype in HALF
            and seen.mask is None
            and q.shape[-1] <= self._max_head_dim
            and torch.backends.cuda.flash_sdp_enabled()
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: AttentionMask, scale: float) -> tuple[Tensor, Tensor]:
        sizes, windows = (q.shape[2], k.shape[2]), self._windows(q, k, seen)
        q, k, v = (value.transpose(1, 2) for value in (q, k, v))
        o, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, *sizes, 0.0, seen.causal, False, scale=scale, **windows
        )
        return o.transpose(1, 2), lse

    def _differentiate(self, gradient: Tensor, of: Attended, seen: AttentionMask, scale: float) -> Tensors:
        q, k, v, o, lse = of
        sizes, windows = (q.shape[2], k.shape[2]), self._windows(q, k, seen)
        gradient, o, q, k, v = (value.transpose(1, 2) for value in (gradient, o, q, k, v))
        state = q.new_empty(2, dtype=torch.uint64)  # of absent dropout
        parts = aten._flash_attention_backward(
            gradient, q, k, v, o, lse.contiguous(), None, None, *sizes, 0.0, seen.causal, state, state[:1],
            scale=scale, **windows,
        )  # fmt: skip
        return tuple(part.transpose(1, 2) for part in parts)

    def _windows(self, q: Tensor, k: Tensor, seen: AttentionMask) -> dict[str, int]:
        if seen.window is None:
            return {}
        # As flash attention counts: the last query stands at the last key.
        left = k.shape[2] - q.shape[2] - seen.apart + seen.window - 1
        return {"window_size_left": left, "window_size_right": 0 if seen.causal else -1}


class Efficient(Fused):
    """The memory-efficient attention of torch: fp32, and any mask, as an additive bias."""

    multiple = 8

    def __init__(self, capability: Capability) -> None:
        halves = HALF if capability >= (8, 0) else (torch.float16,)
        self._types = (torch.float32, *halves) if capability >= (7, 0) else ()

    def supports(self, q: Tensor, k: Tensor, seen: AttentionMask) -> bool:
        return q.dtype in self._types and seen.blank is None and torch.backends.cuda.mem_efficient_sdp_enabled()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: AttentionMask, scale: float) -> tuple[Tensor, Tensor]:
        bias = self._bias(q, k, seen)
        o, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, seen.causal and bias is None, scale=scale
        )
        lse = lse[..., : q.shape[2]]
        if bias is None:
            return o, lse
        nothing = lse < self._low(q) / 2
        return o.masked_fill(nothing.unsqueeze(-1), 0.0), lse.masked_fill(nothing, -torch.inf)

    def _differentiate(self, gradient: Tensor, of: Attended, seen: AttentionMask, scale: float) -> Tensors:
        q, k, v, o, lse = of
        bias = self._bias(q, k, seen)
        # Rows that see nothing, and padding rows, have the weights zero.
        lse = functional.pad(lse.masked_fill(lse == -torch.inf, torch.inf), (0, -q.shape[2] % ROWS), value=torch.inf)
        # In half precision the kernel assumes these strides of o.
        o = o.transpose(1, 2).contiguous().transpose(1, 2)
        seed = q.new_empty((), dtype=torch.long)  # of absent dropout
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, bias, o, lse, seed, seed, 0.0, (True, True, True, False),
            seen.causal and bias is None, scale=scale,
        )  # fmt: skip
        return dq, dk, dv

    def _bias(self, q: Tensor, k: Tensor, seen: AttentionMask) -> Tensor | None:
        """Returns the bias that hides keys from queries [batch, heads, queries, keys]."""
        queries, keys = q.shape[2], k.shape[2]
        hidden = None if seen.is_plain else seen.hides(queries, keys, q.device)
        if hidden is None:
            return None
        bias = q.new_zeros(q.shape[0], 1, queries, keys + -keys % COLUMNS)[..., :keys]
        bias.masked_fill_(hidden.reshape(-1, 1, queries, keys), self._low(q))
        return bias.expand(-1, q.shape[1], -1, -1)

    def _low(self, q: Tensor) -> float:
        # With minus infinity, rows that see nothing would give no numbers.
        return -3e4 if q.dtype is torch.float16 else -1e30


KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")
"""The attention implementations of Transformers with a kernel here."""


def kernel_for(implementation: str, device: torch.device) -> AttentionKernel:
    """Returns the kernel for an attention implementation of Transformers.

    Raises:
        ValueError: the implementation gives no log-sum-exp, or is absent; names what serves.
    """
    if implementation not in KERNELS:
        raise ValueError(
            f"attn_implementation={implementation!r} gives no log-sum-exp, by which attention over a cut sequence is "
            f"put together; with cp_size above 1 use one of {', '.join(KERNELS)}"
        )
    if implementation == "eager":
        return Exact(averages=True)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if implementation == "flash_attention_3":
        _activate_flash_3()
    own = () if implementation == "sdpa" else (Flash(capability, unpads=True),)
    if device.type == "cuda":
        return FirstOf(*own, *cuda_kernels(capability))
    if device.type == "meta":  # kernels are counted there: windows as on a GPU
        return FirstOf(*own, _Windows(HOPPER), TorchCpu())
    return FirstOf(*own, TorchCpu()) if device.type == "cpu" else FirstOf(*own)


HOPPER: Capability = (9, 0)


class _Windows(Flash):
    """The flash attention of torch, for windows only."""

    def supports(self, q: Tensor, k: Tensor, seen: AttentionMask) -> bool:
        return seen.window is not None and super().supports(q, k, seen)


def cuda_kernels(capability: Capability) -> tuple[AttentionKernel, ...]:
    """Returns the kernels of torch for a GPU of this compute capability, the fastest first."""
    kernels = Cudnn(capability), Flash(capability), Efficient(capability)
    has_switch = hasattr(attention, "current_flash_attention_impl")  # from some torch after 2.11
    is_other = has_switch and attention.current_flash_attention_impl() is not None
    return (kernels[1], kernels[0], kernels[2]) if is_other else kernels


def _activate_flash_3() -> None:
    """Makes torch's flash attention run FlashAttention 3, by torch's own switch, and with its package."""
    why = f"torch {torch.__version__} has no switch for it; use torch 2.13 or 'sdpa'"
    if "FA3" in getattr(attention, "list_flash_attention_impls", list)():
        if attention.current_flash_attention_impl() == "FA3":
            return
        try:
            attention.activate_flash_attention_impl("FA3")
            return
        except (ImportError, RuntimeError) as error:
            why = f"it needs the package flash-attn-3 (module flash_attn_interface): {error}; use 'sdpa'"
    raise ValueError(f"attn_implementation='flash_attention_3' with cp_size above 1: {why}")
