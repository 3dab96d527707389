"""The CPU's streams are ordered queues: work runs in the order of issue, after its events, beside the issuing thread.

Threads are steered with `threading.Event`s, so nothing here depends on how fast anything runs. `LONG` only bounds a
test that fails.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.streams.streams import CpuStreams, Streams, make_streams
from hf_helix.runtime.streams.trace import Trace

LONG = 20.0
NEAR, FAR = [kind for kind in Kind if kind.communicates][:2]


@pytest.fixture
def streams() -> Iterator[Streams]:
    result = CpuStreams()
    yield result
    result.close()


class Gate:
    """Work that waits until it is let through."""

    def __init__(self, log: list[str] | None = None, name: str = "") -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.log, self.name = log, name

    def __call__(self) -> None:
        self.entered.set()
        assert self.open.wait(LONG)
        if self.log is not None:
            self.log.append(self.name)


class Broken(Exception):
    pass


def fail() -> None:
    raise Broken("this work fails")


def test_a_cpu_has_cpu_streams() -> None:
    assert isinstance(make_streams(torch.device("cpu")), CpuStreams)


@pytest.mark.parametrize(("kind", "lane"), [(NEAR, ""), (Kind.PIPELINE, "0F")])
def test_first_in_first_out(kind: Kind, lane: str, streams: Streams) -> None:
    log: list[int] = []
    gate = Gate()
    streams.issue(kind, gate, (), "gate", lane)  # everything else queues up behind it
    events = [streams.issue(kind, lambda i=i: log.append(i), (), str(i), lane) for i in range(100)]
    assert gate.entered.wait(LONG)
    assert log == []
    gate.open.set()
    streams.wait(events[-1])
    assert log == list(range(100))


def test_the_issuing_thread_and_other_kinds_do_not_wait(streams: Streams) -> None:
    gate = Gate()
    held = streams.issue(NEAR, gate, (), "held")
    assert gate.entered.wait(LONG)
    here: list[int] = []
    streams.wait(streams.issue(FAR, lambda: here.append(threading.get_ident()), (), "free"))
    assert here != [threading.get_ident()]
    assert streams.compute(lambda: 42, "compute") == 42
    gate.open.set()
    streams.wait(held)


def test_after_is_respected(streams: Streams) -> None:
    log: list[str] = []
    gate = Gate(log, "first")
    first = streams.issue(NEAR, gate, (), "first")
    second = streams.issue(FAR, lambda: log.append("second"), (first,), "second")
    third = streams.issue(FAR, lambda: log.append("third"), (), "third")  # behind the second, whose turn has not come
    assert gate.entered.wait(LONG)
    assert log == []
    gate.open.set()
    streams.wait(third)
    assert log == ["first", "second", "third"]
    streams.wait(second)
    streams.wait(first)  # any order, and again
    streams.wait(first)


def test_lanes_of_one_kind_do_not_wait_for_each_other(streams: Streams) -> None:
    gate = Gate()
    held = streams.issue(Kind.PIPELINE, gate, (), "held", "0F")
    assert gate.entered.wait(LONG)
    for lane in ("0B", "1F"):
        streams.wait(streams.issue(Kind.PIPELINE, lambda: None, (), "free", lane))
    assert not streams.is_over(held)
    gate.open.set()
    streams.wait(held)
    assert streams.is_over(held)


def test_a_failure_stays_in_its_lane(streams: Streams) -> None:
    bad = streams.issue(Kind.PIPELINE, fail, (), "bad", "0F")
    streams.wait(streams.issue(Kind.PIPELINE, lambda: None, (), "free", "0B"))
    for event in (bad, streams.issue(Kind.PIPELINE, lambda: None, (), "later", "0F")):
        with pytest.raises(Broken):
            streams.wait(event)


def test_an_error_is_raised_at_wait_and_ends_the_stream(streams: Streams) -> None:
    log: list[str] = []
    good = streams.issue(NEAR, lambda: log.append("good"), (), "good")
    bad = streams.issue(NEAR, fail, (), "bad")
    later = streams.issue(NEAR, lambda: log.append("later"), (), "later")
    streams.wait(good)
    for event in (bad, later, streams.issue(NEAR, lambda: log.append("much later"), (), "much later"), bad):
        with pytest.raises(Broken, match="this work fails"):
            streams.wait(event)
    assert log == ["good"]


def test_an_error_reaches_what_comes_after_it_on_other_streams_only(streams: Streams) -> None:
    log: list[str] = []
    bad = streams.issue(NEAR, fail, (), "bad")
    streams.wait(streams.issue(FAR, lambda: log.append("independent"), (), "independent"))
    with pytest.raises(Broken):
        streams.wait(streams.issue(FAR, lambda: log.append("dependent"), (bad,), "dependent"))
    assert log == ["independent"]


def test_an_error_ends_its_window_and_not_the_next(streams: Streams) -> None:
    log: list[str] = []

    def broken_window() -> None:
        with streams.window():
            bad = streams.issue(NEAR, fail, (), "bad")
            streams.late.append(streams.issue(FAR, lambda: log.append("dependent"), (bad,), "dependent"))
            streams.issue(NEAR, lambda: log.append("later"), (), "later")
            streams.wait(bad)

    with pytest.raises(Broken):
        broken_window()
    with streams.window():
        for kind in (NEAR, FAR):
            streams.wait(streams.issue(kind, lambda kind=kind: log.append(kind.value), (), "next"))
    assert (log, streams.late) == ([NEAR.value, FAR.value], [])


def test_tensors_live_as_long_as_their_work(streams: Streams) -> None:
    """The issuing thread may drop what it handed over; nothing is held once the event has been waited for."""
    tensor, gate = torch.ones(3), Gate()
    out = torch.zeros(3)
    alive = weakref.ref(tensor)
    streams.issue(NEAR, gate, (), "gate")
    event = streams.issue(NEAR, _copier(out, tensor), (), "copy")
    del tensor
    assert gate.entered.wait(LONG)
    gc.collect()
    assert alive() is not None
    gate.open.set()
    streams.wait(event)
    # The worker drops the last piece when it takes up the next one at the latest.
    streams.wait(streams.issue(NEAR, lambda: None, (), "next"))
    assert alive() is None
    assert out.tolist() == [1.0, 1.0, 1.0]


def _copier(out: torch.Tensor, value: torch.Tensor) -> Callable[[], Any]:
    return lambda: out.copy_(value)


def test_spans_are_recorded_while_a_trace_is_set(streams: Streams) -> None:
    streams.wait(streams.issue(NEAR, lambda: None, (), "unseen"))
    assert streams.compute(lambda: 1, "unseen") == 1
    streams.trace = trace = Trace()
    gate = Gate()
    moved = streams.issue(NEAR, gate, (), "moved")
    assert gate.entered.wait(LONG)
    assert streams.compute(lambda: 2, "computed") == 2
    gate.open.set()
    streams.wait(moved)
    streams.synchronize()
    streams.trace = None
    streams.wait(streams.issue(NEAR, lambda: None, (), "unseen"))
    spans = {span.label: span for span in trace.spans}
    assert {(span.stream, span.label) for span in trace.spans} == {(NEAR.value, "moved"), ("compute", "computed")}
    assert spans["moved"].start <= spans["computed"].start <= spans["computed"].end <= spans["moved"].end
    assert trace.overlapped() == pytest.approx(spans["computed"].end - spans["computed"].start)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_threads_end_after_their_work(is_closed: bool) -> None:
    streams, log = CpuStreams(), []
    before = set(threading.enumerate())
    gate = Gate(log, "last")
    streams.issue(NEAR, gate, (), "last")
    (worker,) = set(threading.enumerate()) - before
    if is_closed:
        streams.close()
    del streams
    gate.open.set()
    worker.join(LONG)
    assert not worker.is_alive()
    assert log == ["last"]
