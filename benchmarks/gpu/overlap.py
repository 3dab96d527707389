"""How much communication is hidden on a GPU, at the shapes of Llama-3 8B cut over eight ranks.

One process plays rank 0 of the eight; links that take the time of NVLink stand for the others (`links.py`). Measured
for each link: a window's computation alone, its communication alone, and the window under three plans, in turn. Plans
are made from a profile that is measured on the same link. The hidden fraction is
1 - (window - computation alone) / communication alone. Beside each window stands how long the host took to issue it.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from benchmarks.gpu.links import LoneTransport, PacedTransport, Rate, holds
from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.timing import Budget, issue_and_run, release
from benchmarks.gpu.windows import silent_mesh
from hf_helix.config import AUTO, HelixConfig
from hf_helix.engine.synthetic import Workload
from hf_helix.measure.operators import measure_profile
from hf_helix.measure.overlap import trace_window
from hf_helix.operators.communication.transport import Transport
from hf_helix.planning.timing.profile import Profile
from hf_helix.report.perfetto import write_perfetto
from hf_helix.runtime.cuda_graphs import WindowGraphs
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner, forget_gradients
from hf_helix.tuning.budget import Tier
from hf_helix.tuning.candidates import baseline_runner, plan_runners, predict_window
from hf_helix.tuning.tuner import tune

ALONE = "computation alone"
PLANS = ("dhelix", "search")
TARGETS = {"spin": 0.90, "copy": 0.90, "blocks 16": 0.60, "blocks 32": 0.60}
EXPECTED = {"spin": 0.93, "copy": 0.90, "blocks 16": 0.75, "blocks 32": 0.60}
"""What was predicted before the first measurement, at 8192 tokens."""

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
    budget = Budget(0.65 * options.seconds)
    with _group_of_one():
        work = lone_workload(sizes, options.device)
        report.note("model", f"{sizes.layers} layers, ready")
        for length, link in sizes.cases:
            if budget.left < 0:
                report.note(f"{length} tokens, {link}", "left out: the time for this piece is spent")
                continue
            with report.attempt(f"{length} tokens, {link}"):
                _run_link(report, Case(work, sizes, length), link)
            release()


def _run_link(report: Report, case: Case, link: str) -> None:
    what = f"{case.length} tokens, {link}"
    with case.linked(PacedTransport(case.tp_size, 0, holds(case.device)[link](), Rate())):
        communication, count = case.communication()
        report.note(f"{what}, communication alone", f"{_ms(communication)} in {count} collectives")
        profile = case.profile()
        report.note(f"{what}, profile", _describe_profile(profile))
        runners = case.runners(profile)
        times = case.times(runners)
        issued, computation = times.pop(ALONE)
        report.note(f"{what}, computation alone", f"{_ms(computation)}, issued in {_ms(issued)}")
        predicted = {rule: predict_window(runner, profile, len(case.window)) for rule, runner in runners.items()}
        hidden = {rule: 1 - max(0.0, ran - computation) / communication for rule, (_, ran) in times.items()}
        for rule, (issued, ran) in times.items():
            each = issued / len(runners[rule].program(len(case.window))) * 1e6
            report.note(
                f"{what}, {rule}",
                f"{_ms(ran)}, hidden {hidden[rule]:.1%}, {times['sequential'][1] / ran:.2f} x as fast as sequential, "
                f"predicted {_ms(predicted[rule])}, issued in {_ms(issued)} ({each:.0f} us an operator)",
            )
        best = max(PLANS, key=lambda rule: hidden[rule])
        target, expected = TARGETS.get(link, 0.0), EXPECTED.get(link, 0.0)
        figure = f"{hidden[best]:.1%} under {best} (at least {target:.0%}; {expected:.0%} was predicted)"
        report.check(f"{what}, hidden", case.device.type == "cpu" or hidden[best] >= target, figure)
        peaks = ", ".join(f"{rule} {case.peak(runner) / 2**30:.2f} GiB" for rule, runner in runners.items())
        report.note(f"{what}, memory at most", f"{peaks} (sequential and a layer's activations more are allowed)")
        report.note(f"{what}, trace", case.trace(runners["search"], f"overlap-{case.length}-{link}.json"))
        with report.attempt(f"{what}, as a CUDA graph"):
            replayed = _run_graphs(report, case, what, runners, communication, target)
        with report.attempt(f"{what}, auto"):
            _run_auto(report, case, what, profile, replayed)


def _run_graphs(
    report: Report, case: Case, what: str, runners: Mapping[str, Runner], communication: float, target: float
) -> dict[str, float]:
    """The same windows replayed from CUDA graphs: what plans hide where the host costs nothing; seconds by plan."""
    if case.device.type != "cuda":
        return {}
    with case.linked(LoneTransport(case.tp_size, 0)):
        computation = case.replayed(runners["sequential"])
    times = {rule: case.replayed(runner) for rule, runner in runners.items()}
    hidden = {rule: 1 - max(0.0, ran - computation) / communication for rule, ran in times.items()}
    each = ", ".join(f"{rule} {_ms(ran)} hides {hidden[rule]:.1%}" for rule, ran in times.items())
    report.note(f"{what}, as a CUDA graph", f"computation alone {_ms(computation)}, {each}")
    best = max(PLANS, key=lambda rule: hidden[rule])
    figure = f"{hidden[best]:.1%} under {best} (at least {target:.0%})"
    report.check(f"{what}, hidden as a CUDA graph", hidden[best] >= target, figure)
    return times


def _run_auto(report: Report, case: Case, what: str, profile: Profile, replayed: Mapping[str, float]) -> None:
    """The choice of `plan="auto"`, which times the same plans as replays, beside the fastest of them."""
    graphs = WindowGraphs(lambda text: report.note(f"{what}, auto", text), option=AUTO)
    tier = Tier("acceptance", ("sequential", *PLANS), timed=len(PLANS), repeats=2, search_share=case.search_share)
    chosen = tune(case.runner, case.window, tier, profile=profile, graphs=graphs)[1]
    steps = ", ".join(f"{rule} {_ms(overlap.step)}" for rule, overlap in chosen.overlaps.items())
    lost = replayed[chosen.chosen] / min(replayed.values()) - 1 if replayed else 0.0
    figure = f"{chosen.chosen} of {steps}: {lost:.1%} slower than the fastest graph (at most 2 %)"
    report.check(f"{what}, auto", lost <= 0.02, figure)


class Case:
    """A model whose every rank but one is missing, and a window for it.

    Args:
        work: the model, see `lone_workload`.
        sizes: what it was made with.
        length: tokens of each of the sequences, one in a micro-batch.
    """

    def __init__(self, work: Workload, sizes: Sizes, length: int) -> None:
        self.length = length
        self.tp_size = sizes.tp_size
        self.device = work.mesh.device
        self._sizes = sizes
        self.search_share = sizes.search_share
        self._axis = work.mesh.tp
        self._about = work.about
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

    def communication(self) -> tuple[float, int]:
        """Seconds of the collectives of a window one after the other, without any computation; how many there are."""
        works = self._collectives()
        stream = torch.cuda.Stream(priority=-1) if self.device.type == "cuda" else None

        def issue() -> None:
            with torch.cuda.stream(stream):  # type: ignore[arg-type]  # None is no stream
                for work in works:
                    work()

        issue()
        times = [issue_and_run(issue, self.device)[1] for _ in range(3)]
        return len(self.window) * statistics.median(times), len(self.window) * len(works)

    def _collectives(self) -> list[Any]:
        """What the collectives of one micro-batch do, with the buffers that they do it to."""
        streams: Any = self.runner.executor.streams
        issue, works = streams.issue, []

        def note(kind: Any, work: Any, *others: Any, **more: Any) -> Any:
            works.append(work)
            return issue(kind, work, *others, **more)

        streams.issue = note
        try:
            self.runner.train_window(self.window[:1])
            streams.synchronize()
        finally:
            del streams.issue
        forget_gradients(self.runner)
        return works

    def profile(self) -> Profile:
        """The operators, measured alone and beside each other."""
        return measure_profile(self.runner, self.window[:2], self._about)

    def runners(self, profile: Profile) -> dict[str, Runner]:
        """A runner for every plan."""
        made = plan_runners(self.runner, PLANS, profile, len(self.window), search_share=self.search_share)
        return {"sequential": self.runner, **made}

    def times(self, runners: Mapping[str, Runner]) -> dict[str, tuple[float, float]]:
        """Median seconds to issue a window and to run it, by plan, and of computation alone. They take turns, since
        the clock of a GPU depends on what it did before.
        """
        pairs: dict[str, list[tuple[float, float]]] = {rule: [] for rule in (ALONE, *runners)}
        for _ in range(self._sizes.repeats + 1):
            with self.linked(LoneTransport(self.tp_size, 0)):
                pairs[ALONE].append(self._time(self.runner))
            for rule, runner in runners.items():
                pairs[rule].append(self._time(runner))
        return {rule: _medians(times[1:]) for rule, times in pairs.items()}

    def _time(self, runner: Runner) -> tuple[float, float]:
        times = issue_and_run(lambda: runner.train_window(self.window), self.device)
        forget_gradients(runner)
        return times

    def replayed(self, runner: Runner) -> float:
        """Median seconds of a window that is replayed from a CUDA graph."""
        self._time(runner)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runner.train_window(self.window)
        times = [issue_and_run(graph.replay, self.device)[1] for _ in range(self._sizes.repeats + 1)]
        forget_gradients(runner)
        del graph
        release()
        return statistics.median(times[1:])

    def peak(self, runner: Runner) -> int:
        """Bytes on the device at most, in a window; 0 without a GPU."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._time(runner)
        return torch.cuda.max_memory_allocated()

    def trace(self, runner: Runner, name: str) -> str:
        """Write what ran when to a file for ui.perfetto.dev; says what part of the communication ran beside
        computation.
        """
        trace = trace_window(runner, self.window)
        TRACES.mkdir(parents=True, exist_ok=True)
        path = TRACES / name.replace(" ", "-")
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


def _medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    issued, ran = zip(*times, strict=True)
    return statistics.median(issued), statistics.median(ran)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
