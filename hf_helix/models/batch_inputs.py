"""The form of a batch: what the host must know of mask and positions to choose the masks of attention.

In:   the batches of a window, on whatever device.
Out:  for each batch whether tokens are masked, and whether positions start anew (packed documents).
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

from hf_helix.operators.attention.ring_attention import PADDING, positions_of
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.vocab_parallel import IGNORED

LOSS_ALONE = "loss_alone"
"""The key of a batch of which only the model's own loss is read. What attention gives for padding on the right is then
read only where it has a target: no other token attends to it, and losses of routers do not count it."""

FORM = "form"
"""The key of a batch under which its `Form` stands, where that was read before."""


@dataclass(frozen=True)
class Form:
    """The facts about a batch's mask and positions that the host needs.

    Attributes:
        is_masked: the mask hides a token, or is not a mask of tokens [batch, sequence].
        needs_mask: a token follows one that the mask hides, or what attention gives for a hidden one is read.
        starts_anew: a position is not the one before it plus one.
        num_documents: the number of tokens of all rows that are at the smallest position.
        longest: the largest number of tokens from one of these to the next.
    """

    is_masked: bool = False
    needs_mask: bool = False
    starts_anew: bool = False
    num_documents: int = 0
    longest: int = 0


def form_of(batch: Mapping[str, Any]) -> Form:
    """Returns the form of a batch; waits for the device where it was not read before."""
    form = batch.get(FORM)
    return forms_of([batch])[0] if form is None else form


def forms_of(batches: Sequence[Mapping[str, Any]]) -> list[Form]:
    """Returns the form of every batch. Waits for the device once, and only where a batch has a mask or positions."""
    tensors = [_figures(batch) for batch in batches]
    present = [figures for figures in tensors if figures is not None]
    values = iter(torch.stack(present).tolist() if present else ())
    return [
        Form() if figures is None else _form(batch, next(values))
        for batch, figures in zip(batches, tensors, strict=True)
    ]


def targets_of(batch: Mapping[str, Any]) -> Tensor:
    """Returns the token that follows each token of a batch [batch, sequence], `IGNORED` where it does not count."""
    targets, labels = batch.get("shift_labels"), batch.get("labels")
    if targets is None:
        targets = torch.full_like(batch["input_ids"], IGNORED) if labels is None else labels
        targets = functional.pad(targets[:, 1:], (0, 1), value=IGNORED)
    return targets


def starts_of(positions: Tensor) -> Tensor:
    """Returns True where a document starts, i.e. where a position is not its predecessor plus one [batch, sequence].

    The first token of a row is False.
    """
    return functional.pad(positions.diff(dim=1) != 1, (1, 0))


def document_ends(positions: Tensor, form: Form) -> dict[str, Any]:
    """Returns the keywords that tell flash attention of Transformers where the documents of one row [1, sequence] end.

    Without them it would find the same in every layer, and wait for the device each time.
    """
    flat = positions.flatten()
    places = torch.arange(len(flat), device=flat.device)
    starts = torch.where(flat == flat.min(), places, len(flat)).sort().values[: form.num_documents]
    ends = functional.pad(starts, (0, 1), value=len(flat)).int()
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": form.longest, "max_length_k": form.longest}


def _form(batch: Mapping[str, Any], figures: Sequence[int]) -> Form:
    hidden, needs, anew, num_documents, longest = figures
    mask = batch.get("attention_mask")
    return Form(bool(hidden) or (mask is not None and mask.dim() != 2), bool(needs), bool(anew), num_documents, longest)


def _figures(batch: Mapping[str, Any]) -> Tensor | None:
    """Returns the values of a `Form` on the device; None where there is nothing to read."""
    ids, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
    if mask is None and positions is None:
        return None
    zero = torch.zeros((), dtype=torch.long, device=ids.device)
    figures = [zero] * 5
    if mask is not None and mask.dim() == 2:
        hidden = mask == 0
        read = hidden & (targets_of(batch) != IGNORED) if batch.get(LOSS_ALONE) else hidden
        figures[:2] = hidden.any(), read.any() | (hidden[:, :-1] & ~hidden[:, 1:]).any()
    if positions is not None:
        figures[2:] = starts_of(positions).any(), *_documents(positions.flatten())
    return torch.stack([figure.to(ids.device, torch.long) for figure in figures])


def _documents(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of documents, and the number of tokens of the longest."""
    starts = positions == positions.min()
    places = torch.arange(len(positions), device=positions.device)
    return starts.sum(), (places - torch.where(starts, places, 0).cummax(0).values).max() + 1


