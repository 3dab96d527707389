"""Tiny real models of every family, and batches for them, made without data sets or files.

In:   a family, and changes to its configuration.
Out:  a model in fp32 on the CPU, the same wherever it is made; micro-batches of random tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 512
WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
EXPERTS = {"num_local_experts": 4}
MANY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
BIASES = {"attention_bias": True, "lm_head_bias": True}
NO_DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", WINDOWS),
    "qwen3": ("Qwen3", {"head_dim": 32, **WINDOWS}),
    "gpt2": ("GPT2", {"n_inner": 128, "bos_token_id": 1, "eos_token_id": 2, **NO_DROPOUT}),
    "gpt_neox": ("GPTNeoX", {"rope_parameters": ROPE}),
    "mixtral": ("Mixtral", EXPERTS),
    "phimoe": ("Phimoe", {**EXPERTS, **BIASES}),
    "qwen3_moe": ("Qwen3Moe", MANY_EXPERTS),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "gpt_oss": ("GptOss", {**EXPERTS, "head_dim": 16, "sliding_window": 24, "attn_implementation": "eager"}),
    "qwen2_moe": ("Qwen2Moe", {**MANY_EXPERTS, "shared_expert_intermediate_size": 64}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}),
}
"""By family the start of its class names, and what its configuration needs."""

MIXTURES = ("mixtral", "phimoe", "qwen3_moe", "gpt_oss", "qwen2_moe", "deepseek_v3")


def tiny(family: str, **changes: Any) -> Any:
    """A model of two layers. All sizes suit the kernels of a GPU: rows of at least 16 bytes, heads of 16 or 32."""
    start, needed = FAMILIES[family]
    options = {
        "attn_implementation": "sdpa",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        **needed,
        **changes,
    }
    made = getattr(transformers, f"{start}LMHeadModel" if family == "gpt2" else f"{start}ForCausalLM")
    config = made.config_class(**options)
    torch.manual_seed(0)
    model = made(config)
    with torch.no_grad():  # biases and norms start as constants, which would hide mistakes
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                draws = torch.Generator().manual_seed(len(name))
                parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.1)
    if family in MIXTURES:
        _keep_far_from_ties(model)
    return model


def _keep_far_from_ties(model: Any) -> None:
    """Routers that decide clearly, so that no rounding sends a token to another expert, and that draw nothing."""
    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")) and getattr(module, "weight", None) is not None:
            draws = torch.Generator().manual_seed(len(name))
            with torch.no_grad():
                module.weight.copy_(torch.randn(module.weight.shape, generator=draws) * 0.5)
            if type(module).__name__.startswith("Phimoe"):  # it chooses as in evaluation
                module.eval().train = lambda mode=True, router=module: router


Batch = dict[str, Tensor]


def batches(count: int, rows: int = 2, lengths: Sequence[int] = (48,), seed: int = 1) -> list[Batch]:
    """Micro-batches of random tokens with labels, a tenth of which does not count.

    Args:
        count: how many.
        rows: sequences in each.
        lengths: of sequences, in turn from one micro-batch to the next.
    """
    made = []
    for place in range(count):
        draws = torch.Generator().manual_seed(100 * seed + place)
        shape = (rows, lengths[place % len(lengths)])
        ids = torch.randint(3, VOCABULARY, shape, generator=draws)
        labels = ids.masked_fill(torch.rand(shape, generator=draws) < 0.1, -100)
        made.append({"input_ids": ids, "labels": labels})
    return made


def targets(window: Sequence[Batch]) -> int:
    """Tokens that count in the loss."""
    return int(sum((batch["labels"][:, 1:] != -100).sum() for batch in window))


def on(window: Sequence[Batch], device: Any) -> list[Batch]:
    """The same on a device."""
    return [{name: value.to(device) for name, value in batch.items()} for batch in window]
