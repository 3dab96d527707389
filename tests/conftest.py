"""Clusters of real processes, shared by all tests of a session."""

import gc
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support.cluster import Cluster

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its functions then run on the CPU

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
paths = [*map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # other processes find tests/support and benchmarks
os.environ["HELIX_CACHE"] = tempfile.mkdtemp(prefix="hf_helix-cache-")  # what one test measures, others find

# How many cases a test of properties takes: `make test` the same ones every time, `make fuzz` others.
settings.register_profile("ci", settings.get_profile("ci"), max_examples=25)
settings.register_profile("default", max_examples=200, deadline=None)


# Torch, Transformers and the tests themselves are a million objects that live as long as the session: the garbage
# collector would look through all of them again and again.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="add versions and outcomes to docs/versions.json")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--record"):
        from support import versions

        marks = ["slow, too"] if "not slow" not in config.getoption("-m") else []
        asked = [word for word in config.invocation_params.args if str(word).startswith("tests")]
        versions.record(terminalreporter.stats, [*map(str, asked), *marks])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def cluster_of() -> Iterator[Callable[[int], Cluster]]:
    """`cluster_of(2)` is a running cluster of two ranks; one that died or has many threads is replaced."""
    running: dict[int, Cluster] = {}

    def get(size: int) -> Cluster:
        for known in [known for known, cluster in running.items() if not cluster.is_alive or cluster.is_worn]:
            running.pop(known).close()
        if size not in running:
            running[size] = Cluster(size)
        return running[size]

    yield get
    for cluster in running.values():
        cluster.close()


@pytest.fixture(scope="session")
def stock(cluster_of: Callable[[int], Cluster], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`stock(train, **options)` is what a job gives under the stock Trainer, and its folder; each is run once.

    With `dp`, on so many processes (DDP). Options are those of the job, but for `folder` and `helix`.
    """
    known: dict[str, tuple[Any, str]] = {}

    def get(job: Callable[..., Any], dp: int = 1, **options: Any) -> tuple[Any, str]:
        key = repr((job.__module__, job.__name__, dp, sorted(options.items())))
        if key not in known:
            given = {"folder": str(tmp_path_factory.mktemp("stock")), "helix": None, **options}
            known[key] = job(**given) if dp == 1 else cluster_of(dp).run(job, **given)[0], given["folder"]
        return known[key]

    return get


@pytest.fixture
def like_stock(cluster_of: Callable[[int], Cluster], stock: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`like_stock(2, {"tp_size": 2}, **case)` trains a case on two ranks, and compares what is logged, evaluated and
    saved with the stock Trainer, on as many processes as there are data-parallel ranks; it returns all ranks' results.
    """
    from support import jobs
    from support.comparisons import compare_runs, compare_weights

    def compare(ranks: int, helix: dict[str, Any], job: Callable[..., Any] = jobs.train, **case: Any) -> list[Any]:
        dp = ranks // math.prod(helix.get(f"{axis}_size", 1) for axis in ("tp", "pp", "cp"))
        expected, folder = stock(job, dp, **case)
        results = cluster_of(ranks).run(job, folder=str(tmp_path / "helix"), helix=helix, **case)
        steps = case.get("training", {}).get("max_steps", 4)
        for result in results:
            compare_runs(result, expected, steps if steps > 0 else 4)
        compare_weights(tmp_path / "helix", folder)
        return results

    return compare
