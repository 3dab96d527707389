"""Streams: ordered queues with events, on CUDA and on CPU alike.

Operators by stream:

    stream                 operators                                                     CUDA stream    CPU
    compute                F, B, I, W, R of every operator; `prepare` of collectives     the current    the main thread
    intra_node             collectives of an axis inside a host (tp, usually)            one, high      a worker thread
    inter_node             collectives of an axis between hosts (cp, ep)                 one, high      a worker thread
    pipeline, by lane      sends and receives between virtual stages: a lane for each    one a lane,    a worker thread
                           direction (F, B) over each boundary between two stages        high           a lane
    gradients              gradient reduction over ranks with other tokens (dp, cp),     one, high      a worker thread
                           gathers of ZeRO-1 weights
    host_up, host_down     copies from the memory of the host, and to it: weights,       one each,      a worker thread
                           gradients                                                     high           each

Gradient reductions over tensor-parallel ranks run on the stream of that axis, in line with its other collectives. The
stream of an operator is the `Kind` of the graph's operator, which an axis takes from the mesh (`Axis.kind`). "High" is
the priority of the CUDA stream: communication starts before queued computation.

In:   transfers, in the plan's order.
Out:  events for later operators to wait on.
Must hold: transfers of one kind, and of one lane, run in the order of issue, after everything issued before them on the
compute stream. The issuing thread never waits for a transfer, unless a computation on a CPU needs the result. An event
keeps the memory of its transfer alive until the compute stream has waited for the event, so freed memory is never in
use.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hf_helix.operators.base import TransferFn
from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.streams.trace import Span, Trace


class Event(ABC):
    """The end of a transfer.

    Attributes:
        label: of the transfer in traces.
        kind: its stream.
    """

    label: str
    kind: Kind


class Streams(ABC):
    """The streams of a rank.

    Attributes:
        trace: the record of a trace while tracing; else None.
        slots_ahead: how early to issue receives from other ranks, see `Plan.issue`.
        late: events of copies to the host that may outlast their window; waited for before the next reductions.
        holds_memory: whether an event keeps the memory of its transfer until a wait for the event, not until its end.
    """

    trace: Trace | None = None
    slots_ahead: int
    holds_memory = False

    def __init__(self) -> None:
        self.late: list[Event] = []

    @abstractmethod
    def issue(self, kind: Kind, transfer: TransferFn, after: Sequence[Event], label: str, lane: str = "") -> Event:
        """Queues a transfer after everything computed so far and after other transfers.

        Args:
            kind: the stream.
            transfer: moves the data; allocates nothing.
            after: events of other streams to wait for.
            label: of the transfer in traces.
            lane: the queue on the stream; a lane keeps order, and does not wait for other lanes.

        Returns:
            The event of its end, for `wait`.
        """

    def window(self) -> AbstractContextManager[Any]:
        """Returns a context for a window: all its computations go to the current stream of its begin. An error that
        ends the window is forgotten: the next window runs."""
        return nullcontext()

    @abstractmethod
    def is_over(self, event: Any) -> bool:
        """Returns whether the transfer is done, without waiting; its memory may then be freed."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """Makes the compute stream wait for an event; raises the error of the transfer, if any."""

    def wait_on_host(self, event: Any) -> None:
        """Makes the host wait for an event, before it reads the data that the transfer has moved there."""
        self.wait(event)

    @abstractmethod
    def compute(self, work: Callable[[], Any], label: str) -> Any:
        """Runs a computation, recorded in the trace while tracing."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits on the host for everything computed, and completes the trace. Never called inside a step."""

    @contextmanager
    def tracing(self) -> Iterator[Trace]:
        """Yields a trace of everything within the context, complete at its end."""
        self.trace = trace = Trace()
        try:
            yield trace
            self.synchronize()
        finally:
            self.trace = None

    @abstractmethod
    def close(self) -> None:
        """Ends the worker threads."""


def stream_name(kind: Kind, lane: str = "") -> str:
    """Returns the name of a stream in traces."""
    return f"{kind.value} {lane}" if lane else kind.value


