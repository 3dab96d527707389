"""The cut model on this rank: what the Trainer and the loop are built on.

In:   an ordinary whole model, a configuration, a mesh, and what a run adds to them; later, batches of a data collator.
Out:  the model cut in place; windows that leave losses and complete gradients; evaluation, clipping, checkpoints, and
      what can be measured.
Must hold: all ranks agree before anything is cut or communicated by a plan; nothing here knows which of the
two calls it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.checkpoint.load import load_parameters
from hf_helix.checkpoint.peft import load_adapters, save_adapters
from hf_helix.checkpoint.random_weights import initialize_parameters
from hf_helix.checkpoint.save import save_pretrained
from hf_helix.checkpoint.shard import cut_parameters, is_cut
from hf_helix.config import AUTO, HelixConfig
from hf_helix.engine.checks import (
    check_batch,
    check_model,
    check_placements,
    check_sizes,
    check_trained,
    limits_of,
    say_what_surprises,
)
from hf_helix.engine.evaluate import pieces_of, whole_logits
from hf_helix.engine.parameter_counts import Sizes
from hf_helix.engine.recompute import modes_of, recompute_units
from hf_helix.models.batch_form import FORM, forms_of
from hf_helix.models.builder import Additions, Sharing
from hf_helix.models.direct_use import Instead, refuse_calls, refuse_parts
from hf_helix.models.model_code import check_forwards
from hf_helix.models.peft import base_of, is_peft
from hf_helix.models.registry import family_of
from hf_helix.models.sequence_sharding import SequenceCut
from hf_helix.operators.moe.dispatch import SHARD_TOKENS
from hf_helix.planning.pipeline.actions import format_schedule
from hf_helix.planning.plans.plan import Plan
from hf_helix.report.flops import peak_tflops, token_flops
from hf_helix.report.live import LiveScore, short_entries
from hf_helix.report.perfetto import write_perfetto
from hf_helix.runtime.cuda_graphs import WindowGraphs, why_never
from hf_helix.runtime.distributed.agreement import agree_on_text, agree_on_window, over_ranks
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.grad_reduce import gradient_norm, set_aside
from hf_helix.runtime.input_ranges import extents
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.notices import say
from hf_helix.runtime.router_stats import router_entries
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.sharded_optimizer import ShardedOptimizer
from hf_helix.runtime.stage import Stage, place_units
from hf_helix.runtime.streams import make_streams
from hf_helix.runtime.trace import Trace
from hf_helix.tuning.autotune import Tuning
from hf_helix.tuning.compare import PAPER, Comparison, compare
from hf_helix.tuning.effort import BASELINE
from hf_helix.tuning.measure.even_link import even_out
from hf_helix.tuning.measure.memory import peak_bytes
from hf_helix.tuning.measure.overlap import Overlap, measure_overlap, trace_window
from hf_helix.tuning.tuner import TUNED_MICROBATCHES, Tuner, describe

logger = logging.getLogger(__name__)


class Scale(NamedTuple):
    """What losses are multiplied with, before gradients are averaged over the data-parallel ranks.

    Attributes:
        tokens: the summed loss of the tokens of a micro-batch; a scalar.
        batch: a loss of a micro-batch as a whole, such as that of routers.
    """

    tokens: Tensor
    batch: float = 1.0


class Engine:
    """Keeps this rank's part of a model, in place, before anything moves to the device, and runs windows through it.

    Args:
        seed: of the run; randomness derives from it.
        microbatches: of a usual window, whose schedule the ranks compare.
        products: the type of matrix products under autocast, such as `torch.bfloat16`; None for no autocast.
        additions: what the run adds to the mathematics of the model.
        checkpointing: options of activation checkpointing, where the run asks for it in the words of Transformers.
        weights: a checkpoint folder, for a model on the meta device; without one, such a model starts at random.
        instead: for the errors of who calls the cut model, or asks it for its weights: what to call.

    Attributes:
        model: as it was given, perhaps a `PeftModel`.
        base: the Transformers model, which is inside it then.
        limits: how far the ids, labels and positions of batches may reach.
        sizes: of the whole model's parameters.
        overlap: what `measure_overlap` found last.
        last_window: the micro-batches of the last window that was trained.
        figures: all that the last `log_entries` found.
        graphs: of windows; None where windows run operator by operator.

    Raises:
        ValueError: the model, or what other ranks bring, does not fit.
    """

    def __init__(
        self,
        model: Any,
        config: HelixConfig,
        mesh: Mesh,
        *,
        seed: int,
        microbatches: int,
        instead: Instead,
        products: torch.dtype | None = None,
        additions: Additions | None = None,
        checkpointing: Mapping[str, Any] | None = None,
        weights: str | Path | None = None,
    ) -> None:
        additions = additions or Additions()
        check_model(model, additions, weights)
        check_sizes(model, config)
        self.model = model
        self.base = base = base_of(model)
        self.config = config
        self.mesh = mesh
        self.family = family_of(base)
        self.limits = limits_of(base)
        self.cut = SequenceCut.of(mesh.tp, mesh.cp)
        modes = modes_of(self.family.layers(base), checkpointing, config)
        self.tuner = Tuner(config, type(base).__name__, describe(base, mesh, products, modes), microbatches)
        self.sizes = Sizes(model)
        self._trains = any(parameter.requires_grad for parameter in model.parameters())
        self.overlap: Overlap | None = None
        self.last_window: list[MicroBatch] = []
        self._looked_again = False
        self.figures: dict[str, float] = {}
        self._said_link = False
        peak = peak_tflops(torch.cuda.get_device_name(mesh.device)) if mesh.device.type == "cuda" else None
        self._live = LiveScore(token_flops(base), world_size(), mesh.dp_size, peak)
        say_what_surprises(model)
        stage = self._place(additions, modes)
        with watched():
            plan = self._agreed_plan(stage, microbatches)
            self._fill(stage, weights, seed)
        self.runner = Runner(stage, plan, mesh, make_streams(mesh.device), self.tuner.scheduler, seed, products)
        self.graphs = self._graphs()
        has_parts = is_cut(stage, mesh)
        for whole in {model, base} if has_parts or mesh.batch_group is not None else ():
            whole._is_cut_by_helix = True
            refuse_calls(whole, instead)
            self.sizes.put_on(whole)
        if has_parts:
            refuse_parts(model, instead)

    def _place(self, additions: Additions, modes: Sequence[str]) -> Stage:
        """Which units are on this rank. `modes`: see `modes_of`."""
        config, mesh = self.config, self.mesh
        ways = config.cp_method, config.expert_capacity_factor
        sharing = Sharing(mesh.tp, mesh.cp, mesh.experts, *ways, mesh.device, config.compile)
        units = recompute_units(self.family.units(self.base, sharing, additions), modes)
        self._called = [*self.family.side_modules(self.base), *(module for unit in units for module in unit.called)]
        check_forwards(self.model, self.base, self.family, self._called)
        check_placements(self.model, {p: placement for unit in units for p, placement in unit.placements.items()})
        return place_units(
            units,
            mesh.pipe,
            self.family.empty(self.base, mesh.tp.size),
            self.tuner.scheduler.placement,
            self.family.head_cost(self.base),
            config.layers_per_stage,
        )

    def _graphs(self) -> WindowGraphs | None:
        if not self.config.cuda_graphs:
            return None
        reason = why_never(self.mesh, self.runner, self.config.expert_capacity_factor, is_peft(self.model))
        if reason is not None:
            say(f"cuda_graphs=True: windows run without CUDA graphs: {reason}")
        return WindowGraphs(say) if reason is None else None

    def _look_again(self) -> None:
        """Hooks may have come between construction and the first batch."""
        if not self._looked_again:
            check_forwards(self.model, self.base, self.family, self._called)
            self._looked_again = True

    def _agreed_plan(self, stage: Stage, microbatches: int) -> Plan:
        """The plan to start with. Collective: layout, schedule and plan are those of every rank."""
        plan = self.tuner.first_plan(stage.layout)
        scheduler = self.tuner.scheduler
        schedule = scheduler(1 if scheduler.name == AUTO else microbatches)
        agree_on_text(f"{stage.layout.describe()}\n{format_schedule(schedule)}\n{plan.to_json()}", "plans")
        return plan

    def _fill(self, stage: Stage, weights: str | Path | None, seed: int) -> None:
        """Give this rank its part of the weights. Collective."""
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            cut_parameters(stage, self.mesh)
        elif weights is not None:
            load_parameters(self.model, stage, self.mesh, weights)
        else:
            if rank() == 0:
                logger.warning(f"the model is on the meta device, without weights: it starts at random, seed={seed}")
            initialize_parameters(self.model, self.family.layers(self.model), stage, self.mesh, seed)

    def close(self) -> None:
        """End the threads of this engine; another takes its place."""
        if self.graphs is not None:
            self.graphs.release()
        self.runner.executor.streams.close()

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.runner.plan

    @property
    def tuning(self) -> Tuning | None:
        """What was measured to choose the plan; None as long as nothing was."""
        return self.tuner.tuning

    # -- training ------------------------------------------------------------------------------------------------

    def extents(self, batches: Sequence[Any]) -> Tensor:
        """How far the ids, labels and positions of a window reach, for `limits.judge`. Nothing waits for it."""
        return extents(batches, self.mesh.device)

    def check_extents(self, batch: Any) -> None:
        """Refuse a batch that was not announced in a window, as `limits.judge`. Waits for the device."""
        self.limits.judge([self.extents([batch]).tolist()])

    def train_window(self, batches: Sequence[Mapping[str, Any]], scale: Scale, step: int) -> list[Tensor]:
        """Forward and backward of a window; gradients are added to `parameter.grad`. Collective.

        Args:
            batches: what the data collator made, on the device; the same on all ranks that share a batch.
            step: of the optimizer; randomness derives from it.

        Returns:
            The loss of every micro-batch, on every rank.
        """
        window = self.last_window = self._checked_window(batches, scale, step)
        if self.graphs is not None:
            self.graphs.keep_gradients()
        with set_aside(self.runner.stage.placements):
            self._settle_link(lambda: window)
            return self._train_counted(window, length=max(batch["input_ids"].shape[-1] for batch in batches))

    def tune(
        self, batches: Sequence[Mapping[str, Any]], scale: Scale, step: int, steps_left: int | None = None
    ) -> Tuning | None:
        """Measure and choose a plan, if the rest of the run is worth it. Collective, before `train_window`.

        Args:
            batches, scale, step: of the window that comes next, see `train_window`.
            steps_left: of the run; None where that is not known.

        Returns:
            What was found, if that has just happened.
        """
        before = self.tuning
        with watched(), set_aside(self.runner.stage.placements):
            make = functools.partial(self._checked_window, batches, scale, step)
            self._settle_link(make)  # before any time is taken
            self.runner = self.tuner.update(self.runner, make, len(batches), steps_left)
        return self.tuning if self.tuning is not before else None

    def _checked_window(self, batches: Sequence[Mapping[str, Any]], scale: Scale, step: int) -> list[MicroBatch]:
        """The micro-batches of a window that can be trained. Collective."""
        if not self.last_window:
            check_trained(self.model, self.runner.stage, self._trains)
            self._look_again()
        check_batch(batches[0])
        agree_on_window([batch["input_ids"] for batch in batches], self.mesh.batch_group)
        self.model.train()
        return self._microbatches(batches, scale, step)

    def _settle_link(self, make_window: Callable[[], Sequence[MicroBatch]]) -> None:
        """Say once how fast the emulated link is; find out first where it is to be even. Collective.

        Args:
            make_window: makes the window to measure with; called where there is something to find out.
        """
        link = self.mesh.link
        if link is None or self._said_link:
            return
        if link.rate is None:
            with watched():
                even_out(self.runner, make_window()[:TUNED_MICROBATCHES])
        say(f"emulated link: {link}; transfers wait asleep until it would have carried them")
        self._said_link = True

    def _train_counted(self, window: list[MicroBatch], length: int) -> list[Tensor]:
        """Train, counted for the logs; the first window after each log is traced, where windows are no graphs."""
        tokens = sum(batch.num_tokens for batch in window)
        if self.graphs is not None:
            graphs = self.graphs
            return self._live.add(tokens, length, lambda: graphs.train_window(self.runner, window))
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

    def log_entries(self, full: bool = False) -> dict[str, float]:
        """The figures of the windows since the last call. Collective.

        Args:
            full: all of them, which `figures` keeps in any case; otherwise what a log line has room for.
        """
        self.runner.executor.streams.synchronize()  # a GPU may be behind the host, whose clock counts
        tuned = self.tuning.overlaps[self.tuning.kept] if self.tuning else None
        capped = self.config.expert_capacity_factor is not None
        routers = router_entries(self.runner.stage, self.mesh, capped)
        self.figures = {**self._live.entries(self.overlap or tuned), **routers}
        return self.figures if full else {**short_entries(self.figures), **routers}

    def _microbatches(self, batches: Sequence[Mapping[str, Any]], scale: Scale, step: int) -> list[MicroBatch]:
        shared = zip(self._share_lengths(batches), forms_of(batches), strict=True)
        return [
            self.microbatch({**batch, FORM: form}, scale, (step, place)) for place, (batch, form) in enumerate(shared)
        ]

    def microbatch(self, batch: Mapping[str, Any], scale: Scale, key: tuple[int, int]) -> MicroBatch:
        """A batch as the runner takes it.

        Args:
            key: see `MicroBatch`.
        """
        prepare = functools.partial(self.family.side_inputs, self.base, batch, self.cut, *scale)
        ids = batch["input_ids"]
        return MicroBatch(prepare, key, num_tokens=ids.numel(), shape=" x ".join(map(str, ids.shape)))

    def _share_lengths(self, batches: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """With a capacity, experts take as many rows of every rank, so the longest batch of all counts. Collective."""
        group = self.mesh.experts.group
        if self.config.expert_capacity_factor is None or group is None:
            return batches
        sizes = [(len(batch["input_ids"]), self.cut.padded(batch["input_ids"].shape[1])) for batch in batches]
        ranks = self.cut.tp_size * self.cut.cp_size
        tokens = torch.tensor([rows * length // ranks for rows, length in sizes], device=self.mesh.device)
        dist.all_reduce(tokens, dist.ReduceOp.MAX, group=group)
        return [{**batch, SHARD_TOKENS: most} for batch, most in zip(batches, tokens.tolist(), strict=True)]

    # -- gradients and the optimizer -----------------------------------------------------------------------------

    def gradient_norm(self) -> Tensor:
        """The 2-norm of the gradient of the whole model, on every rank. Collective."""
        return gradient_norm(self.runner.stage.placements, self.mesh)

    def clip_gradients(self, most: float) -> Tensor:
        """Scale the gradient down to a norm of `most`; the norm before. Collective."""
        norm = self.gradient_norm()
        parameters = [parameter for parameter in self.runner.stage.placements if parameter.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return norm

    def shard_optimizer(self, optimizer: Any, made: Any, options: Mapping[str, Any]) -> Any:
        """The optimizer with its states spread over the data-parallel ranks; itself where there is one.

        Args:
            optimizer: which parameters it holds, with which weight decay.
            made, options: the class that updates them, and what it takes.
        """
        if self.mesh.dp_group is None:
            return optimizer
        rows = [{key: row[key] for key in ("params", "weight_decay")} for row in optimizer.param_groups]
        return ShardedOptimizer(rows, made, process_group=self.mesh.dp_group, **options)

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(
        self, batch: Mapping[str, Any], scale: Scale, step: int, keep_logits: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Forward only. Collective over the ranks that share the batch (with experts, over those that share them).

        Args:
            step: see `train_window`.

        Returns:
            The loss, and if asked for the logits [batch, sequence, vocabulary], on every rank.
        """
        self._look_again()
        self.check_extents(batch)
        self.model.eval()
        pieces = pieces_of(batch, self.runner) if self.family.loss_adds_up(self.base) else [batch]
        with torch.no_grad():
            loss, logits = self.runner.evaluate(self._microbatches(pieces, scale, step), keep_logits)
        if logits is None:
            return loss.detach(), None
        if self.runner.precision.products is not None:
            logits = logits.float()  # as Accelerate hands out what was computed under autocast
        head = self.base.get_output_embeddings().weight
        return loss.detach(), whole_logits(logits, self.runner, head, self.cut)[:, : batch["input_ids"].shape[1]]

    # -- saving and measuring ------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path, max_shard_size: int | str | None = None) -> None:
        """An ordinary Hugging Face checkpoint, each rank writing its part; of a PEFT model the adapters. Collective.

        Args:
            max_shard_size: of a file, such as "5GB"; None for the default of Transformers. Adapters are one file.
        """
        with watched():
            if is_peft(self.model):
                save_adapters(self.model, self.runner.stage, self.mesh, folder)
            else:
                save_pretrained(self.model, self.runner.stage, self.mesh, folder, max_shard_size)

    def load_weights(self, folder: str | Path) -> None:
        """What `save_pretrained` wrote, from any layout: each rank reads its slices. Collective.

        Raises:
            ValueError: on every rank, before anything is written: the folder does not fit.
        """
        load = load_adapters if is_peft(self.model) else load_parameters
        load(self.model, self.runner.stage, self.mesh, folder)

    def measure_overlap(self, repeats: int = 5) -> Overlap:
        """How much communication the plan hides, measured on the last window that was trained. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        window = self._window_to_repeat("measure_overlap")
        with watched():
            self.overlap = measure_overlap({"": self.runner}, window, repeats)[""]
        return self.overlap

    def compare_plans(self, rules: Sequence[str] = (BASELINE, PAPER), repeats: int = 5) -> Comparison:
        """The plan in use beside those of other rules, on the last window that was trained. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        window = self._window_to_repeat("compare_plans")
        profile = self.tuning.profile if self.tuning is not None else None
        with watched():
            found = compare(self.runner, window, rules, profile, repeats)
        self.overlap = found.overlaps[found.kept]
        return found

    def measure_memory(self) -> list[int]:
        """The most bytes of activations and buffers alive in the last window, rank by rank. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        window = self._window_to_repeat("measure_memory")
        with watched():
            return over_ranks(peak_bytes(self.runner, window))

    def trace(self, path: str | Path) -> None:
        """Write a trace of the last window for https://ui.perfetto.dev, a track per stream. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        window = self._window_to_repeat("trace")
        with watched():
            spans = over_ranks(trace_window(self.runner, window, complete=self.mesh.dp_size > 1).spans)
        if rank() == 0:
            write_perfetto(path, spans)

    def _window_to_repeat(self, asked: str) -> list[MicroBatch]:
        if not self.last_window:
            raise ValueError(f"{asked}() needs a window to repeat; call it after train() or train_window()")
        self.model.train()
        return self.last_window
