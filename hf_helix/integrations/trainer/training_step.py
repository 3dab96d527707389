"""Windows for the engine, out of the stock Trainer's loop over micro-batches.

In:   the micro-batches that the stock loop fetches for an optimizer step, and its calls of `training_step`.
Out:  the loss of every micro-batch, and complete gradients.
Must hold: each call of `training_step` gets the micro-batch that was fetched; a call outside of `train()` is a window
of a single micro-batch; every returned loss was computed; a step in `train()` contains nothing but training.

    get_batch_samples    fetches the micro-batches of a step; the engine may measure and choose a plan
    training_step 1      runs the full window, returns the loss of micro-batch 1
    training_step 2...   return the losses of the other micro-batches
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_helix.engine.cut.microbatches import LossScale
from hf_helix.integrations.trainer.checks import check_overrides
from hf_helix.integrations.trainer.evaluation import check_outputs
from hf_helix.integrations.trainer.preemption import PreemptionHooks
from hf_helix.integrations.trainer.trackers import check_trackers
from hf_helix.integrations.upstream import overrides
from hf_helix.models.stock.batch_inputs import count_targets
from hf_helix.runtime.distributed.agreement import agree_on_action
from hf_helix.runtime.distributed.mesh import rank
from hf_helix.runtime.executor import WindowEnded
from hf_helix.runtime.failures import activity
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.notices import say
from hf_helix.tuning.cache import export
from hf_helix.tuning.result_text import TuningResult


class FetchedWindow:
    """The micro-batches of an optimizer step, as fetched.

    Attributes:
        losses: the loss of every micro-batch; None until the window has run.
        num_returned: the number of losses returned by `training_step`.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = list(batches)
        self.losses: Tensor | None = None
        self.num_returned = 0
        self._contents = [_contents(batch) for batch in self.batches]
        self._prepared: list[Any] | None = None

    def prepared(self, prepare: Callable[[Any], Any]) -> list[Any]:
        """Returns the micro-batches as arguments of the model, each prepared once."""
        if self._prepared is None:
            self._prepared = [prepare(batch) for batch in self.batches]
        return self._prepared

    def holds(self, inputs: Any) -> bool:
        """Returns whether the inputs are the next micro-batch, unchanged since the fetch."""
        mine, given = self._contents[self.num_returned], _contents(inputs)
        return mine.keys() == given.keys() and all(
            value is mine[name][0] and version == mine[name][1] for name, (value, version) in given.items()
        )


def _contents(batch: Any) -> dict[Any, tuple[Any, int]]:
    """Returns the values of a batch by name, each with the number of in-place writes."""
    named = batch.items() if isinstance(batch, Mapping) else [(None, batch)]
    return {
        name: (value, value._version if isinstance(value, Tensor) and not value.is_inference() else 0)
        for name, value in named
    }


def trains_as_fetched(kind: type) -> bool:
    """Returns whether no class of a trainer can change a batch after ranks have compared the batches they fetched."""
    changing = "get_batch_samples", "_prepare_inputs", "_prepare_input"
    owners = {base for base in kind.__mro__ for name in changing if name in vars(base)}
    return _has_stock_step(kind) and owners <= {WindowHooks, Trainer}


def _has_stock_step(kind: type) -> bool:
    """Returns whether `WindowHooks.training_step` runs first, without a class in front of it."""
    return getattr(kind, "training_step", None) is WindowHooks.training_step


