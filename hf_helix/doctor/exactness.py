"""How exact predictions are: the error over published runs of the same kind.

In:   `published.json`, the rows that `python -m benchmarks.published` has predicted; a case.
Out:  a sentence with the error of the rows of its kind.
Must hold: the sentence counts the same rows as docs/doctor.md.
"""

import functools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from hf_helix.doctor.case import Case
from hf_helix.planning.timing.cluster import Cluster

FILE = "published.json"
LONG = 16384  # tokens of a sequence, from which on attention decides
FEWEST = 3  # rows of a kind; fewer say nothing, and all rows are taken
CLOSE = 0.15  # a prediction so near to a published figure counts as near
OUTSIDE = 0.1  # of the rows on each side, which the sentence leaves out

MIXTURE, FLOAT8, LONG_ROWS = "mixtures of experts", "float8", "sequences from 16k tokens"
TENSOR, PIPELINE, DATA = "tensor parallelism", "pipelines", "data parallelism"
KINDS = MIXTURE, FLOAT8, LONG_ROWS, TENSOR, PIPELINE, DATA


@dataclass(frozen=True)
class PublishedRun:
    """A published run with its prediction, in tokens per second of a device."""

    name: str
    source: str
    cluster: str
    kind: str  # in `KINDS`
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted in parts of published."""
        return self.predicted / self.published

    @property
    def hardware(self) -> str:
        """The device in the name of the cluster, such as h100 in h100x8."""
        return self.cluster.rpartition("x")[0]


@functools.cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Returns the runs of the record."""
    text = (resources.files("hf_helix.doctor") / FILE).read_text()
    return tuple(PublishedRun(*row) for row in json.loads(text))


def kind_of(case: Case, experts: int = 1) -> str:
    """Returns the kind of a case of a model with a number of experts in a layer: the first of `KINDS` that it is."""
    sizes = case.sizes
    found = {
        MIXTURE: experts > 1,
        FLOAT8: case.config.float8 is not None,
        LONG_ROWS: sizes.cp > 1 or case.length >= LONG,
        TENSOR: sizes.tp > 1,
        PIPELINE: sizes.pp > 1,
    }
    return next((kind for kind, is_it in found.items() if is_it), DATA)


def error_of(runs: Sequence[PublishedRun]) -> tuple[float, float]:
    """Returns the ratios that all but `OUTSIDE` of the runs on each side lie between."""
    ratios = sorted(run.ratio for run in runs)
    left_out = int(OUTSIDE * len(ratios))
    return ratios[left_out], ratios[-1 - left_out]


def statistics_of(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median of ratios, the mean of the absolute values of their logarithms, and the part of them that is
    within `CLOSE` of 1."""
    return (
        statistics.median(ratios),
        statistics.fmean(abs(math.log(ratio)) for ratio in ratios),
        statistics.fmean(abs(ratio - 1) <= CLOSE for ratio in ratios),
    )


def _runs_like(case: Case, experts: int) -> tuple[Sequence[PublishedRun], str]:
    """Returns the published runs to compare a case with, of its kind or all if these are few, and their description."""
    kind = kind_of(case, experts)
    runs = [run for run in published_runs() if run.kind == kind]
    if len(runs) < FEWEST:
        return published_runs(), f", {len(runs) or 'none'} of this kind ({kind})"
    return runs, f" of this kind ({kind})"


def range_of(case: Case, experts: int = 1) -> tuple[float, float]:
    """Returns the least and the largest seconds of a case that published runs like it make likely, in parts of the
    predicted ones; `experts` of a layer of the model."""
    return error_of(_runs_like(case, experts)[0])


def error_line(case: Case, cluster: Cluster, experts: int = 1) -> str:
    """Returns the sentence about the error of a case.

    Args:
        case: the case.
        cluster: whose devices the sentence names, if no run is of them.
        experts: of a layer of the model.
    """
    runs, about = _runs_like(case, experts)
    low, high = (_side(ratio) for ratio in error_of(runs))
    device = cluster.device.name.lower().replace(" ", "")
    known = any(run.hardware in device for run in runs)
    where = "" if known else f", none on {cluster.device.name}"
    return f"Predictions of published runs{about}: {low} to {high}, {len(runs)} rows{where} (docs/doctor.md)."


def _side(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%} too {'fast' if ratio >= 1 else 'slow'}"
