"""From the batches of a window to the micro-batches that a runner takes.

In:   batches as a data collator makes them, on the device.
Out:  `MicroBatch`es, which compute the side inputs of this rank's tokens when they are needed.
Must hold: training, evaluation and measuring make their micro-batches here; the host reads masks and positions before
the window, and waits for nothing inside of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.models.batch_inputs import FORM, SequenceCut, forms_of
from hf_helix.models.registry import family_of
from hf_helix.operators.moe.dispatch import SHARD_TOKENS
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.microbatch import MicroBatch


class LossScale(NamedTuple):
    """What losses are multiplied with, before gradients are averaged over the data-parallel ranks.

    Attributes:
        tokens: the summed loss of the tokens of a micro-batch; a scalar.
        batch: a loss of a micro-batch as a whole, such as that of routers.
    """

    tokens: Tensor
    batch: float = 1.0


class WindowMaker:
    """Makes the micro-batches of a model.

    Args:
        base: the Transformers model.
        mesh: which ranks share a sequence.
    """

    def __init__(self, base: Any, mesh: Mesh) -> None:
        self._base = base
        self._family = family_of(base)
        self._cut = SequenceCut.of(mesh.tp, mesh.cp)

    def microbatch(self, batch: Mapping[str, Any], scale: LossScale, key: tuple[int, int]) -> MicroBatch:
        """Returns a batch as the runner takes it.

        Args:
            batch: `input_ids` and `labels` [batch, sequence], and what else the data collator made.
            scale: what the losses are multiplied with.
            key: the optimizer step and the number of the micro-batch in its window, see `MicroBatch`.
        """
        prepare = functools.partial(self._family.side_inputs, self._base, batch, self._cut, *scale)
        ids = batch["input_ids"]
        return MicroBatch(prepare, key, num_tokens=ids.numel(), shape=" x ".join(map(str, ids.shape)))

    def window(self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int) -> list[MicroBatch]:
        """Returns the batches of a window as the runner takes them.

        Args:
            batches: see `microbatch`.
            scale: what the losses are multiplied with.
            step: the optimizer step, which randomness derives from.
        """
        with_forms = zip(batches, forms_of(batches), strict=True)
        return [
            self.microbatch({**batch, FORM: form}, scale, (step, place))
            for place, (batch, form) in enumerate(with_forms)
        ]


def share_lengths(batches: Sequence[Mapping[str, Any]], mesh: Mesh) -> Sequence[Mapping[str, Any]]:
    """Returns the batches with the largest number of tokens that any rank brings. Collective over `mesh.experts`.

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
