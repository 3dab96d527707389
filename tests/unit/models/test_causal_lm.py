"""The built-in loss is that of causal language models: what is none is refused with the class that is needed."""

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
    T5Config,
)

from hf_helix.models.registry import family_of
from hf_helix.models.stock.causal_lm import build_causal_lm, check_head, text_part

SMALL = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16}


def test_a_model_without_a_head() -> None:
    with pytest.raises(ValueError, match=r"GPT2Model has no language-model head: use GPT2LMHeadModel;"):
        check_head(GPT2Model(GPT2Config(**SMALL)))


def test_a_model_with_another_loss() -> None:
    with pytest.raises(ValueError, match=r"GPT2DoubleHeadsModel is no causal language model: use GPT2LMHeadModel;"):
        check_head(GPT2DoubleHeadsModel(GPT2Config(**SMALL)))


def test_classes_of_ones_own() -> None:
    """With a head they may have any name; without one they are refused."""

    class Own(LlamaForCausalLM):
        pass

    class Headless(LlamaModel):
        pass

    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    check_head(Own(config))
    with pytest.raises(ValueError, match=r"Headless has no language-model head: use LlamaForCausalLM;"):
        check_head(Headless(config))


TEXT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def llava() -> LlavaForConditionalGeneration:
    config = LlavaConfig(text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**VISION))
    return LlavaForConditionalGeneration(config)


def gemma3() -> Gemma3ForConditionalGeneration:
    text = Gemma3TextConfig(**TEXT, num_key_value_heads=2, head_dim=8)
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=SiglipVisionConfig(**VISION)))


@pytest.mark.parametrize("made", [llava, gemma3])
def test_the_text_part_of_a_larger_model(made: Any) -> None:
    """It can be trained in the larger model and, where that is refused, by itself as the refusal says."""
    model = made()
    family_of(model)
    advice = text_part(model)
    names: dict[str, Any] = {
        "model": model,
        "LlamaForCausalLM": LlamaForCausalLM,
        "Gemma3ForCausalLM": Gemma3ForCausalLM,
    }
    for line in advice.partition("by itself: ")[2].split(", "):
        exec(line, names)
    ids = torch.arange(1, 9)[None]
    torch.testing.assert_close(names["text"](ids).logits, model(ids).logits)
    family_of(names["text"])


def test_other_tasks_are_told_what_exists() -> None:
    with pytest.raises(ValueError, match=r"use LlamaForCausalLM; HelixTrainer trains other heads"):
        check_head(LlamaForSequenceClassification(LlamaConfig(**TEXT)))
    with pytest.raises(ValueError, match=r"use BertLMHeadModel; HelixTrainer trains other heads"):
        check_head(BertForSequenceClassification(BertConfig(**TEXT)))
    with pytest.raises(ValueError, match=r"of causal language models; .*the stock Trainer all else"):
        build_causal_lm(T5Config())
    with pytest.raises(
        ValueError, match=r"no causal language model for LlavaConfig: .*a LlamaConfig, config\.text_config"
    ):
        build_causal_lm(LlavaConfig())
