"""Facts about a batch that the host needs to choose attention masks, and the cut of a sequence over ranks.

In:   the batches of a window, on any device; tensors over the full sequence of a micro-batch.
Out:  the `Form` of each batch (hidden tokens, packed documents); this rank's tokens; the documents of a sequence.
Must hold: all batches are read at once, before the window, so that a window never waits for the device; batches without
mask and positions are not read at all. With c context-parallel ranks, rank r holds parts r and 2c-1-r of 2c equal
parts, so that every rank has the same share of the causal triangle; padding stands at the end of the sequence, since no
token attends to it.

    c = 2:   sequence | 0 | 1 | 2 | 3 |   rank 0 holds 0 and 3, rank 1 holds 1 and 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.operators.attention.ring_attention import PADDING, parts_of, positions_of
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.vocabulary.loss import IGNORED

LOSS_ALONE = "loss_alone"
"""The key of a batch of which only the model's own loss is read. Outputs of attention at padding on the right are then
read only at tokens with a target: no other token attends to padding, and losses of routers do not count padding.
"""

FORM = "form"
"""The key of a batch for its `Form`, once read."""


@dataclass(frozen=True)
class Form:
    """Facts about the mask and the positions of a batch.

    Attributes:
        is_masked: the mask hides a token, or is not of shape [batch, sequence].
        needs_mask: a token follows a hidden token, or the output of attention for a hidden token is read.
        starts_anew: a position is not the previous position plus one.
        num_documents: the number of tokens, in all rows, at the smallest position.
        longest: the largest number of tokens between two of these tokens.
        joins_documents: a mask is given, and a position starts anew between two tokens that it does not hide:
            attention reads the mask, and not the positions.
    """

    is_masked: bool = False
    needs_mask: bool = False
    starts_anew: bool = False
    num_documents: int = 0
    longest: int = 0
    joins_documents: bool = False


def form_of(batch: Mapping[str, Any]) -> Form:
    """Returns the form of a batch; waits for the device if the form was not read before."""
    form = batch.get(FORM)
    return forms_of([batch])[0] if form is None else form


def forms_of(batches: Sequence[Mapping[str, Any]]) -> list[Form]:
    """Returns the form of every batch. Waits for the device once, and only for batches with a mask or positions."""
    tensors = [_figures(batch) for batch in batches]
    present = [figures for figures in tensors if figures is not None]
    rows = iter(torch.stack(present).tolist() if present else ())
    found = [None if figures is None else next(rows) for figures in tensors]
    return [Form() if row is None else _form(*row) for row in found]


def _form(masked: int, needs_mask: int, anew: int, num_documents: int, longest: int, joined: int) -> Form:
    return Form(bool(masked), bool(needs_mask), bool(anew), num_documents, longest, bool(joined))


def targets_of(batch: Mapping[str, Any]) -> Tensor:
    """Returns the next token of each token [batch, sequence]; `IGNORED` for targets that do not count."""
    targets, labels = batch.get("shift_labels"), batch.get("labels")
    if targets is None:
        targets = torch.full_like(batch["input_ids"], IGNORED) if labels is None else labels
        targets = functional.pad(targets[:, 1:], (0, 1), value=IGNORED)
    return targets


def count_targets(batch: Mapping[str, Any]) -> Tensor:
    """Returns the number of tokens in the loss of a batch, as a scalar."""
    return (targets_of(batch) != IGNORED).sum()


def starts_of(positions: Tensor) -> Tensor:
    """Returns True at the start of a document, i.e. at a position other than the previous plus one [batch, sequence].

    The first token of a row is False.
    """
    return functional.pad(positions.diff(dim=1) != 1, (1, 0))


def document_ends(positions: Tensor, form: Form) -> dict[str, Any]:
    """Returns the keywords with the ends of documents of one row [1, sequence] for Transformers' flash attention.

    Without the keywords, every layer would compute the ends and wait for the device.
    """
    flat = positions.flatten()
    indices = torch.arange(len(flat), device=flat.device)
    starts = torch.where(flat == flat.min(), indices, len(flat)).sort().values[: form.num_documents]
    ends = functional.pad(starts, (0, 1), value=len(flat)).int()
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": form.longest, "max_length_k": form.longest}


def _figures(batch: Mapping[str, Any]) -> Tensor | None:
    """Returns the values of a `Form` on the device; None for a batch without mask and positions."""
    ids, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
    if mask is None and positions is None:
        return None
    zero = torch.zeros((), dtype=torch.long, device=ids.device)
    figures = [zero] * 6
    if mask is not None and mask.dim() != 2:
        figures[0] = zero + 1
    elif mask is not None:
        hidden = mask == 0
        read = hidden & (targets_of(batch) != IGNORED) if batch.get(LOSS_ALONE) else hidden
        figures[:2] = hidden.any(), read.any() | (hidden[:, :-1] & ~hidden[:, 1:]).any()
    if positions is not None:
        starts = starts_of(positions)
        figures[2:5] = starts.any(), *_documents(positions.flatten())
        if mask is not None and mask.dim() == 2 and positions.dim() == 2:  # others are refused later
            figures[5] = (starts[:, 1:] & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)).any()
    return torch.stack([figure.to(ids.device, torch.long) for figure in figures])


def _documents(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of documents, and the length of the longest."""
    starts = positions == positions.min()
    indices = torch.arange(len(positions), device=positions.device)
    return starts.sum(), (indices - torch.where(starts, indices, 0).cummax(0).values).max() + 1


