"""The engine: the cut model on this rank, under the Trainer and in a loop.

In:   a full model, a configuration, a mesh, and the options of a run.
Out:  the model cut in place; its windows (`session`), its weights and checkpoints (`weights`), and measurements
      (`diagnostics`).
Must hold: all ranks agree before anything is cut; nothing here depends on the caller.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_helix.checkpoint.cut_parameters import is_cut
from hf_helix.config import AUTO, HelixConfig
from hf_helix.engine.advice import Advice
from hf_helix.engine.calls import Calls, is_together
from hf_helix.engine.cut.build import CutUnits, RunOptions, cut_units, start_runner
from hf_helix.engine.cut.checks import check_model, check_sizes, limits_of, warn_bf16_weights, warn_random_start
from hf_helix.engine.cut.float8 import check_float8, describe_float8
from hf_helix.engine.cut.recompute import modes_of
from hf_helix.engine.cut.snapshot import Snapshot
from hf_helix.engine.cut_model import CutModel
from hf_helix.engine.diagnostics import Diagnostics, live_score
from hf_helix.engine.mixed_types import type_between_layers
from hf_helix.engine.proof.first_use import prove_on_first_use
from hf_helix.engine.session import Session
from hf_helix.engine.weights import Weights
from hf_helix.engine.window_checks import WindowChecks
from hf_helix.measure.overlap import Overlap
from hf_helix.models.direct_use import Instead, refuse_calls, refuse_saving, run_calls
from hf_helix.models.registry import family_for, family_of
from hf_helix.models.stock.four_bit import open_four_bit
from hf_helix.models.stock.peft import base_of
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.schedule.actions import format_schedule
from hf_helix.planning.timing.sizes import Sizes, size_text
from hf_helix.planning.window.layout import Layout
from hf_helix.runtime.cuda_graphs import WindowGraphs, reason_against_all_graphs
from hf_helix.runtime.distributed.agreement import check_same_on_all_ranks, on_all_ranks, sum_over_ranks
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.divided import DividedParameters
from hf_helix.runtime.notices import say
from hf_helix.runtime.runner import Runner
from hf_helix.tuning.budget import BASELINE
from hf_helix.tuning.cache import fingerprint
from hf_helix.tuning.candidates import PAPER, Comparison
from hf_helix.tuning.result_text import TuningResult
from hf_helix.tuning.tuner import Tuner


class Engine:
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
        checks: of the model and its batches, before windows.
        session: windows, tuning, evaluation.
        weights: norms, clipping, full tensors, the optimizer's shards, checkpoints.
        diagnostics: figures and measurements.
        share_of_elements: Transformers' count of parameters now, as a part of its count before: a weight in 4 bits
            counts by its bytes.

    Raises:
        ValueError: the model does not fit the options, or ranks differ in model or options.
    """

    def __init__(self, model: Any, config: HelixConfig, mesh: Mesh, options: RunOptions, instead: Instead) -> None:
        self.model, self.base, self.config, self.mesh = model, base_of(model), config, mesh
        self.ends_at_decoder = options.loss_tweaks.ends_at_decoder
        self._check_options()
        self.share_of_elements, between_layers = self._open(options)
        self.family = family_of(self.base)
        # What the whole model says, before it is cut.
        limits, live = limits_of(self.base), live_score(self.base, mesh)
        advice = Advice(self.base, mesh, options.autocast_dtype)
        trains = any(parameter.requires_grad for parameter in model.parameters())
        units, tuner = self._cut_units(options, between_layers)
        notices = self.family.notices(self.base, config.tp_size)
        trained = [parameter.requires_grad for parameter in model.parameters()]

        runner, divided = self._cut(units, options, tuner)
        as_is, own_loss = units.modules_run_as_is, self.ends_at_decoder
        snapshot = Snapshot(model, as_is)
        cut = CutModel(
            model, self.base, self.family, config, mesh, runner.rank_units, as_is, own_loss, trains, snapshot
        )
        graphs = self._make_graphs(runner, snapshot)
        has_parts = is_cut(runner.rank_units, mesh)
        calls = Calls(model, mesh, cut.running, has_parts or mesh.batch_group is not None)
        self.checks = WindowChecks(cut, trained, limits, advice)
        self.weights = Weights(cut, runner.executor.streams)
        self.session = Session(cut, runner, tuner, graphs, divided, self.checks, live, calls)
        self.diagnostics = Diagnostics(cut, self.session, live)
        self._refuse_direct_use(calls, instead, has_parts)
        say(self._summary(trains))
        for line in notices:
            say(f"{type(self.base).__name__}: {line}")
        if config.float8_recipe:
            say(describe_float8(runner.rank_units.all_units.values(), config.float8_recipe, mesh.device))

    def _check_options(self) -> None:
        """Refuses options that a loss of one's own makes impossible."""
        if self.config.verify_every and self.ends_at_decoder:
            raise ValueError(
                f"verify_every={self.config.verify_every} with a loss that the script computes: its window cannot be "
                "computed again without the script; use verify_every=0, or the model's own loss"
            )

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

    def _cut_units(self, options: RunOptions, between_layers: torch.dtype | None) -> tuple[CutUnits, Tuner]:
        """Returns the cut of the open model, and the tuner for plans of its operators. On this rank only."""
        model, base, config, dtype = self.model, self.base, self.config, options.autocast_dtype
        modes = modes_of(self.family.layers(base), options.checkpointing, config)
        about = fingerprint(base, self.mesh, config, dtype, modes, options.loss_tweaks)
        tuner = Tuner(config, type(base).__name__, about, options.num_microbatches)
        cut = cut_units(
            model,
            config,
            self.mesh,
            modes,
            options.loss_tweaks,
            autocast_dtype=dtype,
            between_layers=between_layers,
        )
        return cut, tuner

    def _cut(self, cut: CutUnits, options: RunOptions, tuner: Tuner) -> tuple[Runner, DividedParameters]:
        """Cuts the parameters; returns the runner and the user's view of the parameters. Collective."""
        choose = functools.partial(_choose_plan, tuner)
        runner = start_runner(self.model, cut.rank_units, self.config, self.mesh, options, choose)
        return runner, DividedParameters(runner.rank_units, self.mesh)

    def _summary(self, trains: bool) -> str:
        """The model and its layout, in a line for the start of a run."""
        config, usual = self.config, HelixConfig()
        names = ("shard_optimizer", "shard_parameters", "dp_replicate_size", "offload", "recompute")
        given = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(usual, name)}
        options = "".join(f", {name}={value}" for name, value in given.items())
        schedule = f"schedule {config.schedule}, " if config.pp_size > 1 else ""
        model = f"{type(self.base).__name__} ({'derived' if self.family.needs_proof else 'declared'})"
        where = f"on {size_text(Sizes.of(self.mesh.sizes))}{options}"
        if not trains:  # such as the reference of DPO
            return f"{model}, frozen, {where}: called without gradients"
        return (
            f"{model} {where}; first plan {self.runner.plan.rule} (plan={config.plan}), {schedule}CUDA graphs "
            f"{'on' if self.session.graphs else 'off'}"
        )

    def _make_graphs(self, runner: Runner, snapshot: Snapshot) -> WindowGraphs | None:
        option = self.config.cuda_graphs
        if not option or (option == AUTO and self.mesh.device.type == "cpu"):
            return None
        reason = reason_against_all_graphs(self.mesh, runner, self.config, self.ends_at_decoder)
        if not sum_over_ranks([reason is not None])[0]:
            return WindowGraphs(say, option=option, switches=snapshot.switches)
        say(f"cuda_graphs={option!r}: windows run without CUDA graphs: {reason or 'another rank has a reason'}")
        return None

    def _refuse_direct_use(self, calls: Calls, instead: Instead, has_parts: bool) -> None:
        """Makes direct calls of the cut model raise: they would see only this rank's slices."""
        if not calls.are_shared:
            return
        for place, model in enumerate(dict.fromkeys((self.model, self.base))):
            model._is_cut_by_helix = True
            name = f"forward {place}"
            calls.add(name, model.forward)
            if self.ends_at_decoder:
                run_calls(model, "forward", functools.partial(_call_own, calls, name))
            else:
                refuse_calls(model, instead, functools.partial(calls.run, name))
        if hasattr(self.base, "generate"):
            calls.add("generate", self.base.generate)
            run_calls(self.base, "generate", functools.partial(calls.run, "generate"))
        if has_parts:
            refuse_saving(self.model, instead)

    def close(self) -> None:
        """Ends the threads of this engine, so that another engine can take its place."""
        if self.session.graphs is not None:
            self.session.graphs.release()
        self.session.looks.close()
        self.runner.executor.streams.close()

    # -- what users ask for, of the objects that answer ------------------------------------------------------------

    @property
    def runner(self) -> Runner:
        """Runs windows under the plan in use."""
        return self.session.runner

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.session.runner.plan

    @property
    def tuning(self) -> TuningResult | None:
        """The measurement by which the plan was chosen; None without a measurement."""
        return self.session.tuner.result

    @property
    def overlap(self) -> Overlap | None:
        """The last result of `measure_overlap` or `compare_plans`; None before."""
        return self.diagnostics.overlap

    @property
    def figures(self) -> Mapping[str, float]:
        """All figures of the last log."""
        return self.diagnostics.figures

    def log_entries(self, full: bool = False) -> dict[str, float]:
        """See `Diagnostics.log_entries`."""
        return self.diagnostics.log_entries(full)

    def expert_loads(self) -> list[Tensor]:
        """See `Diagnostics.expert_loads`."""
        return self.diagnostics.expert_loads()

    def measure_overlap(self, repeats: int = 5) -> Overlap:
        """See `Diagnostics.measure_overlap`."""
        return self.diagnostics.measure_overlap(repeats)

    def compare_plans(self, rules: Sequence[str] = (BASELINE, PAPER), repeats: int = 5) -> Comparison:
        """See `Diagnostics.compare_plans`."""
        return self.diagnostics.compare_plans(rules, repeats)

    def measure_memory(self) -> list[int]:
        """See `Diagnostics.measure_memory`."""
        return self.diagnostics.measure_memory()

    def trace(self, path: str | Path) -> None:
        """See `Diagnostics.trace`."""
        self.diagnostics.trace(path)

    def gradient_norm(self) -> Tensor:
        """See `Weights.gradient_norm`."""
        return self.weights.gradient_norm()

    def full_weight(self, name: str) -> AbstractContextManager[Tensor]:
        """See `Weights.full_weight`."""
        return self.weights.full_weight(name)

    def full_gradient(self, name: str) -> AbstractContextManager[Tensor]:
        """See `Weights.full_gradient`."""
        return self.weights.full_gradient(name)

    def full_weights(self) -> AbstractContextManager[Any]:
        """See `Weights.full_weights`."""
        return self.weights.full_weights()

    def load_weights(self, folder: str | Path) -> None:
        """See `Weights.load_weights`."""
        self.weights.load_weights(folder)

    def save_pretrained(self, folder: str | Path, max_shard_size: int | str | None = None, model: Any = None) -> None:
        """See `Weights.save_pretrained`."""
        self.weights.save_pretrained(folder, max_shard_size, model)


def _choose_plan(tuner: Tuner, layout: Layout) -> tuple[Plan, Scheduler]:
    """The first plan and its scheduler; layout, schedule and plan are equal on every rank. Collective."""
    plan = tuner.first_plan(layout)
    schedule = tuner.scheduler(1 if tuner.scheduler.name == AUTO else tuner.num_microbatches)
    check_same_on_all_ranks(f"{layout.describe()}\n{format_schedule(schedule)}\n{plan.to_json()}", "plans")
    return plan, tuner.scheduler


def _call_own(calls: Calls, name: str, stock: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a call of a model with a loss of one's own: by its cut decoder if ranks call alike."""
    return stock(*args, **kwargs) if is_together() else calls.run(name, stock, args, kwargs, alike=stock)
