"""HelixTrainer on one GPU against the stock Trainer: step time, loss, use of the device, peak memory.

Where there is nothing to hide, hf_helix must not cost anything. Both train copies of a Llama of 1.1 billion parameters
in bf16 on the same random tokens, in turn in one process; who goes first changes from round to round. Peak memory is
measured before, with one trainer at a time.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.timing import Budget, release, synchronize
from benchmarks.one_process import HELIX, STOCK, make_model, make_trainer
from hf_helix.report.flops import peak_tflops, token_flops

SLOWER, LOSS = 1.05, 1e-2
"""What is asked: HelixTrainer's step in parts of the stock Trainer's, and how far the losses may be apart."""


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        length: tokens of a sequence.
        micro_batch: sequences of a micro-batch.
        recompute: with gradient checkpointing.
        expected: the step of HelixTrainer in parts of the stock Trainer's, as predicted before the first measurement.
    """

    length: int
    micro_batch: int
    recompute: bool = False
    expected: float = 1.0
    hidden: int = 2048
    intermediate: int = 8192
    layers: int = 16
    heads: int = 16
    kv_heads: int = 8
    vocabulary: int = 32000
    accumulation: int = 8
    steps: int = 2
    rounds: int = 2

    @property
    def name(self) -> str:
        """For a person."""
        again = ", gradient checkpointing" if self.recompute else ""
        return f"{self.accumulation} x {self.micro_batch} x {self.length} tokens{again}"

    @property
    def tokens(self) -> int:
        """Of an optimizer step."""
        return self.accumulation * self.micro_batch * self.length


CASES = (
    Case(2048, 1, expected=1.10),
    Case(4096, 2, expected=0.98),
    Case(4096, 1, expected=1.02),
    Case(4096, 2, recompute=True, expected=1.00),
    Case(2048, 2, expected=1.02),
)
TINY = Case(16, 1, False, 1.0, 32, 64, 2, 4, 2, 64, 2, 1, 1)


def run(report: Report, options: Options) -> None:
    """Every case, the most telling ones first."""
    transformers.logging.set_verbosity_error()
    budget = Budget(0.7 * options.seconds)
    cases = (TINY, replace(TINY, recompute=True)) if options.dry else CASES
    for case in cases:
        if budget.left < 0:
            report.note(case.name, "left out: the time for this piece is spent")
            continue
        with report.attempt(case.name):
            _run_case(report, case, options.device)
        release()


def _run_case(report: Report, case: Case, device: torch.device) -> None:
    dry = device.type != "cuda"
    with tempfile.TemporaryDirectory() as folder:
        peaks = {name: _peak(name, case, device, folder) for name in (STOCK, HELIX)}
        share = peaks[HELIX] / peaks[STOCK] if not dry else 1.0
        figure = f"{peaks[HELIX] / 2**30:.2f} GiB, {peaks[STOCK] / 2**30:.2f} GiB of the stock Trainer"
        report.check(f"{case.name}: peak memory", share <= 1, f"{figure}: {share:.3f} x (at most 1; 0.95 expected)")
        gc.collect()
        model = _model(case, device)
        flops = token_flops(model).causal(case.length) * case.tokens
        models = {STOCK: copy.deepcopy(model), HELIX: model}
        trainers = {name: _trainer(name, models[name], case, folder, dry) for name in (STOCK, HELIX)}
        rounds = [_round(trainers, number) for number in range(case.rounds + 1)]
        for trainer in trainers.values():
            trainer.accelerator.free_memory()
    _tell(report, case, rounds, flops, None if dry else peak_tflops(torch.cuda.get_device_name(device)))


def _tell(report: Report, case: Case, rounds: list[dict[str, Any]], flops: float, peak: float | None) -> None:
    counted = rounds[1:]
    steps = {name: statistics.median(each[name].seconds for each in counted) for name in (STOCK, HELIX)}
    for name, seconds in steps.items():
        issued = statistics.median(each[name].issued for each in counted)
        rate = flops / seconds / 1e12
        used = f", MFU {rate / peak:.1%}" if peak else ""
        figure = f"{seconds * 1e3:.1f} ms a step, issued in {issued * 1e3:.1f} ms, {rate:.0f} TFLOP/s{used}"
        report.note(f"{case.name}: {name}", figure)
    ratios = [each[HELIX].seconds / each[STOCK].seconds for each in counted]
    ratio = statistics.median(ratios)
    spread = f"{ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f}; at most {SLOWER}; {case.expected} expected)"
    report.check(f"{case.name}: step time in parts of the stock Trainer's", peak is None or ratio <= SLOWER, spread)
    report.check(f"{case.name}: MFU at least the stock Trainer's", peak is None or ratio <= 1, f"{1 / ratio:.3f} x")
    apart = max(abs(each[HELIX].loss - each[STOCK].loss) for each in rounds)
    last = rounds[-1]
    figure = f"{last[HELIX].loss:.4f} and {last[STOCK].loss:.4f}, at most {apart:.1e} apart (at most {LOSS})"
    report.check(f"{case.name}: losses", apart <= LOSS, figure)


@dataclass(frozen=True)
class Trained:
    """Some steps of a trainer: median seconds, median seconds until the host had issued a step, mean loss."""

    seconds: float
    issued: float
    loss: float


class DeviceTimer(TrainerCallback):
    """Seconds from step to step, of the host and of the device, which is waited for at the end of each."""

    def __init__(self, device: torch.device) -> None:
        self.steps: list[tuple[float, float]] = []
        self._device = device
        self._last: float | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.steps, self._last = [], None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        issued = time.perf_counter()
        synchronize(self._device)
        now = time.perf_counter()
        if self._last is not None:
            self.steps.append((issued - self._last, now - self._last))
        self._last = now


def _round(trainers: dict[str, Trainer], number: int) -> dict[str, Trained]:
    names = list(trainers) if number % 2 == 0 else list(reversed(trainers))
    return {name: _train(trainers[name]) for name in names}


def _train(trainer: Trainer) -> Trained:
    loss = trainer.train().training_loss
    timer = next(each for each in trainer.callback_handler.callbacks if isinstance(each, DeviceTimer))
    issued, ran = zip(*timer.steps, strict=True)
    return Trained(statistics.median(ran), statistics.median(issued), loss)


def _peak(name: str, case: Case, device: torch.device, folder: str) -> int:
    """Bytes that a trainer has at most on the device in two steps, with its model and its optimizer."""
    gc.collect()
    before = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    trainer = _trainer(name, _model(case, device), replace(case, steps=1), folder, device.type != "cuda")
    trainer.train()
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    trainer.accelerator.free_memory()
    return peak


def _model(case: Case, device: torch.device) -> LlamaForCausalLM:
    with device:
        return make_model(_options(case))


def _trainer(name: str, model: LlamaForCausalLM, case: Case, folder: str, dry: bool) -> Trainer:
    arguments: dict[str, Any] = {"use_cpu": dry, "bf16": True}
    if case.recompute:
        arguments["gradient_checkpointing"] = True
    trainer = make_trainer(name, model, _options(case), folder, **arguments)
    trainer.add_callback(DeviceTimer(trainer.args.device))
    return trainer


def _options(case: Case) -> argparse.Namespace:
    """As `benchmarks/one_process.py` takes them."""
    return argparse.Namespace(
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        layers=case.layers,
        heads=case.heads,
        kv_heads=case.kv_heads,
        vocab_size=case.vocabulary,
        sequence_length=case.length,
        micro_batch=case.micro_batch,
        accumulation=case.accumulation,
        steps=case.steps,
        optimizer="adamw_torch_fused",
        plan="auto",
    )
