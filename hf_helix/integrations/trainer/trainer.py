"""The stock Trainer on a cut model.

In:   an ordinary Transformers model and what `transformers.Trainer` takes, plus a `HelixConfig`.
Out:  the same training, evaluation and checkpoints, with the model cut and two micro-batches interleaved.
Must hold: counters, callbacks, progress bar, schedules and logging stay the stock Trainer's; what cannot be honoured
is refused at construction, by name.

The other parts of the mixin: `training_step` (windows out of the stock loop's steps), `evaluation`, `checkpoints` and
`hyperparameter_search`. What the class under the mixin changes is in `stock` (the Trainer) and `trl` (SFTTrainer).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.utils.logging import get_logger

from hf_helix.checkpoint.random_weights import build_on_meta
from hf_helix.config import HelixConfig
from hf_helix.engine.build import RunOptions
from hf_helix.engine.checks import check_sizes
from hf_helix.engine.engine import Engine
from hf_helix.engine.recompute import asked_by
from hf_helix.integrations.accelerate.launcher import resolve_config
from hf_helix.integrations.accelerate.plugin import HelixPlugin, keep_layout, shared_layout
from hf_helix.integrations.optimizers import watch_steps
from hf_helix.integrations.trainer.checkpoints import CheckpointHooks, make_output_dir
from hf_helix.integrations.trainer.checks import check_arguments, check_trainer
from hf_helix.integrations.trainer.decisions import Decisions
from hf_helix.integrations.trainer.evaluation import EvaluationHooks
from hf_helix.integrations.trainer.hyperparameter_search import SearchHooks
from hf_helix.integrations.trainer.model_card import write_card
from hf_helix.integrations.trainer.stock import StockTrainer, TrainerCall
from hf_helix.integrations.trainer.training_step import WindowHooks
from hf_helix.integrations.trainer.trl import StockSFTTrainer, is_sft
from hf_helix.integrations.upstream import check_class, overrides
from hf_helix.measure.overlap import Overlap
from hf_helix.models.direct_use import Instead
from hf_helix.models.graph.context import LossTweaks
from hf_helix.planning.plan.plan import Plan
from hf_helix.runtime.distributed.agreement import check_same_on_all_ranks, meet
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.environment import check_environment
from hf_helix.runtime.failures.heartbeat import start_watch
from hf_helix.runtime.failures.values import Health
from hf_helix.tuning.cache import shared_options
from hf_helix.tuning.candidates import PAPER, Comparison
from hf_helix.tuning.effort import BASELINE
from hf_helix.tuning.verdict import TuningResult

logger = get_logger(__name__)

USE_INSTEAD = Instead(
    "trainer.train(), trainer.evaluate() or trainer.predict(), for one batch trainer.training_step(model, inputs) or "
    "trainer.prediction_step(model, inputs, prediction_loss_only=True); where ranks share nothing but batches, call it "
    "within trainer.helix.whole_weights()",
    "trainer.save_model(folder)",
)


def _accumulation_steps(args: TrainingArguments) -> int:
    """The micro-batches of a step, by the arguments or Accelerate's options, which the stock Trainer reads later."""
    config: Any = args.accelerator_config
    steps: int = (config.gradient_accumulation_kwargs or {}).get("num_steps", 1)
    return max(args.gradient_accumulation_steps, steps)


