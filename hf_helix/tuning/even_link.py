"""The speed of an emulated link over which communication takes as long as computation (`link="even"`).

In:   a runner whose mesh has a link without a rate, and a window of micro-batches.
Out:  the link with the rate at which communication takes as long as computation, the same on every rank.
Must hold: training is left as it was found; the rate is a round number, so that what is printed is what is emulated.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_helix.measure.overlap import forget_gradients, measure_overlap
from hf_helix.operators.communication.emulated_link import bare
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.tuning.candidates import baseline_runner


def calibrate_link(runner: Runner, window: Sequence[MicroBatch], repeats: int = 3) -> None:
    """Gives the link of a runner's mesh its rate. Collective; call it when there are no gradients.

    Args:
        runner: a runner whose mesh has a link without a rate.
        window: the micro-batches that are measured with.
        repeats: how often computation is timed.

    Raises:
        ValueError: on every rank, if nothing goes over the link.
    """
    link = runner.mesh.link
    assert link is not None
    # Computation is that of one strand at a time, which comparisons of plans go by, too.
    alone = baseline_runner(runner, len(window))
    with bare(link):
        before = link.out.bytes
        alone.train_window(window)
        forget_gradients(alone)
        sent = max(all_gather_object(link.out.bytes - before))
        if not sent:
            raise ValueError("link='even' needs something to carry, and a window sends nothing; use link=None")
        computation = measure_overlap({"": alone}, window, repeats)[""].computation
    link.rate = float(f"{8 * sent / computation:.3g}")
