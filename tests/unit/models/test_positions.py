"""What a decoder makes of the attention mask where a batch brings no positions."""

import pytest
import torch
from torch import nn

from hf_helix.engine.proof.prove import Subject
from hf_helix.models.registry import family_of
from hf_helix.models.stock.batch_inputs import SequenceCut
from hf_helix.models.trace.trace import EXAMPLE_BATCH, EXAMPLE_LENGTH, Given

MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
IDS = torch.arange(10).view(2, 5)


def test_positions_that_count_what_is_seen() -> None:
    """As OPT does: positions of the embedding are those that its own forward makes of the mask."""
    model = Subject.of("OPTForCausalLM").build()
    result: list[torch.Tensor] = []
    table: nn.Module = model.model.decoder.embed_positions
    table.register_forward_hook(
        lambda module, args, kwargs, out: result.append(kwargs["position_ids"]), with_kwargs=True
    )
    model(IDS, attention_mask=MASK)
    family = family_of(Subject.of("OPTForCausalLM").build())
    assert family.count_positions(IDS, MASK).equal(result[0])
    side = family.side_inputs(model, {"input_ids": IDS, "attention_mask": MASK}, SequenceCut(), torch.ones(()))
    assert side["token_positions"].equal(result[0].t())
    assert family.count_positions(IDS, None).equal(torch.arange(5).unsqueeze(0))


@pytest.mark.parametrize("name", ["OPTForCausalLM", "RobertaForCausalLM"])
def test_positions_of_a_model_that_gets_its_weights_later(name: str) -> None:
    with torch.device("meta"):
        model = Subject.of(name).build()
    family = family_of(model)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()
    expected = family_of(Subject.of(name).build()).count_positions(IDS, MASK)
    assert family.count_positions(IDS, MASK).equal(expected)
    assert not expected.equal(torch.arange(5).expand(2, -1))


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "BioGptForCausalLM", "LlamaForCausalLM"])
def test_positions_that_count_everything(name: str) -> None:
    family = family_of(Subject.of(name).build())
    assert family.count_positions(IDS, MASK).equal(torch.arange(5).unsqueeze(0))


def test_positions_that_the_code_around_a_decoder_counts() -> None:
    """Of text alone, too: layers get the ropes of the model's own forward, at hidden tokens as well."""
    name = "Qwen2_5OmniThinkerForConditionalGeneration"
    model = Subject.of(name).build()
    result: list[tuple[torch.Tensor, ...]] = []
    layer: nn.Module = model.model.language_model.layers[0]
    layer.register_forward_hook(
        lambda module, args, kwargs, out: result.append(kwargs["position_embeddings"]), with_kwargs=True
    )
    model(IDS, attention_mask=MASK)
    family = family_of(Subject.of(name).build())
    side = family.side_inputs(model, {"input_ids": IDS, "attention_mask": MASK}, SequenceCut(), torch.ones(()))
    for given, wanted in zip((side["given0"], side["given1"]), result[0], strict=True):
        assert torch.equal(given.expand_as(wanted), wanted)


def test_the_dimension_of_tokens_is_known_where_a_batch_has_as_many_rows() -> None:
    """From the sizes of the examples: a batch of 4 rows of 4 tokens does not tell."""
    rope = Given("cos", (EXAMPLE_BATCH, EXAMPLE_LENGTH, 8), torch.float32, (0, 1))
    assert rope.along_tokens == [1]
