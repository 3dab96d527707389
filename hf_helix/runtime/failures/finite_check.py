"""Health: a loss or a gradient that is not finite ends the run, on every rank.

In:   the losses of each window on this rank, and the norm of the whole gradient.
Out:  an error that names the step and the ranks.
Must hold: nothing waits for the device inside a step. What a step has found is read when the next one begins, or before
anything is evaluated or saved; by then the weights are lost, but nobody has kept them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

SOUND, LOSS, GRADIENT = 0, 1, 2


class Health:
    """What this rank has found in the step that was last taken: whether its losses and the gradient were finite."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._losses: Tensor | None = None
        self._norm: Tensor | None = None
        self._step = 0

    def note_losses(self, losses: Tensor, step: int) -> None:
        """Keeps the losses of this rank's window, until the next are noted. Steps count from 1."""
        self._losses, self._norm, self._step = losses.detach(), None, step

    def note_norm(self, norm: Tensor | float) -> None:
        self._norm = torch.as_tensor(norm, device=self._device)

    def state(self) -> Tensor:
        """What this rank has found, as a number on the device."""
        state = torch.zeros((), dtype=torch.long, device=self._device)
        if self._norm is not None:
            state = torch.where(torch.isfinite(self._norm), state, GRADIENT)
        if self._losses is not None:
            state = torch.where(torch.isfinite(self._losses).all(), state, LOSS)
        return state

    def check(self) -> None:
        """Compares over all ranks, now. Collective.

        Raises:
            FloatingPointError: on every rank, see `judge`.
        """
        mine = self.state().reshape(1)
        states = [mine]
        if dist.is_initialized() and dist.get_world_size() > 1:
            states = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(states, mine)
        self.judge([int(state) for state in states])

    def judge(self, states: list[int]) -> None:
        """Raises if a rank has found something.

        Args:
            states: of every rank.

        Raises:
            FloatingPointError: names the step, and the ranks whose loss it was.
        """
        if not any(states):
            return
        ranks = [str(rank) for rank, state in enumerate(states) if state == LOSS]
        what = f"the loss of rank {', '.join(ranks)}" if ranks else "the norm of the gradient, with sound losses,"
        raise FloatingPointError(
            f"step {self._step}: {what} is not finite (nan or inf), and neither are the weights any more. Resume from "
            "an earlier checkpoint with a lower learning_rate or max_grad_norm=1.0, or look at the samples of that step"
        )
