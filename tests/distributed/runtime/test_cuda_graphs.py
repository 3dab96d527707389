"""Windows from graphs: the same bits as operator by operator, whatever changes from one window to the next."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fake_cuda import FakeCuda
from support.windows_on_fakes import one_rank
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import TrainingArguments

from benchmarks.gpu.models import batches, on, targets, tiny
from benchmarks.gpu.windows import engine_on, silent_mesh
from hf_helix import HelixConfig, HelixTrainer
from hf_helix.engine.engine import Engine
from hf_helix.engine.microbatches import LossScale
from hf_helix.operators.communication.transport import ProcessGroupTransport
from hf_helix.runtime import cuda_graphs as graphs
from hf_helix.runtime.cuda_graphs import CudaRecorder, WindowGraphs
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.notices import say
from hf_helix.runtime.streams import CudaStreams

# -- what the ranks run ------------------------------------------------------------------------------------------------

READS = ("_local_scalar_dense", "nonzero", "bincount", "masked_select")
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class FakeGraph(TorchDispatchMode):
    """The operators of a window, in the order of issue. Everything that they read or made stays alive."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self._tape: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        assert name not in READS, f"{name}: the host reads a value while a window is captured"
        result = func(*args, **(kwargs or {}))
        if name not in EMPTY and not _is_view(func):
            # The same memory, and nothing of autograd's, whose part was over when this was dispatched.
            given, made = tree_map_only(Tensor, _bare, ((args, kwargs or {}), result))
            # Collectives say of nothing that they write to it, and return what they were given.
            memory = {each.untyped_storage()._cdata for each in _tensors(given)}
            new = [each for each in _tensors(made) if each.untyped_storage()._cdata not in memory]
            self._tape.append((func, *given, new if len(new) == len(_tensors(made)) else []))
        return result

    @torch.no_grad()
    def poison(self) -> None:
        """Of the numbers that were made while recording, none is there before the first replay."""
        for func, *_, outputs in self._tape:
            if not func._schema.is_mutable:
                for output in outputs:
                    output.fill_(float("nan") if output.is_floating_point() else 0)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, outputs in self._tape:
            result = func(*args, **kwargs)
            if outputs and not func._schema.is_mutable:
                for output, value in zip(outputs, _tensors(result), strict=True):
                    output.copy_(value)

    def reset(self) -> None:
        self._tape.clear()