class HelixTrainerMixin(WindowHooks, EvaluationHooks, SearchHooks, CheckpointHooks):
    """Puts Helix under a Trainer class: `class MyTrainer(HelixTrainerMixin, Trainer)`.

    Args:
        helix_config: the options; without it they come from `args.parallelism_config`, the environment or the
            launcher's YAML (see `hf_helix.config`).
        weights: a checkpoint folder that a model on the meta device starts from, each rank reading its slices. Without
            it, such a model starts at random. `model="path/to/folder"` is both, model and weights.

    Everything else is the Trainer's own.
    """

    # What the Trainer provides and the mixin uses.
    model: Any
    args: TrainingArguments
    accelerator: Any
    state: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    processing_class: Any
    data_collator: Any

    helix: Engine
    """The cut model: its plan, its tuning, what can be measured, and `figures`, all figures of the last log."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_class(cls)

    def __init__(
        self,
        *args: Any,
        helix_config: HelixConfig | None = None,
        weights: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        call = TrainerCall(args, kwargs)
        self._stock = StockSFTTrainer() if is_sft(type(self)) else StockTrainer()
        self._stock.settle(call)
        arguments: TrainingArguments = call.get("args")
        self._weights = weights
        self._plugin = self._checked_layout(call, helix_config)
        self.helix_config = self._plugin.config
        self._connect_ranks(arguments, call.get("model"))
        model = self._whole_model(call)
        if model is not None:
            call.set("model", model)
            self._cut(model, arguments)
        super().__init__(*call.positional, **call.named)
        check_trainer(self, arguments)
        Decisions(self)

    # -- construction --------------------------------------------------------------------------------------------

    def _checked_layout(self, call: TrainerCall, given: HelixConfig | None) -> HelixPlugin:
        """The layout that is asked for, once every argument has been checked on this rank."""
        arguments = call.get("args")
        plugin = arguments.parallelism_config
        plugin = plugin if isinstance(plugin, HelixPlugin) else None
        config = resolve_config(given, plugin.config if plugin else None)
        for notice in check_environment(config.pp_size):
            logger.warning(notice)
        self._stock.check_call(type(self), call)
        check_arguments(arguments, config)
        return HelixPlugin(config) if plugin is None or plugin.config != config else plugin

    def _connect_ranks(self, args: TrainingArguments, model: Any) -> None:
        """Compares what the ranks ask for, builds the mesh, and watches the ranks from here on. Collective."""
        meet("HelixTrainer is made")
        steps, mixed = _accumulation_steps(args), args.mixed_precision
        shared = f"gradient_accumulation_steps={steps}\nmixed_precision={mixed}\ncheckpointing={asked_by(args)}"
        check_same_on_all_ranks(f"{shared_options(self.helix_config)}\n{shared}", "options")
        check_sizes(model, self.helix_config)
        self._plugin.build_mesh(args.device)
        self._health = Health(args.device)
        start_watch()
        make_output_dir(args)

    def _whole_model(self, call: TrainerCall) -> Any:
        """The model that will be cut, with its adapters; None where `model_init` makes it later. The model of a folder
        is made without its weights, of which each rank reads its slices.
        """
        model = call.get("model")
        if isinstance(model, (str, os.PathLike)):
            if self._weights is not None:
                raise ValueError(
                    f"model={str(model)!r} is read with the weights in its folder, and weights={str(self._weights)!r} "
                    "is given, too; leave it out, or give a model on the meta device with it"
                )
            self._weights = Path(model)
            model = build_on_meta(model, **self._stock.model_options(call.get("args")))
        return self._stock.add_adapters(model, call)

    def _cut(self, model: Any, args: TrainingArguments) -> None:
        """Keeps this rank's part of the model, in place and before anything moves to the device. Collective."""
        self._stock.check_model(model, args)
        before: Engine | None = getattr(self, "helix", None)
        self.helix = Engine(
            model,
            self.helix_config,
            self._plugin.build_mesh(args.device),
            RunOptions(
                seed=args.seed,
                num_microbatches=_accumulation_steps(args),
                autocast_dtype=torch.bfloat16 if args.mixed_precision == "bf16" else None,
                loss_tweaks=LossTweaks(args.label_smoothing_factor, args.neftune_noise_alpha, self._stock.figures),
                checkpointing=asked_by(args),
                weights=self._weights,
            ),
            USE_INSTEAD,
        )
        if before is not None:
            before.close()
        watch_steps(self.helix)
        model._is_accelerate_prepared = True  # nothing is left to wrap

    @overrides("Trainer", "parameters that are spread would keep memory")
    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Moves what this rank holds; parameters that are spread have got memory by it, and give it back."""
        with plain_parameters():
            super()._move_model_to_device(model, device)  # type: ignore[misc]
        self.helix.free_spread_parameters()

    @overrides("Trainer", "every rank would train the whole model by itself")
    def call_model_init(self, trial: Any = None) -> Any:
        """Makes a model as the stock method does, and cuts it."""
        model = super().call_model_init(trial)
        self._cut(model, self.args)
        return model

    # -- the engine ----------------------------------------------------------------------------------------------
    # What README and recipes call most often, so that users of the Trainer need not know of the engine; all else is
    # in `trainer.helix`.

    @property
    def plan(self) -> Plan:
        """The plan in use; `trainer.plan.save(path)` writes a file that `HelixConfig(plan=path)` takes."""
        return self.helix.plan

    @property
    def tuning(self) -> TuningResult | None:
        """The measurements of `plan="auto"`, or of an earlier run of the same case; None before. `print` them."""
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

    @overrides("Trainer", "the log would have no figures of overlap")
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs as the stock method does, with the scorecard beside the training loss."""
        logs.update(self._stock.log_entries(self.model.training))  # in place: what evaluate() returns has them, too
        if "loss" in logs:
            logs = {**logs, **self.helix.log_entries()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    @overrides("Trainer", "it would step stand-ins")
    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the optimizer as the stock method does. With `shard_optimizer` and `shard_parameters`, it steps this
        rank's parts of the parameters.
        """
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        self.helix.step_parts(optimizer)
        return optimizer

    @overrides("Trainer", "the log would count tokens several times")
    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Counts input tokens once for the ranks that share a batch; the stock method counts every rank."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self.helix_config.ranks_per_batch

    @overrides("Trainer", "the log and the checkpoints would count operations several times")
    def store_flos(self) -> None:
        """Counts operations once for the ranks that share a batch; the stock method counts every rank."""
        before = self.state.total_flos
        super().store_flos()  # type: ignore[misc]
        self.state.total_flos = before + (self.state.total_flos - before) / self.helix_config.ranks_per_batch

    # -- the layout, for Accelerate ------------------------------------------------------------------------------

    @overrides("Trainer", "the number of sequences in a step would be wrong")
    def get_tp_size(self) -> int:
        """The number of ranks that share a batch; Transformers 5.17 does not ask the layout for it."""
        return int(self.accelerator.parallelism_config.tp_size)

    @overrides("Trainer", "ranks that share a batch would get different data")
    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Adds the layout to Accelerate's arguments. The training arguments are the user's, and are not changed."""
        return {**super()._build_accelerator_args(**kwargs), "parallelism_config": self._plugin}  # type: ignore[misc]

    @overrides("Trainer", "a second trainer of the process would get the layout of the first")
    def create_accelerator_and_postprocess(self) -> None:
        """Makes the Accelerator as the stock method does, and keeps the layout from others of the process."""
        before = shared_layout()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        keep_layout(self.accelerator, self._plugin, before)

    @overrides("Trainer", "the card would not say how the model was trained", needs=("tags",))
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the stock card with the tag `hf_helix` and a section on the run. On rank 0 only; not collective."""
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            stock = super().create_model_card  # type: ignore[misc]
            given = inspect.signature(stock).bind_partial(*args, **kwargs).arguments
            write_card(self, stock, given)


class HelixTrainer(HelixTrainerMixin, Trainer):  # type: ignore[misc]  # Trainer.objective has no declared type
    """`transformers.Trainer` with the model cut over the ranks and communication hidden behind computation.

    Takes what `Trainer` takes, and `helix_config`. See `HelixTrainerMixin`.
    """
