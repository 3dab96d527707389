"""What single kinds of models need beyond the rules, by `model_type`.

In:   nothing.
Out:  two tables of fields.
Must hold: an entry is here only where the general rules do not do.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]

OPEN: dict[str, Fields] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 20,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [22, 22, 20]},
            "full_attention": None,
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "xmod": {"default_language": "en_XX"},
}
"""What the defaults of a configuration class leave open, as published models of the kind have it."""

SMALL: dict[str, Fields] = {
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "dots3_note_text": {"head_dim": 24},
    "ernie4_5_moe": {"moe_layer_end_index": -1},
    "falcon_h1": {"mamba_d_head": 16},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "longcat_flash": {"num_layers": 2, "num_hidden_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds": False},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {"attention_hidden_size": 128},
}
"""Fields of the small configuration."""
