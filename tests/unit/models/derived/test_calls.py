"""What a decoder's forward hands to its layers, recorded with stubs in place of the layers."""

import pytest
import torch
import transformers
from support.marks import slow
from transformers import T5Config, T5ForConditionalGeneration

from hf_helix.models.derived.derived import DerivedFamily
from hf_helix.models.registry import family_of
from hf_helix.models.small_config import default_config
from hf_helix.models.stock.census import read_census

DEEP = 6
"""More layers than proofs have: code that takes the first of what a layer returns must not take rows of a tensor."""

TUPLES = ("GPTJForCausalLM", "FalconH1ForCausalLM")
"""Classes whose decoders take the first of what a layer returns; layers of the first compute with masks."""

REFUSED = {
    "MllamaForCausalLM": "further layers attend to images",
    "MvpForCausalLM": "a table of positions on the CPU",
    "TrOCRForCausalLM": "a table of positions that is made anew",
    "WhisperForCausalLM": "a table of positions that is made anew",
}
"""Proven classes that are refused, by name, when they are deep or without weights, and why."""

PROVEN = read_census().proven_on("pp2")
OTHERS = [name for name in PROVEN if name not in {*TUPLES, *REFUSED} and hasattr(transformers, name)]


@pytest.mark.parametrize("name", [*TUPLES, *(slow(name) for name in OTHERS)])
def test_deep_models_are_derived_alike_with_and_without_weights(name: str) -> None:
    config, calls = default_config(name, DEEP), []
    for device in ("cpu", "meta"):
        with torch.device(device):
            made = getattr(transformers, name)(config)
        found = getattr(family_of(made), "calls", None)  # none of a declared family
        calls.append(found and [found.has_rows, *(call.key for call in found.calls)])
    assert calls[0] == calls[1]


@pytest.mark.parametrize(("name", "expected"), [("OPTForCausalLM", 128), ("Olmo2ForCausalLM", None)])
def test_the_tables_of_positions_bound_the_length_of_rows(name: str, expected: int | None) -> None:
    """OPT looks positions up two rows further down."""
    made = getattr(transformers, name)(default_config(name, 2))
    assert family_of(made).num_positions(made) == expected
    tables = [module for module in made.modules() if isinstance(module, torch.nn.Embedding)]
    assert expected is None or expected + 2 in {len(table.weight) for table in tables}


def test_a_projection_of_embeddings_side_by_side_gives_the_hidden_size() -> None:
    made = transformers.RoCBertForCausalLM(default_config("RoCBertForCausalLM", 2))
    assert made.config.concat_input
    assert family_of(made).token_shape(made) == (made.config.hidden_size,)


def test_embeddings_of_every_layer_are_refused_by_name() -> None:
    config = default_config("Gemma4ForCausalLM", 2)
    config.hidden_size_per_layer_input = 8  # as of Gemma 4 E2B and E4B
    with torch.device("meta"):
        made = transformers.Gemma4ForCausalLM(config)
    with pytest.raises(ValueError, match="hidden_size_per_layer_input=8 gives every layer"):
        family_of(made)


def test_a_decoder_with_an_encoder_is_refused() -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    with pytest.raises(ValueError, match="T5ForConditionalGeneration cannot be derived: it has an encoder in front"):
        DerivedFamily(T5ForConditionalGeneration(T5Config(**sizes)))
