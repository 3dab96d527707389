"""The fields of small configurations: which size each has.

In:   the name of a field and its value in a configuration of any size.
Out:  its value in the small one.
Must hold: a field that is not named here and counts nothing keeps its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCABULARY = 128
HEADS, GROUPED_HEADS = 4, 2
HEAD_SIZE, WIDE_HEAD_SIZE = 16, 32
HIDDEN = HEADS * HEAD_SIZE
ROTARY_SIZE = 8

SOFT_CAP = 5.0
"""Larger soft caps are lowered to this one: they would change nothing in a small model."""

SIZES = {
    VOCABULARY: "max_position_embeddings max_seq_len mamba_d_ssm encoder_hash_byte_group_vocab",
    HIDDEN: "hidden_size attention_hidden_size embedding_size word_embed_proj_dim backbone_hidden_size lru_width "
    "input_embedding_size output_embedding_size embedding_dim pronunciation_embed_dim shape_embed_dim output_channels "
    "ext_pw_out_channel depthwise_separable_out_channel nemo_conv_channels image_size crop_size hidden_size_global",
    96: "intermediate_size intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size ffn_dim "
    "encoder_ffn_dim decoder_ffn_dim ffn_hidden_size n_inner dff dim_ff feed_forward_size d_inner mlp_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "expert_ffn_hidden_size shared_experts_intermediate_size shared_intermediate_size kv_lora_rank q_lora_rank "
    "o_lora_rank indexer_head_dim router_hidden_size hidden_size_per_layer_input moe_latent_size",
    24: "qk_head_dim query_pre_attn_scalar",
    16: "qk_nope_head_dim v_head_dim index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
    "original_max_position_embeddings mamba_d_state state_size ssm_state_size mamba_d_head mamba_headdim "
    "mamba_head_dim gated_norm_rank laurel_rank adapter_rank",
    ROTARY_SIZE: "qk_rope_head_dim rotary_dim sliding_window attention_chunk_size floor_scale log_scaling_n_floor "
    "chunk_size mamba_chunk_size mamba_n_heads index_topk index_block_size ffn_round_up_to_multiple_of",
    HEADS: "num_attention_heads swa_num_attention_heads encoder_attention_heads decoder_attention_heads "
    "index_n_heads linear_num_value_heads linear_num_heads num_attention_heads_per_layer num_heads",
    2: "num_experts_per_tok moe_topk n_group num_expert_group encoder_layers decoder_layers linear_num_key_heads "
    "index_topk_blocks num_mem_blocks zero_expert_num kv_n_heads moe_top_k n_shared_experts num_shared_experts "
    "num_encoder_layers num_blocks",
    1: "topk_group",
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}

QUERY_HEADS = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
}
"""The field of query heads beside each field of key-value heads."""

HEAD_DIMS = ("head_dim", "swa_head_dim", "kv_channels", "attention_head_size", "d_head", "dim_head")


def small_value(name: str, standard: str, value: Any, given: Mapping[str, Any]) -> Any:
    """Returns the value of a field in the small configuration.

    Args:
        name: the field.
        standard: what most configurations call it; `hidden_size` for `n_embd`.
        value: its value in the configuration of any size.
        given: all of that configuration's fields.
    """
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, list):
        return [small_value(name, standard, each, given) for each in value]
    if name == "per_layer_config":
        return {layer: _small_changes(changes, given) for layer, changes in value.items()}
    if not isinstance(value, int | float):
        return value
    if "dropout" in name or name.endswith(("pdrop", "layerdrop", "dropout_prob", "jitter_noise")):
        return type(value)(0)
    if "softcap" in name or "soft_cap" in name:
        return min(value, SOFT_CAP)
    if name in QUERY_HEADS:
        return HEADS if value == given.get(QUERY_HEADS[name]) else GROUPED_HEADS
    if name in HEAD_DIMS and isinstance(value, int):
        return _small_head(value, given)
    if "vocab_size" in name:
        return VOCABULARY
    size = SIZE_OF.get(name, SIZE_OF.get(standard))
    return value if size is None or not isinstance(value, int) else min(size, value)


def _small_head(value: int, given: Mapping[str, Any]) -> int:
    """Returns the size of heads: as wide together as the model or wider, as they were.

    Args:
        value: the size in the configuration of any size. With multi-head latent attention it may be that of the part
            that is rotated, or of both parts.
        given: all of that configuration's fields.
    """
    rotated, other = given.get("qk_rope_head_dim"), given.get("qk_nope_head_dim")
    if rotated and other and value in (rotated, rotated + other):
        return min(value, SIZE_OF["qk_rope_head_dim" if value == rotated else "qk_head_dim"])
    hidden, heads = given.get("hidden_size"), given.get("num_attention_heads")
    return HEAD_SIZE if hidden is None or heads is None or value * heads == hidden else WIDE_HEAD_SIZE


def _small_changes(changes: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields in which a layer differs from the others; what is larger there stays larger."""
    small = {}
    for name, value in changes.items():
        small[name] = small_value(name, name, value, {**given, **changes})
        usual = given.get(name)
        if name == "head_dim" and "qk_rope_head_dim" not in given and isinstance(usual, int) and value > usual:
            small[name] = small_value(name, name, usual, given) * (value // usual)
    return small


def small_rope(rope: Any, rotary_size: int) -> Any:
    """Returns the parameters of a rope, or of the ropes of several kinds of layers, for small heads.

    Args:
        rope: `rope_parameters` of a configuration; factors stay as they are.
        rotary_size: the features of a small head that a rope may rotate.
    """
    if not isinstance(rope, dict):
        return rope
    size = int(rotary_size * (rope.get("partial_rotary_factor") or 1.0))
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if name in ("short_factor", "long_factor"):
            small[name] = value[: size // 2]
        elif name == "mrope_section":
            small[name] = _sections(value, size // 2)
        elif isinstance(value, dict):
            small[name] = small_rope(value, rotary_size)
        else:
            small[name] = small_value(name, name, value, {})
    return small


def _sections(sections: list[int], total: int) -> list[int]:
    """Returns as many sections in about the same proportions, which add up to a total."""
    small = [max(1, section * total // sum(sections)) for section in sections]
    return [total - sum(small[1:]), *small[1:]]
