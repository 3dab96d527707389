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

LEAST = 0.25  # of the computation, where the bytes as they really go take most of it


def even_out(runner: Runner, window: Sequence[MicroBatch], repeats: int = 2) -> None:
    """Give the link of a runner's mesh its rate. Collective; call it when there are no gradients."""
    link = runner.mesh.link
    assert link is not None
    with bare(link):
        found = measure_overlap({"": runner}, window, repeats)[""]
        before = link.out.bytes
        runner.train_window(window)
        forget_gradients(runner)
        sent = max(over_ranks(link.out.bytes - before))
    # The emulation adds to what transfers take by themselves.
    missing = max(found.computation - found.communication, LEAST * found.computation)
    link.rate = float(f"{8 * sent / missing:.3g}")


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
