"""Micro-batches of a window, from the batches of a data collator.

In:   batches of a data collator, on the device.
Out:  `MicroBatch`es, which compute the side inputs of this rank's tokens when needed.
Must hold: training, evaluation and measuring make their micro-batches here; the host reads masks and positions before
the window, and waits for nothing within the window.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils.logging import get_logger

from hf_helix.models.graph.attention import FLASH
from hf_helix.models.graph.token_loss import token_side_inputs
from hf_helix.models.registry import family_of
from hf_helix.models.stock.batch_inputs import FORM, Form, SequenceCut, count_targets, form_of, forms_of
from hf_helix.operators.experts.moe import SHARD_TOKENS
from hf_helix.runtime.distributed.mesh import Mesh, rank
from hf_helix.runtime.microbatch import MicroBatch

logger = get_logger(__name__)

Prepare = Callable[[], Mapping[str, Any]]


class LossScale(NamedTuple):
    """The factors of losses, before gradients are averaged over the data-parallel ranks.

    Attributes:
        tokens: the factor of the summed loss of the tokens of a micro-batch; a scalar. None for the mean loss of every
            micro-batch, times `batch`.
        batch: the factor of other losses of a micro-batch, such as losses of routers.
    """

    tokens: Tensor | None
    batch: float = 1.0

    def of(self, batch: Mapping[str, Any]) -> tuple[Tensor, float]:
        """Returns the factors for a micro-batch."""
        return (self.batch / count_targets(batch) if self.tokens is None else self.tokens), self.batch


class WindowMaker:
    """The micro-batches of a model.

    Args:
        base: the Transformers model.
        mesh: the mesh of ranks.
        has_token_loss: whether a loss of log-probabilities reads the batches.
    """

    def __init__(self, base: Any, mesh: Mesh, has_token_loss: bool = False) -> None:
        self._base = base
        self._family = family_of(base)
        self._cut = SequenceCut.of(mesh.tp, mesh.cp)
        self._has_token_loss = has_token_loss

    def microbatch(self, batch: Mapping[str, Any], scale: LossScale, key: tuple[int, int]) -> MicroBatch:
        """Returns the micro-batch of a batch.

        Args:
            batch: `input_ids` and `labels` [batch, sequence], and other tensors of the data collator.
            scale: the factors of the losses.
            key: the optimizer step and the number of the micro-batch in its window, see `MicroBatch`.
        """
        self._family.check_batch(batch)
        batch = {**batch, FORM: form_of(batch)}
        self._warn_of_documents(batch[FORM], has_mask=batch.get("attention_mask") is not None)
        factors = scale.of(batch)
        prepare: Prepare = functools.partial(self._family.side_inputs, self._base, batch, self._cut, *factors)
        if self._has_token_loss:
            prepare = functools.partial(_with_batch, prepare, batch, factors[1])
        return MicroBatch(prepare, key, *batch["input_ids"].shape)

    def window(self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int) -> list[MicroBatch]:
        """Returns the micro-batches of a window.

        Args:
            batches: see `microbatch`.
            scale: the factors of the losses.
            step: the optimizer step, a seed of randomness.
        """
        with_forms = zip(batches, forms_of(batches), strict=True)  # of all at once
        return [
            self.microbatch({**batch, FORM: form}, scale, (step, place))
            for place, (batch, form) in enumerate(with_forms)
        ]

    def _warn_of_documents(self, form: Form, has_mask: bool) -> None:
        """Warns once, on rank 0, of rows with several documents that the stock Trainer would treat otherwise, or that a
        mask joins. Flash attention of Transformers reads positions in both cases."""
        config = self._base.config.get_text_config()
        if rank() > 0 or not self._family.packs_by_positions or getattr(config, "_attn_implementation", None) in FLASH:
            return
        if form.starts_anew and not has_mask and getattr(config, "use_cache", False):
            logger.warning_once(
                "use_cache=True and position_ids that start anew in a row: attention stays within each document, and "
                "the stock Trainer would let documents attend to each other; use_cache=False says so for both"
            )
        if form.joins_documents:
            logger.warning_once(
                "attention_mask beside position_ids that start anew in a row: documents attend to each other, as in "
                "the stock Trainer; leave attention_mask out of the batch, and attention stays within each document"
            )


def _with_batch(prepare: Prepare, batch: Mapping[str, Any], scale: float) -> Mapping[str, Any]:
    """Returns the side inputs of a micro-batch and the inputs of a loss of log-probabilities."""
    return {**prepare(), **token_side_inputs(batch, scale)}


def share_lengths(batches: Sequence[Mapping[str, Any]], mesh: Mesh) -> Sequence[Mapping[str, Any]]:
    """Returns the batches with the largest number of tokens of any rank. Collective over `mesh.experts`.

    Experts with a capacity take the same number of rows from every rank, so the longest batch of all decides.
    """
    group = mesh.experts.group
    if group is None:
        return batches
    cut = SequenceCut.of(mesh.tp, mesh.cp)
    sizes = [(len(batch["input_ids"]), cut.padded(batch["input_ids"].shape[1])) for batch in batches]
    ranks = cut.tp_size * cut.cp_size
    tokens = torch.tensor([rows * length // ranks for rows, length in sizes], device=mesh.device)
    dist.all_reduce(tokens, dist.ReduceOp.MAX, group=group)
    return [{**batch, SHARD_TOKENS: most} for batch, most in zip(batches, tokens.tolist(), strict=True)]
