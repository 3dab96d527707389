"""The stock Trainer on a cut model.

In:   an ordinary Transformers model and the arguments of `transformers.Trainer`, plus a `HelixConfig`.
Out:  the same training, evaluation and checkpoints, with the model cut and two micro-batches interleaved.
Must hold: counters, callbacks, progress bar, schedules and logging stay the stock Trainer's; options that cannot be
honoured are refused at construction, by name.

The other parts of the mixin: `training_step` (windows out of the stock loop's steps), `evaluation`, `checkpoints` and
`hyperparameter_search`. `stock` (the Trainer) and `trl` (SFTTrainer) describe the class under the mixin.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.utils.logging import get_logger

from hf_helix.checkpoint.load import build_on_meta
from hf_helix.config import HelixConfig
from hf_helix.engine.cut.build import RunOptions
from hf_helix.engine.cut.checks import check_layouts, check_sizes
from hf_helix.engine.cut.recompute import asked_by
from hf_helix.engine.engine import Engine
from hf_helix.integrations.accelerate.checks import run_in_mixed_precision
from hf_helix.integrations.accelerate.foreign_sizes import ForeignConfig
from hf_helix.integrations.accelerate.launcher import resolve_config
from hf_helix.integrations.accelerate.layouts import in_force, notice_of_launcher
from hf_helix.integrations.accelerate.plugin import HelixPlugin, keep_layout, shared_layout
from hf_helix.integrations.optimizers import check_made_optimizer, hand_over, watch_steps
from hf_helix.integrations.trainer.checkpoints import CheckpointHooks, make_output_dir
from hf_helix.integrations.trainer.checks import check_arguments, check_trainer
from hf_helix.integrations.trainer.decisions import CallbackDecisions
from hf_helix.integrations.trainer.elastic import check_epochs, following
from hf_helix.integrations.trainer.evaluation import EvaluationHooks
from hf_helix.integrations.trainer.hyperparameter_search import SearchHooks
from hf_helix.integrations.trainer.model_card import write_card
from hf_helix.integrations.trainer.preferences import planned_preferences
from hf_helix.integrations.trainer.references import cut_fused_head, cut_references, num_layers_of
from hf_helix.integrations.trainer.rollouts import check_rollouts, feed_rollouts
from hf_helix.integrations.trainer.stock import StockTrainer, TrainerCall, put_aside, take_out
from hf_helix.integrations.trainer.training_step import WindowHooks
from hf_helix.integrations.trainer.trl import (
    StockSFTTrainer,
    count_batches_once,
    count_tokens_once,
    gathering_from_all,
    gathering_once,
    has_own_loss,
    is_of_trl,
    is_online,
    is_read_by_slices,
    is_sft,
    model_options,
    precompute_on_device,
    settle_arguments,
    settle_generation,
)
from hf_helix.integrations.upstream import check_class, overrides
from hf_helix.measure.overlap import Overlap
from hf_helix.models.direct_use import Instead
from hf_helix.models.graph.context import LossTweaks
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.timing.sizes import Sizes, size_text
from hf_helix.runtime.distributed.agreement import agree_on_action, check_same_on_all_ranks
from hf_helix.runtime.distributed.environment import check_environment
from hf_helix.runtime.distributed.groups import set_timeout
from hf_helix.runtime.distributed.mesh import world_size
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.failures.heartbeat import start_watch
from hf_helix.runtime.failures.values import Health
from hf_helix.runtime.notices import say
from hf_helix.tuning.budget import BASELINE
from hf_helix.tuning.cache import shared_options
from hf_helix.tuning.candidates import PAPER, Comparison
from hf_helix.tuning.result_text import TuningResult

logger = get_logger(__name__)

USE_INSTEAD = Instead(
    "trainer.train(), trainer.evaluate() or trainer.predict(), for one batch trainer.training_step(model, inputs) or "
    "trainer.prediction_step(model, inputs, prediction_loss_only=True); where ranks share nothing but batches, call it "
    "within trainer.helix.full_weights()",
    "trainer.save_model(folder)",
)


USUAL_TIMEOUT = TrainingArguments.ddp_timeout
"""Seconds; Transformers 5.23 makes the process group without another one if `use_cpu` is given."""

# Methods of `trainer.accelerator` that do not work on a cut model, with alternatives.
REFUSED = {
    "save_state": "use TrainingArguments(save_strategy='steps'), or set control.should_save in a callback",
    "load_state": "use trainer.train(resume_from_checkpoint=...)",
}


def _accumulation_steps(args: TrainingArguments) -> int:
    """Returns the number of micro-batches of a step, from the arguments or Accelerate's options, which the stock
    Trainer reads later.
    """
    config: Any = args.accelerator_config
    steps: int = (config.gradient_accumulation_kwargs or {}).get("num_steps", 1)
    return max(args.gradient_accumulation_steps, steps)


class HelixTrainerMixin(WindowHooks, EvaluationHooks, SearchHooks, CheckpointHooks):
    """Puts Helix under a Trainer class: `class MyTrainer(HelixTrainerMixin, Trainer)`.

    Args:
        helix_config: the options, or a layout as `DistributedConfig` of Transformers or `ParallelismConfig` of
            Accelerate; by default from `args.parallelism_config`, the environment or the launcher's YAML (see
            `hf_helix.integrations.accelerate.launcher`).
        weights: a checkpoint folder for a model on the meta device; each rank reads its slices. Without the folder,
            such a model starts at random. `model="path/to/folder"` gives model and weights.

    Everything else is the Trainer's own. When the model is cut, `_is_cut` from then on:

        __init__                              options are compared, the mesh is built
        Trainer.__init__                      (a class of TRL has prepared the model before)
          create_accelerator_and_postprocess  a given model is cut, unless the class calls it, see `_take_model`
          call_model_init                     cuts a model of `model_init`; a later trial's at once
          _move_model_to_device               moves a cut model
        __init__                              a model that the class calls is cut and moved
    """

    _is_cut = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_class(cls)
        take_out(cls, HelixTrainerMixin, ("helix_config", "weights"))

    def __init__(
        self,
        *args: Any,
        helix_config: HelixConfig | ForeignConfig | None = None,
        weights: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        helix_config, weights = put_aside(self, "helix_config", helix_config), put_aside(self, "weights", weights)
        call = TrainerCall(args, kwargs)
        self._stock = StockSFTTrainer() if is_sft(type(self)) else StockTrainer()
        settle_arguments(type(self), call)
        arguments: TrainingArguments = call.get("args")
        self._weights = weights
        self._plugin = self._checked_layout(arguments, helix_config)
        self.helix_config = self._plugin.config
        self._stated_steps = _accumulation_steps(arguments)
        arguments = following(arguments, self._plugin.given)
        call.set("args", arguments)
        self._connect_ranks(arguments, call.get("model"))
        ranks_per_batch = self.helix_config.ranks_per_batch
        counts_once = is_online(type(self)) and ranks_per_batch > 1
        self._gathering = functools.partial(gathering_once, ranks_per_batch) if counts_once else contextlib.nullcontext
        if counts_once:
            settle_generation(call, ranks_per_batch)
        self._make_model(call)
        self._loss_function = call.get("compute_loss_func")
        precompute_on_device(self)
        super().__init__(*call.positional, **call.named)
        count_tokens_once(self)
        if self._has_own_loss:
            self._cut(self.model)
            if is_of_trl(type(self)) and ranks_per_batch > 1:
                count_batches_once(self, self.helix.mesh)
            feed_rollouts(self, self.helix)
            if self.place_model_on_device:
                self._move_model_to_device(self.model, self.args.device)
        if getattr(self.model, "is_loaded_in_4bit", False):
            self.helix.weights.move_to(self.args.device)
        check_trainer(self, arguments)
        check_epochs(self, self._plugin.given, self._stated_steps)
        CallbackDecisions(self)

    # -- construction --------------------------------------------------------------------------------------------

    def _checked_layout(self, arguments: TrainingArguments, given: Any) -> HelixPlugin:
        """Returns the plugin with the layout, after a check of every argument on this rank."""
        words = arguments.parallelism_config
        plugin = words if isinstance(words, HelixPlugin) else None
        options = resolve_config(given, plugin.given if plugin else words)
        if arguments.torch_compile:
            options = dataclasses.replace(options, compile=True)
        config = in_force(options)
        for notice in check_environment(config.pp_size):
            logger.warning(notice)
        check_arguments(arguments, config)
        return HelixPlugin(options) if plugin is None or plugin.given != options else plugin

    def _connect_ranks(self, args: TrainingArguments, model: Any) -> None:
        """Compares the options of the ranks, builds the mesh, and starts the heartbeat. Collective."""
        if args.use_cpu and args.ddp_timeout != USUAL_TIMEOUT:
            set_timeout(args.ddp_timeout)
        agree_on_action("HelixTrainer is made")
        steps, mixed = _accumulation_steps(args), args.mixed_precision
        given = self._plugin.given
        shared = f"gradient_accumulation_steps={steps}\nmixed_precision={mixed}\ncheckpointing={asked_by(args)}"
        shared += f"\nlayouts={given.layouts}"
        check_same_on_all_ranks(f"{shared_options(self.helix_config)}\n{shared}", "options")
        check_sizes(model, self.helix_config)
        check_layouts(model, given)
        mesh = self._plugin.build_mesh(args.device)
        if given.layouts is not None:
            say(
                f"layouts for {', '.join(map(str, given.layouts))} ranks: these {world_size()} take "
                f"{size_text(Sizes.of(mesh.sizes))}, and {steps} micro-batches in a step"
            )
            if notice := notice_of_launcher():
                say(notice)
        self._health = Health(args.device)
        start_watch()
        make_output_dir(args)

    def _make_model(self, call: TrainerCall) -> None:
        """Makes a model given as a folder without weights, since each rank reads its slices; a class of TRL reads
        other models given by name itself, whole on every rank."""
        model = call.get("model")
        if not isinstance(model, (str, os.PathLike)) or not is_read_by_slices(type(self), call):
            return
        if self._weights is not None:
            raise ValueError(
                f"model={str(model)!r} is read with the weights in its folder, and weights={str(self._weights)!r} "
                "is given, too; leave it out, or give a model on the meta device with it"
            )
        self._weights = Path(model)
        call.set("model", build_on_meta(model, **model_options(type(self), call.get("args"))))

    def _take_model(self, model: Any) -> None:
        """Cuts the model that a class hands to `Trainer.__init__`; one that its own code calls is cut when that code
        has made what else it needs of the whole model."""
        self._has_own_loss = has_own_loss(self, model, self._loss_function)
        if self._has_own_loss:
            self._stock = planned_preferences(self, model) or self._stock
        check_rollouts(self.args, model)
        if not self._has_own_loss:
            self._cut(model)
        elif self.helix_config.ranks_per_batch > 1 or self.helix_config.shard_parameters:
            mesh = self._plugin.build_mesh(self.args.device)
            layers = num_layers_of(model)
            cut_references(self.accelerator, layers, self.helix_config, mesh, self._run_options(), USE_INSTEAD)

    def _cut(self, model: Any) -> None:
        """Keeps this rank's part of the model, in place and before anything moves to the device. Collective."""
        args = self.args
        before: Engine | None = self.helix if self._is_cut else None
        with self._stock.settling(model):
            self.helix = Engine(
                model,
                self.helix_config,
                self._plugin.build_mesh(args.device),
                self._run_options(),
                USE_INSTEAD,
            )
        self._is_cut = True
        if before is not None:
            before.close()
        watch_steps(self.helix)
        self.accelerator.attach(self.helix, REFUSED)
        model._is_accelerate_prepared = True  # nothing is left to wrap
        if self.helix.ends_at_decoder:
            run_in_mixed_precision(model, self.accelerator)
        if self._has_own_loss:
            cut_fused_head()

    def _run_options(self) -> RunOptions:
        args = self.args
        return RunOptions(
            seed=args.seed,
            num_microbatches=_accumulation_steps(args),
            autocast_dtype=torch.bfloat16 if args.mixed_precision == "bf16" else None,
            loss_tweaks=self._loss_tweaks(args),
            checkpointing=asked_by(args),
            weights=self._weights,
        )

    def _loss_tweaks(self, args: TrainingArguments) -> LossTweaks:
        if (token_loss := self._stock.token_loss(self)) is not None:
            return LossTweaks(token_loss=token_loss)
        if self._has_own_loss:
            return LossTweaks(neftune_alpha=args.neftune_noise_alpha, ends_at_decoder=True)
        return LossTweaks(args.label_smoothing_factor, args.neftune_noise_alpha, self._stock.figures)

    @overrides("Trainer", otherwise="parameters that are spread would keep memory")
    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Moves this rank's parameters; sharded parameters get memory by the move, and release the memory. A model that
        is cut later stays where it is."""
        if not self._is_cut:
            return
        with plain_parameters():
            super()._move_model_to_device(model, device)  # type: ignore[misc]
        self.helix.weights.reshard_parameters()

    @overrides("Trainer", otherwise="every rank would train the whole model by itself")
    def call_model_init(self, trial: Any = None) -> Any:
        """Makes a model as the stock method does, and cuts the model."""
        model = super().call_model_init(trial)
        (self._cut if self._is_cut else self._take_model)(model)
        return model

    # -- the engine ----------------------------------------------------------------------------------------------
    # Shortcuts to the engine for README and recipes; `trainer.helix` has everything else.

    @property
    def plan(self) -> Plan:
        """The plan in use; `trainer.plan.save(path)` writes a file for `HelixConfig(plan=path)`."""
        return self.helix.plan

    @property
    def tuning(self) -> TuningResult | None:
        """The measurements of `plan="auto"`, or of an earlier run of the same case, ready to print; None before
        tuning."""
        return self.helix.tuning

    def measure_overlap(self, repeats: int = 5) -> Overlap:
        """See `Engine.measure_overlap`. Collective."""
        return self.helix.measure_overlap(repeats)

    def compare_plans(self, rules: Sequence[str] = (BASELINE, PAPER), repeats: int = 5) -> Comparison:
        """See `Engine.compare_plans`. Collective."""
        return self.helix.compare_plans(rules, repeats)

    def measure_memory(self) -> list[int]:
        """See `Engine.measure_memory`. Collective."""
        return self.helix.measure_memory()

    def trace(self, path: str | Path) -> None:
        """See `Engine.trace`. Collective."""
        self.helix.trace(path)

    # -- training ------------------------------------------------------------------------------------------------

    @overrides("Trainer", otherwise="the log would have no figures of overlap")
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs as the stock method does, with the scorecard next to the training loss."""
        logs.update(self._stock.log_entries(self.model.training))  # in place, for the result of evaluate()
        if "loss" in logs:
            logs = {**logs, **self.helix.diagnostics.log_entries()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    @overrides("Trainer", otherwise="it would step stand-ins")
    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the optimizer as the stock method does. With `shard_optimizer` or `shard_parameters`, the optimizer
        steps this rank's shards.
        """
        # Of an optimizer of Transformers, the stock method counts the elements of embeddings for a line of its log.
        with plain_parameters() if self.optimizer_cls_and_kwargs is None else contextlib.nullcontext():
            optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        check_made_optimizer(optimizer, self.helix_config)
        hand_over(self.helix, optimizer)
        return optimizer

    @overrides("Trainer", otherwise="the log would count tokens several times")
    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Counts input tokens once for the ranks that share a batch; the stock method counts every rank."""
        before = self.state.num_input_tokens_seen
        with gathering_from_all(self):
            super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self.helix_config.ranks_per_batch

    @overrides("Trainer", otherwise="losses of the user's own would be divided by another number of tokens")
    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Counts the tokens with a label as the stock method does, which divides by the ranks that share a batch."""
        with gathering_from_all(self):
            return super()._get_num_items_in_batch(batch_samples, device)

    @overrides("Trainer", otherwise="the log and the checkpoints would count operations several times")
    def store_flos(self) -> None:
        """Counts operations once for the ranks that share a batch; the stock method counts every rank."""
        before = self.state.total_flos
        super().store_flos()  # type: ignore[misc]
        counted = self.helix_config.ranks_per_batch * self.helix.share_of_elements
        self.state.total_flos = before + (self.state.total_flos - before) / counted

    # -- the layout, for Accelerate ------------------------------------------------------------------------------

    @overrides("Trainer", otherwise="the number of sequences in a step would be wrong")
    def get_tp_size(self) -> int:
        """The number of ranks that share a batch; Transformers 5.17 does not ask the layout for the number."""
        return int(self.accelerator.parallelism_config.tp_size)

    @overrides("Trainer", otherwise="ranks that share a batch would get different data")
    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Adds the layout to Accelerate's arguments, and leaves what is compiled to the layout. The training arguments
        belong to the user and stay unchanged."""
        stock = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        stock.pop("dynamo_plugin", None)
        return {**stock, "parallelism_config": self._plugin, "dynamo_backend": "no"}

    @overrides("Trainer", otherwise="a second trainer of the process would get the layout of the first")
    def create_accelerator_and_postprocess(self) -> None:
        """Makes the Accelerator as the stock method does, and restricts the layout to this Accelerator. It is the first
        thing that `Trainer.__init__` does, so here the model is what a class has made of it."""
        before = shared_layout()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        keep_layout(self.accelerator, self._plugin, before)
        if self._is_cut:
            self.accelerator.attach(self.helix, REFUSED)
        if self.model is not None and not self._is_cut:
            self._take_model(self.model)

    @overrides("Trainer", otherwise="the card would not say how the model was trained", needs=("tags",))
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the stock card with the tag `hf_helix` and a section on the run. On rank 0 only; not collective."""
        if self.is_world_process_zero():
            stock = super().create_model_card  # type: ignore[misc]
            given = inspect.signature(stock).bind_partial(*args, **kwargs).arguments
            write_card(self, stock, given)


class HelixTrainer(HelixTrainerMixin, Trainer):
    """`transformers.Trainer` with the model cut over the ranks and communication overlapped with computation.

    Takes the arguments of `Trainer`, and `helix_config`. See `HelixTrainerMixin`.
    """
