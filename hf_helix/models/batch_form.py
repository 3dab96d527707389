"""The form of a batch: what the host must know of its mask and positions before it can say what attention computes.

In:   the batches of a window, on whatever device.
Out:  for each whether tokens are masked, and whether positions start anew.
Must hold: all batches are read at once, before the window, so that inside of it nothing waits for the device; batches
that bring neither a mask nor positions are not read at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

FORM = "form"
"""In a batch: its `Form`, where that was read before."""


@dataclass(frozen=True)
class Form:
    """What the values of a batch's mask and positions say.

    Attributes:
        is_masked: the mask hides a token, or is none of tokens [batch, sequence].
        rises: a token stands behind one that the mask hides.
        starts_anew: a position is not the one before it plus one.
        num_documents: tokens at the smallest position, of all rows.
        longest: the most tokens from one of these to the next.
    """

    is_masked: bool = False
    rises: bool = False
    starts_anew: bool = False
    num_documents: int = 0
    longest: int = 0


def form_of(batch: Mapping[str, Any]) -> Form:
    """The form of a batch; where nobody has read it before, this waits for the device."""
    found = batch.get(FORM)
    return forms_of([batch])[0] if found is None else found


def forms_of(batches: Sequence[Mapping[str, Any]]) -> list[Form]:
    """The form of every batch. Waits for the device once, and only where a batch has a mask or positions."""
    read = [_figures(batch) for batch in batches]
    there = [figures for figures in read if figures is not None]
    known = iter(torch.stack(there).tolist() if there else ())
    return [
        Form() if figures is None else _form(batch, next(known)) for batch, figures in zip(batches, read, strict=True)
    ]


def starts_of(positions: Tensor) -> Tensor:
    """True where a document starts [batch, sequence], but for the first token: positions do not go on by one."""
    return functional.pad(positions.diff(dim=1) != 1, (1, 0))


def document_ends(positions: Tensor, form: Form) -> dict[str, Any]:
    """What flash attention of Transformers is told of documents in one row [1, sequence]: where they end, the longest.

    It would find the same in every layer, and wait for the device each time.
    """
    flat = positions.flatten()
    places = torch.arange(len(flat), device=flat.device)
    starts = torch.where(flat == flat.min(), places, len(flat)).sort().values[: form.num_documents]
    ends = functional.pad(starts, (0, 1), value=len(flat)).int()
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": form.longest, "max_length_k": form.longest}


def _form(batch: Mapping[str, Any], figures: Sequence[int]) -> Form:
    hidden, rises, anew, num_documents, longest = figures
    mask = batch.get("attention_mask")
    return Form(bool(hidden) or (mask is not None and mask.dim() != 2), bool(rises), bool(anew), num_documents, longest)


def _figures(batch: Mapping[str, Any]) -> Tensor | None:
    """What a `Form` is made of, on the device; None where there is nothing to read."""
    ids, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
    if mask is None and positions is None:
        return None
    zero = torch.zeros((), dtype=torch.long, device=ids.device)
    found = [zero] * 5
    if mask is not None and mask.dim() == 2:
        found[:2] = (mask == 0).any(), (mask[:, 1:] > mask[:, :-1]).any()
    if positions is not None:
        found[2:] = starts_of(positions).any(), *_documents(positions.flatten())
    return torch.stack([figure.to(ids.device, torch.long) for figure in found])


def _documents(positions: Tensor) -> tuple[Tensor, Tensor]:
    """How many documents there are, and the tokens of the longest."""
    starts = positions == positions.min()
    places = torch.arange(len(positions), device=positions.device)
    return starts.sum(), (places - torch.where(starts, places, 0).cummax(0).values).max() + 1
