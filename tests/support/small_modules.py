"""Small modules as decoder layers have them, with code like that of Transformers: [batch, tokens, WIDTH] in and out."""

from types import SimpleNamespace
from typing import Any

import torch
from support.small_traces import WIDTH
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, eager_attention_forward

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 4
FEATURES = 13  # which no number of ranks divides


class Mlp(nn.Module):
    """Gated."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, FEATURES)
        self.up = nn.Linear(WIDTH, FEATURES)
        self.down = nn.Linear(FEATURES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class FusedMlp(nn.Module):
    """Gate and up in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * FEATURES)
        self.down = nn.Linear(FEATURES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class Attention(nn.Module):
    """Grouped-query attention without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.scaling = HEAD_DIM**-0.5
        self.num_key_value_groups = HEADS // KEY_HEADS
        self.is_causal = True
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.k = nn.Linear(WIDTH, KEY_HEADS * HEAD_DIM)
        self.v = nn.Linear(WIDTH, KEY_HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)

    def changed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads before they meet [batch, heads, tokens, HEAD_DIM]."""
        return q, k, v

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, HEAD_DIM)
        heads = [value.view(shape).transpose(1, 2) for value in self.projected(x)]
        interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", eager_attention_forward)
        result, _ = interface(self, *self.changed(*heads, *given), None, dropout=0.0, scaling=self.scaling)
        return self.out(result.reshape(*x.shape[:-1], -1).contiguous())


class FusedAttention(Attention):
    """Queries, keys and values in one matrix: blocks of unequal lengths."""

    def __init__(self) -> None:
        super().__init__()
        del self.q, self.k, self.v
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD_DIM)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        fused, first, second = self.qkv(x), HEADS * HEAD_DIM, (HEADS + KEY_HEADS) * HEAD_DIM
        return fused[..., :first], fused[..., first:second], fused[..., second:]


class NormedAttention(Attention):
    """Norms over all heads of queries and keys, as OLMo 2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = LlamaRMSNorm(HEADS * HEAD_DIM)
        self.k_norm = LlamaRMSNorm(KEY_HEADS * HEAD_DIM)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)


class NormedHeads(Attention):
    """Norms of every head by itself, as Qwen 3 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = LlamaRMSNorm(HEAD_DIM)
        self.k_norm = LlamaRMSNorm(HEAD_DIM)

    def changed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k), v


class GainOfHeads(Attention):
    """A parameter with an entry for every head."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(HEADS))

    def changed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q * self.gain[:, None, None], k, v


class LatentAttention(Attention):
    """Keys and values from few latents, and one key for all heads beside them, as DeepSeek has it."""

    def __init__(self) -> None:
        super().__init__()
        del self.k, self.v
        self.num_key_value_groups = 1
        self.latent = nn.Linear(WIDTH, 5 + HEAD_DIM)
        self.norm = LlamaRMSNorm(5)
        self.unfold = nn.Linear(5, HEADS * 2 * HEAD_DIM)
        self.q = nn.Linear(WIDTH, HEADS * 2 * HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        outer = x.shape[:-1]
        q = self.q(x).view(*outer, HEADS, 2 * HEAD_DIM).transpose(1, 2)
        latent, common = self.latent(x).split([5, HEAD_DIM], -1)
        unfolded = self.unfold(self.norm(latent)).view(*outer, HEADS, 2 * HEAD_DIM).transpose(1, 2)
        own, v = unfolded.split([HEAD_DIM, HEAD_DIM], -1)
        common = common.view(outer[0], 1, outer[1], HEAD_DIM).expand(*own.shape)
        k = torch.cat((own, common), -1)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", eager_attention_forward)
        result, _ = interface(self, q, k, v, None, dropout=0.0, scaling=self.scaling)
        return self.out(result.reshape(*outer, -1).contiguous())


class Rotated(Attention):
    """With the rope of Llama."""

    def changed(self, q: Tensor, k: Tensor, v: Tensor, *rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *apply_rotary_pos_emb(q, k, *rope), v


class Layer(nn.Module):
    """Attention, residual; MLP, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = LlamaRMSNorm(WIDTH), LlamaRMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class ParallelLayer(Layer):
    """Attention and MLP of one value, each behind a norm of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.second(x)) + self.attention(self.first(x)) + x


class OneNormLayer(Layer):
    """Attention and MLP of one normed value."""

    def __init__(self) -> None:
        super().__init__()
        del self.second

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return x + self.attention(h) + self.mlp(h)


class Through(nn.Module):
    """x + down(function(up(x))): a function of features of which a rank may have a share."""

    def __init__(self, function: Any, features: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, features)
        self.down = nn.Linear(features, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.function(self.up(x)))
