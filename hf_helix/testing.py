"""Tests of model families: is a cut model equal to the unsplit one?

In:   a model, a configuration or the name of a class, and layouts.
Out:  a `Proof` for each layout; an AssertionError that says what differs.
Must hold: the calling process needs no launcher, nor does it change: ranks are processes of their own, on the CPU with
gloo, which end with the call. Inside a process group that is there already, its ranks and devices are used instead.
What fails on a rank ends the other ranks and is said.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hf_helix.config import HelixConfig
from hf_helix.engine.proof.prove import SIZES, Subject, default_layouts, describe, prove, shared_reason
from hf_helix.engine.proof.verdict import Proof
from hf_helix.models.registry import registered_elsewhere
from hf_helix.runtime.distributed.agreement import all_gather_object, on_all_ranks
from hf_helix.runtime.distributed.groups import share_process
from hf_helix.runtime.distributed.mesh import build_mesh, forget_meshes, mesh_of, world_size
from hf_helix.runtime.failures.endings import remote_description

LayoutOptions = Mapping[str, Any]
"""Options of `HelixConfig`, such as `{"tp_size": 2}`."""

TIMEOUT = 1800.0
"""The seconds after which ranks that have not answered are ended, where nothing else is said."""


def check_family(
    model: Any,
    layouts: Sequence[LayoutOptions] | None = None,
    *,
    as_is: bool = False,
    imports: Sequence[str] = (),
) -> list[Proof]:
    """Asserts that a model, cut in several ways, computes what it computes unsplit.

    Compared are losses, every gradient by name and the logits that `predict()` gives, on random weights that are large
    enough for caps, norms and windows to matter, with rows that are padded, packed, and of lengths that do not divide.

    Args:
        model: a model, a configuration, or the name of a causal-LM class. Weights are random and scaled, and a
            configuration is made small first.
        layouts: options of `HelixConfig`, one mapping for each layout; None for tensor parallelism, pipeline and both,
            context and, with experts, expert parallelism, each over two ranks.
        as_is: whether a configuration is taken as it is.
        imports: modules that register families. Those of families that are registered when this is called are known.

    Returns:
        A proof for each layout. Of the default layouts, those that the family refuses are among them.

    Raises:
        AssertionError: something differs or fails, a layout that was asked for is refused, or all are.
    """
    proofs = list(prove_layouts(Subject.of(model, as_is), layouts, imports))
    bad = [proof for proof in proofs if proof.verdict in ("different", "failed")]
    bad += [proof for proof in proofs if proof.refusal and (layouts is not None or not any(p.ok for p in proofs))]
    if bad:
        raise AssertionError("\n".join(line for proof in bad for line in (str(proof), *_indented(proof.lines))))
    return proofs


def prove_layouts(
    subject: Subject,
    layouts: Sequence[LayoutOptions] | None = None,
    imports: Sequence[str] = (),
    say: Callable[[str], None] = lambda layout: None,
    timeout: float = TIMEOUT,
) -> Iterator[Proof]:
    """Yields the proof of every layout as it is found; see `check_family`.

    Args:
        subject: what is proven.
        layouts: see `check_family`.
        imports: see `check_family`.
        say: called with every layout before it is proven.
        timeout: the seconds after which ranks that have not answered are ended.
    """
    configs = configs_for(subject, layouts)
    if world_size() > 1:
        share_process((config.pp_size for config in configs), _device())
        for config in configs:
            say(_layout(config))
            yield _prove_here(subject, config)
        return
    modules = list(dict.fromkeys([*registered_elsewhere(), *imports]))
    with _Ranks(modules, timeout) as ranks:
        for config in configs:
            say(_layout(config))
            yield ranks.prove(subject, config)


def configs_for(subject: Subject, layouts: Sequence[LayoutOptions] | None) -> list[HelixConfig]:
    """Returns the layouts that are proven: those that are asked for, or the default ones that the processes allow."""
    if layouts is not None:
        return [HelixConfig(**options) for options in layouts]
    configs = [HelixConfig(**options) for options in default_layouts(subject.build())]
    world = world_size()
    return [config for config in configs if world == 1 or world % num_ranks(config) == 0]


def num_ranks(config: HelixConfig) -> int:
    """Returns the number of processes that a layout needs."""
    return config.ranks_per_batch * config.ep_size


def _prove_here(subject: Subject, config: HelixConfig) -> Proof:
    """A proof on the ranks of the process group that is there. Collective."""
    try:
        mesh = on_all_ranks(lambda: mesh_of(replace(config, link=None), _device()))
        model = on_all_ranks(lambda: subject.build(config))
    except Exception as error:
        return _failed(subject, config, error)
    return prove(model, config, mesh)


def _failed(subject: Subject, config: HelixConfig, error: Exception) -> Proof:
    """The proof of a layout that ranks could not be given. Collective."""
    trace = "" if isinstance(error, ValueError) else traceback.format_exc()  # a ValueError says all that users need
    traces = all_gather_object("" if remote_description(error) else trace)
    return Proof(subject.name, _layout(config), failure=shared_reason(error), trace=next(filter(None, traces), ""))


def _device() -> torch.device:
    """Where the tensors of this rank lie in the process group that is there."""
    is_nccl = "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _layout(config: HelixConfig) -> str:
    """The layout of a configuration as proofs name it."""
    return describe({axis: getattr(config, f"{axis}_size") for axis in SIZES})


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for text in lines for line in text.splitlines()]


# -- ranks of our own ----------------------------------------------------------------------------------------------


class _Failure(NamedTuple):
    """An exception on a rank."""

    summary: str
    trace: str


class _Ranks:
    """Processes that are ranks of one layout after the other, made when they are needed.

    Args:
        imports: the modules that each of them imports first.
        timeout: the seconds after which those that have not answered are ended.
    """

    def __init__(self, imports: Sequence[str], timeout: float) -> None:
        self._imports = list(imports)
        self._timeout = timeout
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="hf_helix-")
        self._number = 0
        # A server that has imported everything forks a rank in no time; on Windows every rank imports by itself.
        kind = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        self._context = multiprocessing.get_context(kind)
        if kind == "forkserver":
            self._context.set_forkserver_preload([__name__])

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        self._folder.cleanup()

    def prove(self, subject: Subject, config: HelixConfig) -> Proof:
        """Returns the proof of a layout. Where a rank fails, all are ended and new ones serve the next layout."""
        world = num_ranks(config)
        self._number += 1
        meeting = str(Path(self._folder.name, f"store{self._number}"))
        workers = self._enough(world)
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((subject, config, meeting, rank, world))
        answers = self._answers(workers)
        failed = next((answer for answer in answers if isinstance(answer, _Failure)), None)
        if failed is None:
            proof: Proof = answers[0]
            return proof
        self._end()
        return Proof(subject.name, _layout(config), failure=failed.summary, trace=failed.trace)

    def _enough(self, count: int) -> list[tuple[Any, Connection]]:
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._imports), daemon=True)  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        return self._workers[:count]

    def _answers(self, workers: Sequence[tuple[Any, Connection]]) -> list[Any]:
        """What the ranks answer; ends with the first failure, since the others may wait for that rank for ever."""
        answers: list[Any] = []
        pending = {pipe: process for process, pipe in workers}
        while pending:
            ready = wait(list(pending), self._timeout)
            if not ready:
                return [_Failure(f"{len(pending)} ranks have not answered for {self._timeout:.0f} s", "")]
            for pipe in ready:
                assert isinstance(pipe, Connection)
                process = pending.pop(pipe)
                try:
                    answers.append(pipe.recv())
                except EOFError:
                    process.join()
                    return [_Failure(f"a rank died with exit code {process.exitcode}", "")]
                if isinstance(answers[-1], _Failure):
                    return answers
        return answers

    def _end(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []


def _serve(pipe: Connection, imports: Sequence[str]) -> None:
    """A rank: proves what it is sent until the pipe is closed."""
    torch.set_num_threads(1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # of a launcher that started the calling process alone
    with contextlib.suppress(EOFError, OSError):
        while True:
            job = pipe.recv()
            try:
                answer: Proof | _Failure = _prove_as_rank(imports, *job)
            except Exception as error:
                answer = _Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
            pipe.send(answer)


def _prove_as_rank(
    imports: Sequence[str], subject: Subject, config: HelixConfig, meeting: str, rank: int, world: int
) -> Proof:
    """One proof in a process group of its own.

    Args:
        imports: the modules to import first.
        subject: what is proven.
        config: the layout.
        meeting: the file by which the ranks find each other.
        rank: this rank.
        world: the number of ranks.
    """
    for module in imports:
        importlib.import_module(module)
    if world == 1:
        return prove(subject.build(config), config, build_mesh(1, "cpu"))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    proof = _prove_here(subject, config)
    forget_meshes()
    dist.destroy_process_group()
    sys.stdout.flush()
    return proof
