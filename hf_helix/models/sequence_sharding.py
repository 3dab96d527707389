"""The cut of a sequence over the ranks that share it.

In:   tensors over the whole sequence of a micro-batch.
Out:  this rank's tokens of them, and the documents of the whole sequence.
Must hold: with c context-parallel ranks, rank r holds the parts r and 2c-1-r of 2c equal ones, so that all have as much
of the causal triangle; padding that makes the sequence divide stands at its end, where nothing looks at it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.models.batch_form import Form, form_of, starts_of
from hf_helix.operators.attention.ring_attention import PADDING, positions_of
from hf_helix.operators.communication.transport import Axis


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