# -- sequence sharding ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceCut:
    """The cut of a sequence.

    Attributes:
        tp_size: the number of tensor-parallel ranks.
        cp_size: the number of context-parallel ranks.
        cp_rank: this rank on the context-parallel axis.
    """

    tp_size: int = 1
    cp_size: int = 1
    cp_rank: int = 0

    @classmethod
    def of(cls, tp: Axis, cp: Axis) -> SequenceCut:
        """Returns the cut over two axes of a mesh."""
        return cls(tp.size, cp.size, cp.rank)

    def padded(self, length: int) -> int:
        """Returns the smallest length that is at least the given length and divides among the ranks."""
        return length + -length % (self.tp_size * (2 * self.cp_size if self.cp_size > 1 else 1))

    def take(self, value: Tensor, dim: int, fill: float = 0) -> Tensor:
        """Returns this rank's tokens of a value.

        Args:
            value: of the full sequence.
            dim: the dimension of the sequence.
            fill: the value of padding.
        """
        extra = self.padded(value.shape[dim]) - value.shape[dim]
        if extra:
            value = functional.pad(value, (0, 0) * (value.dim() - 1 - dim % value.dim()) + (0, extra), value=fill)
        if self.cp_size == 1:
            return value
        n = value.shape[dim] // self.cp_size
        return value.index_select(dim, positions_of(n, self.cp_size, self.cp_rank, value.device))

    def join(self, parts: Tensor) -> Tensor:
        """Returns the full sequence in order, from the tokens of every rank [ranks * n, ...]."""
        return parts if self.cp_size == 1 else parts[self._order(parts).argsort()]

    def parted(self, value: Tensor) -> Tensor:
        """Returns the tokens of every rank [ranks * n, ...], from the full sequence; a sequence that does not divide is
        padded with zeros."""
        extra = self.padded(len(value)) - len(value)
        value = torch.cat((value, value.new_zeros(extra, *value.shape[1:]))) if extra else value
        return value if self.cp_size == 1 else value[self._order(value)]

    def ends(self, value: Tensor, count: int) -> Tensor:
        """Returns the last `count` tokens of this rank's two parts, of a shorter part all, from its tokens [n, ...]."""
        return value.unflatten(0, (2, -1))[:, -count:].flatten(0, 1)

    def behind_ends(self, value: Tensor, ends: Tensor, count: int) -> Tensor:
        """Returns this rank's two parts, each after the tokens before it [2 * (count + n / 2), ...]; zeros are before
        the sequence.

        Args:
            value: the tokens of the rank [n, ...].
            ends: the last `count` tokens of the parts of every rank, from `ends` [ranks * tokens, ...].
            count: the number of tokens before a part.
        """
        before = torch.cat((ends.new_zeros(count, *ends.shape[1:]), self.join(ends)))
        length = len(ends) // (2 * self.cp_size)
        parts = zip(parts_of(self.cp_size, self.cp_rank), value.chunk(2), strict=True)
        return torch.cat([piece for part, tokens in parts for piece in (before[part * length :][:count], tokens)])

    def _order(self, value: Tensor) -> Tensor:
        """Returns the positions of the tokens of rank 0, then of rank 1 and so on."""
        n = len(value) // self.cp_size
        return torch.cat([positions_of(n, self.cp_size, rank, value.device) for rank in range(self.cp_size)])


def documents_of(ids: Tensor, mask: Tensor | None, positions: Tensor | None, form: Form | None = None) -> Tensor | None:
    """Returns the document of every token [batch, sequence], by the rules of Transformers; tokens attend within a
    document. Padding (a mask of 0) is in `PADDING`.

    Returns None if every token attends to all earlier tokens, or if only unread tokens attend to others (padding
    on the right, see `Form`). The form of the batch is read if not given.

    Raises:
        ValueError: the mask does not have two dimensions.
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
