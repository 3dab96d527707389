"""Preemption of a run: after SIGTERM or SIGUSR1 to any rank, all ranks end inside the window and save its last step.

In:   `enable_jit_checkpoint`; a signal to some ranks.
Out:  a window that ends between micro-batches; a checkpoint of the step before it, as if the window had not begun.
Must hold: no weight changes inside a window, so nothing but the window itself is lost, and a resumed run reads its
samples again. A window of one micro-batch, and one that all ranks have begun to the end, is trained and saved.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from hf_helix.checkpoint.files import PREFIX
from hf_helix.checkpoint.training_state import Generators, generators
from hf_helix.checkpoint.whole import is_complete
from hf_helix.integrations.trainer.stock import TrainerAttributes
from hf_helix.runtime.distributed.agreement import decide_on_rank_0
from hf_helix.runtime.failures.preemption import Preemption

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that launchers and Slurm send before they end a run."""


class _Before(NamedTuple):
    """What the state of the trainer was before a window was fetched."""

    tokens: int
    flos: float
    loss: Tensor
    generators: Generators


class PreemptionHooks(TrainerAttributes):
    """The part of `HelixTrainerMixin` that ends a run inside a window."""

    _preemption: Preemption | None = None  # in a run with `enable_jit_checkpoint`
    _before: _Before | None = None
    current_flos: float
    _tr_loss: Tensor
    callback_handler: Any

    is_preempted = False
    """Whether the present window has ended before its last micro-batch."""

    @property
    def is_asked_to_end(self) -> bool:
        """Whether this rank knows of a signal."""
        return self._preemption is not None and self._preemption.is_requested

    @contextlib.contextmanager
    def _preemptible(self) -> Iterator[None]:
        """Returns the context of a run that signals end, with `enable_jit_checkpoint`. Collective."""
        self.is_preempted, self._before = False, None
        if not getattr(self.args, "enable_jit_checkpoint", False):
            yield
            return
        self._preemption = preemption = Preemption()
        for callback in self.callback_handler.callbacks:
            manager = callback.jit_manager if isinstance(callback, JITCheckpointCallback) else None
            if manager is not None:  # its handler of SIGTERM calls the method in a thread, after a wait
                manager.kill_wait, manager._enable_checkpoint = 0, preemption.request
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGUSR1, preemption.ask) if in_main else None
        try:
            yield
        finally:
            if before is not None:
                signal.signal(signal.SIGUSR1, before)
            preemption.close()
            self._preemption = None

    def _note_before_window(self) -> None:
        """Notes what a checkpoint of the last step has, before the samples of the next are read."""
        if self._preemption is not None:
            self._before = _Before(
                self.state.num_input_tokens_seen, self.current_flos, self._tr_loss.clone(), generators()
            )

    def _may_begin(self, num_microbatches: int) -> Callable[[int], bool] | None:
        """Returns the question before each micro-batch of a window; None if nothing can end the window."""
        preemption, step = self._preemption, self.state.global_step
        if preemption is None or num_microbatches == 1:
            return None
        return lambda microbatch: preemption.may_begin(step, microbatch)

    def _end_inside(self) -> Tensor:
        """Ends the run inside the present window; returns a loss that counts nothing."""
        self.is_preempted = True
        return torch.zeros((), device=self.args.device)

    def restore_before_window(self) -> None:
        """Forgets the micro-batches that the stock loop has counted, of a window that has ended inside."""
        assert self._before is not None
        self.state.num_input_tokens_seen, self.current_flos = self._before.tokens, self._before.flos
        self._tr_loss = self._before.loss

    def lacks_checkpoint(self) -> bool:
        """Whether the last step is worth a checkpoint and `output_dir` has none of it. Collective."""
        folder = Path(self.args.output_dir or ".", f"{PREFIX}-{self.state.global_step}")
        return self.state.global_step > 0 and not decide_on_rank_0(lambda: is_complete(folder))
