"""Collectives that end where they are issued, so that what is alive does not depend on how busy the machine is; and
such that hold what they work with until they are waited for, as those of a GPU do.

In:   the streams of a rank.
Out:  the same streams, patched.
Must hold: transfers of a pipeline keep their pace, since a send waits for the receive of another rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from hf_helix.operators.communication.collectives import prepare_reduce_scatter
from hf_helix.operators.communication.transport import Axis
from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.gradients import reduce as flat
from hf_helix.runtime.streams.streams import Event, Streams


@contextmanager
def collectives_at_once(streams: Streams) -> Iterator[None]:
    """Waits for each collective as soon as it is issued; what it reads is not kept for longer than that."""
    issue = streams.issue

    def issue_and_wait(
        kind: Kind, work: Callable[[], object], after: Sequence[Event], label: str, lane: str = ""
    ) -> Event:
        event = issue(kind, work, after, label, lane)
        if kind is not Kind.PIPELINE:
            streams.wait(event)
        return event

    with mock.patch.object(streams, "issue", issue_and_wait):
        yield


class KeepingEvent(Event):
    """The event of a collective that is over, and that holds what it worked with until it is waited for."""

    def __init__(self, inner: Any, keep: object) -> None:
        self.label, self.kind, self.inner, self.keep = inner.label, inner.kind, inner, keep


@contextmanager
def collectives_kept(streams: Streams) -> Iterator[None]:
    """Keeps what each collective reads and works with until it is waited for, or its event is gone. Gradients are
    summed inside the collective, as NCCL does: gloo needs room for what arrives."""
    issue, wait, is_over = streams.issue, streams.wait, streams.is_over

    def inner(event: Any) -> Any:
        return event.inner if isinstance(event, KeepingEvent) else event

    def issue_and_keep(
        kind: Kind, work: Callable[[], object], after: Sequence[Event], label: str, lane: str = ""
    ) -> Event:
        event = issue(kind, work, [inner(each) for each in after], label, lane)
        if kind is Kind.PIPELINE:
            return event
        wait(event)
        return KeepingEvent(event, (work, after))

    def wait_and_drop(event: Any) -> None:
        wait(inner(event))
        if isinstance(event, KeepingEvent):
            event.keep = None

    def summed_inside(axis: Axis, value: Tensor) -> tuple[Tensor, Callable[[], object]]:
        out = value.new_empty((value.shape[0] // axis.size, *value.shape[1:]))

        def work() -> None:
            arrived, scatter = prepare_reduce_scatter(axis, value)
            scatter()
            out.copy_(arrived)

        return out, work

    with (
        mock.patch.object(flat, "prepare_reduce_scatter", summed_inside),
        mock.patch.object(streams, "issue", issue_and_keep),
        mock.patch.object(streams, "wait", wait_and_drop),
        mock.patch.object(streams, "is_over", lambda event: is_over(inner(event))),
    ):
        yield
