"""The proof: a cut model computes the losses, gradients and logits of the unsplit Transformers model.

In:   a configuration, the name of a class, or a model; a layout, and a mesh of the layout.
Out:  a small model in fp32 with random weights, the same in every process; a `Proof`, equal on all ranks.
Must hold: the cut model runs the engine's own way: declared, cut, planned and run as in training. A small model has
every kind of part of the model that it stands for, or the proof names the missing ones. The given model and the random
state of the process are as before. A failure on a rank before ranks communicate is a failure on all ranks; a
failure in the middle of a window is raised, so that the rank ends.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_helix.checkpoint.cut_parameters import full_parameter
from hf_helix.config import HelixConfig
from hf_helix.engine.cut.build import CutUnits, RunOptions, cut_units, start_runner
from hf_helix.engine.cut.called_decoder import CalledDecoder
from hf_helix.engine.cut.evaluate import evaluate_batch
from hf_helix.engine.cut.float8 import use_float8
from hf_helix.engine.cut.microbatches import LossScale, WindowMaker
from hf_helix.engine.cut.recompute import modes_of
from hf_helix.engine.proof.coverage import lacking, parts_of
from hf_helix.engine.proof.reference import (
    ITEMS,
    KINDS,
    LENGTHS,
    RECURRENT_LENGTHS,
    ROWS,
    USUAL_GAIN,
    Batch,
    Outcome,
    Unsplit,
    add_up,
    ends_at_decoder,
    inputs_of,
    loss_of_output,
    make_batches,
    scale_weights,
)
from hf_helix.engine.proof.verdict import ComparedWindow, Proof, compare, float8_error
from hf_helix.models.graph.context import LossTweaks
from hf_helix.models.new_adapters import adapt_experts
from hf_helix.models.registry import family_for, family_of
from hf_helix.models.small_config import EXPERT_COUNTS, default_config, small_config
from hf_helix.models.stock.batch_inputs import LOSS_ALONE
from hf_helix.models.stock.causal_lm import build_causal_lm, check_causal_lm_class, classifier_classes, read_config
from hf_helix.models.stock.copies import copy_module
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.runtime.distributed.agreement import all_gather_object, decide_on_rank_0, on_all_ranks
from hf_helix.runtime.distributed.endings import remote_description
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.runner import Runner

IMPLEMENTATIONS = ("eager", "sdpa", None)
"""Attention that runs in fp32 on every device. Where a model uses another kind, Transformers chooses among these."""

KEYS = ("num_key_value_heads", "num_kv_heads")
HEADS = ("num_attention_heads", *KEYS, "linear_num_key_heads", "linear_num_value_heads", "linear_num_heads")


@dataclass(frozen=True)
class Subject:
    """The description of a model, built anew in every process.

    Attributes:
        config: its configuration; None for only a class, or a given model.
        kind: its class; None for the causal LM of the configuration.
        model: the model itself, of any size.
        as_is: whether the configuration keeps its sizes; otherwise it is made small.
        adapts_experts: whether the model has LoRA adapters of its experts, which alone are trained.
    """

    config: PretrainedConfig | None = None
    kind: type[Any] | None = None
    model: Any = None
    as_is: bool = False
    adapts_experts: bool = False

    @classmethod
    def of(cls, given: Any, as_is: bool = False) -> Subject:
        """Returns the subject of a model, a configuration, the name of a class of Transformers (a causal LM, or a
        sequence classifier, whose decoder is compared), or a folder or file with a configuration.

        Raises:
            ValueError: `given` is none of these.
        """
        if isinstance(given, nn.Module):
            return cls(model=given, as_is=True)
        if isinstance(given, PretrainedConfig):
            return cls(given, as_is=as_is)
        if not isinstance(given, str | Path):
            raise ValueError(
                f"{given!r} is no model to check; give a model, a configuration, the name of a causal-LM class such as "
                "'LlamaForCausalLM', or a folder with a config.json"
            )
        if is_class(given):
            if str(given) not in classifier_classes():
                check_causal_lm_class(str(given))
            if as_is:
                raise ValueError(
                    f"{given} is a class, which has no sizes of its own; leave as_is out, or give a config"
                )
            return cls(kind=getattr(transformers, str(given)))
        return cls(read_config(given), as_is=as_is)

    def build(self, config: HelixConfig | None = None) -> Any:
        """Returns the model for a layout; None for the smallest."""
        if self.model is not None:
            return copy_module(self.model).float()
        return self._made(self._sized(config or HelixConfig()))

    @property
    def name(self) -> str:
        """The name of the class, or of the configuration without a class."""
        return (self.kind or type(self.config if self.model is None else self.model)).__name__

    def uncovered(self, small: nn.Module) -> tuple[str, ...]:
        """Returns the parts of the configuration's own model that a small model lacks."""
        return () if self.config is None or self.as_is else lacking(self._parts, small)

    @functools.cached_property
    def _parts(self) -> frozenset[tuple[str, str]]:
        """The parts of the configuration's own model."""
        with torch.device("meta"):
            return parts_of(self._made(copy.deepcopy(self.config)))

    def _made(self, config: Any) -> Any:
        """The model of a configuration, with the same weights in every process."""
        if config._attn_implementation not in IMPLEMENTATIONS:
            config._attn_implementation = None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed generators of GPUs as well
            make = self.kind or functools.partial(build_causal_lm, dtype=torch.float32)
            model = make(config).float()
            return adapt_experts(model) if self.adapts_experts else model

    def _sized(self, layout: HelixConfig) -> PretrainedConfig:
        """The configuration for a layout: a pipeline has two virtual stages a rank, each with a layer or more. Of a
        pattern of layers that a few do not show, all layers stay."""
        if self.as_is and self.config is not None:
            return copy.deepcopy(self.config)
        layers = 2 * layout.pp_size if layout.pp_size > 1 else 2
        if self.config is None:
            assert self.kind is not None
            return _widened(default_config(self.kind.__name__, layers), layout)
        few, text = _made_small(self.config, layers), self.config.get_text_config()
        with torch.device("meta"):
            is_complete = not self.uncovered(self._made(copy.deepcopy(few)))
        return _widened(few if is_complete else _made_small(self.config, None), layout, text)


