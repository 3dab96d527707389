"""The Trainer over a pipeline and over data-parallel ranks, for a `Cluster`."""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from support import jobs
from support.tuning_jobs import hasty

from hf_helix.planning import traffic
from hf_helix.planning.window.layout import with_traffic
from hf_helix.runtime.gradients.buckets import planned_buckets
from hf_helix.runtime.runner import Runner


def model_of(**changes: Any) -> dict[str, Any]:
    """Four virtual stages, and one that holds more than the others."""
    return {"num_hidden_layers": 5, **changes}


@contextlib.contextmanager
def buckets_of(size: int) -> Iterator[None]:
    """Gradients are summed in buckets of so many bytes; 0 for the usual size."""
    with mock.patch.object(traffic, "BUCKET_BYTES", size or traffic.BUCKET_BYTES):
        yield


def with_buckets(runner: Runner, size: int) -> Runner:
    """The runner with buckets of another size."""
    with buckets_of(size):
        units = runner.rank_units
        plain = replace(units.layout, traffic=())
        layout = with_traffic(plain, planned_buckets(units.rows, units.all_units, plain, runner.mesh.place), ())
        rank_units, streams = replace(units, layout=layout), runner.executor.streams
        return Runner(rank_units, runner.plan, runner.mesh, streams, runner.scheduler, runner.seed)


def train(folder: str, helix: dict[str, Any] | None, bucket_bytes: int = 0, **options: Any) -> dict[str, Any]:
    """As `jobs.train`."""
    options["model"] = model_of(**options.get("model", {}))
    with buckets_of(bucket_bytes), hasty(), contextlib.redirect_stdout(io.StringIO()):
        return jobs.train(folder, helix, **options)
