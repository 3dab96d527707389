"""The engine: the cut model on this rank, under the Trainer and in a loop.

In:   a full model, a configuration, a mesh, and the options of a run; later, batches of a data collator.
Out:  the model cut in place; windows that leave losses and complete gradients; evaluation, clipping, checkpoints, and
      measurements (`diagnostics`).
Must hold: all ranks agree before anything is cut or communicated by a plan; no plan is measured or chosen while a
window is trained; nothing here depends on the caller.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_helix.checkpoint.background import Copies, Writes
from hf_helix.checkpoint.cut_parameters import align_buffers, is_cut
from hf_helix.checkpoint.load import load_adapters, load_parameters
from hf_helix.checkpoint.save import begin_save, save_full, save_pretrained
from hf_helix.config import AUTO, HelixConfig
from hf_helix.engine.advice import Advice
from hf_helix.engine.calls import Calls, is_together, together
from hf_helix.engine.cut.build import Declared, RunOptions, declare, start_runner
from hf_helix.engine.cut.called_decoder import CalledDecoder, Decoding
from hf_helix.engine.cut.checks import (
    check_batch,
    check_model,
    check_sizes,
    check_trained,
    limits_of,
    warn_bf16_weights,
    warn_random_start,
)
from hf_helix.engine.cut.evaluate import evaluate_batch
from hf_helix.engine.cut.float8 import check_float8, describe_float8
from hf_helix.engine.cut.microbatches import LossScale, WindowMaker, share_lengths
from hf_helix.engine.cut.recompute import modes_of
from hf_helix.engine.cut.snapshot import Snapshot
from hf_helix.engine.diagnostics import Diagnostics
from hf_helix.engine.matrix_steps import MatrixStep
from hf_helix.engine.mixed_types import type_between_layers
from hf_helix.engine.optimizer_shards import (
    cut_states,
    full_weights,
    host_threads,
    join_states,
    keep_quantization,
    step_shards,
    steps_shards,
    unsharded,
)
from hf_helix.engine.proof.first_use import prove_on_first_use
from hf_helix.engine.verification import Digests, in_another_order, raise_if_different
from hf_helix.models.derived.model_code import check_forwards
from hf_helix.models.direct_use import (
    Instead,
    leave_out_unread,
    refuse_calls,
    refuse_saving,
    run_calls,
)
from hf_helix.models.registry import family_for, family_of
from hf_helix.models.stock.batch_inputs import LOSS_ALONE
from hf_helix.models.stock.four_bit import open_four_bit
from hf_helix.models.stock.peft import base_of, is_peft
from hf_helix.operators.parameters.host_shard import arrived
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.schedule.actions import format_schedule
from hf_helix.planning.schedule.placement import FOLD, FRONT
from hf_helix.planning.timing.sizes import Sizes, size_text
from hf_helix.planning.window.layout import Layout
from hf_helix.runtime.cuda_graphs import WindowGraphs, reason_against_all_graphs
from hf_helix.runtime.distributed.agreement import (
    agree_on_action,
    agree_on_window,
    check_same_on_all_ranks,
    decide_on_rank_0,
    on_all_ranks,
    sum_over_ranks,
)
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.divided import (
    DividedParameters,
    full_of,
    is_recording,
    plain_parameters,
    running_model_code,
)
from hf_helix.runtime.failures import activity
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.failures.values import value_bounds
from hf_helix.runtime.gradients.reduce import gradient_norm
from hf_helix.runtime.local_parameters import LocalParameter, local_parameters
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.notices import say
from hf_helix.runtime.runner import Runner, forget_gradients, measured, set_aside
from hf_helix.tuning.cache import fingerprint
from hf_helix.tuning.candidates import calibrate_link
from hf_helix.tuning.result_text import TuningResult
from hf_helix.tuning.tuner import TUNED_MICROBATCHES, Tuner


class Engine(Diagnostics):
    """The engine of a model, which is cut in place before anything moves to the device.

    Args:
        model: a full Transformers model, perhaps a `PeftModel`.
        config: the options of the run.
        mesh: the mesh of ranks.
        options: the other options of the run.
        instead: the suggestions of errors if a user calls the cut model, or asks for its weights.

    Attributes:
        model: the model as given.
        base: the Transformers model, inside of a `PeftModel`.
        config, mesh: as given.
        runner: runs windows under the plan in use.
        tuner: chooses the plan.
        limits: the bounds of the ids, labels and positions of batches.
        last_window: the micro-batches of the last trained window.
        graphs: CUDA graphs of windows; None if windows run operator by operator.
        share_of_elements: Transformers' count of parameters now, as a part of its count before: a weight in 4 bits
            counts by its bytes.

    Raises:
        ValueError: the model does not fit the options, or ranks differ in model or options.
    """

    def __init__(self, model: Any, config: HelixConfig, mesh: Mesh, options: RunOptions, instead: Instead) -> None:
        self.model, self.base, self.config, self.mesh = model, base_of(model), config, mesh
        self.share_of_elements, between_layers = self._open(options)
        self.family, self.limits = family_of(self.base), limits_of(self.base)
        super().__init__(self.base, mesh)
        self._maker = WindowMaker(self.base, mesh)
        self._advice = Advice(self.base, mesh, options.autocast_dtype)
        self._trains = any(parameter.requires_grad for parameter in model.parameters())
        self.ends_at_decoder = options.loss_tweaks.ends_at_decoder
        if config.verify_every and self.ends_at_decoder:
            raise ValueError(
                f"verify_every={config.verify_every} with a loss that the script computes: its window cannot be "
                "computed again without the script; use verify_every=0, or the model's own loss"
            )
        self.last_window: list[MicroBatch] = []
        self._has_said_link = self._has_said_images = False
        self._trained_then: list[bool] = []  # whether the last window trained each parameter
        self._bounds: list[Tensor] = []  # of the calls of a window, see `value_bounds`
        self._hooks: list[int] = []  # the number of hooks of each module at the last check

        declared, self.tuner = self._declare(options, between_layers)
        self._trained_at_cut = [parameter.requires_grad for parameter in model.parameters()]
        self.runner, self._divided = self._cut(declared, options)
        self._parameters = tuple(model.parameters())
        self._modules_run_as_is = declared.modules_run_as_is
        self._snapshot = Snapshot(model, self._modules_run_as_is)
        self.graphs = self._make_graphs()
        self._has_parts = is_cut(self.runner.rank_units, mesh)
        self._calls = Calls(model, mesh, self._running, self._has_parts or mesh.batch_group is not None)
        self.called_decoder = self._make_called_decoder() if self.ends_at_decoder else None
        self._refuse_direct_use(instead)
        say(self._summary())
        if config.float8_recipe:
            say(describe_float8(self.runner.rank_units.all_units.values(), config.float8_recipe, mesh.device))

    def _open(self, options: RunOptions) -> tuple[float, torch.dtype | None]:
        """Checks the whole model, opens weights in 4 bits, and proves a derived family; returns `share_of_elements`.
        Collective."""
        check_model(self.model, options.loss_tweaks, options.weights)
        check_sizes(self.model, self.config)
        family_for(self.base, self.config.tp_size)
        check_float8(self.config.float8_recipe, self.mesh.device)
        elements = self.base.num_parameters(exclude_embeddings=True)
        open_four_bit(self.base)
        share: float = self.base.num_parameters(exclude_embeddings=True) / elements
        prove_on_first_use(self.base, self.config, self.mesh)
        dtype, device = options.autocast_dtype, self.mesh.device
        between_layers = on_all_ranks(lambda: type_between_layers(self.model, self.config, device, dtype))
        warn_bf16_weights(self.model)
        warn_random_start(self.model, options.weights, options.seed)
        return share, between_layers

    def _declare(self, options: RunOptions, between_layers: torch.dtype | None) -> tuple[Declared, Tuner]:
        """Returns the cut of the open model, and the tuner for plans of its operators. On this rank only."""
        model, base, config, dtype = self.model, self.base, self.config, options.autocast_dtype
        modes = modes_of(self.family.layers(base), options.checkpointing, config)
        about = fingerprint(base, self.mesh, config, dtype, modes)
        tuner = Tuner(config, type(base).__name__, about, options.num_microbatches)
        declared = declare(
            model,
            config,
            self.mesh,
            modes,
            options.loss_tweaks,
            autocast_dtype=dtype,
            between_layers=between_layers,
        )
        return declared, tuner

    def _cut(self, declared: Declared, options: RunOptions) -> tuple[Runner, DividedParameters]:
        """Cuts the model as declared; returns the runner and the user's view of the parameters. Collective."""
        full = {name: (parameter.shape, parameter.requires_grad) for name, parameter in self.model.named_parameters()}
        runner = start_runner(self.model, declared.rank_units, self.config, self.mesh, options, self._choose_plan)
        return runner, DividedParameters(self.model, runner.rank_units, self.mesh, full)

    def _summary(self) -> str:
        """The model and its layout, in a line for the start of a run."""
        config, usual = self.config, HelixConfig()
        names = ("shard_optimizer", "shard_parameters", "dp_replicate_size", "offload", "recompute")
        given = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(usual, name)}
        options = "".join(f", {name}={value}" for name, value in given.items())
        schedule = f"schedule {config.schedule}, " if config.pp_size > 1 else ""
        model = f"{type(self.base).__name__} ({'derived' if self.family.needs_proof else 'declared'})"
        where = f"on {size_text(Sizes.of(self.mesh.sizes))}{options}"
        if not self._trains:  # such as the reference of DPO
            return f"{model}, frozen, {where}: called without gradients"
        return (
            f"{model} {where}; first plan {self.runner.plan.rule} (plan={config.plan}), {schedule}CUDA graphs "
            f"{'on' if self.graphs else 'off'}"
        )

    def _choose_plan(self, layout: Layout) -> tuple[Plan, Scheduler]:
        """The first plan and its scheduler; layout, schedule and plan are equal on every rank. Collective."""
        plan = self.tuner.first_plan(layout)
        scheduler = self.tuner.scheduler
        schedule = scheduler(1 if scheduler.name == AUTO else self.tuner.num_microbatches)
        check_same_on_all_ranks(f"{layout.describe()}\n{format_schedule(schedule)}\n{plan.to_json()}", "plans")
        return plan, scheduler

    def _make_graphs(self) -> WindowGraphs | None:
        option = self.config.cuda_graphs
        if not option or (option == AUTO and self.mesh.device.type == "cpu"):
            return None
        reason = reason_against_all_graphs(self.mesh, self.runner, self.config, self.ends_at_decoder)
        if not sum_over_ranks([reason is not None])[0]:
            return WindowGraphs(say, option=option, switches=self._snapshot.switches)
        say(f"cuda_graphs={option!r}: windows run without CUDA graphs: {reason or 'another rank has a reason'}")
        return None

    def _make_called_decoder(self) -> CalledDecoder:
        def check(batch: Mapping[str, Any]) -> None:
            agree_on_window([batch], self.mesh.batch_group)
            if self.called_decoder is not None and not self.called_decoder.is_open:
                self._bounds.clear()  # of a window that an error has ended
            if is_recording() and self.mesh.device.type != "cpu":
                self._bounds.append(self.value_bounds([batch]))  # a look would wait for the device
            else:
                self.check_value_bounds(batch)

        self._divided.share_losses()
        if self.runner.scheduler.placement != FOLD:
            say(
                f"schedule={self.config.schedule!r} has no slot for a forward and a backward pass: with a loss of your "
                "own, nothing overlaps; use schedule='auto'"
            )
        calls = Decoding(functools.partial(self._calls.run, "decoder"), is_together)
        called_decoder = CalledDecoder(self.runner, self._maker, check, self._begin_window, calls)
        decoder = self.family.decoder(self.base)
        self._calls.add("decoder", decoder.forward)
        called_decoder.put_into(decoder)
        leave_out_unread(decoder)
        return called_decoder

    def _refuse_direct_use(self, instead: Instead) -> None:
        """Makes direct calls of the cut model raise: they would see only this rank's slices."""
        if not self._calls.are_shared:
            return
        for place, model in enumerate(dict.fromkeys((self.model, self.base))):
            model._is_cut_by_helix = True
            name = f"forward {place}"
            self._calls.add(name, model.forward)
            if self.ends_at_decoder:
                run_calls(model, "forward", functools.partial(self._call_own, name))
            else:
                refuse_calls(model, instead, functools.partial(self._calls.run, name))
        if hasattr(self.base, "generate"):
            self._calls.add("generate", self.base.generate)
            run_calls(self.base, "generate", functools.partial(self._calls.run, "generate"))
        if self._has_parts:
            refuse_saving(self.model, instead)

    def _call_own(self, name: str, stock: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a call of a model with a loss of one's own: by its cut decoder if ranks call alike."""
        return stock(*args, **kwargs) if is_together() else self._calls.run(name, stock, args, kwargs, alike=stock)

    def _check_unchanged(self) -> None:
        """Refuses changes of the model since it was cut, and hooks that would never run."""
        self._snapshot.check(with_types=self.mesh.pipe.size > 1 or self.mesh.cp.size > 1)
        hooks = self._snapshot.count_hooks()
        if hooks != self._hooks:
            check_forwards(self.model, self.base, self.family, self._modules_run_as_is, self.ends_at_decoder)
            self._hooks = hooks

    def close(self) -> None:
        """Ends the threads of this engine, so that another engine can take its place."""
        if self.graphs is not None:
            self.graphs.release()
        self.looks.close()
        self.runner.executor.streams.close()

    # -- between steps -------------------------------------------------------------------------------------------

    @plain_parameters()
    def move_to(self, device: torch.device) -> None:
        """Moves this rank's parameters, also packed ones in 4 bits, which `model.to` does not move."""
        torch.nn.Module.to(self.model, device)
        self.reshard_parameters()

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
        before = self.tuning
        self._settle_link(make_window)  # before any time is taken
        with measured(self.runner):
            self.runner = self.tuner.update(self.runner, make_window, count, steps_left, self.graphs)
        return self.tuning if self.tuning is not before else None

    @plain_parameters()
    def settle_link(self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int) -> None:
        """Says once the rate of an emulated link; with `link="even"` measures the rate first. Collective.

        `tune` also does so; call this method before a window without `tune`.

        Args:
            batches, scale, step: see `tune`.
        """
        self._settle_link(functools.partial(self._checked_window, batches, scale, step))

    def _settle_link(self, make_window: Callable[[], list[MicroBatch]]) -> None:
        link = self.mesh.link
        if link is None or self._has_said_link:
            return
        if link.rate is None:
            with watched(), measured(self.runner):
                calibrate_link(self.runner, make_window()[:TUNED_MICROBATCHES])
        say(f"emulated link: {link}; transfers wait asleep until it would have carried them")
        self._has_said_link = True

    # -- training ------------------------------------------------------------------------------------------------

    def value_bounds(self, batches: Sequence[Any]) -> Tensor:
        """Returns the largest ids, labels and positions of a window, for `limits.raise_if_invalid`, on the device."""
        return value_bounds(batches, self.mesh.device)

    def check_value_bounds(self, batch: Any) -> None:
        """Refuses a batch outside of a window by `limits.raise_if_invalid`. Waits for the device."""
        self.limits.raise_if_invalid([self.value_bounds([batch]).tolist()])

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
        digests = Digests() if self._is_verified(step) else None
        with set_aside(self.runner), self._counted(window, traces=not replays):
            if self.graphs is not None:
                losses = self.graphs.train_window(self.runner, window)
            else:
                note = None if digests is None else digests.add
                losses = self.runner.train_window(window, may_begin=may_begin, note=note)
            if digests is not None:
                self._verify(window, digests, step)
        self._divided.note_gradients()
        return losses

    def _is_verified(self, step: int) -> bool:
        every = self.config.verify_every
        return every > 0 and step % every == every - 1

    def _verify(self, window: Sequence[MicroBatch], digests: Digests, step: int) -> None:
        """Computes the gradients of a window again, see `hf_helix.engine.verification`. Collective."""
        again = Digests()
        with measured(self.runner):
            in_another_order(self.runner).train_window(window, note=again.add)
            forget_gradients(self.runner)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        raise_if_different(digests.differing(again), names, step + 1)

    def _checked_window(
        self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int, is_compared: bool = False
    ) -> list[MicroBatch]:
        """The checked micro-batches of a window. Collective."""
        self._check_trainable()
        check_batch(batches[0])
        if not is_compared:
            agree_on_window(batches, self.mesh.batch_group)
        self._advice.say(batches)
        self.model.train()
        self._check_images(batches)
        return self._make_window([{**batch, LOSS_ALONE: True} for batch in batches], scale, step)

    def _check_images(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Refuses a step in which only some replicas have gradients of a tower, or whose features reach beyond the
        first stage; prints once that the split of layers over stages counts no tower. Collective."""
        config, towers = self.config, self.family.towers
        if config.pp_size > 1 and any(map(self.family.reads_images, batches)):
            first, needed = self._first_layers, self.family.first_least
            if first < needed:
                raise ValueError(
                    f"the first pipeline stage has {first} whole layers, and images add features behind {needed}; use "
                    f"layers_per_stage with {needed} or more at its start, or a smaller pp_size than {config.pp_size}"
                )
        splits = config.pp_size > 1 and config.layers_per_stage is None and not config.image_share
        if splits and towers is not None and not self._has_said_images and towers.have_images(batches[0]):
            say(
                "the batch has images, and the split of layers over pipeline stages counts no tower: use image_share="
                f"{towers.share_of(batches[0]):.2f}, the part of this batch's tokens that are of images, or the "
                "layers_per_stage of hf-helix doctor"
            )
            self._has_said_images = True
        if self.mesh.dp_size == 1 or not self.family.trains_towers():
            return
        has_images = any(map(self.family.reads_images, batches))
        if all(agree_on_action("a window is trained", [has_images, not has_images])):
            raise ValueError(
                f"with {self.mesh.dp_size} data-parallel ranks, some have images in a step and others have none, and "
                "the towers are trained: freeze them (requires_grad_(False) before the trainer is made), give every "
                "micro-batch an image, or use tp_size, cp_size or pp_size for all ranks"
            )

    @functools.cached_property
    def _first_layers(self) -> int:
        """The number of whole layers of the first pipeline stage that has layers."""
        layout = self.runner.layout
        stages = ([layout.units[unit] for unit in layout.chunks[stage]] for stage in sorted(layout.chunks))
        wholes = ([n for n in names if layout.graphs[n].forward.repeats and FRONT not in n] for names in stages)
        return len(next(filter(None, wholes), []))

    @plain_parameters()
    def _check_trainable(self) -> None:
        """Refuses changes of the model since it was cut, before a window is trained."""
        trained = [parameter.requires_grad for parameter in self._parameters]
        if trained != self._trained_then:
            check_trained(self.model, self.runner.rank_units, self._trains)
            if trained != self._trained_at_cut and self.runner.layout.reductions:
                say(
                    "parameters were frozen or unfrozen after the model was cut: gradients are reduced at the end of "
                    "an optimizer step, without overlap; freeze them before the trainer is made"
                )
            self._trained_then = trained
        self._check_unchanged()
        self._snapshot.check_trainable()
        self._align_buffers("a window is trained")

    def _align_buffers(self, action: str) -> None:
        """Gives buffers that a script has changed, on any rank, rank 0's values, as DDP does before every window.
        Collective on a model with buffers; `action` is the clause for the ranks' next action."""
        if self._snapshot.has_buffers:
            (have_changed,) = agree_on_action(action, [self._snapshot.have_buffers_changed()])
            if have_changed:
                align_buffers(self.model, self.mesh.device)
                self._snapshot.have_buffers_changed()  # by the alignment itself

    @contextlib.contextmanager
    def _begin_window(self, window: Sequence[MicroBatch]) -> Iterator[None]:
        """Returns the context of a window of calls, see `CalledDecoder`."""
        self._check_trainable()
        with set_aside(self.runner), self._counted(window):
            yield

    def finish_window(self) -> None:
        """Ends a window of calls, see `CalledDecoder`: gradients are complete. Collective."""
        assert self.called_decoder is not None
        self.called_decoder.finish()
        bounds, self._bounds = self._bounds, []
        if bounds:
            self.limits.raise_if_invalid([torch.stack(bounds).amax(0).tolist()])
        self.last_window = self.called_decoder.window
        self._divided.note_gradients()

    def drop_window(self) -> None:
        """Ends a window of calls without its gradients."""
        assert self.called_decoder is not None
        self.called_decoder.drop()
        self._bounds = []

    def _make_window(self, batches: Sequence[Mapping[str, Any]], scale: LossScale, step: int) -> list[MicroBatch]:
        is_shared = self.config.expert_capacity_factor is not None
        return self._maker.window(share_lengths(batches, self.mesh) if is_shared else batches, scale, step)

    # -- gradients and the optimizer -----------------------------------------------------------------------------

    @plain_parameters()
    def gradient_norm(self) -> Tensor:
        """Returns the 2-norm of the full gradient of the model, on every rank. Collective."""
        rank_units = self.runner.rank_units
        return gradient_norm(rank_units.placements, self.mesh, rank_units.flat_parameters)

    @plain_parameters()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradient down to a norm of `max_norm`; returns the norm before. Collective."""
        norm = self.gradient_norm()
        rank_units = self.runner.rank_units
        parameters = [parameter for parameter in rank_units.stepped if parameter.grad is not None]
        if rank_units.host_shards and max_norm / (norm + 1e-6) >= 1:
            return norm  # to multiply by 1 would be a pass over the host's memory
        arrived(parameter.grad for parameter in parameters)
        with host_threads(rank_units):
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    @contextlib.contextmanager
    def full_weight(self, name: str) -> Iterator[Tensor]:
        """Yields a full weight by its name in the model; writes to the tensor are kept. Collective."""
        parameter = self.model.get_parameter(name)
        full = full_of(parameter).detach()
        yield full
        parameter.data = full

    @contextlib.contextmanager
    def full_gradient(self, name: str) -> Iterator[Tensor]:
        """Yields a full gradient by its name in the model, between a window and the optimizer's step; writes to the
        tensor are kept. Collective.

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
        """Returns a context in which a model sharded over replicas (`shard_optimizer`, `shard_parameters`) has full
        weights on every rank: the model can be called and read, and generates.

        Every rank must enter the context; within the context nothing is collective, and to train, to evaluate with the
        engine, to save and to load are errors. Writes to sharded parameters are lost at the end.

        Raises:
            ValueError: this rank has slices of the model even then.
            RuntimeError: the context is entered already.
        """
        return full_weights(self.model, self.runner.rank_units, self.mesh, self.config)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Returns the context in which the model's own code runs over this rank's slices: linears and lookups run over
        slices; other cut weights, such as experts, are gathered once. Collective."""
        with unsharded(self.runner.rank_units), running_model_code():
            yield

    def together(self) -> AbstractContextManager[None]:
        """Returns the context of an evaluation by a loss of one's own, within which ranks that share a batch call the
        model alike."""
        return together()

    @plain_parameters()
    def reshard_parameters(self) -> None:
        """Makes sharded parameters placeholders again, after a script has given them memory: `model.to("cpu:0")` copies
        tensors on `cpu`."""
        for flat in self.runner.rank_units.flat_parameters:
            flat.reshard()

    @plain_parameters()
    def step_shards(self, optimizer: Any, reads_matrices: bool = False) -> None:
        """Replaces full parameters by this rank's shards in an optimizer that has not stepped. Initial states of the
        optimizer stay (Adagrad). Collective.

        Args:
            optimizer: the optimizer itself, without Accelerate's wrapper.
            reads_matrices: whether the optimizer reads whole matrices, so that one rank steps each.
        """
        rank_units, streams = self.runner.rank_units, self.runner.executor.streams
        if steps_shards(optimizer):  # as at a second `train()`
            return
        local = local_parameters(self.model, rank_units, self.mesh)
        if reads_matrices:
            join_states(optimizer)
            step_shards(optimizer, rank_units, streams, reads_matrices)
            MatrixStep.install(optimizer, local, rank_units, self.mesh, streams)
        else:
            cut_states(optimizer, rank_units, self.mesh)
            step_shards(optimizer, rank_units, streams)
            keep_quantization(optimizer, local)

    @contextlib.contextmanager
    def stepped(self, optimizer: Any) -> Iterator[Mapping[Any, LocalParameter]]:
        """Yields the parameters that this rank steps in an optimizer, whose states in the context have the shapes of
        these parameters."""
        matrices = MatrixStep.of(optimizer)
        if matrices is None:
            yield local_parameters(self.model, self.runner.rank_units, self.mesh)
        else:
            with matrices.whole_shapes() as local:
                yield local

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
            agree_on_action("a batch is evaluated", mesh=self.mesh, given=[batch])
        self._check_unchanged()
        self.check_value_bounds(batch)
        self.model.eval()
        whole = LossScale(*scale.of(batch))  # of the batch, whose rows may run as several micro-batches
        make_window = functools.partial(self._make_window, scale=whole, step=step)
        return evaluate_batch(self.runner, self.base, batch, make_window, keep_logits, self.graphs)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @watched()
    def save_pretrained(self, folder: str | Path, max_shard_size: int | str | None = None, model: Any = None) -> None:
        """Writes an ordinary Hugging Face checkpoint, each rank its part; of a PEFT model the adapters. Collective.

        Args:
            folder: the folder of the checkpoint.
            max_shard_size: the size of a file, such as "5GB"; None for the default of Transformers. Adapters are a
                single file.
            model: another model, made of the cut model by a script, such as by merging adapters; None for the cut
                model. Another model, and a cut model with changed modules, is assembled in the memory of rank 0's host.
        """
        model, is_as_cut = self._model_to_save(model)
        if is_as_cut:
            with plain_parameters():
                save_pretrained(model, self.runner.rank_units, self.mesh, folder, max_shard_size)
        else:
            save_full(model, folder, max_shard_size)

    @watched()
    def begin_save(self, folder: str | Path, copies: Copies, model: Any = None) -> list[Writes]:
        """Begins `save_pretrained`; adapters and changed models are written at once. Collective.

        Args:
            folder: that nobody reads yet.
            copies: see `hf_helix.checkpoint.save.begin_save`.
            model: see `save_pretrained`.

        Returns:
            What is left to do.
        """
        model, is_as_cut = self._model_to_save(model)
        decide_on_rank_0(lambda: Path(folder).mkdir(parents=True, exist_ok=True))
        if is_as_cut:
            with plain_parameters():
                return [begin_save(model, self.runner.rank_units, self.mesh, Path(folder), copies=copies)]
        save_full(model, folder)
        return []

    def _model_to_save(self, model: Any) -> tuple[Any, bool]:
        """Returns the model to save, and whether each rank writes its part. Collective."""
        self._align_buffers("the model is saved")
        model = self.model if model is None else model
        is_as_cut = model is self.model and not self._snapshot.change_of_structure()
        check_same_on_all_ranks(f"{type(model).__name__}, as it was cut: {is_as_cut}", "models to save")
        return model, is_as_cut and not is_peft(model)

    @plain_parameters()
    def load_weights(self, folder: str | Path) -> None:
        """Reads a checkpoint of `save_pretrained`, from any layout: each rank its slices. Collective.

        Raises:
            ValueError: on every rank, before any weight is written: the folder does not fit.
        """
        load = load_adapters if is_peft(self.model) else load_parameters
        load(self.model, self.runner.rank_units, self.mesh, folder)