def _made_small(config: PretrainedConfig, layers: int | None) -> PretrainedConfig:
    """A small configuration.

    Raises:
        ValueError: the class of the configuration takes no small sizes.
    """
    try:
        return small_config(config, layers)
    except Exception as error:  # of a check of the class, each of its own kind
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{type(config).__name__} takes no small sizes, with which a model would be compared ({reason}); give "
            "hf_helix.testing.check_family(config, as_is=True) a configuration that is small already"
        ) from error


def is_class(given: str | Path) -> bool:
    """Returns whether a text is the name of a model class of Transformers."""
    return (
        str(given).isidentifier() and getattr(getattr(transformers, str(given), None), "config_class", None) is not None
    )


def has_experts(model: nn.Module) -> bool:
    """Returns whether a model has a mixture of experts."""
    return any(".experts." in name for name, _ in model.named_parameters())


def default_layouts(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the layouts of a check without given layouts, as options of `HelixConfig`."""
    two: tuple[dict[str, Any], ...] = ({"tp_size": 2}, {"pp_size": 2}, {"tp_size": 2, "pp_size": 2}, {"cp_size": 2})
    return [*two, *([{"ep_size": 2}] if has_experts(model) else [])]


def _widened(config: PretrainedConfig, layout: HelixConfig, given: PretrainedConfig | None = None) -> PretrainedConfig:
    """A small configuration with heads and experts that all ranks divide; in small configurations, two divides them.
    Where a given configuration has fewer key-value heads than ranks, which then share them, they stay as few."""
    options = config.get_text_config()
    factor = layout.tp_size // math.gcd(layout.tp_size, 2)  # times two heads: a multiple of the ranks
    if factor > 1:
        is_free = not getattr(options, "head_dim", None)  # else heads have their own size
        for name in (*HEADS, *(["hidden_size"] if is_free else [])):
            if isinstance(value := getattr(options, name, None), int):
                few = (getattr(given, name, None) or layout.tp_size) if name in KEYS else layout.tp_size
                setattr(options, name, value * factor if few >= layout.tp_size else few)
    ranks = layout.tp_size * layout.ep_size
    for name in EXPERT_COUNTS:
        if isinstance(value := getattr(options, name, None), int) and value % ranks:
            setattr(options, name, ranks * -(-value // ranks))
    return config


# -- the comparison --------------------------------------------------------------------------------------------------


PLANS = ("sequential", "greedy")
"""The first runs every kind of batches; the others, of two strands, run a window with a batch of each kind."""

MIXED = "all kinds"
SIZES = ("tp", "pp", "cp", "ep")


def prove(
    model: Any, config: HelixConfig, mesh: Mesh, plans: Sequence[str] = PLANS, uncovered: tuple[str, ...] = ()
) -> Proof:
    """Compares a cut model with the unsplit model: losses, every gradient by name, and logits. Collective.

    Args:
        model: a small Transformers model in fp32, the same on every rank. Its weights are scaled in a copy.
        config: the options of the cut; the plan is not read.
        mesh: the mesh of ranks, of the sizes in `config`.
        plans: the rules of the plans, `sequential` first.
        uncovered: the parts of the model in question that the small model lacks.
    """
    started = time.monotonic()
    about = type(model).__name__, describe(mesh.sizes)
    with _undisturbed(mesh.device):
        try:
            ours = on_all_ranks(lambda: _Copy(model, config, mesh))
            ours.set_mode(decide_on_rank_0(ours.draws))
            on_all_ranks(ours.run_unsplit)
            cut = on_all_ranks(ours.cut_units)
        except Exception as error:
            return Proof(*about, refusal=shared_reason(error))
        cases, float8 = ours.run(cut, plans)
    return Proof(*about, cases=cases, uncovered=uncovered, float8=float8, seconds=time.monotonic() - started)


def describe(sizes: Mapping[str, int]) -> str:
    """Returns the sizes of a mesh as text, such as "tp_size=2, pp_size=2"; data parallelism has no option."""
    options = [f"{name}_size={sizes[name]}" for name in SIZES if sizes.get(name, 1) > 1]
    dp_size = sizes.get("dp", 1)
    return ", ".join(options) or f"{dp_size} process{'es' * (dp_size > 1)}"


class _Copy:
    """A copy of a model that is cut and, on the ranks that compare, a copy that stays unsplit; see `prove`."""

    def __init__(self, model: Any, config: HelixConfig, mesh: Mesh) -> None:
        # The run has other layers; a capacity changes results, and a link only takes time.
        config = replace(config, plan=PLANS[0], layers_per_stage=None)
        self.config = replace(config, expert_capacity_factor=None, link=None, float8=None)
        self.float8 = config.float8_recipe
        self.mesh = mesh
        self.model = copy_module(model).train()
        scale_weights(self.model)
        self.names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.joined_elsewhere: set[str] = set()
        self.compares = mesh.pipe.rank == mesh.cp.rank == mesh.tp.rank == 0
        self.unsplit = Unsplit(self.model, mesh.device) if self.compares else None
        self.is_recurrent = family_for(self.model, config.tp_size).is_recurrent
        self.windows = self._make_windows()

    def _make_windows(self) -> list[dict[str, list[Batch]]]:
        """The batches by kind, for each of some data-parallel ranks; other ranks repeat these batches."""
        pad = getattr(self.model.config.get_text_config(), "pad_token_id", None) or 0
        tables = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        vocab_size = min(table.weight.shape[0] for table in tables if table is not None)  # that are read and written
        lengths = RECURRENT_LENGTHS if self.is_recurrent else LENGTHS
        distinct = next(count for count in (4, 3, 2, 1) if self.mesh.dp_size % count == 0)
        windows = []
        for place in range(distinct):
            window = {kind: make_batches(kind, vocab_size, pad, self.mesh.device, place, lengths) for kind in KINDS}
            window[MIXED] = [batches[n % len(batches)] for n, batches in enumerate(window.values())]
            windows.append(window)
        return windows

    # -- before anything is cut ----------------------------------------------------------------------------------

    def draws(self) -> bool:
        """Whether the model draws random numbers in training (dropout, some routers)."""
        assert self.unsplit is not None
        return self.unsplit.draws(self.windows[0][KINDS[0]][0])

    def set_mode(self, draws: bool) -> None:
        """Leaves the model in training; puts a model that draws random numbers in evaluation."""
        self.model.train(not draws)
        if self.unsplit is not None:
            self.unsplit.model.train(not draws)

    def run_unsplit(self) -> None:
        """Runs the unsplit model on all batches; the results are kept.

        Raises:
            ValueError: the model does not train on batches of some kind.
        """
        if self.unsplit is None:
            return
        for kind in KINDS:
            try:
                self._expected(self.unsplit, kind, self.windows[0][kind])
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                raise ValueError(f"the unsplit model does not train on token ids alone ({kind}): {problem}") from error

    def cut_units(self) -> CutUnits:
        """The cut of the copy, on this rank."""
        modes = modes_of(family_of(self.model).layers(self.model), None, self.config)
        return cut_units(
            self.model, self.config, self.mesh, modes, LossTweaks(ends_at_decoder=ends_at_decoder(self.model))
        )

    # -- windows -------------------------------------------------------------------------------------------------

    def run(self, cut: CutUnits, plans: Sequence[str]) -> tuple[tuple[ComparedWindow, ...], str]:
        """Cuts the copy, and runs and compares all windows; also returns a sentence about fp8. Collective."""
        runner = start_runner(self.model, cut.rank_units, self.config, self.mesh, RunOptions())
        self.model.to(self.mesh.device)
        first, *others = plans
        try:
            cases = (
                *[self._case(kind, self._under(first, runner)) for kind in KINDS],
                *[self._case(MIXED, self._under(plan, runner)) for plan in others],
            )
            return cases, self._float8_error(runner) if self.float8 else ""
        finally:
            runner.executor.streams.close()

    def _under(self, rule: str, runner: Runner) -> Runner:
        """The runner under another plan."""
        profile, model = rough_profile(runner.layout), type(self.model).__name__
        return runner.with_plan(make_plan(rule, profile, model=model, mesh=self.config.option_sizes))

    def _float8_error(self, runner: Runner) -> str:
        """The error of fp8 against bf16, in a window with bf16 autocast and weights of a usual size. Collective."""
        with torch.no_grad():
            for parameter in runner.rank_units.own_rows:
                parameter.mul_(USUAL_GAIN if parameter.dim() > 1 else 1)
        about = runner.rank_units, runner.plan, self.mesh, runner.executor.streams, runner.scheduler, runner.seed
        in_bf16 = self._outcome(ROWS, Runner(*about, torch.bfloat16, self.config.fused_kernels))
        head = self.model.get_output_embeddings()
        use_float8(runner.rank_units.all_units.values(), self.float8, None if head is None else head.weight)
        in_float8 = self._outcome(ROWS, Runner(*about, torch.bfloat16, self.config.fused_kernels))
        errors = all_gather_object(float8_error(in_float8, in_bf16) if self.compares else None)
        loss, gradients = max(error for error in errors if error is not None)
        return (
            f"float8={self.float8} in place of bf16 changes the loss by {loss:.1e} and gradients by {gradients:.1e} of "
            "their norm; up to 2e-1 is usual on so small a model with random weights"
        )

    def _case(self, kind: str, runner: Runner) -> ComparedWindow:
        """One window. Collective."""
        outcome = self._outcome(kind, runner)
        batches, rule = self._batches(kind), runner.plan.rule
        mine = on_all_ranks(lambda: self._compare(kind, rule, batches, outcome) if self.compares else None)
        cases = [case for case in all_gather_object(mine) if case is not None]
        return max(cases, key=lambda case: len(case.wrong))

    def _batches(self, kind: str) -> list[Batch]:
        """The batches of this rank."""
        dp_rank = 0 if self.mesh.dp_group is None else dist.get_rank(self.mesh.dp_group)
        return self.windows[dp_rank % len(self.windows)][kind]

    def _outcome(self, kind: str, runner: Runner) -> Outcome:
        """The results of a window of the cut model. Collective."""
        batches = self._batches(kind)
        scale = LossScale(torch.tensor(1 / ITEMS, device=self.mesh.device))
        make_window = functools.partial(WindowMaker(self.model, self.mesh).window, scale=scale, step=0)
        logits: Tensor | None = None
        if ends_at_decoder(self.model):
            losses, logits = self._train_output(runner, batches)
        else:
            losses = runner.train_window(make_window([{**batch, LOSS_ALONE: True} for batch in batches]))
        gradients = self._full_gradients(runner)
        self.model.zero_grad()
        if logits is None:
            _, logits = evaluate_batch(runner, self.model, batches[0], make_window, keep_logits=True)
        assert logits is not None
        return Outcome(tuple(loss.item() for loss in losses), gradients, logits.double().cpu())

    def _train_output(self, runner: Runner, batches: Sequence[Batch]) -> tuple[list[Tensor], Tensor]:
        """Runs a window with a loss of the decoder's output; returns the losses, and the output for the first batch."""
        called_decoder = CalledDecoder(runner, WindowMaker(self.model, self.mesh))
        losses, outputs = [], []
        for batch in batches:
            with called_decoder.training(step=0):
                loss, output = loss_of_output(called_decoder.outputs(inputs_of(batch))[0], batch)
                loss.backward()
            losses.append(loss.detach())
            outputs.append(output.detach())
        called_decoder.finish()
        return losses, outputs[0]

    def _full_gradients(self, runner: Runner) -> dict[str, Tensor]:
        """The gradients by name, in fp64 on the host; empty on ranks that do not compare. Collective."""
        gradients = {}
        for name in self.names:
            parameter = self.model.get_parameter(name)
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            row = runner.rank_units.rows[parameter]
            full = full_parameter(mine, row, self.mesh)
            if full is not None:
                gradients[name] = full.double()
            if self.mesh.axis_of(row.cut).rank > 0:  # experts, joined on the first rank of their axis
                self.joined_elsewhere.add(name)
        return gradients

    def _compare(self, kind: str, plan: str, batches: Sequence[Batch], outcome: Outcome) -> ComparedWindow:
        """The comparison of a window."""
        unsplit = self.unsplit
        assert unsplit is not None
        expected = self._expected(unsplit, kind, batches)

        def exact() -> list[Outcome]:
            try:
                return [self._expected(unsplit.exact(), kind, batches)]
            except (RuntimeError, NotImplementedError):  # an operator without fp64
                return []

        def moved() -> list[Outcome]:
            return [self._expected(each, kind, batches) for each in unsplit.moved()] if self.is_recurrent else []

        return compare(kind, plan, outcome, expected, exact, moved)

    def _expected(self, unsplit: Unsplit, kind: str, batches: Sequence[Batch]) -> Outcome:
        """The outcome of the unsplit model for a window, with gradients averaged over data-parallel ranks."""
        everywhere = [unsplit.run(window[kind]).gradients for window in self.windows]
        total = add_up(everywhere)
        mean = {name: gradient / len(everywhere) for name, gradient in total.items()}
        unused = {
            name: torch.zeros((), dtype=torch.float64).expand(parameter.shape)
            for name, parameter in unsplit.model.named_parameters()
            if parameter.requires_grad and name not in mean
        }
        gradients = {name: value for name, value in (mean | unused).items() if name not in self.joined_elsewhere}
        return replace(unsplit.run(batches), gradients=gradients)


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Restores the random generators of host and device at the end of the context, which computes in fp32."""
    if device.type != "cuda":
        with torch.random.fork_rng(devices=[]):
            yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"  # not in TF32, which rounds to three digits
    try:
        with torch.random.fork_rng(devices=[device]):
            yield
    finally:
        matmul.fp32_precision = before
        torch.cuda.empty_cache()


def reason_of(error: Exception) -> str:
    """Returns the reason of a refusal on this rank."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def shared_reason(error: Exception) -> str:
    """Returns the reason of a refusal, in the words of the first rank with a reason. Collective."""
    text = reason_of(error)
    reasons = all_gather_object("" if remote_description(error) else text)
    return next(filter(None, reasons), text)
