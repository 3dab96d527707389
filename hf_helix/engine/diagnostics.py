"""Diagnostics of a cut model: figures for the logs, overlap, comparisons of plans, memory, traces.

In:   a session with its last trained window.
Out:  figures, the same on every rank; files with pictures and traces.
Must hold: measuring leaves training as it was; nothing slows a window of training but its own trace, once between two
logs.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_helix.engine.cut_model import CutModel
from hf_helix.engine.routers import LOADS, RouterCounts, router_entries
from hf_helix.engine.session import Session
from hf_helix.measure.memory import peak_bytes
from hf_helix.measure.overlap import Overlap, measure_overlap, trace_window
from hf_helix.report.flops import peak_tflops, token_flops
from hf_helix.report.live import LiveScore, short_entries
from hf_helix.report.perfetto import write_perfetto
from hf_helix.runtime.deferred_backward import modes_kept
from hf_helix.runtime.distributed.agreement import agree_on_action, all_gather_object
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import measured
from hf_helix.tuning.budget import BASELINE
from hf_helix.tuning.candidates import PAPER, Comparison, compare


class Diagnostics:
    """The measurements of a session.

    Args:
        cut: the cut model.
        session: its windows.
        live: the windows since the last log.

    Attributes:
        overlap: the last result of `measure_overlap` or `compare_plans`; None before.
        figures: all figures of the last `log_entries`.
    """

    def __init__(self, cut: CutModel, session: Session, live: LiveScore) -> None:
        self._cut, self._session, self._live = cut, session, live
        self.overlap: Overlap | None = None
        self.figures: dict[str, float] = {}
        self._routers = RouterCounts(session.runner.rank_units, cut.mesh)

    def measure_overlap(self, repeats: int = 5) -> Overlap:
        """Measures the communication that the plan hides, on the last trained window. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        with self._repeated_window("measure_overlap") as window:
            self.overlap = measure_overlap({"": self._session.runner}, window, repeats, graphs=self._session.graphs)[""]
        return self.overlap

    def compare_plans(self, rules: Sequence[str] = (BASELINE, PAPER), repeats: int = 5) -> Comparison:
        """Measures the plan in use and the plans of other rules, on the last trained window. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        tuning = self._session.tuner.result
        profile = tuning.profile if tuning is not None else None
        with self._repeated_window("compare_plans") as window:
            comparison = compare(self._session.runner, window, rules, profile, repeats, graphs=self._session.graphs)
        self.overlap = comparison.overlaps[comparison.chosen]
        return comparison

    def measure_memory(self) -> list[int]:
        """Returns the peak bytes of activations and buffers in the last window, rank by rank. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        with self._repeated_window("measure_memory") as window:
            return all_gather_object(peak_bytes(self._session.runner, window))

    def trace(self, path: str | Path) -> None:
        """Writes a trace of the last window for https://ui.perfetto.dev, a track for each stream. Collective.

        Raises:
            ValueError: nothing has been trained yet.
        """
        with self._repeated_window("trace") as window:
            spans = all_gather_object(
                trace_window(self._session.runner, window, complete=bool(self._session.runner.layout.reductions)).spans
            )
        if rank() == 0:
            write_perfetto(path, spans)

    @contextlib.contextmanager
    def _repeated_window(self, asked: str) -> Iterator[list[MicroBatch]]:
        agree_on_action(f"{asked}() is called")
        if not self._session.last_window:
            raise ValueError(f"{asked}() needs a window to repeat; call it after train() or train_window()")
        if self._session.graphs is not None:
            self._session.graphs.keep_gradients()
            self._session.graphs.release()  # their memory belongs to another window
        with modes_kept(self._cut.model.modules()):
            self._cut.model.train()
            with watched(), plain_parameters(), measured(self._session.runner):
                yield self._session.last_window

    # -- the logs ------------------------------------------------------------------------------------------------

    def log_entries(self, full: bool = False) -> dict[str, float]:
        """Returns the figures since the last call: all if `full`, else the figures of a log line. Collective."""
        self._session.runner.executor.streams.synchronize()  # a GPU may be behind the host, whose clock counts
        tuning = self._session.tuner.result
        tuned = tuning.overlaps[tuning.chosen] if tuning else None
        capped = self._cut.config.expert_capacity_factor is not None
        others = {**router_entries(self._routers.read(), capped), **self._session.looks.entries()}
        self.figures = {**self._live.entries(self.overlap or tuned), **others}
        return self.figures if full else {**short_entries(self.figures), **others}

    def expert_loads(self) -> list[Tensor]:
        """Returns how many tokens each expert was chosen by since the last call [experts], for every router in the
        order of layers; at the first call since the last log. Every token of training counts once, padding not.
        Collective."""
        agree_on_action("expert_loads() is called")
        self._session.runner.executor.streams.synchronize()
        return [sums[:-3] for sums in self._routers.read(LOADS)]


def live_score(base: Any, mesh: Mesh) -> LiveScore:
    """Returns the counts for the logs, of a Transformers model before it is cut."""
    peak = peak_tflops(torch.cuda.get_device_name(mesh.device)) if mesh.device.type == "cuda" else None
    return LiveScore(token_flops(base), world_size(), mesh.dp_size, peak)
