"""The Trainer door.

In:   an ordinary Transformers model and what `transformers.Trainer` takes, plus a `HelixConfig`.
Out:  the same training, evaluation and checkpoints, with the model cut and two micro-batches interleaved.
Must hold: counters, callbacks, progress bar, schedules and logging stay the stock Trainer's; what cannot be honoured
is refused at construction, by name.

The take-over: `get_batch_samples` keeps the window, the first `training_step` of it runs all of it and returns the
sum of its losses, the others return zero.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils.logging import get_logger

from hf_helix.adapters import family_of
from hf_helix.adapters.builder import Additions, Sharing
from hf_helix.adapters.sequence import SequenceCut
from hf_helix.checkpoint import cut_parameters, save_pretrained
from hf_helix.config import HelixConfig, resolve_config
from hf_helix.model_card import write_card
from hf_helix.operators.collectives import prepare_all_gather
from hf_helix.operators.experts import SHARD_TOKENS
from hf_helix.operators.unit import cut_bounds
from hf_helix.planning.pipeline import AUTO
from hf_helix.planning.plan import Plan
from hf_helix.planning.schedule import format_schedule
from hf_helix.plugin import HelixPlugin
from hf_helix.refusals import (
    check_arguments,
    check_batch,
    check_evaluation,
    check_model,
    check_placements,
    check_trainer,
)
from hf_helix.report.flops import peak_tflops, token_flops
from hf_helix.report.live import LiveScore
from hf_helix.report.perfetto import write_perfetto
from hf_helix.runtime.agreement import agree_on_number, agree_on_text, agree_on_window
from hf_helix.runtime.gradients import gradient_norm
from hf_helix.runtime.liveness import start_watch, watched
from hf_helix.runtime.measure import Overlap, measure_overlap, over_ranks, trace_window
from hf_helix.runtime.memory import peak_bytes
from hf_helix.runtime.mesh import Mesh, world_size
from hf_helix.runtime.routers import router_entries
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.sharding import ShardedOptimizer
from hf_helix.runtime.stage import place_units
from hf_helix.runtime.strand import MicroBatch
from hf_helix.runtime.streams import make_streams, prepare_cuda
from hf_helix.runtime.trace import Trace
from hf_helix.runtime.tuning import Tuning
from hf_helix.tuner import Tuner, describe, options_of

logger = get_logger(__name__)


class HelixTrainerMixin:
    """Puts Helix under a Trainer class: `class MyTrainer(HelixTrainerMixin, Trainer)`.

    Args:
        helix_config: the options; without it they come from `args.parallelism_config`, the environment or the
            launcher's YAML (see `hf_helix.config`).

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

    # Runs windows of micro-batches on this rank.
    runner: Runner

    def __init__(self, *args: Any, helix_config: HelixConfig | None = None, **kwargs: Any) -> None:
        notice = prepare_cuda()
        if notice:
            logger.warning(notice)
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        if arguments is None:
            arguments = TrainingArguments(output_dir="tmp_trainer", save_strategy="no")
            args, kwargs["args"] = args[:1], arguments
        model = kwargs.get("model", args[0] if args else None)
        plugin = arguments.parallelism_config
        plugin = plugin if isinstance(plugin, HelixPlugin) else None
        config = resolve_config(helix_config, plugin.config if plugin else None)
        check_arguments(arguments, config)
        if plugin is None or plugin.config != config:
            plugin = arguments.parallelism_config = HelixPlugin(config)
        steps = arguments.gradient_accumulation_steps
        mixed = arguments.mixed_precision
        agree_on_text(f"{options_of(config)}\ngradient_accumulation_steps={steps}\nmixed_precision={mixed}", "options")
        self.helix_config = config
        self._mesh: Mesh = plugin.build_mesh(arguments.device)
        self._cut = SequenceCut.of(self._mesh.tp, self._mesh.cp)
        self._last_alone: Overlap | None = None
        self._window: list[Any] | None = None
        self._last_window: list[MicroBatch] = []
        start_watch()
        if model is not None:
            self._take(model, arguments)
        super().__init__(*args, **kwargs)
        check_trainer(self, arguments)

    # -- what the runner is made of ------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """Which ranks share what."""
        return self._mesh

    @property
    def plan(self) -> Plan:
        """The plan in use; `trainer.plan.save(path)` writes a file that `HelixConfig(plan=path)` takes."""
        return self.runner.plan

    @property
    def tuning(self) -> Tuning | None:
        """What `plan="auto"` measured, or an earlier run of the same case; None before the first window."""
        return self._tuner.tuning

    def measure_overlap(self, repeats: int = 5) -> Overlap:
        """How much communication the plan hides, measured on the last window that was trained. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        if not self._last_window:
            raise ValueError("measure_overlap() needs a window to repeat; call it after train()")
        self.model.train()
        with watched():
            self._last_alone = measure_overlap({"": self.runner}, self._last_window, repeats)[""]
        return self._last_alone

    def measure_memory(self) -> list[int]:
        """The most bytes of activations and buffers alive in the last window, rank by rank. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        if not self._last_window:
            raise ValueError("measure_memory() needs a window to repeat; call it after train()")
        self.model.train()
        with watched():
            return over_ranks(peak_bytes(self.runner, self._last_window))

    def trace(self, path: str | Path) -> None:
        """Write a trace of the last window for https://ui.perfetto.dev, a track per stream. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        if not self._last_window:
            raise ValueError("trace() needs a window to repeat; call it after train()")
        self.model.train()
        with watched():
            trace = trace_window(self.runner, self._last_window, complete=self._mesh.dp_size > 1)
            spans = over_ranks(trace.spans)
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            write_perfetto(path, spans)

    def call_model_init(self, trial: Any = None) -> Any:
        """A model made by `model_init` is cut like one that was passed in."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        self._take(model, self.args)
        return model

    def _take(self, model: Any, args: TrainingArguments) -> None:
        """Keep this rank's part of the model, in place, before anything moves to the device; make it runnable."""
        check_model(model, args)
        self._family = family_of(model)
        config, tp_size = self.helix_config, self._mesh.tp.size
        name = type(model).__name__
        products = torch.bfloat16 if args.mixed_precision == "bf16" else None
        self._tuner = Tuner(config, name, describe(model, self._mesh, products))
        mesh = self._mesh
        sharing = Sharing(mesh.tp, mesh.cp, mesh.experts, config.cp_method, config.expert_capacity_factor)
        self._num_weights = model.num_parameters(exclude_embeddings=True)
        additions = Additions(args.label_smoothing_factor, args.neftune_noise_alpha)
        units = [unit.without(config.without) for unit in self._family.units(model, sharing, additions)]
        check_placements(model, {p: placement for unit in units for p, placement in unit.placements.items()})
        stage = place_units(
            units,
            self._mesh.pipe,
            self._family.empty(model, tp_size),
            self._tuner.scheduler.placement,
            self._family.head_cost(model),
            config.layers_per_stage,
        )
        with watched():
            plan = self._tuner.first_plan(stage.layout)
        peak = peak_tflops(torch.cuda.get_device_name(args.device)) if args.device.type == "cuda" else None
        self._live = LiveScore(token_flops(model), world_size(), self._mesh.dp_size, peak)
        scheduler = self._tuner.scheduler
        with watched():
            # All ranks agree before anything is cut or communicated by the plan.
            whole = 1 if scheduler.name == AUTO else args.gradient_accumulation_steps
            text = f"{stage.layout.describe()}\n{format_schedule(scheduler(whole))}\n{plan.to_json()}"
            agree_on_text(text, "plans")
            cut_parameters(stage, self._mesh)
        if hasattr(self, "runner"):
            self.runner.executor.streams.close()
        self.runner = Runner(stage, plan, self._mesh, make_streams(args.device), scheduler, args.seed, products)
        model._is_accelerate_prepared = True  # nothing is left to wrap
        model._is_cut_by_helix = self._mesh.batch_group is not None
        if model._is_cut_by_helix:
            model.forward = _refuse_forward(model.forward)

    # -- training ------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the stock method. Resuming is not built yet."""
        if resume_from_checkpoint:
            raise ValueError(
                "resume_from_checkpoint is not built yet in hf_helix; start from a saved model instead: "
                "AutoModelForCausalLM.from_pretrained(folder), and train() without it"
            )
        with watched():
            return super().train(None, *args, **kwargs)  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Collects the micro-batches of an optimizer step, and keeps them for `training_step`. Collective."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        with watched():
            agree_on_number(len(batches), device)
        samples, num_items = super().get_batch_samples(iter(batches), num_batches, device)  # type: ignore[misc]
        self._window = list(samples)
        return samples, num_items

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The first call of a window runs all of it and returns the sum of its losses; the others return zero."""
        if self._window is None:
            return torch.zeros((), device=self.args.device)
        window, self._window = self._window, None
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers have a mode, too
        batches = self._share_lengths([self._prepare_inputs(batch) for batch in window])  # type: ignore[attr-defined]
        check_batch(batches[0])
        agree_on_window([batch["input_ids"] for batch in batches], self._mesh.batch_group)
        microbatches = [
            self._microbatch(batch, num_items_in_batch, (self.state.global_step, place))
            for place, batch in enumerate(batches)
        ]
        self._last_window = microbatches
        self.runner = self._tuner.decide(self.runner, microbatches)
        losses = self._train_window(microbatches, length=max(batch["input_ids"].shape[-1] for batch in batches))
        return torch.stack(losses).sum()

    def _share_lengths(self, batches: list[Any]) -> list[Any]:
        """With a capacity, experts take as many rows of every rank, so the longest batch of all counts. Collective."""
        group = self._mesh.experts.group
        if self.helix_config.expert_capacity_factor is None or group is None:
            return batches
        sizes = [(len(batch["input_ids"]), self._cut.padded(batch["input_ids"].shape[1])) for batch in batches]
        ranks = self._cut.tp_size * self._cut.cp_size
        tokens = torch.tensor([rows * length // ranks for rows, length in sizes], device=self._mesh.device)
        dist.all_reduce(tokens, dist.ReduceOp.MAX, group=group)
        return [{**batch, SHARD_TOKENS: most} for batch, most in zip(batches, tokens.tolist(), strict=True)]

    def _train_window(self, window: list[MicroBatch], length: int) -> list[Tensor]:
        """Train, counted for the logs; the first window after each log is traced."""
        tokens = sum(batch.num_tokens for batch in window)
        if not self._live.wants_trace:
            return self._live.add(tokens, length, lambda: self.runner.train_window(window))
        streams = self.runner.executor.streams
        streams.trace = trace = Trace()
        start = time.perf_counter()
        try:
            losses = self._live.add(tokens, length, lambda: self.runner.train_window(window))
            streams.synchronize()
        finally:
            streams.trace = None
        self._live.add_trace(trace, tokens, time.perf_counter() - start)
        return losses

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the stock method, with the scorecard beside the training loss."""
        if "loss" in logs:
            tuned = self.tuning.overlaps[self.tuning.kept] if self.tuning else None
            capped = self.helix_config.expert_capacity_factor is not None
            routers = router_entries(self.runner.whole, self._mesh, capped)
            logs = {**logs, **self._live.entries(self._last_alone or tuned), **routers}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _microbatch(self, batch: Mapping[str, Any], num_items: Any, key: tuple[int, int]) -> MicroBatch:
        # As the stock Trainer: gradients are averaged over dp, so a mean over all tokens is scaled up by dp. It divides
        # the count by the ranks that share a batch, also where it has not summed over them.
        averages = self.args.average_tokens_across_devices
        factor = self._mesh.dp_size if averages else 1 / self.helix_config.ranks_per_batch
        scale = torch.as_tensor(factor / num_items, dtype=torch.float32, device=self.args.device)
        whole = self._mesh.dp_size if averages else 1.0
        prepare = functools.partial(self._family.side_inputs, self.model, batch, self._cut, scale, whole)
        ids = batch["input_ids"]
        return MicroBatch(prepare, key, num_tokens=ids.numel(), shape=" x ".join(map(str, ids.shape)))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock method; with `shard_optimizer`, every data-parallel rank keeps the states of its share."""
        is_new, group = self.optimizer is None, self._mesh.dp_group
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if is_new and self.helix_config.shard_optimizer and group is not None:
            given = self.optimizer_cls_and_kwargs
            made, options = given or self.get_optimizer_cls_and_kwargs(self.args, self.model)  # type: ignore[attr-defined]
            rows = [{key: row[key] for key in ("params", "weight_decay")} for row in optimizer.param_groups]
            self.optimizer = ShardedOptimizer(rows, made, process_group=group, **options)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        norm = gradient_norm(self.runner.stage.placements, self._mesh)
        parameters = [parameter for parameter in self.runner.stage.placements if parameter.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(parameters, self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return gradient_norm(self.runner.stage.placements, self._mesh) if grad_norm is None else grad_norm

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """The stock method counts every rank of a group that shares a batch."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self.helix_config.ranks_per_batch

    def floating_point_ops(self, inputs: Any) -> int:
        """This rank's share of what the stock method counts for the uncut model."""
        return 6 * inputs["input_ids"].numel() * self._num_weights // self.helix_config.ranks_per_batch

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As the stock method; a rank that fails is named."""
        check_evaluation(dataloader.dataset, self._mesh.dp_size)
        with watched():
            return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Forward only. Logits are gathered over the vocabulary where somebody reads them."""
        batch = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        labels = batch.get("labels")
        num_items = self._get_num_items_in_batch([batch], self.args.device)  # type: ignore[attr-defined]
        items = 1 if num_items is None else num_items
        pieces = [
            self._microbatch(piece, items, (self.state.global_step, place))
            for place, piece in enumerate(self._share_lengths(self._pieces(batch)))
        ]
        with torch.no_grad():
            loss, logits = self.runner.evaluate(pieces, keep_logits=not prediction_loss_only)
        found = None if labels is None else loss.detach()
        if logits is None:
            return found, None, None
        if self.runner.precision.products is not None:
            logits = logits.float()  # as Accelerate hands out what was computed under autocast
        length = batch["input_ids"].shape[1]
        return found, self._whole_logits(logits)[:, :length], labels

    def _pieces(self, batch: Mapping[str, Any]) -> list[Any]:
        """The rows of a batch in as many micro-batches as keep every rank of the pipeline and two strands busy."""
        if not self._family.loss_adds_up(self.model):
            return [batch]
        rows = len(batch["input_ids"])
        most = min(rows, self.runner.scheduler.most or rows)
        count = min(most, 2 * self._mesh.pipe.size) if self._mesh.batch_group is not None else 1
        if count < 2:
            return [batch]
        cut = {
            name: value.tensor_split(count)
            if isinstance(value, Tensor) and value.dim() and len(value) == rows
            else None
            for name, value in batch.items()
        }
        return [
            {name: batch[name] if parts is None else parts[place] for name, parts in cut.items()}
            for place in range(count)
        ]

    def _whole_logits(self, logits: Tensor) -> Tensor:
        """[tokens, batch, slice] of every rank to [batch, sequence, vocabulary]."""
        tp = self._mesh.tp
        if tp.size > 1:
            stage = self.runner.stage
            head = stage.model[stage.head].placements[self.model.get_output_embeddings().weight]
            lengths = [last - first for first, last in (cut_bounds(head.length, tp.size, r) for r in range(tp.size))]
            padded = nn.functional.pad(logits, (0, max(lengths) - logits.shape[-1]))
            gathered, work = prepare_all_gather(tp, padded)
            work()
            blocks = gathered.chunk(tp.size)
            logits = torch.cat([block[..., :length] for block, length in zip(blocks, lengths, strict=True)], -1)
        if self._mesh.cp.size > 1:
            gathered, work = prepare_all_gather(self._mesh.cp, logits)
            work()
            logits = self._cut.join(gathered)
        return logits.transpose(0, 1).contiguous()

    @property
    def gather_function(self) -> Callable[[Any], Any]:
        """What evaluation collects metrics with: over the data-parallel ranks, each sample once."""
        return self._gather_for_metrics

    @gather_function.setter
    def gather_function(self, value: Any) -> None:
        """The stock Trainer sets its own, which counts every rank that shares a batch."""

    def _gather_for_metrics(self, data: Any) -> Any:
        if isinstance(data, (tuple, list)):
            return type(data)(self._gather_for_metrics(item) for item in data)
        if isinstance(data, Mapping):
            return type(data)({name: self._gather_for_metrics(item) for name, item in data.items()})  # type: ignore[call-arg]
        if self._mesh.dp_group is not None:
            data = data.contiguous()
            blocks = [torch.empty_like(data) for _ in range(self._mesh.dp_size)]
            dist.all_gather(blocks, data, group=self._mesh.dp_group)
            data = torch.cat([block[None] if block.dim() == 0 else block for block in blocks])
        state = self.accelerator.gradient_state
        # The last batch was filled up with samples from the start.
        return data[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else data

    # -- saving --------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """An ordinary Hugging Face checkpoint, gathered unit by unit. Collective."""
        folder = output_dir if output_dir is not None else self.args.output_dir
        assert folder is not None
        with watched():
            save_pretrained(self.model, self.runner.whole, self._mesh, folder)
        if self.args.should_save:
            processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As the stock method, with the tag `hf_helix` and a section on the run. Not collective: rank 0 writes."""
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            stock = super().create_model_card  # type: ignore[misc]
            given = inspect.signature(stock).bind_partial(*args, **kwargs).arguments
            write_card(self, stock, given, self._last_alone)


class HelixTrainer(HelixTrainerMixin, Trainer):
    """`transformers.Trainer` with the model cut over the ranks and communication hidden behind computation.

    Takes what `Trainer` takes, and `helix_config`. See `HelixTrainerMixin`.
    """


def _refuse_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps the signature, by which the Trainer chooses columns."""

    @functools.wraps(forward)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "this model's weights are cut over several ranks, so it cannot be called directly; use trainer.train(), "
            "trainer.evaluate() or trainer.predict(), or save it with trainer.save_model(folder) and load it with "
            "from_pretrained(folder)"
        )

    return refuse
