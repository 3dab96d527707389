"""Small configurations make models that run in a moment, and keep what tells their class from others."""

import functools
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
)

from hf_helix.models.small_config import default_config, small_config
from hf_helix.models.stock.causal_lm import causal_lm_classes

SAMPLE = (
    *("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "Gemma4ForCausalLM", "Phi3ForCausalLM"),
    *("Olmo2ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "Qwen2MoeForCausalLM", "SmolLM3ForCausalLM"),
)

NOT_MADE = {
    "Gemma3nForConditionalGeneration": "timm",  # its image tower is of that package
    "Gemma4AssistantForCausalLM": "hidden_size_per_layer_input",  # the defaults of its configuration make no model
    # shares the keys and values of another model
    "Gemma4UnifiedAssistantForCausalLM": "layer types|shared_kv_states",
    "DoryForCausalLM": "n_recurrent_layers",  # three counts add up to the layers
    "GitForCausalLM": "batch_size",  # has no loss without images
    "MusicgenForCausalLM": "shape",  # reads several codebooks beside each other
    "MusicgenMelodyForCausalLM": "shape",
}
"""Classes whose small models cannot be run on token ids, with a word of the reason."""


def run(name: str) -> tuple[Any, float]:
    """Runs the small model of a class forward and backward; returns it with its loss."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(default_config(name))
    ids = torch.randint(3, 100, (2, 12))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return model, float(loss.detach())


@pytest.mark.parametrize("name", SAMPLE)
def test_the_small_model_of_a_class_runs_and_every_parameter_has_a_gradient(name: str) -> None:
    model, loss = run(name)
    assert loss < 7  # log(128) is 4.9
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in causal_lm_classes() if name not in NOT_MADE])
def test_every_class_has_a_small_model(name: str) -> None:
    model, loss = run(name)
    assert loss < 30  # multipliers make some large
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_MADE)
def test_a_class_without_a_small_model_says_why(name: str) -> None:
    with pytest.raises(Exception, match=NOT_MADE[name]):
        run(name)


def test_layers_of_every_kind_stay() -> None:
    gemma = small_config(Gemma3TextConfig())
    assert gemma.layer_types == ["sliding_attention", "full_attention"]
    assert (gemma.num_hidden_layers, gemma.sliding_window) == (2, 8)
    glm = default_config("Glm4MoeForCausalLM")
    assert (glm.num_hidden_layers, glm.first_k_dense_replace) == (2, 1)
    smollm = default_config("SmolLM3ForCausalLM", fewest_layers=4)
    assert (smollm.num_hidden_layers, smollm.no_rope_layers) == (4, [1, 1, 1, 0])
    qwen = small_config(Qwen2MoeConfig(decoder_sparse_step=2, mlp_only_layers=[3]))
    assert (qwen.num_hidden_layers, qwen.decoder_sparse_step, qwen.mlp_only_layers) == (2, 1, [0])


def test_heads_stay_grouped_and_wider_than_the_model_where_they_were() -> None:
    def heads(config: PretrainedConfig) -> tuple[int, int, int]:
        small = small_config(config)
        return small.num_attention_heads, small.num_key_value_heads, small.head_dim

    assert heads(LlamaConfig(num_key_value_heads=8)) == (4, 2, 16)
    assert heads(LlamaConfig()) == (4, 4, 16)
    assert heads(LlamaConfig(head_dim=64)) == (4, 4, 32)
    layers = default_config("Gemma4ForCausalLM").per_layer_config
    assert layers["full_attention"].head_dim == 2 * layers["sliding_attention"].head_dim


def test_a_single_head_of_keys_stays_and_two_heads_get_no_more() -> None:
    assert small_config(LlamaConfig(num_key_value_heads=1)).num_key_value_heads == 1
    two = small_config(LlamaConfig(num_attention_heads=2, num_key_value_heads=2))
    assert (two.num_attention_heads, two.num_key_value_heads) == (2, 2)


def test_lists_of_layers_and_patterns_stay() -> None:
    """As in Bamba-9B, in a dense Jamba, and with narrow embeddings as in OPT-350M; heads of a small Bamba fit."""
    bamba = small_config(AutoConfig.for_model("bamba", attn_layer_indices=[9, 18, 27]))
    assert (bamba.num_hidden_layers, bamba.attn_layer_indices) == (2, [1])
    few = {"hidden_size": 64, "mamba_n_heads": 4, "mamba_d_head": 32, "attn_layer_indices": [1]}
    assert small_config(AutoConfig.for_model("bamba", **few)).mamba_n_heads == 8
    assert small_config(AutoConfig.for_model("jamba", num_experts=1, num_experts_per_tok=1)).num_experts == 1
    opt = small_config(AutoConfig.for_model("opt", hidden_size=1024, word_embed_proj_dim=512))
    assert (opt.hidden_size, opt.word_embed_proj_dim) == (64, 32)
    whole = small_config(AutoConfig.for_model("bamba", attn_layer_indices=[9, 18, 27]), None)
    assert (whole.num_hidden_layers, whole.attn_layer_indices) == (32, [9, 18, 27])


def test_parts_of_heads_that_are_smaller_stay() -> None:
    """The part of a head that is rotated has two names in the configuration of DeepSeek-V3."""
    small = small_config(DeepseekV3Config(qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8))
    assert (small.qk_rope_head_dim, small.head_dim, small.qk_head_dim) == (4, 4, 12)


def test_caps_show_multipliers_stay_and_nothing_is_random_unless_given() -> None:
    gemma = default_config("Gemma2ForCausalLM")
    assert gemma.attn_logit_softcapping == gemma.final_logit_softcapping == 5
    assert default_config("GraniteForCausalLM").logits_scaling != 1
    given = functools.partial(LlamaConfig, attention_dropout=0.1)
    assert small_config(given(tie_word_embeddings=True)).tie_word_embeddings
    assert small_config(given()).attention_dropout == 0.1
    assert default_config("GPT2LMHeadModel").attn_pdrop == 0


def test_ropes_fit_small_heads() -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_theta": 1e4}
    config = AutoConfig.for_model("phi3", rope_parameters=factors, original_max_position_embeddings=4096)
    small = small_config(config)
    assert len(small.rope_parameters["short_factor"]) == len(small.rope_parameters["long_factor"]) == 8
    assert small.rope_parameters["original_max_position_embeddings"] == 16


def test_the_given_configuration_stays_as_it_is() -> None:
    config = Gemma3TextConfig()
    before = config.to_dict()
    small_config(config)
    assert config.to_dict() == before


def test_a_class_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"LamaForCausalLM is not a model class .* such as LlamaForCausalLM"):
        default_config("LamaForCausalLM")


def test_recurrent_layers_stay() -> None:
    """Of a published configuration, and of the defaults of a class."""
    given = Lfm2Config(full_attn_idxs=[2, 5, 8], num_hidden_layers=9)
    for small in (small_config(given), default_config("Lfm2ForCausalLM")):
        assert set(small.layer_types) == {"conv", "full_attention"}
