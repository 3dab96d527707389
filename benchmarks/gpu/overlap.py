"""How much communication is hidden on a GPU, at the shapes of Llama-3 8B cut over eight ranks.

One process plays rank 0 of the eight; links that take the time of NVLink stand for the others (`links.py`). Measured
for each link: a window's computation alone, its communication alone, and the window under three plans, in turn, issued
operator by operator and as CUDA graphs. Plans are made from a profile that is measured on the same link. The hidden
fraction is 1 - (window - computation alone) / communication alone. Asked for, too, is that `plan="auto"`, which times
replays, finds the fastest graph.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from benchmarks.gpu.links import LoneTransport, PacedTransport, Rate, holds
from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.timing import issue_and_run, release
from benchmarks.gpu.windows import silent_mesh
from hf_helix.config import AUTO, HelixConfig
from hf_helix.engine.synthetic import Workload
from hf_helix.measure.operators import measure_profile
from hf_helix.measure.overlap import time_steps, trace_window
from hf_helix.operators.communication.transport import Transport
from hf_helix.planning.timing.profile import Profile
from hf_helix.report.perfetto import write_perfetto
from hf_helix.runtime.cuda_graphs import WindowGraphs
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner, forget_gradients
from hf_helix.tuning.budget import Tier
from hf_helix.tuning.candidates import baseline_runner, plan_runners, predict_window
from hf_helix.tuning.tuner import tune

PLANS = ("dhelix", "search")
TARGETS = {"spin": 0.90, "copy": 0.90, "blocks 16": 0.60, "blocks 32": 0.60}
TRACES = Path(__file__).parents[2] / "runs" / "gpu"


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        cases: lengths of the sequence and links, the most telling ones first.
        search_share: the length of a search, in parts of the usual one.
    """

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32768
    layers: int = 4
    tp_size: int = 8
    microbatches: int = 8
    repeats: int = 5
    search_share: float = 0.1
    cases: tuple[tuple[int, str], ...] = (
        (8192, "spin"),
        (8192, "copy"),
        (8192, "blocks 16"),
        (4096, "spin"),
        (8192, "blocks 32"),
        (4096, "blocks 16"),
    )


DRY = Sizes(32, 64, 4, 2, 64, 2, 2, 4, 1, 0.02, ((32, "naps"),))


def run(report: Report, options: Options) -> None:
    """Measure every length on every link, the most telling ones first."""
    sizes = DRY if options.dry else Sizes()
    with _group_of_one():
        work = lone_workload(sizes, options.device)
        report.note("model", f"{sizes.layers} layers, ready")
        cases = [Case(report, work, sizes, *each) for each in sizes.cases]
        report.each(((case.what, case.run) for case in cases), 0.65 * options.seconds)


