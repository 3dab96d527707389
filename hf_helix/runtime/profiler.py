"""The profiler: how long each operator takes on this machine, at these shapes, on this mesh.

In:   a runner and a window of micro-batches.
Out:  seconds by block entry and unit kind, the same on every rank.
Must hold: operators are timed through the executor's own issue code, in a running step, not one by one; the slowest
rank counts, since a collective ends with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hf_helix.planning.plan import Times
from hf_helix.runtime.measure import forget_gradients, over_ranks
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.strand import MicroBatch
from hf_helix.runtime.trace import Trace


def measure_times(runner: Runner, window: Sequence[MicroBatch]) -> Times:
    """Run a window twice under the runner's plan and take the median of each operator. Collective.

    Meant for a plan that overlaps nothing, so that operators are seen alone.
    """
    mine: dict[tuple[str, str], list[float]] = {}
    kinds = {unit.label: unit.name for unit in runner.stage.units}
    streams = runner.executor.streams
    for is_warm in (False, True):
        streams.trace = trace = Trace()
        try:
            runner.train_window(window, complete=False)
            streams.synchronize()
        finally:
            streams.trace = None
        forget_gradients(runner)
        for span in trace.spans if is_warm else ():
            unit, entry = _place(span.label, kinds)
            mine.setdefault((unit, entry), []).append(span.end - span.start)
    medians = {key: statistics.median(found) for key, found in mine.items()}
    ranks = over_ranks(medians)
    return {key: max(found[key] for found in ranks) for key in medians}


def _place(label: str, kinds: dict[str, str]) -> tuple[str, str]:
    """('layer', 'B.mlp.down.W') of 'B2.layers.3.mlp.down.W'."""
    strand, _, rest = label.partition(".")
    unit = next(name for name in kinds if rest.startswith(name + "."))
    return kinds[unit], f"{strand[0]}.{rest.removeprefix(unit + '.')}"
