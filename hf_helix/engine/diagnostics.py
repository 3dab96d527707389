"""Diagnostics of a cut model: figures for the logs, overlap, comparisons of plans, memory, traces.

In:   the runner in use, and the last trained window.
Out:  figures, the same on every rank; files with pictures and traces.
Must hold: measuring leaves training as it was; nothing slows a window of training but its own trace, once between two
logs.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_helix.config import HelixConfig
from hf_helix.measure.memory import peak_bytes
from hf_helix.measure.overlap import Overlap, measure_overlap, trace_window
from hf_helix.planning.plan.plan import Plan
from hf_helix.report.flops import peak_tflops, token_flops
from hf_helix.report.live import LiveScore, short_entries
from hf_helix.report.perfetto import write_perfetto
from hf_helix.runtime.cuda_graphs import WindowGraphs
from hf_helix.runtime.deferred_backward import modes_kept
from hf_helix.runtime.distributed.agreement import agree_on_action, all_gather_object
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.failures import activity
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.rank_units import RankUnits
from hf_helix.runtime.runner import Runner, measured
from hf_helix.runtime.stragglers.looks import Looks
from hf_helix.tuning.budget import BASELINE
from hf_helix.tuning.candidates import PAPER, Comparison, compare
from hf_helix.tuning.result_text import TuningResult
from hf_helix.tuning.tuner import Tuner


class Diagnostics:
    """The measurements of an `Engine`, the only subclass.

    Args:
        base: a Transformers model, before it is cut.
        mesh: the mesh of ranks.

    Attributes:
        overlap: the last result of `measure_overlap` or `compare_plans`; None before.
        figures: all figures of the last `log_entries`.
        looks: the looks at windows that name slow ranks.
    """

    # Attributes of the engine.
    model: Any
    config: HelixConfig
    mesh: Mesh
    last_window: list[MicroBatch]
    runner: Runner
    tuner: Tuner
    graphs: WindowGraphs | None

    def __init__(self, base: Any, mesh: Mesh) -> None:
        self.overlap: Overlap | None = None
        self.figures: dict[str, float] = {}
        peak = peak_tflops(torch.cuda.get_device_name(mesh.device)) if mesh.device.type == "cuda" else None
        self.looks = Looks(mesh)
        self._live = LiveScore(token_flops(base), world_size(), mesh.dp_size, peak)

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.runner.plan

    @property
    def tuning(self) -> TuningResult | None:
        """The measurement by which the plan was chosen; None without a measurement."""
        return self.tuner.result

    def measure_overlap(self, repeats: int = 5) -> Overlap:
        """Measures the communication that the plan hides, on the last trained window. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        with self._repeated_window("measure_overlap") as window:
            self.overlap = measure_overlap({"": self.runner}, window, repeats, graphs=self.graphs)[""]
        return self.overlap

    def compare_plans(self, rules: Sequence[str] = (BASELINE, PAPER), repeats: int = 5) -> Comparison:
        """Measures the plan in use and the plans of other rules, on the last trained window. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        profile = self.tuning.profile if self.tuning is not None else None
        with self._repeated_window("compare_plans") as window:
            comparison = compare(self.runner, window, rules, profile, repeats, graphs=self.graphs)
        self.overlap = comparison.overlaps[comparison.chosen]
        return comparison

    def measure_memory(self) -> list[int]:
        """Returns the peak bytes of activations and buffers in the last window, rank by rank. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        with self._repeated_window("measure_memory") as window:
            return all_gather_object(peak_bytes(self.runner, window))

    def trace(self, path: str | Path) -> None:
        """Writes a trace of the last window for https://ui.perfetto.dev, a track for each stream. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        with self._repeated_window("trace") as window:
            spans = all_gather_object(
                trace_window(self.runner, window, complete=bool(self.runner.layout.reductions)).spans
            )
        if rank() == 0:
            write_perfetto(path, spans)

    @contextlib.contextmanager
    def _repeated_window(self, asked: str) -> Iterator[list[MicroBatch]]:
        agree_on_action(f"{asked}() is called")
        if not self.last_window:
            raise ValueError(f"{asked}() needs a window to repeat; call it after train() or train_window()")
        if self.graphs is not None:
            self.graphs.keep_gradients()
            self.graphs.release()  # their memory belongs to another window
        with modes_kept(self.model.modules()):
            self.model.train()
            with watched(), plain_parameters(), measured(self.runner):
                yield self.last_window

    # -- the logs ------------------------------------------------------------------------------------------------

    def log_entries(self, full: bool = False) -> dict[str, float]:
        """Returns the figures since the last call: all if `full`, else the figures of a log line. Collective."""
        self.runner.executor.streams.synchronize()  # a GPU may be behind the host, whose clock counts
        tuned = self.tuning.overlaps[self.tuning.chosen] if self.tuning else None
        capped = self.config.expert_capacity_factor is not None
        routers = router_entries(self.runner.rank_units, self.mesh, capped)
        others = {**routers, **self.looks.entries()}
        self.figures = {**self._live.entries(self.overlap or tuned), **others}
        return self.figures if full else {**short_entries(self.figures), **others}

    @contextlib.contextmanager
    def _counted(self, window: Sequence[MicroBatch], traces: bool = True) -> Iterator[None]:
        """Returns a context that trains a window and counts it for the logs.

        Args:
            window: the micro-batches; complete at the end of the context.
            traces: whether the first window after each log is traced.
        """
        is_looked_at = self.looks.begin(self.runner)
        start, is_traced = time.perf_counter(), traces and (is_looked_at or self._live.wants_trace)
        streams = self.runner.executor.streams
        self._live.begin()
        activity.note_step()
        with (
            activity.doing(activity.TRAINING, lambda: self.runner.executor.place),
            streams.tracing() if is_traced else contextlib.nullcontext() as trace,
        ):
            yield
        self.looks.end(window, trace)
        tokens = sum(batch.num_tokens for batch in window)
        self._live.add(tokens, max((batch.length for batch in window), default=0))
        if trace is not None and self._live.wants_trace:
            self._live.add_trace(trace, tokens, time.perf_counter() - start)


# -- routers --------------------------------------------------------------------------------------------------------


def router_entries(rank_units: RankUnits, mesh: Mesh, capped: bool) -> dict[str, float]:
    """Returns the figures of routers since the last log, as means over layers; each token counts once. Collective.

    Args:
        capped: whether experts drop tokens beyond their capacity.

    Returns:
        Nothing if the model has no routers; otherwise
        `helix/router_z`: mean of the squared log-sum-exp of a token's logits (the z-loss of ST-MoE without its factor),
        if the logits of every layer are known;
        `helix/expert_imbalance`: the load of the busiest expert in parts of the mean load, 1 if all are equal;
        `helix/dropped_tokens`: the share of dropped choices.
    """
    meters = [(index, meter) for index, unit in sorted(rank_units.all_units.items()) for meter in unit.meters]
    if not meters:
        return {}
    held, sizes = rank_units.units, [meter.num_experts + 3 for _, meter in meters]
    sums = torch.cat(
        [
            meter.read(mesh.device) if index in held else torch.zeros(size, device=mesh.device)
            for (index, meter), size in zip(meters, sizes, strict=True)
        ]
    )
    if world_size() > 1:
        dist.all_reduce(sums)
    loads, others = zip(*[(each[:-3], each[-3:]) for each in sums.split(sizes)], strict=True)
    squares, tokens, dropped = torch.stack(others).unbind(1)
    if not bool((tokens > 0).all()):
        return {}
    chosen = torch.stack([load.sum() for load in loads])
    entries = {}
    if not bool(squares.isnan().any()):
        entries["helix/router_z"] = (squares / tokens).mean()
    entries["helix/expert_imbalance"] = torch.stack([load.max() / load.mean() for load in loads]).mean()
    if capped:
        entries["helix/dropped_tokens"] = (dropped / chosen).mean()
    return {name: round(float(value), 4) for name, value in entries.items()}
