"""Small configurations: a model of the same class that a test can run in a second.

In:   a Transformers configuration of any size, or the name of a causal-LM class.
Out:  a copy with narrow layers, few if asked, and a small vocabulary; of a class, without dropout.
Must hold: all distinctions stay: every kind of layer, grouped heads and single heads, windows, ropes, caps,
multipliers, groups of experts, biases, dropout. Every size shared by ranks divides by two, but a single key-value head.
"""

from collections.abc import Collection, Mapping
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig

Values = dict[str, Any]

MROPE = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}
OF_QWEN = {"text_config": {"rope_parameters": MROPE}}
OF_GLM = {"text_config": {"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}}}
OPEN: dict[str, Values] = {
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
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [22, 22, 20]}
    },
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "glm4v": OF_GLM,
    "glm46v": OF_GLM,
    "glm4v_moe": OF_GLM,
    "glm_ocr": OF_GLM,
    "glm_moe_dsa": {"index_topk_freq": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 2},
    "hunyuan_vl_text": {
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 16, 16, 16]},
    },
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14, 17, 20, 23, 26, 29]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "paddleocr_vl": OF_QWEN,
    "qwen2_vl": OF_QWEN,
    "qwen2_5_vl": OF_QWEN,
    "qwen2_5_omni_thinker": {**OF_QWEN, "vision_start_token_id": 151652},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "step3p5": {"sliding_window": 512},
    "xmod": {"default_language": "en_XX"},
}
"""What the defaults of a configuration class leave open, as published models of the kind have it."""

SMALL: dict[str, Values] = {
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "dots3_note_text": {"head_dim": 24},
    "falcon_h1": {"mamba_d_head": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mistral4": {"qk_nope_head_dim": 8, "qk_head_dim": 16, "head_dim": 16},
    "reformer": {"axial_pos_embds": False},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"attention_hidden_size": 128},
}
"""Sizes of the small configuration."""

FEW: dict[str, Values] = {
    "ernie4_5_moe": {"moe_layer_end_index": -1},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}
"""Fields of the few layers of the small configuration."""


VOCABULARY = 128
HEADS, GROUPED_HEADS = 4, 2
HEAD_SIZE, WIDE_HEAD_SIZE = 16, 32
HIDDEN = HEADS * HEAD_SIZE
ROTARY_SIZE = 8

SOFT_CAP = 5.0  # larger soft caps are lowered to this one: they would change nothing in a small model
SIZES = {
    VOCABULARY: "max_position_embeddings max_seq_len mamba_d_ssm encoder_hash_byte_group_vocab",
    HIDDEN: "hidden_size attention_hidden_size backbone_hidden_size lru_width embedding_dim pronunciation_embed_dim "
    "shape_embed_dim output_channels ext_pw_out_channel depthwise_separable_out_channel nemo_conv_channels image_size "
    "crop_size hidden_size_global out_hidden_size text_hidden_size audio_hidden_size",
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
    "chunk_size mamba_chunk_size mamba_n_heads mamba_num_heads index_topk index_block_size block_size "
    "ffn_round_up_to_multiple_of",
    HEADS: "num_attention_heads swa_num_attention_heads encoder_attention_heads decoder_attention_heads "
    "index_n_heads linear_num_value_heads linear_num_heads num_attention_heads_per_layer num_heads",
    2: "num_experts_per_tok moe_topk n_group num_expert_group encoder_layers linear_num_key_heads "
    "index_topk_blocks num_mem_blocks zero_expert_num kv_n_heads moe_top_k n_shared_experts num_shared_experts "
    "num_encoder_layers num_blocks num_filters depths index_kpool",
    1: "topk_group",
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}

EMBEDDINGS = ("embedding_size", "word_embed_proj_dim", "input_embedding_size", "output_embedding_size")
"""Widths of embeddings, which projections join to another width of the layers."""

INNER_HEADS = {"mamba_n_heads": ("mamba_d_head", "mamba_expand")}
"""Fields of a number of heads that together are as wide as the expanded layer: the size of a head, and the factor."""

QUERY_HEADS = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
}
"""The field of query heads for each field of key-value heads."""

