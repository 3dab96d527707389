"""HelixTrainer on one GPU against the stock Trainer: step time, loss, use of the device, peak memory.

Where there is nothing to hide, hf_helix must not cost anything. Each trainer has the device to itself and trains a
fresh copy of one Llama of 1.1 billion parameters in bf16 on the same random tokens. The stock Trainer is measured once
for all cases of the same sizes and training arguments. The first steps do not count: they compile, capture graphs, and
choose kernels.
"""

import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from transformers import TrainerCallback

from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.timing import release, synchronize
from benchmarks.trainers import HELIX, STOCK, make_model, make_trainer
from hf_helix import HelixConfig
from hf_helix.report.flops import peak_tflops, token_flops

LOSS = 1e-2
"""How far the losses may be apart; a step may take as long as the stock Trainer's, with as much memory."""

WARM_UP = 3
"""Steps that do not count."""


@dataclass(frozen=True)
class Sizes:
    """The model, and what it is trained on in a step.

    Attributes:
        batch: sequences of a micro-batch.
        sequence: tokens of one.
        steps: so many are trained, and one more.
        accumulation: micro-batches of a step.
    """

    batch: int
    sequence: int
    steps: int
    accumulation: int = 8
    hidden: int = 2048
    intermediate: int = 8192
    layers: int = 16
    heads: int = 16
    kv_heads: int = 8
    vocabulary: int = 32000

    @property
    def tokens(self) -> int:
        """Of an optimizer step."""
        return self.accumulation * self.batch * self.sequence


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        helix: options of `HelixConfig`.
        arguments: of `TrainingArguments`, for both trainers.
    """

    sizes: Sizes
    helix: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stock_name(self) -> str:
        """For a person; the same for cases that the same run of the stock Trainer is compared with."""
        sizes = self.sizes
        return ", ".join([f"{sizes.accumulation} x {sizes.batch} x {sizes.sequence} tokens", *self.arguments])

    @property
    def name(self) -> str:
        """For a person."""
        return ", ".join([self.stock_name, *(f"{name}={value}" for name, value in self.helix.items())])


SHORT, LONG = Sizes(1, 2048, WARM_UP + 5), Sizes(2, 4096, WARM_UP + 2)
COMPILED, CHECKPOINTS = {"compile": True}, {"gradient_checkpointing": True}
EAGER = {"cuda_graphs": False}  # else graphs are the default on a GPU
CASES = (
    Case(SHORT),
    Case(LONG),
    Case(SHORT, COMPILED),
    Case(SHORT, EAGER),
    Case(SHORT, {**COMPILED, **EAGER}),
    Case(LONG, COMPILED),
    Case(LONG, EAGER),
    Case(replace(LONG, steps=WARM_UP + 1), arguments=CHECKPOINTS),
)
TINY = Sizes(1, 16, WARM_UP, 2, 32, 64, 2, 4, 2, 64)
DRY = (Case(TINY), Case(TINY, {"recompute": "selective"}), Case(TINY, arguments=CHECKPOINTS))


@dataclass(frozen=True)
class Trained:
    """A run of a trainer.

    Attributes:
        seconds: of each step that counts.
        issued: seconds until the host had issued it.
        loss: the mean over all steps.
        peak: bytes of the device at most, with model and optimizer.
        flops: of a step.
    """

    seconds: list[float]
    issued: list[float]
    loss: float
    peak: int
    flops: float

    @property
    def step(self) -> float:
        """Seconds, the median."""
        return statistics.median(self.seconds)


def run(report: Report, options: Options) -> None:
    """Every case, the most telling ones first."""
    transformers.logging.set_verbosity_error()
    device = options.device
    peak = None if options.dry else peak_tflops(torch.cuda.get_device_name(device))
    stock: dict[str, Trained] = {}

    def check(case: Case) -> None:
        if case.stock_name not in stock:
            stock[case.stock_name] = _train(STOCK, case, device)
            _tell(report, f"{case.stock_name}: {STOCK}", stock[case.stock_name], peak)
        trained = _train(HELIX, case, device)
        _tell(report, f"{case.name}: {HELIX}", trained, peak)
        compare(report, case.name, trained, stock[case.stock_name], options.dry)

    cases = DRY if options.dry else CASES
    report.each(((case.name, functools.partial(check, case)) for case in cases), 0.75 * options.seconds)


def compare(report: Report, name: str, trained: Trained, stock: Trained, dry: bool) -> None:
    """What is asked of a run beside the stock Trainer's; of a dry one, only that it learns the same."""
    ratio, share = trained.step / stock.step, 1.0 if dry else trained.peak / stock.peak
    report.check(f"{name}: step time", dry or ratio <= 1, f"{ratio:.3f} x of stock (at most 1 x)")
    report.check(f"{name}: peak memory", share <= 1, f"{share:.3f} x of stock (at most 1 x)")
    apart = abs(trained.loss - stock.loss)
    figure = f"{trained.loss:.4f}, {stock.loss:.4f} of stock: {apart:.1e} apart (at most {LOSS})"
    report.check(f"{name}: loss", apart <= LOSS, figure)


def _tell(report: Report, name: str, trained: Trained, peak: float | None) -> None:
    rate = trained.flops / trained.step / 1e12
    used = f", MFU {rate / peak:.1%}" if peak else ""
    spread = (
        f"{trained.step * 1e3:.1f} ms a step ({min(trained.seconds) * 1e3:.1f} to {max(trained.seconds) * 1e3:.1f})"
    )
    issued = f"issued in {statistics.median(trained.issued) * 1e3:.1f} ms"
    report.note(name, f"{spread}, {issued}, {rate:.0f} TFLOP/s{used}, {trained.peak / 2**30:.2f} GiB at most")


class DeviceTimer(TrainerCallback):
    """Seconds from step to step, of the host and of the device, which is waited for at the end of each."""

    def __init__(self, device: torch.device) -> None:
        self.steps: list[tuple[float, float]] = []
        self._device = device
        self._last: float | None = None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        issued = time.perf_counter()
        synchronize(self._device)
        now = time.perf_counter()
        if self._last is not None:
            self.steps.append((issued - self._last, now - self._last))
        self._last = now


def _train(name: str, case: Case, device: torch.device) -> Trained:
    """A trainer that has the device to itself, from its model to the end of its last step."""
    release()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    timer = DeviceTimer(device)
    with alone(name, case, device) as trainer:
        model = trainer.model
        trainer.add_callback(timer)
        loss = trainer.train().training_loss
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
    issued, ran = zip(*timer.steps[WARM_UP - 1 :], strict=True)  # nothing comes before the first step to count from
    flops = token_flops(model).causal(case.sizes.sequence) * case.sizes.tokens
    return Trained(list(ran), list(issued), loss, peak, flops)


@contextlib.contextmanager
def alone(name: str, case: Case, device: torch.device) -> Iterator[Any]:
    """The trainer of a case, `HELIX` or `STOCK` by name, with a model on the device, which it has to itself."""
    release()
    arguments = {"use_cpu": device.type != "cuda", "bf16": True, **case.arguments}
    with tempfile.TemporaryDirectory() as folder:
        with device:
            model = make_model(case.sizes)
        helix = HelixConfig(tp_size=1, **case.helix) if name == HELIX else None
        trainer = make_trainer(model, case.sizes, folder, helix, **arguments)
        yield trainer
        trainer.accelerator.free_memory()
