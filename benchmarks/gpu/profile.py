"""What a step's device time is spent on, by torch's profiler: the share without any kernel, and the longest kernels.

A trace of one step in steady state, operator by operator and from CUDA graphs; the model and the arguments are those of
the piece `trainer`. Asked for is the idle share of a step from graphs, since nothing else may hold the device up there.
"""

from collections import Counter
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.timing import synchronize
from benchmarks.gpu.trainer import DRY, EAGER, HELIX, LONG, SHORT, WARM_UP, Case, alone
from hf_helix.runtime.streams.trace import merge

IDLE = 0.03
"""The most that a step from CUDA graphs may be without a kernel."""
SHOWN = 20
CASES = (Case(LONG, EAGER), Case(LONG), Case(SHORT))


def run(report: Report, options: Options) -> None:
    for case in DRY[:1] if options.dry else CASES:
        with report.attempt(case.name):
            _tell(report, case, _kernels(case, options.device), options.dry)


class _OneStep(TrainerCallback):
    """Profiles the first step that counts."""

    def __init__(self, device: torch.device) -> None:
        activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        self.profile, self._device = profile(activities=[activity]), device

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARM_UP:
            synchronize(self._device)
            self.profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARM_UP + 1:
            synchronize(self._device)
            self.profile.stop()


def _kernels(case: Case, device: torch.device) -> list[tuple[str, float, float]]:
    """Name, start and end in seconds of every kernel of a step; on a CPU of the operators that call no others."""
    step = _OneStep(device)
    with alone(HELIX, case, device) as trainer:
        trainer.add_callback(step)
        trainer.train()
    on_gpu = device.type == "cuda"
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [each for each in step.profile.events() if each.device_type == kind and (on_gpu or not each.cpu_children)]
    return [(each.name, each.time_range.start * 1e-6, each.time_range.end * 1e-6) for each in events]


def _tell(report: Report, case: Case, kernels: list[tuple[str, float, float]], dry: bool) -> None:
    first, last = min(start for _, start, _ in kernels), max(end for *_, end in kernels)
    busy = sum(end - start for start, end in merge((start, end) for _, start, end in kernels))
    idle, limited = 1 - busy / (last - first), not dry and "cuda_graphs" not in case.helix
    layers = len(kernels) / (case.sizes.layers * case.sizes.accumulation)
    figure = f"{idle:.1%} of {last - first:.4f} s without a kernel, {len(kernels)} kernels, {layers:.0f} a layer"
    report.check(f"{case.name}: idle", idle <= IDLE or not limited, f"{figure} (at most {IDLE:.0%} from graphs)")
    seconds, counts = Counter[str](), Counter(name for name, *_ in kernels)
    for name, start, end in kernels:
        seconds[name] += end - start
    for name, spent in seconds.most_common(SHOWN):
        report.note(f"{case.name}: {name[:90]}", f"{spent * 1e3:.2f} ms in {counts[name]}, {spent / busy:.1%}")