HEAD_DIMS = ("head_dim", "swa_head_dim", "kv_channels", "attention_head_size", "d_head", "dim_head")


def small_value(name: str, standard: str, value: Any, given: Mapping[str, Any]) -> Any:
    """Returns the value of a field in the small configuration."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, list):
        return [small_value(name, standard, each, given) for each in value]
    if name == "per_layer_config":
        return {layer: _small_changes(changes, given) for layer, changes in value.items()}
    if not isinstance(value, int | float):
        return value
    if "softcap" in name or "soft_cap" in name:
        return min(value, SOFT_CAP)
    if name in QUERY_HEADS:
        return _small_keys(value, given.get(QUERY_HEADS[name]))
    if name in EMBEDDINGS and isinstance(value, int):
        return min(value, HIDDEN if value == given.get("hidden_size") else HIDDEN // 2)
    if name in HEAD_DIMS and isinstance(value, int):
        return _small_head(value, given)
    if "vocab_size" in name:
        return VOCABULARY
    size = SIZE_OF.get(name, SIZE_OF.get(standard))
    return value if size is None or not isinstance(value, int) else min(size, value)


def _small_keys(value: float, heads: Any) -> int:
    """Returns the number of key-value heads: one for each head, some for several heads each, or one."""
    most = min(HEADS, heads) if isinstance(heads, int) else HEADS
    if value == 1 or value == heads:
        return 1 if value == 1 else most
    return min(GROUPED_HEADS, most)


def _small_head(value: int, given: Mapping[str, Any]) -> int:
    """Returns the size of a head; heads that are together wider than the model stay wider."""
    rotated, other = given.get("qk_rope_head_dim"), given.get("qk_nope_head_dim")
    if rotated and other and value in (rotated, rotated + other):
        return min(value, SIZE_OF["qk_rope_head_dim" if value == rotated else "qk_head_dim"])
    hidden, heads = given.get("hidden_size"), given.get("num_attention_heads")
    return HEAD_SIZE if hidden is None or heads is None or value * heads == hidden else WIDE_HEAD_SIZE


def _small_changes(changes: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields in which a layer differs from the other layers; larger values stay larger."""
    small = {}
    for name, value in changes.items():
        small[name] = small_value(name, name, value, {**given, **changes})
        usual = given.get(name)
        if name == "head_dim" and "qk_rope_head_dim" not in given and isinstance(usual, int) and value > usual:
            small[name] = small_value(name, name, usual, given) * (value // usual)
    return small


def small_rope(rope: Any, rotary_size: int) -> Any:
    """Returns the parameters of a rope, or of the ropes of several kinds of layers, for small heads."""
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
    """Returns the same number of sections in about the same proportions, with the given total; equal neighbours stay
    equal."""
    small = [max(1, section * total // sum(sections)) for section in sections]
    small[-1 if sections[0] == sections[1] else 0] += total - sum(small)
    return small


FEWEST, MOST = 2, 4

COUNTS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers")  # values that count all layers
# how many layers at the start, or at the end, are of another kind
FIRST = ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index", "num_hash_layers")
LAST = ("num_kv_shared_layers",)
PLACES = {"mlp_only_layers", "full_attn_idxs", "moe_layers", "hybrid_layer_ids", "local_layer_ids", "ple_layer_ids"}
PLACES |= {"attn_layer_indices"}
"""Values that list the layers of a kind."""

PERIODS = {"attn_layer_period", "expert_layer_period", "decoder_sparse_step", "global_attn_every_n_layers"}
PERIODS |= {"interleave_moe_layer_step", "layer_group_size", "moe_layer_interval", "n_layers_per_attn_res_block"}
PERIODS |= {"no_rope_layer_interval", "sliding_window_pattern"}
"""Values that say that every n-th layer is of another kind."""

OFFSETS = {"attn_layer_period": "attn_layer_offset", "expert_layer_period": "expert_layer_offset"}
"""For some of these values, the field with the first such layer."""

Features = list[Any]  # a field's value for each layer


def _listed(values: Values, count: int) -> Values:
    """Returns values that list the dense layers of a mixture, if a field makes every n-th layer sparse."""
    step, dense = values.get("decoder_sparse_step"), values.get("mlp_only_layers")
    if not isinstance(step, int) or step < 2 or not isinstance(dense, list):
        return values
    places = [layer for layer in range(count) if layer in dense or (layer + 1) % step]
    return {**values, "decoder_sparse_step": 1, "mlp_only_layers": places}


def shorten(given: Mapping[str, Any], standard: Mapping[str, str], fewest: int = FEWEST) -> Values:
    """Returns the fields of a configuration with few layers."""
    values = dict(given)
    counts = [name for name in values if standard.get(name, name) in COUNTS and isinstance(values[name], int)]
    if not counts:
        return values
    count = values[counts[0]]
    values = _listed(values, count)
    said = {name: features for name, value in values.items() if (features := _features(name, value, count))}
    kinds = list(zip(*([str(each) for each in features] for features in said.values()), strict=True))
    kept = _kept(kinds, count, fewest)
    for name, features in said.items():
        values[name] = _restricted(name, features, kept)
    values.update(dict.fromkeys(counts, len(kept) if said else max(len(kept), fewest)))
    for name in PERIODS:
        if isinstance(values.get(name), int):
            values[name] = min(values[name], FEWEST)
            if name in OFFSETS:
                values[OFFSETS[name]] %= FEWEST
    return values


def _features(name: str, value: Any, count: int) -> Features | None:
    """Returns the features of each layer by a field, or None for a field that is equal for all layers."""
    if name in FIRST and isinstance(value, int):
        return [layer < value for layer in range(count)]
    if name in LAST and isinstance(value, int):
        return [layer >= count - value for layer in range(count)]
    if name in PLACES and isinstance(value, list):
        return [layer in value for layer in range(count)]
    if name == "per_layer_config" and isinstance(value, dict):
        at = {int(layer): changes for layer, changes in value.items()}
        return [at.get(layer) for layer in range(count)]
    if isinstance(value, list) and len(value) == count:
        return value
    return None


def _restricted(name: str, features: Features, kept: list[int]) -> Any:
    """Returns the value of a field for the kept layers; the reverse of `_features`."""
    of_kept = [features[layer] for layer in kept]
    if name in FIRST or name in LAST:
        return sum(of_kept)
    if name in PLACES:
        return [place for place, feature in enumerate(of_kept) if feature]
    if name == "per_layer_config":
        return {place: changes for place, changes in enumerate(of_kept) if changes}
    return of_kept


def _kept(kinds: list[tuple[str, ...]], count: int, fewest: int) -> list[int]:
    """Returns the layers to keep: the first of each kind; of too many, a choice that shows every feature."""
    kept: list[int] = []
    shown: set[tuple[int, str]] = set()
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    for layer in first:
        new = set(enumerate(kinds[layer])) - shown
        if len(first) <= MOST or new:
            kept.append(layer)
            shown |= new
    others = [layer for layer in range(count) if layer not in kept]
    return sorted(kept + others[: max(0, fewest - len(kept))])


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS, EXPERTS_IN_GROUPS = 4, 8
GROUP_COUNTS = ("n_group", "num_expert_group")

MULTIPLIER = 0.75  # the value of a multiplier whose default is 1, which would hide that it was forgotten


def default_config(class_name: str, fewest_layers: int = FEWEST) -> PretrainedConfig:
    """Returns the small configuration of a causal-LM class, from the defaults of its config class, else ValueError."""
    kind = getattr(getattr(transformers, class_name, None), "config_class", None)
    if kind is None:
        raise ValueError(
            f"{class_name} is not a model class of Transformers {transformers.__version__}; give the name of a "
            "causal-LM class, such as LlamaForCausalLM"
        )
    config = without_dropout(kind(**_left_open(kind)))
    for name, value in config.to_dict().items():
        if value == 1.0 and isinstance(value, float) and _is_multiplier(name):
            setattr(config, name, MULTIPLIER)
    if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        config.is_decoder = True  # otherwise BERT and its like are encoders
    return small_config(config, fewest_layers)


def _left_open(kind: type[PretrainedConfig]) -> Values:
    """Returns the values of `OPEN` for a class of configurations and the parts of its own."""
    parts = {name: _left_open(part) for name, part in kind.sub_configs.items() if part is not AutoConfig}
    return {**{name: values for name, values in parts.items() if values}, **OPEN.get(kind.model_type, {})}


def without_dropout(config: PretrainedConfig, kept: Collection[str] = ()) -> PretrainedConfig:
    """Returns a configuration, changed so that nothing is drawn in training; the fields of `kept` stay."""
    for name, value in config.to_dict().items():
        if _is_dropout(name) and isinstance(value, int | float) and value and name not in kept:
            setattr(config, name, type(value)(0))
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PretrainedConfig):
            without_dropout(part, kept)
    return config


def _is_dropout(name: str) -> bool:
    """Returns whether a field is the rate of random draws in training."""
    return "dropout" in name or name.endswith(("pdrop", "layerdrop", "jitter_noise"))


def _is_multiplier(name: str) -> bool:
    """Returns whether a field scales activations; scores of attention are left to their own scale."""
    return name.endswith(("multiplier", "logits_scaling", "routed_scaling_factor"))


def small_config(config: PretrainedConfig, fewest_layers: int | None = FEWEST) -> PretrainedConfig:
    """Returns a small configuration of the same class with one layer of each kind, and at least `fewest_layers`; None
    for all layers. The given configuration does not change."""
    given = config.to_dict()
    standard: dict[str, str] = {name: word for word, name in (config.attribute_map or {}).items()}
    values = dict(given) if fewest_layers is None else shorten(given, standard, fewest_layers)
    for name, value in values.items():
        values[name] = small_value(name, standard.get(name, name), value, given)
    _make_experts_few(values)
    _bring_token_ids_in_range(values)
    values.update(SMALL.get(config.model_type, {}))
    if fewest_layers is not None:
        values.update(FEW.get(config.model_type, {}))
        if config.model_type == "longcat_flash":  # a layer has two of attention, which are counted
            values.update(num_layers=fewest_layers, num_hidden_layers=2 * fewest_layers)
    _fit_inner_heads(values)
    _keep_keys_apart(values, given)
    rotary = values.get("head_dim") or HEAD_SIZE
    for name in ("rope_parameters", "rope_scaling"):
        if name in values:
            values[name] = small_rope(values[name], rotary)
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PretrainedConfig):
            values[name] = small_config(part, fewest_layers).to_dict()
    if "use_cache" in values:
        values["use_cache"] = False  # training needs no cache, and some classes cannot make a cache
    small: PretrainedConfig = type(config).from_dict(values)
    small._attn_implementation = config._attn_implementation  # left out by `to_dict`
    return small


def _fit_inner_heads(values: Values) -> None:
    """Gives the heads of a recurrence the number that fits their small size."""
    for name, (size, factor) in INNER_HEADS.items():
        if all(isinstance(values.get(each), int) and values[each] for each in (name, size, factor)):
            values[name] = max(1, values[factor] * values["hidden_size"] // values[size])


def _keep_keys_apart(values: Values, given: Mapping[str, Any]) -> None:
    """Gives layers more key-value heads than those layers that have fewer than usual."""
    changes = given.get("per_layer_config") or {}
    for name, heads in QUERY_HEADS.items():
        usual = given.get(name)
        if isinstance(usual, int) and any(layer.get(name, usual) < usual for layer in changes.values()):
            values[name] = min(HEADS, values[heads])


def _make_experts_few(values: Values) -> None:
    """Leaves four experts, eight if tokens choose groups first."""
    grouped = any((values.get(name) or 1) > 1 for name in GROUP_COUNTS)
    for name in EXPERT_COUNTS:
        if isinstance(values.get(name), int) and values[name] > 1:  # a single one is a dense layer
            values[name] = EXPERTS_IN_GROUPS if grouped else EXPERTS


def _bring_token_ids_in_range(values: Values) -> None:
    """Gives special tokens the last ids of the vocabulary, each its own; padding and the ends of texts the first."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name in values:
        if name.endswith(("token_id", "token_index")) and name not in ids:
            ids[name] = VOCABULARY - 1 - (len(ids) - 3)
    for name, place in ids.items():
        if isinstance(values.get(name), int | list):
            values[name] = place
