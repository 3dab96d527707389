"""Windows from graphs: the same bits as operator by operator, whatever changes from one window to the next."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda
from support.fake_graphs import FakeRecorder

from benchmarks.gpu.models import batches, on, targets, tiny
from benchmarks.gpu.windows import engine_on, silent_mesh
from hf_helix.engine import Engine, Scale
from hf_helix.runtime import graphs
from hf_helix.runtime.graphs import WindowGraphs
from hf_helix.runtime.streams import CudaStreams

CPU = torch.device("cpu")
SMALL = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 512}


@contextlib.contextmanager
def engine_with(
    recorder: FakeRecorder | None, family: str = "llama", model: Any = None, products: Any = None, **options: Any
) -> Iterator[Engine]:
    """An engine of rank 0 of a layout; its windows come from graphs of a recorder."""
    sizes = {axis: options.pop(axis) for axis in ("tp", "cp", "ep") if axis in options}
    made = functools.partial(tiny, family, **{**SMALL, **(model or {})})
    options = {"plan": "greedy", **options}
    with engine_on(made, silent_mesh(CPU, **sizes), 2, products, **options) as engine:
        engine.runner.executor.streams.close()
        engine.runner.executor.streams = CudaStreams(CPU, FakeCuda())  # in this thread, where operators are seen
        engine.graphs = WindowGraphs(recorder) if recorder is not None else None
        yield engine


def trained(engine: Engine, lengths: tuple[tuple[int, ...], ...] = ((12, 8),) * 4) -> list[Any]:
    """Losses, norms and weights after some steps, each of a window of its own tokens and lengths."""
    optimizer = torch.optim.AdamW(engine.model.parameters(), lr=1e-2)
    found: list[Any] = []
    for step, each in enumerate(lengths):
        window = batches(2, lengths=each, seed=step + 1)
        scale = Scale(torch.tensor(1 / targets(window)), 1 / 2)
        losses = engine.train_window(on(window, CPU), scale, step)
        found += [[loss.item() for loss in losses], float(engine.clip_gradients(1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, {name: value.detach().clone() for name, value in engine.model.named_parameters()}]


def same(found: list[Any], wanted: list[Any]) -> bool:
    *mine, my_weights = found
    *theirs, their_weights = wanted
    return mine == theirs and all(torch.equal(value, their_weights[name]) for name, value in my_weights.items())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one rank"),
        pytest.param({"tp": 2, "products": torch.bfloat16}, id="tp2 bf16"),
        pytest.param({"cp": 2}, id="cp2"),
        pytest.param({"tp": 2, "recompute": "full"}, id="tp2 recompute"),
        pytest.param({"family": "gpt2", "model": {"n_inner": 32}}, id="tied weights"),
    ],
)
def test_steps_are_those_of_windows_operator_by_operator(options: dict[str, Any]) -> None:
    with engine_with(None, **options) as engine:
        wanted = trained(engine)
    recorder = FakeRecorder()
    with engine_with(recorder, **options) as engine:
        assert same(trained(engine), wanted)
    assert [graph.replays for graph in recorder.graphs] == [3]


def test_routers_are_counted_on() -> None:
    options: dict[str, Any] = {"family": "mixtral", "ep": 2, "expert_capacity_factor": 4.0}
    entries = []
    for recorder in (None, FakeRecorder()):
        with engine_with(recorder, **options) as engine:
            trained(engine)
            routers = ("helix/router_z", "helix/expert_imbalance", "helix/dropped_tokens")
            logged = engine.log_entries()
            entries.append([logged[name] for name in routers])
    assert entries[0] == entries[1]
    assert entries[0][1] > 1


def test_gradients_of_earlier_windows_are_added_to() -> None:
    window = batches(2, lengths=(12,))
    scale = Scale(torch.tensor(1 / targets(window)), 1 / 2)
    found = []
    for recorder in (None, FakeRecorder()):
        with engine_with(recorder) as engine:
            for step in range(4):
                engine.train_window(on(window, CPU), scale, step)
            found.append({name: parameter.grad.clone() for name, parameter in engine.model.named_parameters()})
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())


def test_each_shape_has_a_graph_up_to_a_number(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    lengths = ((12, 8), (8, 12), (16, 16)) * 3
    with engine_with(None) as engine:
        wanted = trained(engine, lengths)
    recorder = FakeRecorder()
    with engine_with(recorder) as engine:
        assert same(trained(engine, lengths), wanted)
    assert [graph.replays for graph in recorder.graphs] == [2, 2]
    assert capsys.readouterr().out.count("windows of 2 different shapes are kept as CUDA graphs") == 1


def test_weights_that_lie_elsewhere_are_captured_anew() -> None:
    recorder = FakeRecorder()
    with engine_with(recorder) as engine:
        trained(engine)
        for parameter in engine.model.parameters():
            parameter.data = parameter.data * 2
        moved = trained(engine)
    with engine_with(None) as engine:
        trained(engine)
        for parameter in engine.model.parameters():
            parameter.data = parameter.data * 2
        assert same(moved, trained(engine))
    assert [graph.replays for graph in recorder.graphs] == [3, 3]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"family": "gpt2", "model": {"n_inner": 32, "resid_pdrop": 0.1}}, "attn.dropout draws random numbers"),
        ({"model": {"attention_dropout": 0.1}}, "draws random numbers"),
    ],
)
def test_windows_that_draw_are_not_captured(options: dict[str, Any], reason: str, capsys: Any) -> None:
    recorder = FakeRecorder()
    with engine_with(recorder, **options) as engine:
        trained(engine)
    assert not recorder.graphs
    assert capsys.readouterr().out.count(reason) == 1


def test_hooks_run_in_every_window(capsys: Any) -> None:
    recorder, calls = FakeRecorder(), []
    with engine_with(recorder) as engine:
        trained(engine)
        before = len(recorder.graphs)
        engine.model.model.norm.register_forward_hook(lambda *_: calls.append(1))
        trained(engine)
    assert before == len(recorder.graphs) == 1
    assert len(calls) == 4 * 2
    assert "has hooks" in capsys.readouterr().out


def test_what_cannot_be_captured_is_said(capsys: Any) -> None:
    with engine_on(functools.partial(tiny, "llama", **SMALL), silent_mesh(CPU), 2, cuda_graphs=True) as engine:
        assert engine.graphs is None
    assert "windows run without CUDA graphs: the model is on a cpu device" in capsys.readouterr().out


def test_a_window_that_fails_to_be_captured_says_what_to_do(monkeypatch: Any) -> None:
    class Failing(FakeRecorder):
        def record(self, work: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    with engine_with(Failing()) as engine, pytest.raises(RuntimeError, match=r"HelixConfig\(cuda_graphs=False\)"):
        trained(engine)
