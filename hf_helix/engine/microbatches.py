"""Micro-batches of a window, from the batches of a data collator.

In:   batches of a data collator, on the device.
Out:  `MicroBatch`es, which compute the side inputs of this rank's tokens when needed.
Must hold: training, evaluation and measuring make their micro-batches here; the host reads masks and positions before
the window, and waits for nothing within the window.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.models.batch_inputs import FORM, SequenceCut, count_targets, forms_of
from hf_helix.models.registry import family_of
from hf_helix.operators.moe import SHARD_TOKENS
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.microbatch import MicroBatch


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
    """

    def __init__(self, base: Any, mesh: Mesh) -> None:
        self._base = base
        self._family = family_of(base)
        self._cut = SequenceCut.of(mesh.tp, mesh.cp)

    def microbatch(self, batch: Mapping[str, Any], scale: LossScale, key: tuple[int, int]) -> MicroBatch:
        """Returns the micro-batch of a batch.

        Args:
            batch: `input_ids` and `labels` [batch, sequence], and other tensors of the data collator.
            scale: the factors of the losses.
            key: the optimizer step and the number of the micro-batch in its window, see `MicroBatch`.
        """
        self._family.check_batch(batch)
        prepare = functools.partial(self._family.side_inputs, self._base, batch, self._cut, *scale.of(batch))
        return MicroBatch(prepare, key, *batch["input_ids"].shape)

    def window(self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int) -> list[MicroBatch]:
        """Returns the micro-batches of a window.

        Args:
            batches: see `microbatch`.
            scale: the factors of the losses.
            step: the optimizer step, a seed of randomness.
        """
        with_forms = zip(batches, forms_of(batches), strict=True)
        return [
            self.microbatch({**batch, FORM: form}, scale, (step, place))
            for place, (batch, form) in enumerate(with_forms)
        ]


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
