"""What graphs GPT-2 and GPT-NeoX become, and what of them cannot be cut."""

import itertools
from typing import Any

import pytest
import torch
from support.models import tiny

from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.registry import family_of
from hf_helix.models.stock.batch_inputs import SequenceCut
from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.planning.graph.operator import Kind

GPT2: dict[str, Any] = {"family": "gpt2"}
NEOX: dict[str, Any] = {"family": "gpt_neox"}


@pytest.mark.parametrize(
    ("model", "collectives"),
    [
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, 4),
        (NEOX, 2),
    ],
    ids=str,
)
def test_layers_have_equal_graphs_and_parallel_residuals_communicate_once(
    model: dict[str, Any], collectives: int
) -> None:
    made, sharing = tiny(**model), ParallelContext(Axis(SilentTransport(2, 0)))
    layers = [unit.graphs.forward for unit in family_of(made).units(made, sharing) if unit.name == "layer"]
    assert all(one.describe() == other.describe() for one, other in itertools.pairwise(layers))
    assert sum(op.kind is Kind.INTRA_NODE for op in layers[0].operators) == collectives


REFUSED: list[tuple[dict[str, Any], int, list[str]]] = [
    (GPT2, 3, ["tp_size=3", "4 attention heads", "n_head", "1, 2, 4"]),
    ({**GPT2, "n_inner": 1}, 2, ["tp_size=2", "n_inner=1", "tp_size=1"]),
    ({**GPT2, "n_inner": None, "vocab_size": 3, "pad_token_id": None}, 4, ["vocab_size=3", "n_inner=128", "tp_size=3"]),
    ({**GPT2, "add_cross_attention": True}, 1, ["add_cross_attention=True", "add_cross_attention=False"]),
    (NEOX, 3, ["tp_size=3", "4 attention heads", "1, 2, 4"]),
]


@pytest.mark.parametrize(("model", "tp_size", "words"), REFUSED, ids=str)
def test_what_cannot_be_cut(model: dict[str, Any], tp_size: int, words: list[str]) -> None:
    made = tiny(**model)
    with pytest.raises(ValueError, match=words[0]) as caught:
        family_of(made).check(made.config, tp_size)
    for word in words:
        assert word in str(caught.value)


def test_dropout_of_attention_over_a_shared_sequence() -> None:
    made = tiny(**GPT2, attn_pdrop=0.1)
    with pytest.raises(ValueError, match=r"attn_pdrop=0\.1.*attn_pdrop=0\.0"):
        family_of(made).units(made, ParallelContext(cp=Axis(SilentTransport(2, 0))))


def test_token_types() -> None:
    made, ids = tiny(**GPT2), torch.ones(1, 4, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "token_type_ids": ids}
    with pytest.raises(ValueError, match=r"token_type_ids.*return_token_type_ids=False"):
        family_of(made).side_inputs(made, batch, SequenceCut(), torch.ones(()))