# -- sequence sharding ---------------------------------------------------------------------------------------------
# The cut of a sequence over the ranks that share it.
#
# In:   tensors over the whole sequence of a micro-batch.
# Out:  this rank's tokens of them, and the documents of the whole sequence.
# Must hold: with c context-parallel ranks, rank r holds the parts r and 2c-1-r of 2c equal ones, so that all have as
# much
# of the causal triangle; padding that makes the sequence divide stands at its end, where nothing looks at it.


@dataclass(frozen=True)
class SequenceCut:
    """The cut of a sequence.

    Attributes:
        tp_size: the number of tensor-parallel ranks.
        cp_size: the number of context-parallel ranks.
        cp_rank: this rank among the context-parallel ones.
    """

    tp_size: int = 1
    cp_size: int = 1
    cp_rank: int = 0

    @classmethod
    def of(cls, tp: Axis, cp: Axis) -> SequenceCut:
        """Returns the cut over two axes of a mesh."""
        return cls(tp.size, cp.size, cp.rank)

    def padded(self, length: int) -> int:
        """Returns the smallest length that divides among the ranks and holds the given one."""
        return length + -length % (self.tp_size * (2 * self.cp_size if self.cp_size > 1 else 1))

    def take(self, value: Tensor, dim: int, fill: float = 0) -> Tensor:
        """Returns this rank's tokens of a value over the whole sequence.

        Args:
            value: the value of the whole sequence.
            dim: the dimension of the sequence.
            fill: the padding that makes the sequence divide.
        """
        extra = self.padded(value.shape[dim]) - value.shape[dim]
        if extra:
            value = functional.pad(value, (0, 0) * (value.dim() - 1 - dim % value.dim()) + (0, extra), value=fill)
        if self.cp_size == 1:
            return value
        n = value.shape[dim] // self.cp_size
        return value.index_select(dim, positions_of(n, self.cp_size, self.cp_rank, value.device))

    def join(self, parts: Tensor) -> Tensor:
        """Returns the whole sequence in order, from the tokens of every rank [ranks * n, ...]."""
        if self.cp_size == 1:
            return parts
        n = parts.shape[0] // self.cp_size
        places = torch.cat([positions_of(n, self.cp_size, rank, parts.device) for rank in range(self.cp_size)])
        return parts[places.argsort()]


def documents_of(ids: Tensor, mask: Tensor | None, positions: Tensor | None, form: Form | None = None) -> Tensor | None:
    """Returns which tokens may attend to each other, by the rules of Transformers.

    Args:
        ids: [batch, sequence].
        mask: 1 for tokens, 0 for padding [batch, sequence].
        positions: as the collator gave them; where they start anew, so does a document, unless there is a mask.
        form: the form of the batch; None reads it.

    Returns:
        The document of every token [batch, sequence], `PADDING` for padding; None where a token attends to all tokens
        before it, or where only tokens that nobody reads attend to others (padding on the right, see `Form`).

    Raises:
        ValueError: the mask is not of two dimensions.
    """
    if mask is not None and mask.dim() != 2:
        raise ValueError(
            f"attention_mask has {mask.dim()} dimensions, and with cp_size above 1 only a mask of tokens [batch, "
            "sequence] can be cut; mark documents with position_ids that start anew and leave the mask out"
        )
    form = form or form_of({"input_ids": ids, "attention_mask": mask, "position_ids": positions})
    if mask is not None:
        return torch.where(mask != 0, 0, PADDING) if form.needs_mask else None
    return starts_of(positions).cumsum(1).expand(len(ids), -1) if positions is not None and form.starts_anew else None
