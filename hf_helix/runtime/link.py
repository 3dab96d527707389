"""The speed of an emulated link that is to be even: found by measuring, before the first window.

In:   a runner whose mesh has a link without a rate, and a window of micro-batches.
Out:  the link with the rate at which communication takes as long as computation, the same on every rank.
Must hold: training is left as it was found; the rate is a round number, so that what is printed is what is emulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hf_helix.operators.link import Link
from hf_helix.runtime.measure import forget_gradients, measure_overlap, over_ranks
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.strand import MicroBatch


def even_out(runner: Runner, window: Sequence[MicroBatch], repeats: int = 2) -> None:
    """Give the link of a runner's mesh its rate. Collective; call it when there are no gradients."""
    link = runner.mesh.link
    assert link is not None
    with bare(link):
        before = link.out.bytes
        runner.train_window(window)
        forget_gradients(runner)
        sent = max(over_ranks(link.out.bytes - before))
        computation = measure_overlap({"": runner}, window, repeats)[""].computation
    link.rate = float(f"{8 * sent / computation:.3g}")


@contextmanager
def bare(link: Link | None) -> Iterator[None]:
    """Within it, transfers go as they are."""
    if link is None:
        yield
        return
    rate, link.rate = link.rate, None
    try:
        yield
    finally:
        link.rate = rate