class FakeRecorder:
    """Attributes: graphs: that were recorded."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def record(self, work: Callable[[], Any]) -> tuple[Any, FakeGraph]:
        graph = FakeGraph()
        with graph:
            result = work()
        graph.poison()
        self.graphs.append(graph)
        return result, graph

    def forget(self) -> None:
        pass


def _bare(value: Tensor) -> Tensor:
    with torch.no_grad():
        return value.detach()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_view(func: Any) -> bool:
    """Whether it gives another view of a storage and touches nothing."""
    aliases = [each.alias_info for each in func._schema.returns]
    return bool(aliases) and all(info is not None and not info.is_write for info in aliases)


# -- the tests --------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
SMALL = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 512}


@contextlib.contextmanager
def engine_with(
    recorder: FakeRecorder | None, family: str = "llama", model: Any = None, autocast_dtype: Any = None, **options: Any
) -> Iterator[Engine]:
    """An engine of rank 0 of a layout; its windows come from graphs of a recorder."""
    sizes = {axis: options.pop(axis) for axis in ("tp", "cp", "ep") if axis in options}
    made = functools.partial(tiny, family, **{**SMALL, **(model or {})})
    options = {"plan": "greedy", **options}
    with engine_on(made, silent_mesh(CPU, **sizes), 2, autocast_dtype, **options) as engine:
        engine.runner.executor.streams.close()
        engine.runner.executor.streams = CudaStreams(CPU, FakeCuda())  # in this thread, where operators are seen
        engine.graphs = WindowGraphs(say, recorder) if recorder is not None else None
        yield engine


def trained(engine: Engine, lengths: tuple[tuple[int, ...], ...] = ((12, 8),) * 4) -> list[Any]:
    """Losses, norms and weights after some steps, each of a window of its own tokens and lengths."""
    optimizer = torch.optim.AdamW(engine.model.parameters(), lr=1e-2)
    result: list[Any] = []
    for step, each in enumerate(lengths):
        window = batches(2, lengths=each, seed=step + 1)
        scale = LossScale(torch.tensor(1 / targets(window)), 1 / 2)
        losses = engine.train_window(on(window, CPU), scale, step)
        result += [*losses, engine.clip_gradients(1.0)]
        optimizer.step()
        optimizer.zero_grad()
    # Read at the end, so that no later window may have overwritten them.
    figures = [float(figure) for figure in result]
    return [*figures, {name: value.detach().clone() for name, value in engine.model.named_parameters()}]


def same(result: list[Any], wanted: list[Any]) -> bool:
    *mine, my_weights = result
    *theirs, their_weights = wanted
    return mine == theirs and all(torch.equal(value, their_weights[name]) for name, value in my_weights.items())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one rank"),
        pytest.param({"tp": 2, "autocast_dtype": torch.bfloat16}, id="tp2 bf16"),
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
    options: dict[str, Any] = {"family": "phimoe", "ep": 2, "expert_capacity_factor": 4.0}
    entries = []
    for recorder in (None, FakeRecorder()):
        with engine_with(recorder, **options) as engine:
            trained(engine)
            routers = ("helix/router_z", "helix/expert_imbalance", "helix/dropped_tokens")
            logged = engine.log_entries()
            entries.append([logged[name] for name in routers])
    assert entries[0] == entries[1]
    assert entries[0][1] > 1


@plain_parameters()
def test_gradients_of_earlier_windows_are_added_to() -> None:
    window = batches(2, lengths=(12,))
    scale = LossScale(torch.tensor(1 / targets(window)), 1 / 2)
    result = []
    for recorder in (None, FakeRecorder()):
        with engine_with(recorder) as engine:
            for step in range(4):
                engine.train_window(on(window, CPU), scale, step)
            result.append({name: parameter.grad.clone() for name, parameter in engine.model.named_parameters()})
    assert all(torch.equal(result[1][name], gradient) for name, gradient in result[0].items())


def test_each_shape_has_a_graph_up_to_a_number(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
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


@pytest.mark.parametrize(
    ("others", "said"),
    [
        pytest.param(lambda step: [0, 0, 1], "another rank cannot capture it", id="another rank cannot"),
        pytest.param(lambda step: [step, 0, 0], "", id="the windows of another rank do not repeat"),
        pytest.param(lambda step: [0, 1, 0], "", id="the weights of another rank have moved"),
    ],
)
def test_no_rank_captures_alone(others: Any, said: str, monkeypatch: Any, capsys: Any) -> None:
    calls: list[int] = []

    def with_another(mine: list[int]) -> list[int]:
        calls.append(1)
        return [here + there for here, there in zip(mine, others(len(calls)), strict=True)]

    monkeypatch.setattr(graphs, "sum_over_ranks", with_another)
    recorder = FakeRecorder()
    with engine_with(recorder) as engine:
        trained(engine)
    assert not recorder.graphs
    assert said in capsys.readouterr().out


def test_graphs_end_before_the_process_groups(monkeypatch: Any) -> None:
    order: list[str] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: order.append("groups"))
    monkeypatch.setattr(FakeGraph, "reset", lambda graph: order.append("graph"))
    graphs._release_before_groups.cache_clear()
    with engine_with(FakeRecorder()) as engine:
        trained(engine)
        dist.destroy_process_group()
    graphs._release_before_groups.cache_clear()
    assert order == ["graph", "groups"]


def test_the_trainer_learns_the_same(tmp_path: Path) -> None:
    rows = [{name: value[0] for name, value in batch.items()} for batch in batches(16, rows=1, lengths=(8,))]
    logs, recorder = [], FakeRecorder()
    for used in (None, recorder):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=5,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            logging_steps=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = HelixTrainer(tiny("llama", **SMALL), arguments, train_dataset=rows, helix_config=HelixConfig())
        trainer.helix.graphs = WindowGraphs(say, used) if used is not None else None
        trainer.train()
        logs.append([(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry])
    assert logs[0] == logs[1]
    assert [graph.replays for graph in recorder.graphs] == [4]


def test_what_cannot_be_captured_is_said(capsys: Any) -> None:
    with engine_on(functools.partial(tiny, "llama", **SMALL), silent_mesh(CPU), 2, cuda_graphs=True) as engine:
        assert engine.graphs is None
    assert "windows run without CUDA graphs: the model is on a cpu device" in capsys.readouterr().out


class Capture(contextlib.AbstractContextManager[None]):
    """`torch.cuda.graph`, of which the end fails where what was captured did."""

    def __init__(self, *given: Any, **options: Any) -> None:
        pass

    def __exit__(self, kind: Any, *error: object) -> None:
        if kind is not None:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_a_window_that_cannot_be_captured_says_why(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))

    def waiting() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    wanted = r"\(RuntimeError: operation not permitted when stream is capturing\); use HelixConfig\(cuda_graphs=False\)"
    with pytest.raises(RuntimeError, match=wanted):
        CudaRecorder().record(waiting)


def test_weights_that_are_gathered_once_are_those_that_were_stepped(monkeypatch: Any) -> None:
    """One rank of two that each step a part, whose collectives move nothing: a replay casts what was stepped since."""

    def keep_own_part(self: Any, out: Tensor, value: Tensor) -> None:  # torch 2.11's fake group would write nothing
        out.copy_(value.chunk(self.size)[self.rank])

    monkeypatch.setattr(ProcessGroupTransport, "reduce_scatter", keep_own_part)
    result = []
    recorder = FakeRecorder()
    for captured in (None, WindowGraphs(say, recorder)):
        options: dict[str, Any] = {"dp": 2, "shard_optimizer": True, "autocast_dtype": torch.bfloat16}
        with one_rank(FakeCuda(), **options) as (runner, window):
            optimizer = torch.optim.AdamW(runner.stage.stepped, lr=1e-2)
            losses = []
            for _ in range(4):
                losses.append(captured.train_window(runner, window) if captured else runner.train_window(window))
                optimizer.step()
                optimizer.zero_grad()
                losses.append([runner.evaluate(window[:1])[0]])
            result.append([torch.stack([loss for each in losses for loss in each]), *runner.stage.stepped])
    assert [graph.replays for graph in recorder.graphs] == [3]
    assert len(result[0][0].unique()) > 8
    assert all(torch.equal(mine, wanted) for wanted, mine in zip(*result, strict=True))
