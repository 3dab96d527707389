"""A few real processes with a real gloo process group, kept alive over many tests.

A job is a module-level function, or the name of one, "module:function" or "function" of `support.jobs`; it is called on
every rank at once with the same arguments. Ranks import the module by its name, so that the jobs of a test may stand in
its own file. Ranks are forked from one process that has imported everything, which takes it about eight seconds; that
process runs no job and has no process group.
"""

import gc
import importlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

JOB_TIMEOUT = 240
MOST_THREADS = 60
"""Each gloo group has a thread that wakes every 10 ms, used or not: with hundreds of them in each of 14 ranks, the
machine did little else. Ranks keep the groups of every mesh that they made."""
Job = str | Callable[..., Any]


@dataclass
class Failure:
    """An exception of one rank."""

    kind: str
    message: str
    trace: str


class JobFailed(AssertionError):
    """At least one rank raised."""


class Cluster:
    def __init__(self, size: int) -> None:
        self.size = size
        context, port = forking(), free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: Job, **arguments: Any) -> list[Any]:
        """The results of every rank; fails if one of them raised."""
        results = self.attempt(job, **arguments)
        if raised := traces_of(dict(enumerate(results))):
            raise JobFailed("\n".join(raised))
        return results

    def errors(self, job: Job, **arguments: Any) -> list[Failure]:
        """The exceptions of every rank; fails if one of them did not raise."""
        results = self.attempt(job, **arguments)
        assert all(isinstance(result, Failure) for result in results), results
        return results

    def assert_raises(
        self, job: Job, *words: str, raises: str = "ValueError", alike: bool = False, **arguments: Any
    ) -> list[str]:
        """Asserts that every rank raises an error whose message has all words; returns the messages.

        Args:
            raises: the class of the error.
            alike: whether the messages are the same on all ranks.
        """
        failures = self.errors(job, **arguments)
        for failure in failures:
            assert failure.kind == raises, failure.trace
            assert [word for word in words if word not in failure.message] == [], failure.message
        said = [failure.message for failure in failures]
        assert not alike or len(set(said)) == 1, said
        return said

    def attempt(self, job: Job, **arguments: Any) -> list[Any]:
        name = job if isinstance(job, str) else f"{job.__module__}:{job.__name__}"
        for pipe in self._pipes:
            pipe.send((name, arguments))
        results: dict[int, Any] = {}
        while len(results) < self.size:
            pending = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(pending, timeout=JOB_TIMEOUT)
            if not ready:
                self.close()
                hanging = f"{name} hangs on ranks {sorted(set(range(self.size)) - results.keys())}"
                raise JobFailed("\n".join([hanging, *traces_of(results)]))
            for pipe in ready:
                results[self._pipes.index(pipe)] = pipe.recv()  # type: ignore[arg-type, union-attr]
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    @property
    def is_worn(self) -> bool:
        """Whether a rank has more than `MOST_THREADS`."""
        return any(len(os.listdir(f"/proc/{process.pid}/task")) > MOST_THREADS for process in self._processes)


def traces_of(results: Mapping[int, Any]) -> list[str]:
    """The traces of the ranks whose result is a failure."""
    return [f"rank {rank}: {result.trace}" for rank, result in results.items() if isinstance(result, Failure)]


def forking() -> ForkServerContext:
    """Makes processes by forking the one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.preloaded"])
    return context


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch
    from support.tuning_jobs import hasty, world

    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays; collections need not look at it each time
    assert world() == size  # the process group is there from the first job on
    with hasty():
        _work(pipe)


def _work(pipe: Connection) -> None:
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            return
        try:
            module, _, function = job.rpartition(":")
            result = getattr(importlib.import_module(module or "support.jobs"), function)(**arguments)
        except Exception as error:
            result = Failure(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(result)
