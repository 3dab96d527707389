"""The stock Trainer on a cut model.

In:   an ordinary Transformers model and what `transformers.Trainer` takes, plus a `HelixConfig`.
Out:  the same training, evaluation and checkpoints, with the model cut and two micro-batches interleaved.
Must hold: counters, callbacks, progress bar, schedules and logging stay the stock Trainer's; what cannot be honoured
is refused at construction, by name.

How the stock loop's steps become windows is in `takeover`, checkpoints in `resume.hooks`, evaluation in
`evaluation_hooks`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, set_seed
from transformers.utils.logging import get_logger

from hf_helix.checkpoint.random_weights import outline_of
from hf_helix.config import HelixConfig
from hf_helix.engine.build import RunOptions
from hf_helix.engine.checks import check_sizes
from hf_helix.engine.engine import Engine
from hf_helix.engine.microbatches import Scale
from hf_helix.engine.recompute import asked_by
from hf_helix.integrations.accelerate.launcher import resolve_config
from hf_helix.integrations.accelerate.plugin import HelixPlugin, keep_layout, shared_layout
from hf_helix.integrations.trainer.checkpoints import CheckpointHooks, make_output_dir
from hf_helix.integrations.trainer.checks import check_arguments, check_trainer
from hf_helix.integrations.trainer.evaluation import EvaluationHooks
from hf_helix.integrations.trainer.hyperparameter_search import SearchHooks
from hf_helix.integrations.trainer.model_card import write_card
from hf_helix.integrations.trainer.training_step import WindowHooks
from hf_helix.integrations.trainer.trl import adapted, check_routers, check_sft, is_sft
from hf_helix.models.builder import Additions
from hf_helix.models.direct_use import Instead
from hf_helix.planning.plans.plan import Plan
from hf_helix.runtime.distributed.agreement import agree_on_text
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.environment import check_environment
from hf_helix.runtime.failures.finite_check import Health
from hf_helix.runtime.failures.heartbeat import start_watch
from hf_helix.runtime.notices import say
from hf_helix.runtime.runner import Runner
from hf_helix.tuning.cache import export
from hf_helix.tuning.compare import PAPER, Comparison
from hf_helix.tuning.effort import BASELINE
from hf_helix.tuning.fingerprint import shared_options
from hf_helix.tuning.measure.overlap import Overlap
from hf_helix.tuning.result import TuningResult

logger = get_logger(__name__)

INSTEAD = Instead(
    "trainer.train(), trainer.evaluate() or trainer.predict(), for one batch trainer.training_step(model, inputs) or "
    "trainer.prediction_step(model, inputs, prediction_loss_only=True)",
    "trainer.save_model(folder)",
)


def _accumulated(args: TrainingArguments) -> int:
    """The micro-batches of a step, also where Accelerate's options say it, which the stock Trainer reads later."""
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

    # The cut model.
    _engine: Engine

    def __init__(
        self,
        *args: Any,
        helix_config: HelixConfig | None = None,
        weights: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        if arguments is None:
            arguments = TrainingArguments(output_dir="tmp_trainer")
            args, kwargs["args"] = args[:1], arguments
        model = kwargs.get("model", args[0] if args else None)
        plugin = arguments.parallelism_config
        plugin = plugin if isinstance(plugin, HelixPlugin) else None
        config = resolve_config(helix_config, plugin.config if plugin else None)
        for notice in check_environment(config.pp_size):
            logger.warning(notice)
        if is_sft(type(self)):
            given = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments
            check_sft(type(self), given, arguments)
        check_arguments(arguments, config)
        if plugin is None or plugin.config != config:
            plugin = HelixPlugin(config)
        self._plugin = plugin
        steps = _accumulated(arguments)
        mixed = arguments.mixed_precision
        shared = f"gradient_accumulation_steps={steps}\nmixed_precision={mixed}\ncheckpointing={asked_by(arguments)}"
        agree_on_text(f"{shared_options(config)}\n{shared}", "options")
        self.helix_config = config
        check_sizes(model, config)
        self._mesh: Mesh = plugin.build_mesh(arguments.device)
        self._health = Health(arguments.device)
        start_watch()
        make_output_dir(arguments)
        self._weights = weights
        if isinstance(model, (str, os.PathLike)):
            model = self._outline(model, arguments)
        if kwargs.get("peft_config") is not None and is_sft(type(self)):
            set_seed(arguments.seed)
            model, kwargs = adapted(model, kwargs["peft_config"]), {**kwargs, "peft_config": None}
        if model is not None:
            args, kwargs = ((model, *args[1:]), kwargs) if args else (args, {**kwargs, "model": model})
            self._take(model, arguments)
        super().__init__(*args, **kwargs)
        check_trainer(self, arguments)

    # -- the engine ----------------------------------------------------------------------------------------------

    @property
    def helix(self) -> Engine:
        """The cut model: its plan, its tuning, what can be measured, and `figures`, all of the last log's."""
        return self._engine

    @property
    def mesh(self) -> Mesh:
        """Which ranks share what."""
        return self._mesh

    @property
    def runner(self) -> Runner:
        """Runs windows of micro-batches on this rank."""
        return self._engine.runner

    @property
    def plan(self) -> Plan:
        """The plan in use; `trainer.plan.save(path)` writes a file that `HelixConfig(plan=path)` takes."""
        return self._engine.plan

    @property
    def tuning(self) -> TuningResult | None:
        """What `plan="auto"` measured, or an earlier run of the same case; None as long as nothing was. `print` it."""
        return self._engine.tuning

    def measure_overlap(self, repeats: int = 5) -> Overlap:
        """How much communication the plan hides, measured on the last window that was trained. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        return self._engine.measure_overlap(repeats)

    def compare_plans(self, rules: Sequence[str] = (BASELINE, PAPER), repeats: int = 5) -> Comparison:
        """The plan in use beside those of other rules, all timed in turn on the last window. Collective.

        Args:
            rules: see `HelixConfig.plan`.
            repeats: how often each is timed; medians are taken.

        Raises:
            ValueError: nothing has been trained yet.
        """
        return self._engine.compare_plans(rules, repeats)

    def measure_memory(self) -> list[int]:
        """The most bytes of activations and buffers alive in the last window, rank by rank. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        return self._engine.measure_memory()

    def trace(self, path: str | Path) -> None:
        """Write a trace of the last window for https://ui.perfetto.dev, a track per stream. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        self._engine.trace(path)

    def call_model_init(self, trial: Any = None) -> Any:
        """A model made by `model_init` is cut like one that was passed in."""
        model = super().call_model_init(trial)
        self._take(model, self.args)
        return model

    def _outline(self, folder: str | os.PathLike[str], args: TrainingArguments) -> Any:
        """The model of a folder without its weights, of which ranks read what they hold. TRL's options for it count."""
        if self._weights is not None:
            raise ValueError(
                f"model={str(folder)!r} is read with the weights in its folder, and weights={str(self._weights)!r} is "
                "given, too; leave it out, or give a model on the meta device with it"
            )
        self._weights = Path(folder)
        usual = {"dtype": torch.float32} if is_sft(type(self)) else {}
        return outline_of(folder, **{**usual, **(getattr(args, "model_init_kwargs", None) or {})})

    def _take(self, model: Any, args: TrainingArguments) -> None:
        """Keep this rank's part of the model, in place, before anything moves to the device; make it runnable."""
        if is_sft(type(self)):
            check_routers(model, args)
        before = getattr(self, "_engine", None)
        self._engine = Engine(
            model,
            self.helix_config,
            self._mesh,
            RunOptions(
                seed=args.seed,
                num_microbatches=_accumulated(args),
                products=torch.bfloat16 if args.mixed_precision == "bf16" else None,
                additions=Additions(args.label_smoothing_factor, args.neftune_noise_alpha),
                checkpointing=asked_by(args),
                weights=self._weights,
            ),
            INSTEAD,
        )
        if before is not None:
            before.close()
        model._is_accelerate_prepared = True  # nothing is left to wrap

    # -- training ------------------------------------------------------------------------------------------------

    def _tune(self, batches: list[Any], scale: Scale, step: int) -> None:
        """Let the engine choose a plan, if it is time to; what it finds is said and written. Collective."""
        steps_left = self.state.max_steps - step
        found = self._engine.tune(batches, scale, step, steps_left if steps_left > 0 else None)
        if found is not None and self.args.process_index == 0:
            folder = Path(str(self.args.output_dir), "helix")
            try:
                export(folder, found, self.plan.to_json())
                say(f"{found.verdict} (details: {folder / 'tuning.txt'})")
            except OSError as error:
                say(f"{found.verdict} (details: print(trainer.tuning), since {folder} cannot be written: {error})")

    def _scale(self, num_items: Any) -> Scale:
        # As the stock Trainer: gradients are averaged over dp, so a mean over all tokens is scaled up by dp. It divides
        # the count by the ranks that share a batch, also where it has not summed over them.
        averages = self.args.average_tokens_across_devices
        factor = self._mesh.dp_size if averages else 1 / self.helix_config.ranks_per_batch
        tokens = torch.as_tensor(
            factor if num_items is None else factor / num_items, dtype=torch.float32, device=self.args.device
        )
        return Scale(tokens, self._mesh.dp_size if averages else 1.0)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the stock method, with the scorecard beside the training loss."""
        if "loss" in logs:
            logs = {**logs, **self._engine.log_entries()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock method; with `shard_optimizer`, every data-parallel rank keeps the states of its share."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if is_new and self.helix_config.shard_optimizer:
            given = self.optimizer_cls_and_kwargs
            made, options = given or self.get_optimizer_cls_and_kwargs(self.args, self.model)  # type: ignore[attr-defined]
            self.optimizer = self._engine.shard_optimizer(optimizer, made, options)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._engine.clip_gradients(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        self._check_window_ran()
        norm = self._engine.gradient_norm() if grad_norm is None else grad_norm
        self._health.note_norm(norm)
        return norm

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """The stock method counts every rank of a group that shares a batch."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self.helix_config.ranks_per_batch

    def store_flos(self) -> None:
        """The stock method counts every rank of a group that shares a batch."""
        before = self.state.total_flos
        super().store_flos()  # type: ignore[misc]
        self.state.total_flos = before + (self.state.total_flos - before) / self.helix_config.ranks_per_batch

    def get_num_trainable_parameters(self) -> int:
        """Those of the whole model."""
        return self._engine.sizes.count(only_trainable=True)

    # -- the layout, for Accelerate ------------------------------------------------------------------------------

    def get_tp_size(self) -> int:
        """Ranks that share a batch; Transformers 5.17 does not ask the layout for them."""
        return int(self.accelerator.parallelism_config.tp_size)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """As the stock method, with the layout, which the arguments need not name: they are the user's."""
        return {**super()._build_accelerator_args(**kwargs), "parallelism_config": self._plugin}  # type: ignore[misc]

    def create_accelerator_and_postprocess(self) -> None:
        """As the stock method; the layout is this trainer's, and not of every Accelerator of the process."""
        before = shared_layout()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        keep_layout(self.accelerator, self._plugin, before)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As the stock method, with the tag `hf_helix` and a section on the run. Not collective: rank 0 writes."""
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            stock = super().create_model_card  # type: ignore[misc]
            given = inspect.signature(stock).bind_partial(*args, **kwargs).arguments
            write_card(self, stock, given, self._engine.overlap)


class HelixTrainer(HelixTrainerMixin, Trainer):  # type: ignore[misc]  # Trainer.objective has no declared type
    """`transformers.Trainer` with the model cut over the ranks and communication hidden behind computation.

    Takes what `Trainer` takes, and `helix_config`. See `HelixTrainerMixin`.
    """