class WindowHooks(PreemptionHooks):
    """The part of `HelixTrainerMixin` that trains."""

    _window: FetchedWindow | None = None

    @overrides("Trainer", otherwise="a loss of the user's own would be ignored without a word")
    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares as the stock method does. Raises ValueError if an override would have no effect."""
        check_overrides(self)
        check_trackers(self)
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    @overrides(
        "Trainer", otherwise="evaluations would leave outputs out without a word", needs=("ignore_keys_for_eval",)
    )
    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as the stock method does. Raises ValueError if evaluations would return outputs other than the
        logits."""
        evaluates = self.args.eval_strategy != "no" or self.args.eval_on_start
        if not self._has_own_loss and self.compute_metrics is not None and evaluates:
            check_outputs(self.model.config, kwargs.get("ignore_keys_for_eval"))
        try:
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._window = None  # the run may have been stopped inside a window

    @overrides("Trainer", otherwise="ranks that share a batch would draw differently in workers")
    def get_train_dataloader(self) -> Any:
        """Returns the stock loader, with equal worker seeds on the ranks that share a batch."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        stock = getattr(loader, "base_dataloader", loader)
        if isinstance(seed := getattr(stock, "worker_init_fn", None), functools.partial) and "rank" in seed.keywords:
            stock.worker_init_fn = functools.partial(seed, rank=rank() // self.helix_config.ranks_per_batch)
        return loader

    @overrides("Trainer", otherwise="there would be no window to interleave, and ranks with different data would hang")
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Collects the micro-batches of an optimizer step and keeps them for `training_step`. Collective.

        When tuning is due, plans are measured with these micro-batches.

        Returns:
            The micro-batches, and the number of their tokens with a label, as the stock method.
        """
        mesh = self.helix.mesh
        self._note_before_window()
        if mesh.ranks_per_batch > 1:  # the workers of their loaders draw alike
            with watched():
                agree_on_action("a batch is fetched", mesh=mesh)
        with activity.doing(activity.DATA):
            batches = list(itertools.islice(epoch_iterator, num_batches))
        with watched():
            self.helix.checks.agree(batches, self._health)
        samples, num_items = super().get_batch_samples(iter(batches), num_batches, device)  # type: ignore[misc]
        self._window = window = FetchedWindow(samples) if samples else None
        if window is not None and self.helix.ends_at_decoder:
            self._say_tuning(self.helix.session.tune_calls(self._steps_left))
        elif window is not None:
            ready, scale = window.prepared(self._prepare_batch), self.loss_scale(num_items, self._num_parts)
            self._say_tuning(self.helix.session.tune(ready, scale, self.state.global_step, self._steps_left))
        return samples, num_items

    @overrides("Trainer", otherwise="the cut model would be called, which is an error")
    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Runs forward and backward of a micro-batch. The first call of a window runs the full window. Collective.

        Outside of `train()`, the micro-batch is a window of its own; gradients are added to existing gradients.

        Args:
            inputs: the micro-batch, as fetched.

        Raises:
            RuntimeError: in `train()`, a micro-batch of several has changed since the fetch.
        """
        window = self._window
        if self.helix.ends_at_decoder:
            return self._own_step(model, inputs, num_items_in_batch)
        if window is None:
            agree_on_action("trainer.training_step() is called", mesh=self.helix.mesh)
            self.helix.checks.check_values(inputs)
            window = self._window = FetchedWindow([inputs])
            scale = self._scale_of_one(inputs, num_items_in_batch)
            try:
                # Inside of `train()`, `tune` does the same.
                self.helix.session.settle_link(window.prepared(self._prepare_batch), scale, self.state.global_step)
                return self._run_window(window, scale, is_compared=False)[0]
            finally:
                self._window = None
        if len(window.batches) == 1:
            if not window.holds(inputs):
                self.helix.checks.check_values(inputs)
                window = self._window = FetchedWindow([inputs])
        elif not window.holds(inputs):
            raise RuntimeError(
                f"{type(self).__name__}.training_step got another micro-batch than was fetched, or a changed one: "
                "the micro-batches of an optimizer step run together, so a change would come too late for the "
                "others; change batches in the data collator, or use gradient_accumulation_steps=1"
            )
        if window.losses is None:
            if not _has_stock_step(type(self)):
                agree_on_action("a window is trained")  # a user's override may have started with work on a single rank
            scale = self.loss_scale(num_items_in_batch, self._num_parts)
            try:
                window.losses = self._run_window(window, scale, trains_as_fetched(type(self)))
            except WindowEnded:
                self._window = None
                return self._end_inside()
        loss = window.losses[window.num_returned]
        window.num_returned += 1
        if window.num_returned == len(window.batches):
            self._window = None
        return loss

    def _own_step(self, model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        """Runs the stock step of a micro-batch, whose backward pass runs with the next one; the last micro-batch of a
        window, and one outside of `train()`, completes the gradients."""
        session, window, step = self.helix.session, self._window, self.state.global_step
        if window is not None and not self._begins(window):
            self._window = None
            session.drop_window()
            return self._end_inside()
        if window is None or not _has_stock_step(type(self)) or self.helix.mesh.ranks_per_batch > 1:
            # A callback of one rank may have drawn numbers since the fetch.
            with watched():
                agree_on_action("trainer.training_step() is called", mesh=self.helix.mesh, given=[inputs])
        with session.calling(step) as losses, self._gathering():
            loss: Tensor = super().training_step(model, inputs, num_items)  # type: ignore[misc]
            losses.append(loss)
        self._health.note_losses(loss.detach().reshape(1), step + 1)
        if window is not None:
            window.num_returned += 1
        if window is None or window.num_returned == len(window.batches):
            self._window = None
            session.finish_window()
        return loss

    def _begins(self, window: FetchedWindow) -> bool:
        """Returns whether the next micro-batch may begin; the last one always, since the stock loop steps after it."""
        number = window.num_returned
        may_begin = self._may_begin(len(window.batches))
        return may_begin is None or number == len(window.batches) - 1 or may_begin(number)

    def _prepare_batch(self, inputs: Any) -> Any:
        return self._stock.prepare(self, inputs)

    def _run_window(self, window: FetchedWindow, scale: LossScale, is_compared: bool) -> Tensor:
        """Runs a window and returns the loss of every micro-batch. Collective.

        Args:
            window: the micro-batches.
            scale: the factors of their losses.
            is_compared: see `Session.train_window`.
        """
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers have a mode
        ready = window.prepared(self._prepare_batch)
        step = self.state.global_step
        may_begin = self._may_begin(len(ready))
        found = self.helix.session.train_window(ready, scale, step, is_compared, may_begin)
        losses = self._stock.take_losses(self, ready, found)
        # Without any label, the loss of every micro-batch is 0 / 0 as in the stock Trainer, and the gradient is zero.
        noted = losses if scale.tokens is None else losses.where(scale.tokens.isfinite(), 0.0)
        self._health.note_losses(noted, step + 1)
        return losses

    @property
    def _steps_left(self) -> int | None:
        left = self.state.max_steps - self.state.global_step
        return left if left > 0 else None

    def _say_tuning(self, tuning: TuningResult | None) -> None:
        """Prints and writes the result of a tuning, if any."""
        if tuning is not None and self.args.process_index == 0:
            folder = Path(str(self.args.output_dir), "helix")
            try:
                export(folder, tuning, self.helix.plan.to_json())
                say(f"{tuning.summary} (details: {folder / 'tuning.txt'})")
            except OSError as error:
                say(f"{tuning.summary} (details: print(trainer.tuning), since {folder} cannot be written: {error})")

    @property
    def _num_parts(self) -> int:
        """The number of micro-batches of the present step."""
        return getattr(self, "current_gradient_accumulation_steps", 1)

    def loss_scale(self, num_items: Any, num_parts: int = 1) -> LossScale:
        """Returns the factors for the losses of a window.

        As in the stock Trainer, gradients are averaged over dp, so the mean over all tokens is multiplied by dp. The
        stock Trainer divides `num_items` by tp * pp * cp even without a sum over these ranks; the factor undoes the
        division.

        Args:
            num_items: the number of tokens of the window with a label; None for a sum of losses.
            num_parts: the number of micro-batches. The stock Trainer takes the mean of their mean losses if the model
                does not accept the number of tokens, as models with towers do not.
        """
        if not self.model_accepts_loss_kwargs:
            return LossScale(None, 1 / num_parts)
        averages = self.args.average_tokens_across_devices
        factor = self.helix.mesh.dp_size if averages else 1 / self.helix_config.ranks_per_batch
        tokens = torch.as_tensor(
            factor if num_items is None else factor / num_items, dtype=torch.float32, device=self.args.device
        )
        dp_size = self.helix.mesh.dp_size if averages else 1.0
        return LossScale(tokens, self._stock.batch_factor(num_parts, dp_size))

    def _scale_of_one(self, inputs: Mapping[str, Any], num_items: Any) -> LossScale:
        """Returns the factors for a single micro-batch. Without `num_items`, the stock Trainer divides the mean loss of
        the micro-batch by the number of micro-batches of a step.
        """
        if num_items is not None:
            return self.loss_scale(num_items)
        part = 1 / self._num_parts
        return LossScale((part / count_targets(inputs)).to(self.args.device), part)

    def _check_window_ran(self) -> None:
        """Refuses an optimizer step before the window has run, if a subclass computes the loss itself."""
        if self._window is not None and self._window.losses is None:
            raise RuntimeError(
                f"{type(self).__name__}.training_step does not call super().training_step(model, inputs, "
                "num_items_in_batch), which runs the micro-batches of an optimizer step together; call it, and use "
                "the loss that it returns"
            )

    @overrides("Trainer", otherwise="each rank would clip by the norm of its own part of the gradient")
    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.helix.weights.clip_gradients(self.args.max_grad_norm)

    @overrides("Trainer", otherwise="the log would show the norm of one rank's part, and nan would not end the run")
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        self._check_window_ran()
        norm = self.helix.gradient_norm() if grad_norm is None else grad_norm
        self._health.note_norm(norm)
        return norm
