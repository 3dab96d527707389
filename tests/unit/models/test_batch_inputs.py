"""What the host reads of a batch, and what attention gets of it without looking again."""

from typing import Any

import pytest
import torch
from support.derived_models import small
from support.dispatched import Calls
from support.models import llama
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_helix.models.graph.attention import Attention, causal_masks, like_embeddings
from hf_helix.models.registry import family_of
from hf_helix.models.stock.batch_inputs import (
    FORM,
    LOSS_ALONE,
    Form,
    SequenceCut,
    document_ends,
    documents_of,
    form_of,
    forms_of,
    starts_of,
)

IDS = torch.arange(16).view(2, 8)
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
ONES = torch.ones(2, 8, dtype=torch.long)
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
RIGHT = LEFT.flip(1)
BATCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ones": {"attention_mask": ONES},
    "left": {"attention_mask": LEFT},
    "right": {"attention_mask": RIGHT.bool()},
    "positions": {"position_ids": torch.arange(8).expand(2, -1)},
    "packed": {"position_ids": PACKED},
    "packed, one row for all": {"position_ids": PACKED[:1]},
    "packed, with a mask of ones": {"position_ids": PACKED, "attention_mask": ONES},
    "packed, with padding": {"position_ids": PACKED, "attention_mask": RIGHT},
}


WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "bincount", "unique", "masked_select")
"""What makes the host wait for a device."""


@pytest.mark.filterwarnings("error::FutureWarning")  # Transformers 5.24 warns of the cache's old name
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_masks_are_those_of_transformers_and_nothing_waits(name: str, implementation: str) -> None:
    model = llama(attn_implementation=implementation)
    model.config.sliding_window = 3
    batch = {"input_ids": IDS, **BATCHES[name]}
    (batch[FORM],) = forms_of([batch])
    with Calls(*WAITING) as reads:
        side = family_of(model).side_inputs(model, batch, SequenceCut(), torch.ones(()))
        documents = starts_of(batch["position_ids"]).cumsum(1) if "position_ids" in batch else None
        mask = batch.get("attention_mask") if batch[FORM].is_masked else None
        if not (batch[FORM].starts_anew and "attention_mask" not in batch):
            documents = None
        windowed = causal_masks(model, [3], IDS, mask, documents)[3]
    assert reads.names == []
    positions = batch.get("position_ids", torch.arange(8)[None])
    theirs_reads = Calls(*WAITING)
    for create, mine in ((create_causal_mask, side["masks"][None]), (create_sliding_window_causal_mask, windowed)):
        with theirs_reads:
            theirs = create(
                model.config,
                like_embeddings(model, IDS),
                batch.get("attention_mask"),
                None,  # the cache, whose name Transformers 5.24 has changed
                position_ids=positions,
            )
        assert (mine is None) is (theirs is None)
        assert mine is None or torch.equal(mine, theirs)
    assert theirs_reads.names or ("attention_mask" in batch and implementation == "eager")


def test_a_window_of_batches_is_read_at_once_and_only_where_there_is_something_to_read() -> None:
    batches = [{"input_ids": IDS, **given} for given in BATCHES.values()]
    with Calls(*WAITING) as reads:
        result = forms_of(batches)
        assert forms_of(batches[:1]) == [Form()]
    # `tolist` of a whole tensor is one copy, which the dispatcher on CPU shows as none.
    assert reads.names == []
    known = dict(zip(BATCHES, result, strict=True))
    assert not known["ones"].is_masked
    assert [name for name, form in known.items() if form.joins_documents] == [
        "packed, with a mask of ones",
        "packed, with padding",
    ]
    assert known["left"] == Form(True, True)
    assert known["right"] == Form(True, True)
    assert known["positions"] == Form(num_documents=2, longest=8)
    assert known["packed"] == Form(starts_anew=True, num_documents=4, longest=8)
    assert known["packed, with padding"].is_masked


@pytest.mark.parametrize("positions", [PACKED[:1], PACKED[:1] + 2, torch.arange(8)[None]])
def test_flash_attention_is_told_what_it_would_find(positions: Tensor) -> None:
    (form,) = forms_of([{"input_ids": IDS[:1], "position_ids": positions}])
    with Calls(*WAITING) as reads:
        mine = document_ends(positions, form)
    assert reads.names == []
    (ends, _), (longest, _) = prepare_fa_kwargs_from_position_ids(positions)
    assert torch.equal(mine["cu_seq_lens_q"], ends)
    assert mine["cu_seq_lens_q"].dtype == ends.dtype
    assert mine["max_length_k"] == int(longest)


@pytest.mark.parametrize(("positions", "told"), [(PACKED, False), (PACKED[:1], True), (None, False)])
def test_flash_attention_gets_no_positions_to_look_at(
    positions: Tensor | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not there on CPU; what would be called notes what it is given."""
    given: dict[str, Any] = {}

    def noted(module: Any, q: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, None]:
        given.update(options)
        return q.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", noted)
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    batch = {"input_ids": IDS[:1] if told else IDS}
    batch |= {} if positions is None else {"position_ids": positions}
    side = family_of(model).side_inputs(model, batch, SequenceCut(), torch.ones(()))
    q = torch.zeros(len(batch["input_ids"]), 2, 8, 4)
    module = model.model.layers[0].self_attn
    with Calls(*WAITING) as reads:
        attention = Attention(module, lambda _: (q, q, q))
        out = attention(IDS[0], masks=side["masks"], positions=side["positions"], ends=side["ends"])
    assert reads.names == []
    assert out.shape == (8, len(q), 8)
    assert "position_ids" not in given
    assert ("cu_seq_lens_q" in given) is told


@pytest.mark.parametrize("loss_alone", [True, False])
@pytest.mark.parametrize("counted", ["all", "shifted", "shown", "none"])
@pytest.mark.parametrize("mask", [LEFT, RIGHT, ONES])
def test_padding_on_the_right_needs_a_mask_where_it_is_read(mask: Tensor, counted: str, loss_alone: bool) -> None:
    batch = {"input_ids": IDS, "attention_mask": mask, LOSS_ALONE: loss_alone}
    if counted == "shifted":
        batch["shift_labels"] = IDS.where(mask > 0, 1)
    elif counted != "none":
        batch["labels"] = IDS if counted == "all" else IDS.where(mask > 0, -100)
    form = form_of(batch)
    is_read = not loss_alone or counted in ("all", "shifted")
    assert form == Form(mask is not ONES, mask is LEFT or (mask is RIGHT and is_read))
    assert (documents_of(IDS, mask, None, form) is not None) is form.needs_mask


def test_documents_of_a_cut_sequence_do_not_wait_either() -> None:
    batch = {"input_ids": IDS, "position_ids": PACKED}
    (form,) = forms_of([batch])
    with Calls(*WAITING) as reads:
        documents = documents_of(IDS, None, PACKED, form)
    assert reads.names == []
    assert documents is not None
    assert documents.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8]


def test_inputs_that_the_cut_model_would_not_read_are_refused_by_name() -> None:
    family = family_of(small("BartForCausalLM", num_hidden_layers=1))
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": ONES, "position_ids": PACKED}
    family.check_batch(batch)
    with pytest.raises(
        ValueError, match=r"the batch has encoder_hidden_states, which Bart.* would read and .*leave it"
    ):
        family.check_batch({**batch, "encoder_hidden_states": IDS})
