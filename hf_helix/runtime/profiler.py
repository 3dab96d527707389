"""The profiler: how long each operator takes on this machine, at these shapes, on this mesh.

In:   a runner and a window of micro-batches.
Out:  seconds by block entry and unit kind, the same on every rank.
Must hold: operators are timed through the executor's own issue code, in a running step, not one by one. Of a
computation the slowest rank counts; of a collective the fastest, since the others only wait for the last to arrive.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hf_helix.planning.plan import Times
from hf_helix.runtime.measure import over_ranks, trace_window
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.strand import MicroBatch


def measure_times(runner: Runner, window: Sequence[MicroBatch]) -> Times:
    """Run a window twice under the runner's plan and take the median of each operator. Collective.

    Meant for a plan that overlaps little, so that operators are seen alone; under `sequential` only the collectives
    that weight gradients run beside are not.
    """
    mine: dict[tuple[str, str], list[float]] = {}
    computed: set[tuple[str, str]] = set()
    names = {unit.label: unit.name for unit in runner.stage.units}
    trace_window(runner, window)  # warms up
    for span in trace_window(runner, window).spans:
        key = _split_label(span.label, names)
        mine.setdefault(key, []).append(span.end - span.start)
        if span.stream == "compute":
            computed.add(key)
    medians = {key: statistics.median(found) for key, found in mine.items()}
    ranks = over_ranks(medians)
    return {key: (max if key in computed else min)(found[key] for found in ranks) for key in medians}


def _split_label(label: str, names: dict[str, str]) -> tuple[str, str]:
    """('layer', 'B.mlp.down.W') of 'B2.layers.3.mlp.down.W'."""
    strand, _, rest = label.partition(".")
    unit = next(name for name in names if rest.startswith(name + "."))
    return names[unit], f"{strand[0]}.{rest.removeprefix(unit + '.')}"
