"""The cut model on this rank: what the Trainer and the loop are built on.

In:   an ordinary whole model, a configuration, a mesh, and what a run adds to them; later, batches of a data collator.
Out:  the model cut in place; windows that leave losses and complete gradients; evaluation, clipping, checkpoints, and
      what can be measured (`diagnostics`).
Must hold: all ranks agree before anything is cut or communicated by a plan; no plan is measured or chosen while a
window is trained; nothing here knows which of the two calls it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_helix.checkpoint.load import load_parameters
from hf_helix.checkpoint.peft import load_adapters
from hf_helix.checkpoint.save import save_full, save_pretrained
from hf_helix.checkpoint.shard import is_cut
from hf_helix.config import AUTO, HelixConfig
from hf_helix.engine.advice import Advice
from hf_helix.engine.build import RunOptions, build_runner
from hf_helix.engine.checks import (
    check_batch,
    check_model,
    check_sizes,
    check_trained,
    limits_of,
    warn_random_start,
    warn_bf16_weights,
)
from hf_helix.engine.diagnostics import Diagnostics
from hf_helix.engine.evaluate import evaluate_batch
from hf_helix.engine.microbatches import LossScale, WindowMaker, share_lengths
from hf_helix.engine.proof.first_use import prove_on_first_use
from hf_helix.engine.recompute import modes_of
from hf_helix.engine.snapshot import Snapshot
from hf_helix.engine.zero import cut_states, step_shards, full_weights
from hf_helix.models.batch_inputs import LOSS_ALONE
from hf_helix.models.direct_use import Instead, refuse_calls, refuse_saving
from hf_helix.models.model_code import check_forwards
from hf_helix.models.peft import base_of, is_peft
from hf_helix.models.registry import family_of
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.schedule.actions import format_schedule
from hf_helix.planning.schedule.scheduler import Scheduler
from hf_helix.planning.window.layout import Layout
from hf_helix.runtime.cuda_graphs import WindowGraphs, reason_against_all_graphs
from hf_helix.runtime.distributed.agreement import agree_on_window, check_same_on_all_ranks, meet
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.divided import DividedParameters, full_of, plain_parameters
from hf_helix.runtime.failures.heartbeat import collective, watched
from hf_helix.runtime.failures.values import value_bounds
from hf_helix.runtime.gradients.reduce import gradient_norm, set_aside
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.notices import say
from hf_helix.tuning.cache import fingerprint
from hf_helix.tuning.candidates import calibrate_link
from hf_helix.tuning.tuner import TUNED_MICROBATCHES, Tuner
from hf_helix.tuning.verdict import TuningResult


class Engine(Diagnostics):
    """Keeps this rank's part of a model, in place, before anything moves to the device, and runs windows through it.

    Args:
        model: a whole Transformers model, perhaps a `PeftModel`.
        config: the options of the run.
        mesh: which ranks share what.
        options: what the run asks for beside them.
        instead: what the errors suggest where a user calls the cut model, or asks it for its weights.

    Attributes:
        model: the model as it was given.
        base: the Transformers model, which is inside of a `PeftModel`.
        runner: runs windows under the plan in use.
        tuner: decides which plan is used.
        limits: how far the ids, labels and positions of batches may reach.
        graphs: CUDA graphs of windows; None where windows run operator by operator.

    Raises:
        ValueError: the model, or what other ranks bring, does not fit.
    """

    def __init__(self, model: Any, config: HelixConfig, mesh: Mesh, options: RunOptions, instead: Instead) -> None:
        check_model(model, options.loss_tweaks, options.weights)
        check_sizes(model, config)
        self.model = model
        self.base = base = base_of(model)
        prove_on_first_use(base, config, mesh)
        super().__init__(base, config, mesh)
        self.family = family_of(base)
        self.limits = limits_of(base)
        full = {name: (parameter.shape, parameter.requires_grad) for name, parameter in model.named_parameters()}
        self._maker = WindowMaker(base, mesh)
        self._trains = any(parameter.requires_grad for parameter in model.parameters())
        self._has_said_link = False
        modes = modes_of(self.family.layers(base), options.checkpointing, config)
        about = fingerprint(base, mesh, options.autocast_dtype, modes)
        self.tuner = Tuner(config, type(base).__name__, about, options.num_microbatches)
        warn_bf16_weights(model)
        warn_random_start(model, options.weights, options.seed)
        self._advice = Advice(base, mesh, options.autocast_dtype)
        self.runner, self._called = build_runner(model, config, mesh, modes, options, self._choose_plan)
        self._parameters = tuple(model.parameters())
        self._trained_then: list[bool] = []  # which of them the last window trained
        self._divided = DividedParameters(model, self.runner.stage, mesh, full)
        self._snapshot = Snapshot(model, self._called)
        self._hooks: list[int] = []  # how many the model had when they were checked last
        self.graphs = self._make_graphs()
        self._refuse_direct_use(instead)

    def _choose_plan(self, layout: Layout) -> tuple[Plan, Scheduler]:
        """The plan to start with. Collective: layout, schedule and plan are those of every rank."""
        plan = self.tuner.first_plan(layout)
        scheduler = self.tuner.scheduler
        schedule = scheduler(1 if scheduler.name == AUTO else self.tuner.num_microbatches)
        check_same_on_all_ranks(f"{layout.describe()}\n{format_schedule(schedule)}\n{plan.to_json()}", "plans")
        return plan, scheduler

    def _make_graphs(self) -> WindowGraphs | None:
        if not self.config.cuda_graphs:
            return None
        reason = reason_against_all_graphs(
            self.mesh, self.runner, self.config.expert_capacity_factor, is_peft(self.model)
        )
        if reason is not None:
            say(f"cuda_graphs=True: windows run without CUDA graphs: {reason}")
        return WindowGraphs(say) if reason is None else None

    def _refuse_direct_use(self, instead: Instead) -> None:
        """Lets the model itself raise where it would now work on this rank's part alone."""
        has_parts = is_cut(self.runner.stage, self.mesh)
        for whole in {self.model, self.base} if has_parts or self.mesh.batch_group is not None else ():
            whole._is_cut_by_helix = True
            refuse_calls(whole, instead)
        if has_parts:
            refuse_saving(self.model, instead)

    def _check_unchanged(self) -> None:
        """Refuses what a script has changed since the model was cut, and what would never run."""
        self._snapshot.check(with_types=self.mesh.pipe.size > 1 or self.mesh.cp.size > 1)
        hooks = self._snapshot.count_hooks()
        if hooks != self._hooks:
            check_forwards(self.model, self.base, self.family, self._called)
            self._hooks = hooks

    def close(self) -> None:
        """Ends the threads of this engine, so that another can take its place."""
        if self.graphs is not None:
            self.graphs.release()
        self.runner.executor.streams.close()

    # -- between steps -------------------------------------------------------------------------------------------

    @collective
    @plain_parameters()
    def tune(
        self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int, steps_left: int | None = None
    ) -> TuningResult | None:
        """Measures and chooses a plan, if the rest of the run is worth it. Collective, before `train_window`.

        Args:
            batches: the batches of the next window, see `train_window`.
            scale: what its losses are multiplied with.
            step: the number of the next optimizer step.
            steps_left: how many steps the run has left; None where that is not known.

        Returns:
            What was measured, if that has just happened; otherwise None.
        """
        before = self.tuning
        self.settle_link(batches, scale, step)  # before any time is taken
        with set_aside(self.runner.stage.stepped):
            make_window = functools.partial(self._checked_window, batches, scale, step)
            self.runner = self.tuner.update(self.runner, make_window, len(batches), steps_left)
        return self.tuning if self.tuning is not before else None

    @plain_parameters()
    def settle_link(self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int) -> None:
        """Says once how fast an emulated link is; measures first where it is to be even. Collective.

        `tune` does this, too. Call it before a window that no plan is chosen for.

        Args:
            batches: the batches of the next window, see `train_window`.
            scale: what its losses are multiplied with.
            step: the number of the next optimizer step.
        """
        link = self.mesh.link
        if link is None or self._has_said_link:
            return
        if link.rate is None:
            with watched(), set_aside(self.runner.stage.stepped):
                calibrate_link(self.runner, self._checked_window(batches, scale, step)[:TUNED_MICROBATCHES])
        say(f"emulated link: {link}; transfers wait asleep until it would have carried them")
        self._has_said_link = True

    # -- training ------------------------------------------------------------------------------------------------

    def value_bounds(self, batches: Sequence[Any]) -> Tensor:
        """Returns how far the ids, labels and positions of a window reach, for `limits`; waits for nothing."""
        return value_bounds(batches, self.mesh.device)

    def check_value_bounds(self, batch: Any) -> None:
        """Refuses a batch that was not announced in a window, as `limits.raise_if_invalid`. Waits for the device."""
        self.limits.raise_if_invalid([self.value_bounds([batch]).tolist()])

    @plain_parameters()
    def train_window(self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int) -> list[Tensor]:
        """Runs forward and backward of a window; gradients are added to `parameter.grad`. Collective.

        Args:
            batches: what the data collator made, on the device; the same on all ranks that share a batch.
            scale: what the losses are multiplied with.
            step: the number of the optimizer step, which randomness derives from.

        Returns:
            The loss of every micro-batch, on every rank.
        """
        window = self.last_window = self._checked_window(batches, scale, step)
        longest = max(batch["input_ids"].shape[-1] for batch in batches)
        self._divided.note_gradients()
        if self.graphs is not None:
            self.graphs.keep_gradients()
            with set_aside(self.runner.stage.stepped):
                return self._count(window, longest, functools.partial(self.graphs.train_window, self.runner, window))
        with set_aside(self.runner.stage.stepped):
            return self._count_traced(window, longest, functools.partial(self.runner.train_window, window))

    def _checked_window(self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int) -> list[MicroBatch]:
        """The micro-batches of a window that can be trained. Collective."""
        trained = [parameter.requires_grad for parameter in self._parameters]
        if trained != self._trained_then:
            check_trained(self.model, self.runner.stage, self._trains)
            self._trained_then = trained
        self._check_unchanged()
        self._snapshot.check_trainable()
        check_batch(batches[0])
        agree_on_window(batches, self.mesh.batch_group)
        self._advice.say(batches)
        self.model.train()
        return self._make_window([{**batch, LOSS_ALONE: True} for batch in batches], scale, step)

    def _make_window(self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int) -> list[MicroBatch]:
        is_shared = self.config.expert_capacity_factor is not None
        return self._maker.window(share_lengths(batches, self.mesh) if is_shared else batches, scale, step)

    def microbatch(self, batch: Mapping[str, Any], scale: LossScale, key: tuple[int, int]) -> MicroBatch:
        """Returns a batch as the runner takes it, see `WindowMaker.microbatch`.

        Args:
            batch: what the model's forward takes, tensors [batch, sequence].
            scale: what the losses are multiplied with.
            key: the optimizer step and the number of the micro-batch in its window, see `MicroBatch`.
        """
        return self._maker.microbatch(batch, scale, key)

    # -- gradients and the optimizer -----------------------------------------------------------------------------

    @plain_parameters()
    def gradient_norm(self) -> Tensor:
        """Returns the 2-norm of the gradient of the whole model, on every rank. Collective."""
        stage = self.runner.stage
        return gradient_norm(stage.placements, self.mesh, stage.flat_parameters)

    @plain_parameters()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradient down to a norm of `max_norm`; returns the norm it had. Collective."""
        norm = self.gradient_norm()
        parameters = [parameter for parameter in self.runner.stage.stepped if parameter.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    @contextlib.contextmanager
    def full_weight(self, name: str) -> Iterator[Tensor]:
        """Yields a full weight by its name in the model; what is written to it is kept. Collective."""
        parameter = self.model.get_parameter(name)
        full = full_of(parameter).detach()
        yield full
        parameter.data = full

    @contextlib.contextmanager
    def full_gradient(self, name: str) -> Iterator[Tensor]:
        """Yields a full gradient by its name in the model, between a window and the optimizer's step; what is written
        to it is kept. Collective.

        Raises:
            ValueError: there is no gradient.
        """
        parameter = self.model.get_parameter(name)
        if parameter.grad is None:
            raise ValueError(f"{name} has no gradient; ask for it in a callback's on_pre_optimizer_step")
        full = full_of(parameter.grad)
        yield full
        parameter.grad = full

    def full_weights(self) -> AbstractContextManager[Any]:
        """Returns a context in which the model has all weights, which it otherwise is without between windows
        (`shard_optimizer`, `shard_parameters`): it can be called and generates, and its parameters can be read. What is
        written to parameters that are spread is lost at the end. Every rank must enter it; what happens within it is
        not collective. To train, to evaluate with the engine, to save and to load are errors within it.

        Raises:
            ValueError: this rank has slices of the model even then.
            RuntimeError: it is within such a context already.
        """
        return full_weights(self.model, self.runner.stage, self.mesh)

    @plain_parameters()
    def reshard_parameters(self) -> None:
        """Makes parameters that are spread stand-ins again, after somebody has given them memory: `model.to("cpu:0")`
        copies what is on `cpu`."""
        for flat in self.runner.stage.flat_parameters:
            flat.reshard()

    @plain_parameters()
    def step_shards(self, optimizer: Any) -> None:
        """Lets an optimizer of the model's parameters step what this rank has of them. It has not stepped; the states
        that some optimizers start with stay (Adagrad)."""
        cut_states(optimizer, self.runner.stage, self.mesh)
        step_shards(optimizer, self.runner.stage)

    # -- evaluation ----------------------------------------------------------------------------------------------

    @plain_parameters()
    def evaluate(
        self, batch: Mapping[str, Any], scale: LossScale, step: int, keep_logits: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Runs forward only. Collective.

        Args:
            batch: see `train_window`.
            scale: what the loss is multiplied with.
            step: see `train_window`.
            keep_logits: whether the logits are returned, too.

        Returns:
            The loss, and if asked for the logits [batch, sequence, vocabulary], on every rank.
        """
        meet("a batch is evaluated")
        self._check_unchanged()
        agree_on_window([batch], self.mesh.batch_group)
        self.check_value_bounds(batch)
        self.model.eval()
        make_window = functools.partial(self._make_window, scale=scale, step=step)
        return evaluate_batch(self.runner, self.family, self.base, batch, make_window, keep_logits)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @collective
    def save_pretrained(self, folder: str | Path, max_shard_size: int | str | None = None, model: Any = None) -> None:
        """Writes an ordinary Hugging Face checkpoint, each rank its part; of a PEFT model the adapters. Collective.

        Args:
            folder: where the checkpoint is written.
            max_shard_size: the size of a file, such as "5GB"; None for the default of Transformers. Adapters are one
                file.
            model: another model that the script has made of the cut one, such as by merging adapters; None for the cut
                one. That, and a cut model whose modules were changed, is put together in the memory of rank 0's host.
        """
        model = self.model if model is None else model
        is_as_cut = model is self.model and not self._snapshot.change_of_structure()
        check_same_on_all_ranks(f"{type(model).__name__}, as it was cut: {is_as_cut}", "models to save")
        if is_as_cut and not is_peft(model):
            with plain_parameters():
                save_pretrained(model, self.runner.stage, self.mesh, folder, max_shard_size)
        else:
            save_full(model, folder, max_shard_size)

    @plain_parameters()
    def load_weights(self, folder: str | Path) -> None:
        """Reads what `save_pretrained` wrote, from any layout: each rank its slices. Collective.

        Raises:
            ValueError: on every rank, before anything is written: the folder does not fit.
        """
        load = load_adapters if is_peft(self.model) else load_parameters
        load(self.model, self.runner.stage, self.mesh, folder)