class Case:
    """A model whose every rank but one is missing, a window for it, and a link.

    Args:
        report: takes what is found.
        work: the model, see `lone_workload`.
        sizes: what it was made with.
        length: tokens of each of the sequences, one in a micro-batch.
        link: a key of `holds`.
    """

    def __init__(self, report: Report, work: Workload, sizes: Sizes, length: int, link: str) -> None:
        self.report, self.sizes, self.link = report, sizes, link
        self.what = f"{length} tokens, {link}"
        self.device, self._axis, self._about = work.mesh.device, work.mesh.tp, work.about
        self.runner = baseline_runner(work.runner)
        self.window: list[MicroBatch] = work.window(sizes.microbatches, 1, length)

    @contextlib.contextmanager
    def linked(self, transport: Transport) -> Iterator[None]:
        """Let the collectives take time."""
        before, self._axis.transport = self._axis.transport, transport
        try:
            yield
        finally:
            self._axis.transport = before

    def run(self) -> None:
        """Profile, plans, the choice of `auto`, and windows under every plan."""
        release()
        sizes, on_gpu = self.sizes, self.device.type == "cuda"
        with self.linked(PacedTransport(sizes.tp_size, 0, holds(self.device)[self.link](), Rate())):
            profile = measure_profile(self.runner, self.window[:2], self._about)
            self.note("profile", _describe_profile(profile))
            graphs = WindowGraphs(lambda text: self.note("auto", text), option=AUTO)
            tier = Tier("acceptance", ("sequential", *PLANS), len(PLANS), sizes.search_share)
            chosen = tune(self.runner, self.window, tier, profile=profile, graphs=graphs)[1]
            communication = next(iter(chosen.overlaps.values())).communication
            self.note("communication alone", _ms(communication))
            made = plan_runners(self.runner, PLANS, profile, len(self.window), search_share=sizes.search_share)
            runners = {"sequential": self.runner, **made}
            predicted = {rule: predict_window(runner, profile, len(self.window)) for rule, runner in runners.items()}
            self.note("predicted", ", ".join(f"{rule} {_ms(seconds)}" for rule, seconds in predicted.items()))
            steps = self.compare("operator by operator", runners, communication)
            self.tell_issue(runners)
            if on_gpu:
                steps = self.compare("from CUDA graphs", runners, communication, graphs)
            lost = steps[chosen.chosen] / min(steps.values()) - 1
            figure = f"{chosen.chosen}, {lost:.1%} slower than the fastest graph (at most 2 %)"
            self.report.check(f"{self.what}, auto", not on_gpu or lost <= 0.02, figure)
            self.note("trace", self.trace(runners["search"]))

    def note(self, name: str, figure: str) -> None:
        """A figure of this case."""
        self.report.note(f"{self.what}, {name}", figure)

    def compare(
        self, how: str, runners: Mapping[str, Runner], communication: float, graphs: WindowGraphs | None = None
    ) -> dict[str, float]:
        """Times a window under every plan in turn, between two measurements of its computation alone.

        Args:
            how: the name of the comparison.
            runners: by rule.
            communication: seconds of a window's communication alone.
            graphs: to time replays; None to time windows operator by operator.

        Returns:
            The seconds of a window by rule.
        """
        alone: list[float] = []

        def compute() -> None:
            with self.linked(LoneTransport(self.sizes.tp_size, 0)):
                alone.extend(time_steps({"": self.runner}, self.window, self.sizes.repeats, graphs)[""])

        compute()
        times = time_steps(runners, self.window, self.sizes.repeats, graphs)
        compute()
        steps, computation = {rule: statistics.median(each) for rule, each in times.items()}, statistics.median(alone)
        bound = max(computation, communication)
        hidden = {rule: 1 - max(0.0, step - computation) / communication for rule, step in steps.items()}
        self.note(f"{how}, computation alone", _ms(computation))
        for rule, step in steps.items():
            gain = steps["sequential"] / step
            figure = f"{_ms(step)}, {gain:.2f} x as fast as sequential, {bound / step:.2f} of the bound"
            self.note(f"{how}, {rule}", f"{figure}, hidden {hidden[rule]:.1%}")
        best, target = max(PLANS, key=lambda rule: hidden[rule]), TARGETS.get(self.link, 0.0)
        figure = f"{hidden[best]:.1%} under {best} (at least {target:.0%})"
        passed = hidden[best] >= target and (graphs is None or not graphs.has_given_up)
        self.report.check(f"{self.what}, {how}, hidden", self.device.type == "cpu" or passed, figure)
        return steps

    def tell_issue(self, runners: Mapping[str, Runner]) -> None:
        """How long the host takes to issue a window, and the memory that the window needs."""
        for rule, runner in runners.items():
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            issued, _ = issue_and_run(lambda runner=runner: runner.train_window(self.window), self.device)
            forget_gradients(runner)
            peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
            each = issued / len(runner.program(len(self.window))) * 1e6
            self.note(f"{rule}, issued in", f"{_ms(issued)}, {each:.0f} us an operator; {peak / 2**30:.2f} GiB at most")

    def trace(self, runner: Runner) -> str:
        """Write what ran when to a file for ui.perfetto.dev; says what part of the communication ran beside
        computation.
        """
        trace = trace_window(runner, self.window)
        TRACES.mkdir(parents=True, exist_ok=True)
        path = TRACES / f"overlap-{self.what.replace(' ', '-').replace(',', '')}.json"
        write_perfetto(path, [trace.spans])
        busy = trace.busy(compute=False)
        return f"{trace.overlapped() / busy if busy else 0:.1%} overlapped in runs/gpu/{path.name}"


def lone_workload(sizes: Sizes, device: torch.device) -> Workload:
    """A model with random weights as rank 0 of a tensor-parallel group holds it; products in bf16, weights in fp32."""
    mesh = silent_mesh(device, tp=sizes.tp_size, made=LoneTransport)
    return Workload(_model(sizes), HelixConfig(tp_size=sizes.tp_size), device, mesh, autocast_dtype=torch.bfloat16)


@contextlib.contextmanager
def _group_of_one() -> Iterator[None]:
    """A process group of this process alone, whose ranks the profiler lets meet."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _model(sizes: Sizes) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=max(length for length, _ in sizes.cases),
        attn_implementation="sdpa",
    )


def _describe_profile(profile: Profile) -> str:
    """Sums over a layer, and what communication costs computation beside it."""
    layer: dict[bool, list[float]] = {True: [], False: []}
    for (unit, name), seconds in profile.times.items():
        if profile.layout.graphs[unit].forward.repeats:
            layer[(unit, name) in profile.bytes].append(seconds)
    slow = [pair.first / profile.times[name] for (name, other), pair in profile.pairs.items() if other in profile.bytes]
    beside = f", computation beside one takes {statistics.median(slow):.2f} x as long (median)" if slow else ""
    return (
        f"a layer has {len(layer[False])} computations of {_ms(sum(layer[False]))} "
        f"and {len(layer[True])} collectives of {_ms(sum(layer[True]))}{beside}; {len(profile.pairs)} pairs"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
