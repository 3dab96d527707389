"""Only causal language models are derived: what is none is refused with the class that is needed."""

from __future__ import annotations

import pytest
from transformers import GPT2Config, GPT2DoubleHeadsModel, GPT2Model, LlamaConfig, LlamaForCausalLM, LlamaModel

from hf_helix.models.causal_lm import check_head
from hf_helix.models.registry import family_of

SMALL = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16}


def test_a_model_without_a_head() -> None:
    with pytest.raises(ValueError, match=r"GPT2Model has no language-model head: .* use GPT2LMHeadModel"):
        family_of(GPT2Model(GPT2Config(**SMALL)))


def test_a_model_with_another_loss() -> None:
    with pytest.raises(ValueError, match=r"GPT2DoubleHeadsModel is no causal language model: .* use GPT2LMHeadModel"):
        family_of(GPT2DoubleHeadsModel(GPT2Config(**SMALL)))


def test_classes_of_ones_own() -> None:
    """With a head they may have any name; without one they are refused."""

    class Own(LlamaForCausalLM):
        pass

    class Headless(LlamaModel):
        pass

    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    check_head(Own(config))
    with pytest.raises(ValueError, match=r"Headless has no language-model head: .* use LlamaForCausalLM"):
        check_head(Headless(config))
