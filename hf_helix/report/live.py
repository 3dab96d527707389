"""The scorecard while training: figures for the logs, so that every tracker shows them.

In:   trained windows, a traced window between two logs, and the measurement of computation and communication by
    themselves.
Out:  `helix/...` entries of a log.
Must hold: every figure comes from windows since the last log; unknown figures, and noise of a little communication, are
left out, never guessed.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hf_helix.measure.overlap import Overlap
from hf_helix.planning.timing.token_flops import TokenFlops
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.streams.streams import Streams
from hf_helix.runtime.streams.trace import Trace

# The figures of a log line. The speed is there already, in the progress bar.
SHORT = ("helix/overlapped_fraction", "helix/hidden_fraction")
LEAST_COMMUNICATION = 0.05  # in parts of a window's time, which varies by about as much


def short_entries(figures: Mapping[str, float]) -> dict[str, float]:
    """Returns the figures of a log line: two at most."""
    return {name: figures[name] for name in SHORT if name in figures}


@dataclass
class _Since:
    """The counts since the last log."""

    started: float = 0.0  # the start of the first window, by `time.perf_counter`; 0 before
    tokens: int = 0  # tokens of all windows, over the data-parallel ranks
    length: int = 0
    trace: Trace | None = None
    traced_tokens: int = 0  # tokens of the traced window, over the data-parallel ranks
    traced_seconds: float = 0.0


class LiveScore:
    """The windows between two logs. FLOPs of a token, and the dense peak of a device in TFLOP/s, are None if
    unknown; `ranks` processes share the work, on `batches` data-parallel ranks, each with windows of its own."""

    def __init__(self, flops: TokenFlops | None, ranks: int, batches: int, peak: float | None) -> None:
        self._flops = flops
        self._ranks = ranks
        self._batches = batches
        self._peak = peak
        self._since = _Since()

    @contextlib.contextmanager
    def counting(
        self, streams: Streams, window: Sequence[MicroBatch], traces: bool = True, is_looked_at: bool = False
    ) -> Iterator[Trace | None]:
        """Returns a context that trains a window and counts it for the logs; yields its trace, if any.

        Args:
            streams: that run the window.
            window: the micro-batches; complete at the end of the context.
            traces: whether the first window after each log is traced.
            is_looked_at: whether the window is traced in any case.
        """
        start, is_traced = time.perf_counter(), traces and (is_looked_at or self.wants_trace)
        self.begin()
        with streams.tracing() if is_traced else contextlib.nullcontext() as trace:
            yield trace
        tokens = sum(batch.num_tokens for batch in window)
        self.add(tokens, max((batch.length for batch in window), default=0))
        if trace is not None and self.wants_trace:
            self.add_trace(trace, tokens, time.perf_counter() - start)

    @property
    def wants_trace(self) -> bool:
        """Whether the next window should be traced: the first after each log."""
        return self._since.trace is None

    def begin(self) -> None:
        """Notes that a window begins."""
        self._since.started = self._since.started or time.perf_counter()

    def add(self, tokens: int, length: int) -> None:
        """Counts a window that has ended: its tokens on this rank, and the tokens of its longest sequence."""
        self._since.tokens += tokens * self._batches
        self._since.length = max(self._since.length, length)

    def add_trace(self, trace: Trace, tokens: int, seconds: float) -> None:
        """Keeps the trace of a window.

        Args:
            trace: of this rank.
            tokens: of the window on this rank.
            seconds: of the window.
        """
        since = self._since
        since.trace, since.traced_tokens, since.traced_seconds = trace, tokens * self._batches, seconds

    def entries(self, alone: Overlap | None) -> dict[str, float]:
        """Returns the figures since the last log, and begins anew; `alone` is an earlier measurement, if any."""
        since, self._since = self._since, _Since()
        if not since.tokens:
            return {}
        return {**self._speed(since, time.perf_counter() - since.started), **_overlap(since, alone)}

    def _speed(self, since: _Since, seconds: float) -> dict[str, float]:
        rate = since.tokens / seconds
        figures = {"helix/tokens_per_second": rate}
        if self._flops is not None:
            causal, full = (
                count(since.length) * rate / self._ranks / 1e12 for count in (self._flops.causal, self._flops.full)
            )
            figures["helix/tflops_per_device"] = causal
            if self._peak is not None:
                figures.update({"helix/mfu": causal / self._peak, "helix/mfu_full_attention": full / self._peak})
        return {name: float(f"{value:.5g}") for name, value in figures.items()}


def _overlap(since: _Since, alone: Overlap | None) -> dict[str, float]:
    trace = since.trace
    busy = trace.busy(compute=False) if trace is not None else 0.0
    if trace is None or not busy:
        return {}
    exposed = busy - trace.overlapped()
    figures = {"helix/overlapped_fraction": trace.overlapped() / busy}
    if alone is not None and alone.communication:
        share = since.traced_tokens / alone.tokens  # windows differ in length, and so did the measured window
        communication = share * alone.communication
        exposed = max(0.0, since.traced_seconds - share * alone.computation)
        if communication >= LEAST_COMMUNICATION * since.traced_seconds:
            # Where communication slows computation down by more than it takes itself, nothing is hidden.
            figures["helix/hidden_fraction"] = max(0.0, 1 - exposed / communication)
    figures["helix/exposed_ms"] = exposed * 1e3
    return {name: round(value, 4) for name, value in figures.items()}
