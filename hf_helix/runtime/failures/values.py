"""Values: ids out of range are refused before a window runs; a loss or a gradient that is not finite ends the run.

In:   the batches of a window, on any device, and the rows of the tables for ids, labels and positions; after a step the
      losses of the window on this rank, and the norm of the whole gradient.
Out:  a few numbers, which ranks exchange when they compare the lengths of their windows; an error on every rank, with
      the id, or with the step and the ranks.
Must hold: no check waits for the device inside a step. A rank with a part of a table must not take an invalid id for an
id of another rank; on a GPU an id out of range ends the process without a message. Losses and norms of a step are read
when the next step begins, or before an evaluation or a save: the weights are lost by then, but nothing has saved them.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.vocabulary.loss import IGNORED
from hf_helix.runtime.distributed.agreement import gather_numbers
from hf_helix.runtime.distributed.mesh import rank

logger = logging.getLogger(__name__)

NUM_BOUNDS = 5


def value_bounds(batches: Sequence[Any], device: torch.device) -> Tensor:
    """Returns the negated smallest and the largest id, the same for counted labels, and the largest position; on the
    device.

    Zero for missing values, and for no batches.
    """
    if not batches:
        return torch.zeros(NUM_BOUNDS, dtype=torch.long, device=device)
    return torch.stack([_of_batch(batch) for batch in batches]).amax(0).to(device)


def _of_batch(batch: Any) -> Tensor:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor):
        return torch.zeros(NUM_BOUNDS, dtype=torch.long)
    targets, labels, places = batch.get("shift_labels"), batch.get("labels"), batch.get("position_ids")
    if targets is None and labels is not None:
        targets = labels[..., 1:]  # no token is followed by the first label
    counted = None if targets is None else torch.where(targets == IGNORED, 0, targets)
    farthest = ids.new_full((), max(ids.shape[-1] - 1, 0)) if places is None else _ends(places, ids)[1]
    return torch.stack((*_ends(ids, ids), *_ends(counted, ids), farthest.to(ids.device))).long()


def _ends(values: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """The negated smallest and the largest number of a tensor."""
    if values is None or not values.numel():
        return like.new_zeros(()), like.new_zeros(())
    smallest, largest = values.to(like.device).aminmax()
    return -smallest, largest


@dataclass
class Limits:
    """The largest ids, labels and positions.

    Attributes:
        ids: the rows of the input embedding.
        labels: the rows of the head.
        positions: the rows of a table of positions; None if any position has an embedding.
        trained_length: the longest sequence of the model's pretraining; None if unknown.
    """

    ids: int
    labels: int
    positions: int | None = None
    trained_length: int | None = None
    _has_warned: bool = field(default=False, init=False)

    def raise_if_invalid(self, ranges: Sequence[Sequence[int]]) -> None:
        """Raises if a rank has a value without a row in its table; warns once about long sequences.

        Raises:
            ValueError: names the value, the size of the table, and a remedy.
        """
        for place, (smallest_id, largest_id, smallest_label, largest_label, position) in enumerate(ranges):
            where = f" in a batch of rank {place}" if len(ranges) > 1 else ""
            odd = _outside(-smallest_id, largest_id, self.ids)
            if odd is not None:
                table = f"the input embedding has {self.ids} rows (ids 0 to {self.ids - 1})"
                raise _beyond_vocabulary(f"token id {odd}{where}: {table}", "input_ids")
            odd = _outside(-smallest_label, largest_label, self.labels)
            if odd is not None:
                table = f"the head has {self.labels} rows (labels 0 to {self.labels - 1}; {IGNORED} is not counted)"
                raise _beyond_vocabulary(f"label {odd}{where}: {table}", "labels")
            if self.positions is not None and position >= self.positions:
                raise ValueError(
                    f"position {position}{where}: the model has embeddings of {self.positions} positions, so "
                    f"{self.positions} tokens are the longest sequence; cut longer ones: tokenizer(..., "
                    f"truncation=True, max_length={self.positions})"
                )

        longest = 1 + max(row[-1] for row in ranges)
        if self.trained_length is not None and longest > self.trained_length and not self._has_warned:
            self._has_warned = True
            if rank() == 0:
                logger.warning(
                    f"a sequence has {longest} tokens, and the model was made for {self.trained_length} "
                    "(config.max_position_embeddings): all of them are used, as by the stock Trainer; cut longer ones "
                    f"with tokenizer(..., truncation=True, max_length={self.trained_length})"
                )


def _outside(smallest: int, largest: int, rows: int) -> int | None:
    return smallest if smallest < 0 else largest if largest >= rows else None


def _beyond_vocabulary(what: str, source: str) -> ValueError:
    return ValueError(
        f"{what}. If tokens were added to the tokenizer, call model.resize_token_embeddings(len(tokenizer)) before the "
        f"model is cut; otherwise look at what makes {source}"
    )


# -- finite check --------------------------------------------------------------------------------------------------

SOUND, LOSS, GRADIENT = 0, 1, 2


class Health:
    """The result of the last step on this rank: whether its losses and the gradient were finite."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._losses: Tensor | None = None
        self._norm: Tensor | None = None
        self._step = 0

    def note_losses(self, losses: Tensor, step: int) -> None:
        """Keeps the losses of this rank's window, until the next call. Steps count from 1."""
        self._losses, self._norm, self._step = losses.detach(), None, step

    def note_norm(self, norm: Tensor | float) -> None:
        self._norm = torch.as_tensor(norm, device=self._device)

    def state(self) -> Tensor:
        """Returns the result of this rank, as a number on the device."""
        state = torch.zeros((), dtype=torch.long, device=self._device)
        if self._norm is not None:
            state = torch.where(torch.isfinite(self._norm), state, GRADIENT)
        if self._losses is not None:
            state = torch.where(torch.isfinite(self._losses).all(), state, LOSS)
        return state

    def check(self) -> None:
        """Compares over all ranks, now. Collective.

        Raises:
            FloatingPointError: on every rank, see `raise_if_invalid`.
        """
        self.raise_if_invalid([state for (state,) in gather_numbers(self.state()[None])])

    def raise_if_invalid(self, states: list[int]) -> None:
        """Raises if a rank has a loss or a norm that is not finite.

        Args:
            states: of every rank.

        Raises:
            FloatingPointError: names the step, and the ranks with such a loss.
        """
        if not any(states):
            return
        ranks = [str(rank) for rank, state in enumerate(states) if state == LOSS]
        what = f"the loss of rank {', '.join(ranks)}" if ranks else "the norm of the gradient, with sound losses,"
        raise FloatingPointError(
            f"step {self._step}: {what} is not finite (nan or inf), and neither are the weights any more. Resume from "
            "an earlier checkpoint with a lower learning_rate or max_grad_norm=1.0, or look at the samples of that step"
        )
