"""The session of a cut model: the windows of one run, for the Trainer, for a loop, and for measurements.

In:   a cut model with its runner and tuner; batches of a data collator, or calls of the model by a loss of one's own.
Out:  losses, complete gradients, and values of evaluations; the plan in use, which tuning replaces between windows.
Must hold: no plan is measured or chosen while a window is trained; see `WindowChecks` for what ranks compare before.

    tune          measures and chooses a plan, if the rest of the run is worth it
    train_window  forward and backward of all micro-batches
    evaluate      forward of a batch

With a loss of one's own, `calling` encloses each call and its backward pass, and `finish_window` ends the window.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_helix.engine.calls import Calls, is_together
from hf_helix.engine.cut.called_decoder import CalledDecoder, Decoding
from hf_helix.engine.cut.evaluate import evaluate_batch
from hf_helix.engine.cut.microbatches import LossScale, WindowMaker, share_lengths
from hf_helix.engine.cut_model import CutModel
from hf_helix.engine.verification import Digests, in_another_order, raise_if_different
from hf_helix.engine.window_checks import WindowChecks
from hf_helix.models.direct_use import leave_out_unread
from hf_helix.models.stock.batch_inputs import LOSS_ALONE
from hf_helix.planning.schedule.placement import FOLD
from hf_helix.report.live import LiveScore
from hf_helix.runtime.cuda_graphs import WindowGraphs
from hf_helix.runtime.distributed.agreement import agree_on_action, agree_on_window
from hf_helix.runtime.divided import DividedParameters, is_recording, plain_parameters
from hf_helix.runtime.failures import activity
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.notices import say
from hf_helix.runtime.runner import Runner, forget_gradients, measured, set_aside
from hf_helix.runtime.stragglers.looks import Looks
from hf_helix.tuning.candidates import calibrate_link
from hf_helix.tuning.result_text import TuningResult
from hf_helix.tuning.tuner import TUNED_MICROBATCHES, Tuner


class Session:
    """The windows of a run.

    Args:
        cut: the cut model.
        runner: under the first plan.
        tuner: chooses further plans.
        graphs: CUDA graphs of windows; None if windows run operator by operator.
        divided: the user's view of the parameters.
        checks: of the model and its batches.
        live: counts windows for the logs.
        calls: the calls of the model outside of windows.

    Attributes:
        runner: runs windows under the plan in use.
        tuner, graphs: as given.
        looks: at windows, that name slow ranks.
        last_window: the micro-batches of the last trained window.
        called_decoder: the calls of the decoder by a loss of one's own; None for the built-in loss.
    """

    def __init__(
        self,
        cut: CutModel,
        runner: Runner,
        tuner: Tuner,
        graphs: WindowGraphs | None,
        divided: DividedParameters,
        checks: WindowChecks,
        live: LiveScore,
        calls: Calls,
    ) -> None:
        self._cut, self._divided, self._checks, self._live = cut, divided, checks, live
        self.runner, self.tuner, self.graphs = runner, tuner, graphs
        self.looks = Looks(cut.mesh)
        self.last_window: list[MicroBatch] = []
        self._maker = WindowMaker(cut.base, cut.mesh, runner.has_token_loss)
        self._bounds: list[Tensor] = []  # of the calls of a window, see `value_bounds`
        self._has_said_link = False
        self.called_decoder = self._make_called_decoder(calls) if cut.ends_at_decoder else None

    def _make_called_decoder(self, calls: Calls) -> CalledDecoder:
        cut = self._cut
        self._divided.share_losses()
        if self.runner.scheduler.placement != FOLD:
            say(
                f"schedule={cut.config.schedule!r} has no slot for a forward and a backward pass: with a loss of your "
                "own, nothing overlaps; use schedule='auto'"
            )
        decoding = Decoding(functools.partial(calls.run, "decoder"), is_together)
        called_decoder = CalledDecoder(self.runner, self._maker, self._check_call, self._begin_window, decoding)
        decoder = cut.family.decoder(cut.base)
        calls.add("decoder", decoder.forward)
        called_decoder.put_into(decoder)
        leave_out_unread(decoder)
        return called_decoder

    def _check_call(self, batch: Mapping[str, Any]) -> None:
        """Compares the batch of a call over the ranks that share it, and its values with the tables. Collective."""
        agree_on_window([batch], self._cut.mesh.batch_group)
        if self.called_decoder is not None and not self.called_decoder.is_open:
            self._bounds.clear()  # of a window that an error has ended
        if is_recording() and self._cut.mesh.device.type != "cpu":
            self._bounds.append(self._checks.value_bounds([batch]))  # a look would wait for the device
        else:
            self._checks.check_values(batch)

    # -- between steps -------------------------------------------------------------------------------------------

    @watched()
    @plain_parameters()
    def tune(
        self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int, steps_left: int | None = None
    ) -> TuningResult | None:
        """Measures and chooses a plan, if the rest of the run is worth it. Collective, before `train_window`.

        Args:
            batches: the batches of the next window, see `train_window`.
            scale: the factors of its losses.
            step: the number of the next optimizer step.
            steps_left: the number of steps left; None if unknown.

        Returns:
            The result of a tuning that has just ended; otherwise None.
        """
        return self._tune(functools.partial(self._checked_window, batches, scale, step), len(batches), steps_left)

    @watched()
    @plain_parameters()
    def tune_calls(self, steps_left: int | None = None) -> TuningResult | None:
        """Like `tune`, for runs whose loss is computed by the caller; measures with the last window's calls.
        Collective."""
        if not self.last_window:
            return None
        result = self._tune(lambda: self.last_window, len(self.last_window), steps_left)
        assert self.called_decoder is not None
        self.called_decoder.use(self.runner)
        return result

    @activity.doing(activity.TUNING)
    def _tune(
        self, make_window: Callable[[], list[MicroBatch]], count: int, steps_left: int | None
    ) -> TuningResult | None:
        before = self.tuner.result
        self._settle_link(make_window)  # before any time is taken
        with measured(self.runner):
            self.runner = self.tuner.update(self.runner, make_window, count, steps_left, self.graphs)
        return self.tuner.result if self.tuner.result is not before else None

    @plain_parameters()
    def settle_link(self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int) -> None:
        """Says once the rate of an emulated link; with `link="even"` measures the rate first. Collective.

        `tune` also does so; call this method before a window without `tune`.

        Args:
            batches, scale, step: see `tune`.
        """
        self._settle_link(functools.partial(self._checked_window, batches, scale, step))

    def _settle_link(self, make_window: Callable[[], list[MicroBatch]]) -> None:
        link = self._cut.mesh.link
        if link is None or self._has_said_link:
            return
        if link.rate is None:
            with watched(), measured(self.runner):
                calibrate_link(self.runner, make_window()[:TUNED_MICROBATCHES])
        say(f"emulated link: {link}; transfers wait asleep until it would have carried them")
        self._has_said_link = True

    # -- training ------------------------------------------------------------------------------------------------

    @plain_parameters()
    def train_window(
        self,
        batches: Sequence[Mapping[str, Any]],
        scale: LossScale,
        step: int,
        is_compared: bool = False,
        may_begin: Callable[[int], bool] | None = None,
    ) -> list[Tensor]:
        """Runs forward and backward of a window; gradients are added to `parameter.grad`. Collective.

        Args:
            batches: the batches of the data collator, on the device; the same on all ranks that share a batch.
            scale: the factors of the losses.
            step: the number of the optimizer step, a seed of randomness.
            is_compared: whether ranks that share the batches have compared them.
            may_begin: asked before each micro-batch; False ends the window. Not asked by CUDA graphs, which replay a
                window as a whole.

        Returns:
            The loss of every micro-batch, on every rank.

        Raises:
            WindowEnded: `may_begin` has ended the window, which leaves no gradients.
        """
        window = self.last_window = self._checked_window(batches, scale, step, is_compared)
        if self.graphs is not None:
            self.graphs.keep_gradients()
        replays = self.graphs is not None and not self.graphs.has_given_up
        every = self._cut.config.verify_every
        digests = Digests(self._cut.model) if every > 0 and step % every == every - 1 else None
        with set_aside(self.runner), self._counting(window, traces=not replays):
            if self.graphs is not None:
                losses = self.graphs.train_window(self.runner, window)
            else:
                note = None if digests is None else digests.add
                losses = self.runner.train_window(window, may_begin=may_begin, note=note)
            if digests is not None:
                digests.complete()
                self._verify(window, digests, step)
        self._divided.note_gradients()
        return losses

    @contextlib.contextmanager
    def _counting(self, window: Sequence[MicroBatch], traces: bool = True) -> Iterator[None]:
        """Returns the context of a window that is trained, for the logs, for looks at slow ranks, and for the place of
        a stuck one."""
        is_looked_at, streams = self.looks.begin(self.runner), self.runner.executor.streams
        activity.note_step()
        with (
            activity.doing(activity.TRAINING, lambda: self.runner.executor.place),
            self._live.counting(streams, window, traces, is_looked_at) as trace,
        ):
            yield
        self.looks.end(window, trace)

    def _verify(self, window: Sequence[MicroBatch], digests: Digests, step: int) -> None:
        """Computes the gradients of a window again, see `hf_helix.engine.verification`. Collective."""
        again = Digests(self._cut.model)
        with measured(self.runner):
            in_another_order(self.runner).train_window(window, note=again.add)
            again.complete()
            forget_gradients(self.runner)
        raise_if_different(digests, again, step + 1)

    def _checked_window(
        self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int, is_compared: bool = False
    ) -> list[MicroBatch]:
        """The checked micro-batches of a window. Collective."""
        self._checks.check_window(batches, is_compared)
        return self._make_window([{**batch, LOSS_ALONE: True} for batch in batches], scale, step)

    def _make_window(self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int) -> list[MicroBatch]:
        is_shared = self._cut.config.expert_capacity_factor is not None
        return self._maker.window(share_lengths(batches, self._cut.mesh) if is_shared else batches, scale, step)

    # -- a loss of one's own -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def calling(self, step: int) -> Iterator[list[Tensor]]:
        """Returns the context of a call of the model and its backward pass, whose loss the caller adds to the list.

        Args:
            step: see `train_window`.
        """
        assert self.called_decoder is not None
        losses: list[Tensor] = []
        with self.called_decoder.training(step):
            yield losses
        for loss in losses:
            self.called_decoder.losses.add_loss(loss)

    @contextlib.contextmanager
    def _begin_window(self, window: Sequence[MicroBatch]) -> Iterator[None]:
        """Returns the context of a window of calls, see `CalledDecoder`."""
        self._checks.check_trainable()
        with set_aside(self.runner), self._counting(window):
            yield

    def finish_window(self) -> None:
        """Ends a window of calls, see `CalledDecoder`: gradients are complete. Collective."""
        assert self.called_decoder is not None
        self.called_decoder.finish()
        bounds, self._bounds = self._bounds, []
        if bounds:
            self._checks.limits.raise_if_invalid([torch.stack(bounds).amax(0).tolist()])
        self.last_window = self.called_decoder.window
        self._divided.note_gradients()

    def drop_window(self) -> None:
        """Ends a window of calls without its gradients."""
        assert self.called_decoder is not None
        self.called_decoder.drop()
        self._bounds = []

    # -- evaluation ----------------------------------------------------------------------------------------------

    @plain_parameters()
    def evaluate(
        self,
        batch: Mapping[str, Any],
        scale: LossScale,
        step: int,
        keep_logits: bool = False,
        is_compared: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs forward only. Collective.

        Args:
            batch: see `train_window`.
            scale: the factors of the loss.
            step: see `train_window`.
            keep_logits: whether logits are also returned.
            is_compared: see `train_window`.

        Returns:
            The loss, and if asked for the logits [batch, sequence, vocabulary], on every rank.
        """
        if not is_compared:
            agree_on_action("a batch is evaluated", mesh=self._cut.mesh, given=[batch])
        self._checks.check_unchanged()
        self._checks.check_values(batch)
        self._cut.model.eval()
        whole = LossScale(*scale.of(batch))  # of the batch, whose rows may run as several micro-batches
        make_window = functools.partial(self._make_window, scale=whole, step=step)
        return evaluate_batch(self.runner, self._cut.base, batch, make_window, keep_logits, self.graphs)
