"""Times from a trace (`busy`, `beside`, `merge`) are what counting the cells of a fine grid gives.

Spans start and end on the grid, so the count is exact. (The trace of a real run is
in distributed/test_trace.py; pytest wants file names that differ.)
"""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hf_helix.runtime.streams.trace import Span, Trace, merge

LENGTH = 40
intervals = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(lambda pair: tuple(sorted(pair)))
spans = st.lists(
    st.builds(lambda s, i: Span(s, "", *i), st.sampled_from(["compute", "intra_node", "inter_node"]), intervals)
)


def cells(pieces: list[tuple[int, int]]) -> set[int]:
    """Unit cells that at least one interval covers."""
    return {cell for start, end in pieces for cell in range(start, end)}


def of(result: list[Span], compute: bool) -> set[int]:
    return cells([(span.start, span.end) for span in result if (span.stream == "compute") == compute])


@given(spans)
def test_busy_and_beside(drawn: list[Span]) -> None:
    trace = Trace(spans=drawn)
    assert trace.busy(compute=True) == len(of(drawn, True))
    assert trace.busy(compute=False) == len(of(drawn, False))
    assert trace.overlapped() == len(of(drawn, True) & of(drawn, False))


@given(st.lists(intervals))
def test_merge(pieces: list[tuple[int, int]]) -> None:
    """The same cells, as disjoint intervals in order that do not even touch."""
    merged = merge(pieces)
    assert cells(merged) == cells(pieces)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(merged))


def test_a_long_trace_is_read_in_linear_time() -> None:
    """A comparison of every span with every other would be 2,500 million steps."""
    trace = Trace(
        spans=[Span(("compute", "intra_node")[place % 2], "", place, place + 1.5) for place in range(100_000)]
    )
    assert trace.overlapped() == 49_999.5
