"""Collectives that end where they are issued, so that what is alive does not depend on how busy the machine is.

In:   the streams of a rank.
Out:  the same streams, patched.
Must hold: transfers of a pipeline keep their pace, since a send waits for the receive of another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.streams import Event, Streams


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