def make_streams(device: torch.device) -> Streams:
    """Returns the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()


class _CpuEvent(Event):
    __slots__ = ("_done", "error", "kind", "label")

    def __init__(self, label: str, kind: Kind) -> None:
        self.label = label
        self.kind = kind
        self.error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def set(self) -> None:
        self._done.release()

    def is_set(self) -> bool:
        return not self._done.locked()

    def wait(self) -> None:
        with self._done:
            pass
        if self.error is not None:
            raise self.error


_Item = tuple[TransferFn, Sequence[_CpuEvent], _CpuEvent, Trace | None]
_CLOSE, _RECOVER = "close", "recover"


class _Worker:
    """A thread for the transfers of a stream, in order. After a failure it runs nothing more until `recover`."""

    def __init__(self, stream: str) -> None:
        self._queue: queue.SimpleQueue[_Item | str] = queue.SimpleQueue()
        self._stream = stream
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"hf_helix-{stream}", daemon=True)
        self._thread.start()

    def put(self, transfer: TransferFn, after: Sequence[Any], event: _CpuEvent, trace: Trace | None) -> None:
        self._queue.put((transfer, after, event, trace))

    def recover(self) -> None:
        """Forgets a failure, once everything is through that was put before."""
        self._queue.put(_RECOVER)

    def close(self) -> None:
        self._queue.put(_CLOSE)

    def _run(self) -> None:
        while (item := self._queue.get()) != _CLOSE:
            if isinstance(item, str):
                self._failure = None
                continue
            transfer, after, event, trace = item
            try:
                if self._failure is not None:
                    raise self._failure
                for earlier in after:
                    earlier.wait()
                start = time.perf_counter()
                transfer()
                if trace is not None:
                    trace.spans.append(Span(self._stream, event.label, start, time.perf_counter()))
            except BaseException as error:
                self._failure = event.error = error
            finally:
                event.set()
                del item, transfer, after, event


class CpuStreams(Streams):
    """Worker threads for communication; computation runs in the calling thread."""

    slots_ahead = 1  # a waiting receive costs nothing, and gloo sends nothing before the receive is posted

    def __init__(self) -> None:
        super().__init__()
        self._workers: dict[tuple[Kind, str], _Worker] = {}

    def __del__(self) -> None:
        self.close()

    @contextmanager
    def window(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.late.clear()  # also of copies that may have failed
            for worker in self._workers.values():
                worker.recover()
            raise

    def issue(self, kind: Kind, transfer: TransferFn, after: Sequence[Event], label: str, lane: str = "") -> Event:
        worker = self._workers.get((kind, lane))
        if worker is None:
            worker = self._workers[kind, lane] = _Worker(stream_name(kind, lane))
        event = _CpuEvent(label, kind)
        worker.put(transfer, after, event, self.trace)
        return event

    def is_over(self, event: Any) -> bool:
        return bool(event.is_set())

    def wait(self, event: Any) -> None:
        event.wait()

    def compute(self, work: Callable[[], Any], label: str) -> Any:
        if self.trace is None:
            return work()
        start, before = time.perf_counter(), time.thread_time()
        result = work()
        core = time.thread_time() - before
        self.trace.spans.append(Span("compute", label, start, time.perf_counter(), core=core))
        return result

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


class _CudaEvent(Event):
    __slots__ = ("done", "keep", "kind", "label")

    def __init__(self, label: str, kind: Kind, done: torch.cuda.Event, keep: object) -> None:
        self.label = label
        self.kind = kind
        self.done = done
        self.keep = keep


class CudaStreams(Streams):
    """CUDA streams and events. Collectives are called with `async_op=False`, so they run on the current stream.

    Args:
        device: the GPU.
        cuda: the source of streams and events; tests give fakes that report every missing order.
    """

    # A waiting receive of NCCL takes SMs from computation, and keeps the device busy: the host hangs if it waits for
    # the device (to load a kernel, to free memory) before it has issued the sends for the other rank.
    slots_ahead = 0
    holds_memory = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__()
        self._device = device
        self._cuda = cuda
        self._streams: dict[tuple[Kind, str], tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
        self._compute: torch.cuda.Stream | None = None
        self._pending: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def window(self) -> Iterator[None]:
        before, self._compute = self._compute, self._cuda.current_stream(self._device)
        try:
            yield
        finally:
            self._compute = before

    def issue(self, kind: Kind, transfer: TransferFn, after: Sequence[Any], label: str, lane: str = "") -> Event:
        known = self._streams.get((kind, lane))
        if known is None:
            known = self._streams[kind, lane] = self._cuda.Stream(self._device, priority=-1), self._cuda.Event()
        stream, computed = known
        compute = self._compute or self._cuda.current_stream(self._device)
        # One event serves all waits of a stream: a wait is for the last record before it.
        computed.record(compute)
        self._wait_for_computed(stream, computed)
        for earlier in after:
            stream.wait_event(earlier.done)
        # As `torch.cuda.stream` does after a lookup of the device and the current stream, which are known here.
        self._cuda.set_stream(stream)
        try:
            if self.trace is None:
                transfer()
            else:
                self._recorded(stream_name(kind, lane), label, transfer)
        finally:
            self._cuda.set_stream(compute)
        done = self._cuda.Event()
        done.record(stream)
        return _CudaEvent(label, kind, done, (transfer, after))

    def _wait_for_computed(self, stream: Any, computed: Any) -> None:
        """Makes a stream wait for the compute stream. Afterwards the stream may write to memory that the compute stream
        used before."""
        stream.wait_event(computed)

    def is_over(self, event: Any) -> bool:
        # A captured event has no end to ask for: its memory stays until the compute stream has waited.
        return not self._cuda.is_current_stream_capturing() and bool(event.done.query())

    def wait(self, event: Any) -> None:
        (self._compute or self._cuda.current_stream(self._device)).wait_event(event.done)
        event.keep = None

    def wait_on_host(self, event: Any) -> None:
        event.done.synchronize()

    def compute(self, work: Callable[[], Any], label: str) -> Any:
        return self._recorded("compute", label, work)

    def synchronize(self) -> None:
        self._cuda.synchronize(self._device)
        if self.trace is not None and self._pending:
            base = self._pending[0][2]
            for stream, label, start, end in self._pending:
                first, last = base.elapsed_time(start) / 1e3, base.elapsed_time(end) / 1e3
                self.trace.spans.append(Span(stream, label, first, last))
        self._pending.clear()

    def close(self) -> None:
        self._streams.clear()

    def _recorded(self, stream: str, label: str, work: Callable[[], Any]) -> Any:
        if self.trace is None:
            return work()
        start, end = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)
        start.record()
        result = work()
        end.record()
        self._pending.append((stream, label, start, end))
        return result
