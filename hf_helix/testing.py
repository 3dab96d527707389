"""Tests of model families: a cut model is compared with the unsplit model.

In:   a model, a configuration or the name of a class, and layouts.
Out:  a `Proof` for each layout; an AssertionError with the differences.
Must hold: the calling process needs no launcher and does not change: ranks are separate processes on the CPU with gloo,
ended with the call. Within a process group, its ranks and devices are used instead. A failure of a rank ends the other
ranks and is reported.
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
from hf_helix.runtime.distributed.endings import remote_description
from hf_helix.runtime.distributed.mesh import forget_meshes, mesh_of, world_size

LayoutOptions = Mapping[str, Any]
"""Options of `HelixConfig`, such as `{"tp_size": 2}`."""

TIMEOUT = 1800.0
"""The default seconds after which silent ranks are ended."""


def check_family(
    model: Any,
    layouts: Sequence[LayoutOptions] | None = None,
    *,
    as_is: bool = False,
    imports: Sequence[str] = (),
) -> list[Proof]:
    """Asserts that a model, cut in several ways, equals the unsplit model.

    Losses, every gradient by name and the logits of `predict()` are compared, on random weights large enough for caps,
    norms and windows to matter, with rows that are padded, packed, and of lengths that do not divide.

    Args:
        model: a model, a configuration, or the name of a causal-LM class. Weights are random and scaled, and a
            configuration is made small first.
        layouts: options of `HelixConfig`, a mapping for each layout; None for tensor parallelism, pipeline and both,
            context and, with experts, expert parallelism, each over two ranks.
        as_is: whether a configuration keeps its sizes.
        imports: modules that register families; modules of families registered before the call are known.

    Returns:
        A proof for each layout, refused default layouts among them.

    Raises:
        AssertionError: a value differs, a rank fails, a given layout is refused, or all default layouts are.
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
    """Yields the proof of every layout at once when it is found; see `check_family`.

    Args:
        subject: the model.
        layouts: see `check_family`.
        imports: see `check_family`.
        say: called with every layout before its proof.
        timeout: the seconds after which silent ranks are ended.
    """
    configs = configs_for(subject, layouts)
    if world_size() > 1:
        for config in configs:
            say(layout_text(config))
            yield _prove_here(subject, config)
        return
    modules = list(dict.fromkeys([*registered_elsewhere(), *imports]))
    with _Ranks(modules, timeout) as ranks:
        for config in configs:
            say(layout_text(config))
            yield ranks.prove(subject, config)


def configs_for(subject: Subject, layouts: Sequence[LayoutOptions] | None) -> list[HelixConfig]:
    """Returns the given layouts, or the default layouts that the processes allow."""
    if layouts is not None:
        return [HelixConfig(**options) for options in layouts]
    configs = [HelixConfig(**options) for options in default_layouts(subject.build())]
    world = world_size()
    return [config for config in configs if world == 1 or world % num_ranks(config) == 0]


def num_ranks(config: HelixConfig) -> int:
    """Returns the number of processes that a layout needs."""
    return config.ranks_per_batch * config.ep_size


def _prove_here(subject: Subject, config: HelixConfig) -> Proof:
    """A proof on the ranks of the present process group. Collective."""
    try:
        mesh = on_all_ranks(lambda: mesh_of(replace(config, link=None), _device()))
        model = on_all_ranks(lambda: subject.build(config))
    except Exception as error:
        return _failed(subject, config, error)
    return prove(model, config, mesh, uncovered=subject.uncovered(model))


def _failed(subject: Subject, config: HelixConfig, error: Exception) -> Proof:
    """The proof of a layout without a mesh or a model. Collective."""
    trace = "" if isinstance(error, ValueError) else traceback.format_exc()  # a ValueError tells users enough
    traces = all_gather_object("" if remote_description(error) else trace)
    return Proof(subject.name, layout_text(config), failure=shared_reason(error), trace=next(filter(None, traces), ""))


def _device() -> torch.device:
    """The device of this rank in the present process group."""
    is_nccl = "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def layout_text(config: HelixConfig) -> str:
    """Returns the layout of a configuration, as text."""
    return describe({axis: getattr(config, f"{axis}_size") for axis in SIZES})


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for text in lines for line in text.splitlines()]


# -- ranks of our own ----------------------------------------------------------------------------------------------


class _Failure(NamedTuple):
    """An exception on a rank."""

    summary: str
    trace: str


class _Ranks:
    """Processes, made when needed, that are ranks of a layout after another.

    Args:
        imports: the modules that each process imports first.
        timeout: the seconds after which silent ranks are ended.
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
        """Returns the proof of a layout. After a failure all ranks are ended, and new ranks serve the next layout."""
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
        return Proof(subject.name, layout_text(config), failure=failed.summary, trace=failed.trace)

    def _enough(self, count: int) -> list[tuple[Any, Connection]]:
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._imports), daemon=True)  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        return self._workers[:count]

    def _answers(self, workers: Sequence[tuple[Any, Connection]]) -> list[Any]:
        """The answers of the ranks, up to the first failure: other ranks may wait for the failed rank for ever."""
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
    """The loop of a rank: proves the received subjects until the pipe is closed."""
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
    """A proof in a process group of its own; ranks find each other by the file `meeting`."""
    for module in imports:
        importlib.import_module(module)
    if world == 1:
        model = subject.build(config)
        return prove(model, config, mesh_of(HelixConfig(), "cpu"), uncovered=subject.uncovered(model))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    proof = _prove_here(subject, config)
    forget_meshes()
    dist.destroy_process_group()
    sys.stdout.flush()
    return proof
