"""Windows from graphs: the same bits as operator by operator, whatever changes from one window to the next."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fake_cuda import FakeCuda, is_view, tensors_in
from support.marks import slow
from support.models import adapted
from support.windows_on_fakes import one_rank, train_windows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import TrainingArguments

from benchmarks.gpu.models import batches, on, targets, tiny
from benchmarks.gpu.windows import engine_on, silent_mesh
from hf_helix import HelixConfig, HelixTrainer
from hf_helix.engine.cut.microbatches import LossScale
from hf_helix.engine.cut.snapshot import Snapshot
from hf_helix.engine.engine import Engine
from hf_helix.measure.overlap import measure_overlap
from hf_helix.operators.communication.collectives import LaneChannel
from hf_helix.operators.communication.transport import ProcessGroupTransport
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.runtime import cuda_graphs as graphs
from hf_helix.runtime.cuda_graphs import CapturedDraws, CudaRecorder, WindowGraphs
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.notices import say
from hf_helix.runtime.streams.streams import CudaStreams
from hf_helix.tuning.budget import Tier
from hf_helix.tuning.tuner import tune

# -- what the ranks run ------------------------------------------------------------------------------------------------

READS = ("_local_scalar_dense", "nonzero", "bincount", "masked_select")
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class FakeGraph(TorchDispatchMode):
    """The operators of a window, in the order of issue. Everything that they read or made stays alive."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self.is_alive = True
        self.generators: list[torch.Generator] = []
        self.default: torch.Generator | None = None  # whose state torch's own has at present
        self._tape: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        assert name not in READS, f"{name}: the host reads a value while a window is captured"
        result = func(*args, **(kwargs or {}))
        if name not in EMPTY and not is_view(func._schema):
            # The same memory, and nothing of autograd's, whose part was over when this was dispatched.
            given, made = tree_map_only(Tensor, _bare, ((args, kwargs or {}), result))
            # Collectives say of nothing that they write to it, and return what they were given.
            memory = {each.untyped_storage()._cdata for each in tensors_in(given)}
            new = [each for each in tensors_in(made) if each.untyped_storage()._cdata not in memory]
            self._tape.append((func, *given, new if len(new) == len(tensors_in(made)) else [], self.default))
        return result

    @torch.no_grad()
    def poison(self) -> None:
        """Of the numbers that were made while recording, none is there before the first replay."""
        for func, *_, outputs, _ in self._tape:
            if not func._schema.is_mutable:
                for output in outputs:
                    output.fill_(float("nan") if output.is_floating_point() else 0)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, outputs, default in self._tape:
            with swapped(default):
                result = func(*args, **kwargs)
            if outputs and not func._schema.is_mutable:
                for output, value in zip(outputs, tensors_in(result), strict=True):
                    output.copy_(value)

    def reset(self) -> None:
        self.is_alive = False
        self._tape.clear()


@contextlib.contextmanager
def swapped(generator: torch.Generator | None) -> Iterator[None]:
    """On a CPU, whose generator cannot have the state of another one: a copy of the state, there and back."""
    if generator is None:
        yield
        return
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    yield
    generator.set_state(torch.default_generator.get_state())
    torch.default_generator.set_state(before)


class FakeDraws(CapturedDraws):
    """Tells the graph from which generator torch's own functions draw."""

    graph: FakeGraph

    @contextlib.contextmanager
    def seeded(self, device: torch.device, seed: int) -> Iterator[None]:
        self.graph.default = self.generator(device, seed)
        with swapped(self.graph.default):
            yield
        self.graph.default = None


class FakeRecorder:
    """Attributes: graphs: that were recorded; fails: which captures fail, by their numbers; room: for other windows."""

    draws = FakeDraws
    bytes_held = 3_000_000_000

    def __init__(self, fails: Sequence[int] = (), cuda: FakeCuda | None = None) -> None:
        self.graphs: list[FakeGraph] = []
        self.fails = fails
        self.room = True
        self.num_asked = 0
        self.cuda = cuda or FakeCuda()

    def record(self, work: Callable[[], Any], draws: FakeDraws) -> tuple[Any, FakeGraph]:
        self.num_asked += 1
        draws.graph = graph = FakeGraph()
        self.cuda.captures = True
        try:
            with graph:
                result = work()
        finally:
            self.cuda.captures = False
        if self.num_asked in self.fails:
            raise RuntimeError("OutOfMemoryError: no memory is left")
        graph.poison()
        graph.generators = draws.generators
        self.graphs.append(graph)
        return result, graph

    def has_room(self) -> bool:
        return self.room

    def forget(self) -> None:
        pass


def _bare(value: Tensor) -> Tensor:
    with torch.no_grad():
        return value.detach()


# -- the tests --------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
SMALL = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 512}


@contextlib.contextmanager
def engine_with(
    recorder: FakeRecorder | None,
    family: str = "llama",
    model: Any = None,
    autocast_dtype: Any = None,
    adapters: Any = None,
    option: Any = True,
    **options: Any,
) -> Iterator[Engine]:
    """An engine of rank 0 of a layout; its windows come from graphs of a recorder."""
    sizes = {axis: options.pop(axis) for axis in ("tp", "cp", "ep") if axis in options}
    made = functools.partial(tiny, family, **{**SMALL, **(model or {})})
    if adapters is not None:
        made = functools.partial(adapted, made(), **adapters)
    options = {"plan": "greedy", **options}
    with engine_on(made, silent_mesh(CPU, **sizes), 2, autocast_dtype, **options) as engine:
        engine.runner.executor.streams.close()
        cuda = recorder.cuda if recorder is not None else FakeCuda()
        engine.runner.executor.streams = CudaStreams(CPU, cuda)  # in this thread, where operators are seen
        called = [module for unit in engine.runner.rank_units.units.values() for module in unit.modules_run_as_is]
        switches = Snapshot(engine.model, called).switches
        engine.session.graphs = WindowGraphs(say, recorder, option, switches) if recorder is not None else None
        yield engine


Lengths = tuple[tuple[int, ...], ...]
"""Of the sequences of every micro-batch, step by step."""


def trained(engine: Engine, lengths: Lengths = ((12, 8),) * 4) -> list[Any]:
    """Losses, norms and weights after some steps, each of a window of its own tokens and lengths."""
    optimizer = torch.optim.AdamW(engine.model.parameters(), lr=1e-2)
    result: list[Any] = []
    for step, each in enumerate(lengths):
        window = batches(2, lengths=each, seed=step + 1)
        scale = LossScale(torch.tensor(1 / targets(window)), 1 / 2)
        losses = engine.session.train_window(on(window, CPU), scale, step)
        result += [*losses, engine.weights.clip_gradients(1.0)]
        optimizer.step()
        optimizer.zero_grad()
    # Read at the end, so that no later window may have overwritten them.
    figures = [float(figure) for figure in result]
    return [*figures, {name: value.detach().clone() for name, value in engine.model.named_parameters()}]


def replayed(recorder: FakeRecorder, lengths: Lengths = ((12, 8),) * 4, **options: Any) -> list[int]:
    """How often each graph of a recorder is replayed in a training, which has the bits of one without graphs.

    It leaves the default generator as that one does.
    """
    without_graphs = {name: value for name, value in options.items() if name != "option"}
    with engine_with(None, **without_graphs) as engine:
        wanted = trained(engine, lengths)
    drawn = torch.get_rng_state()
    with engine_with(recorder, **options) as engine:
        assert same(trained(engine, lengths), wanted)
        assert engine.session.graphs is not None
        assert engine.session.graphs.num_captured == 0 or not recorder.fails
    assert torch.equal(torch.get_rng_state(), drawn)
    return [graph.replays for graph in recorder.graphs]


def same(result: list[Any], wanted: list[Any]) -> bool:
    *mine, my_weights = result
    *theirs, their_weights = wanted
    return mine == theirs and all(torch.equal(value, their_weights[name]) for name, value in my_weights.items())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tp": 2, "autocast_dtype": torch.bfloat16}, id="tp2 bf16"),
        pytest.param({"family": "gpt2", "model": {"n_inner": 32}}, id="tied weights"),
    ],
)
def test_steps_are_those_of_windows_operator_by_operator(options: dict[str, Any]) -> None:
    assert replayed(FakeRecorder(), **options) == [3]


def test_routers_are_counted_on() -> None:
    options: dict[str, Any] = {"family": "phimoe", "ep": 2, "expert_capacity_factor": 4.0}
    entries = []
    for recorder in (None, FakeRecorder()):
        with engine_with(recorder, **options) as engine:
            trained(engine)
            routers = ("helix/router_z", "helix/expert_imbalance", "helix/dropped_tokens")
            logged = engine.diagnostics.log_entries()
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
                engine.session.train_window(on(window, CPU), scale, step)
            result.append({name: parameter.grad.clone() for name, parameter in engine.model.named_parameters()})
    assert all(torch.equal(result[1][name], gradient) for name, gradient in result[0].items())


def test_each_shape_has_a_graph_up_to_a_number(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    lengths = ((12, 8), (8, 12), (16, 16)) * 3
    assert replayed(FakeRecorder(), lengths) == [2, 2]
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
    "options",
    [
        pytest.param({"model": {"attention_dropout": 0.1}, "recompute": "full"}, id="drawn again in backward"),
        pytest.param({"family": "phimoe", "expert_capacity_factor": 4.0}, id="a router's noise"),
    ],
)
def test_windows_draw_the_numbers_of_their_step(options: dict[str, Any]) -> None:
    recorder = FakeRecorder()
    assert replayed(recorder, **options) == [3]
    seeds = [generator.initial_seed() for generator in recorder.graphs[0].generators]
    assert len(seeds) == len(set(seeds)) * (2 if "recompute" in options else 1)


@pytest.mark.slow
def test_adapters_that_are_switched_and_scaled_have_graphs_of_their_own() -> None:
    def change(engine: Engine, name: str, factor: float, share: float) -> None:
        engine.model.set_adapter(name)
        for module in engine.model.modules():
            if hasattr(module, "lora_A"):
                module.scaling[name] *= factor
                module.lora_dropout[name].p = share

    changes = [("default", 1.0, 0.2), ("other", 1.0, 0.2), ("other", 2.0, 0.2), ("other", 1.0, 0.4)]
    recorder, results = FakeRecorder(), []
    for used in (None, recorder):
        with engine_with(used, adapters={"lora_dropout": 0.2, "idle": "other"}) as engine:
            results.append([])
            for each in changes:
                change(engine, *each)
                results[-1].append(trained(engine))
    assert all(same(mine, wanted) for wanted, mine in zip(*results, strict=True))
    # Whatever trains anew drops the graphs; other numbers have graphs beside them, once they have come as often.
    assert [graph.replays for graph in recorder.graphs] == [3, 3, 3, 2]


def test_evaluation_replays_too() -> None:
    recorder, results = FakeRecorder(), []
    for used in (None, recorder):
        with engine_with(used, tp=2) as engine:
            results.append([])
            for step in range(3):
                trained(engine)
                for seed in range(2):
                    (batch,) = on(batches(1, lengths=(12,), seed=10 * step + seed), CPU)
                    scale = LossScale(torch.tensor(1.0), 1.0)
                    loss, logits = engine.session.evaluate(batch, scale, step, keep_logits=True)
                    assert logits is not None
                    results[-1] += [loss, logits, engine.session.evaluate(batch, scale, step)[0]]
    assert all(torch.equal(mine, wanted) for wanted, mine in zip(*results, strict=True))
    assert [graph.replays for graph in recorder.graphs] == [11, 5, 4]  # a third shape waits for a third time


def test_a_capture_that_fails_is_said_and_the_run_goes_on(capsys: Any) -> None:
    recorder = FakeRecorder(fails=(2,))
    replayed(recorder, ((12, 8), (8, 12)) * 3, option="auto")
    assert recorder.num_asked == 2
    said = "windows run without CUDA graphs from here on, since one could not be captured (OutOfMemoryError: no memory"
    assert capsys.readouterr().out.count(said) == 1


def test_a_capture_that_fails_ends_a_run_that_asked_for_graphs() -> None:
    wanted = r"OutOfMemoryError: no memory is left\); use HelixConfig\(cuda_graphs=False\)"
    with engine_with(FakeRecorder(fails=(1,))) as engine, pytest.raises(RuntimeError, match=wanted):
        trained(engine)


def learn(folder: str, used: FakeRecorder | None, option: Any = True) -> list[Any]:
    """What a Trainer logs, with the windows of a recorder or without graphs."""
    rows = [{name: value[0] for name, value in batch.items()} for batch in batches(16, rows=1, lengths=(8,))]
    arguments = TrainingArguments(
        output_dir=folder,
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
    if used is not None:
        trainer.helix.runner.executor.streams.close()
        trainer.helix.runner.executor.streams = CudaStreams(CPU, used.cuda)
        trainer.helix.session.graphs = WindowGraphs(say, used, option)
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def fall_back(folder: str) -> tuple[bool, int, bool]:
    """Of this rank: whether it learned the same, how many captures it began, and whether it has given up."""
    wanted = learn(folder, None)
    recorder = FakeRecorder(fails=[1] if dist.get_rank() == 1 else [])
    learned = learn(folder, recorder, "auto")
    return learned == wanted, recorder.num_asked, any(graph.replays for graph in recorder.graphs)


def test_ranks_fall_back_together(cluster_of: Any, tmp_path: Path) -> None:
    """A capture of one rank of two fails; both go on operator by operator."""
    assert cluster_of(2).run(fall_back, folder=str(tmp_path)) == [(True, 1, False)] * 2


def test_graphs_make_room_for_windows_of_other_shapes(capsys: Any) -> None:
    usual, rare = (12, 8), (16, 16)
    lengths = (usual, usual, usual, rare, usual, usual, usual, rare[:1] * 2, usual)
    recorder = FakeRecorder()
    recorder.room = False
    assert replayed(recorder, lengths) == [2, 1]  # the second capture waits twice as long
    assert capsys.readouterr().out.count("CUDA graphs hold 3.0 GB, and a window of another shape has no memory") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "dualpipe_v", "tp_size": 2, "autocast_dtype": torch.bfloat16},
        slow({"schedule": "1f1b", "recompute": "full"}),
    ],
    ids=str,
)
def test_pipelines_are_captured_without_a_question_of_the_host(options: dict[str, Any], monkeypatch: Any) -> None:
    options = {"pp_size": 2, "model": {"num_hidden_layers": 4}, **options}
    cuda = FakeCuda(prompt=True)  # a question would be answered, and is an error in a capture
    cuda.captures = True
    train_windows(cuda, **options)
    assert not cuda.mistakes
    assert not cuda.waits
    assert all(cuda.default.clock.get(stream, 0) >= stream.clock[stream] for stream in cuda.streams), "not joined"
    monkeypatch.setattr(LaneChannel, "receive", lambda self, out, forward: out.fill_(0.5))
    monkeypatch.setattr(ProcessGroupTransport, "reduce_scatter", keep_own_part)
    monkeypatch.setattr(ProcessGroupTransport, "all_gather", repeat_own_part)
    monkeypatch.setattr(ProcessGroupTransport, "exchange", lambda self, out, value: out.copy_(value))
    steps_alike(**options)


@pytest.mark.parametrize(
    "options", [{"shard_parameters": True, "recompute": "full"}, {"shard_optimizer": True}], ids=str
)
def test_gathered_weights_are_those_that_were_stepped(options: dict[str, Any], monkeypatch: Any) -> None:
    """Gathered for each layer, or once in a window; a replay casts what was stepped since."""
    monkeypatch.setattr(ProcessGroupTransport, "reduce_scatter", keep_own_part)
    if "shard_parameters" in options:
        monkeypatch.setattr(ProcessGroupTransport, "all_gather", repeat_own_part)
    steps_alike(dp=2, autocast_dtype=torch.bfloat16, **options)


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


@pytest.mark.parametrize(("option", "said"), [(True, 1), ("auto", 0)])
def test_on_a_cpu_graphs_are_missed_where_they_were_asked_for(option: Any, said: int, capsys: Any) -> None:
    with engine_on(functools.partial(tiny, "llama", **SMALL), silent_mesh(CPU), 2, cuda_graphs=option) as engine:
        assert engine.session.graphs is None
    assert capsys.readouterr().out.count("windows run without CUDA graphs: the model is on a cpu device") == said


class Capture(contextlib.AbstractContextManager[None]):
    """`torch.cuda.graph`, of which the end fails where what was captured did, and leaves its own stream in use."""

    def __init__(self, *given: Any, **options: Any) -> None:
        pass

    def __exit__(self, kind: Any, *error: object) -> None:
        if kind is not None:
            raise RuntimeError("operation failed due to a previous error during capture")


class Default:
    """A default generator of a GPU: `state` is that of another one, or its own."""

    state = "own"

    def clone_state(self) -> str:
        return "a copy"

    def graphsafe_get_state(self) -> str:
        return self.state

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state


def test_a_capture_that_fails_leaves_the_device_as_it_was(monkeypatch: Any) -> None:
    default, calls = Default(), []
    for name, value in {
        "graph": Capture,
        "CUDAGraph": FakeGraph,
        "graph_pool_handle": lambda: (0, 1),
        "default_generators": [default],
        "current_device": lambda: 0,
        "current_stream": lambda: "before",
        "set_stream": calls.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *given, name=name: calls.append((name, *given)))
    states = []

    def waiting() -> None:
        states.append(default.state)
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="RuntimeError: operation not permitted when stream is capturing"):
        CudaRecorder().record(waiting, CapturedDraws(CPU, 0))
    assert states == ["a copy"]
    assert default.state == "own"
    assert calls == ["before", ("_cuda_endAllocateToPool", 0, (0, 1)), ("_cuda_releasePool", 0, (0, 1))]


def test_plans_are_chosen_by_their_replays(monkeypatch: Any) -> None:
    """Whatever they take operator by operator; the graphs of the run are gone before, and nothing is left behind."""
    recorder = FakeRecorder()
    tier = Tier("two", ("sequential", "greedy"), timed=1, search_share=0.1)
    slow = [0.0, 0.0, 0.2]  # computation alone, and both plans

    def replay(graph: FakeGraph) -> None:
        assert not recorder.graphs[0].is_alive
        graph.replays += 1
        time.sleep(slow[(recorder.graphs.index(graph) - 1) % 3])

    with engine_with(recorder, tp=2, family="phimoe", expert_capacity_factor=4.0) as engine:
        trained(engine)
        assert engine.session.graphs is not None
        runner = engine.runner
        meters = [meter for unit in runner.rank_units.units.values() for meter in unit.meters]
        monkeypatch.setattr(FakeGraph, "replay", replay)
        profile = rough_profile(runner.rank_units.layout)
        _, result = tune(runner, engine.session.last_window, tier, profile=profile, graphs=engine.session.graphs)
        assert engine.session.graphs.num_captured == 0
        assert all(parameter.grad is None for parameter in engine.model.parameters())
        assert not any(meter.sums.isnan().any() for meter in meters if meter.sums is not None)
    assert result.chosen == "sequential"
    assert [graph.replays for graph in recorder.graphs[1:]] == [3, 3, 2]
    assert not any(graph.is_alive for graph in recorder.graphs)


def test_plans_are_timed_operator_by_operator_where_one_cannot_be_captured(capsys: Any) -> None:
    recorder = FakeRecorder(fails=(2,))
    with engine_with(recorder, option="auto", tp=2) as engine:
        trained(engine, ((12, 8),))
        overlap = measure_overlap({"": engine.runner}, engine.session.last_window, 1, graphs=engine.session.graphs)[""]
        assert overlap.step > 0
    assert recorder.num_asked == 2
    assert not any(graph.replays or graph.is_alive for graph in recorder.graphs)
    assert "windows run without CUDA graphs from here on" in capsys.readouterr().out


def keep_own_part(self: Any, out: Tensor, value: Tensor) -> None:  # torch 2.11's fake group would write nothing
    out.copy_(value.chunk(self.size)[self.rank])


def repeat_own_part(self: Any, out: Tensor, value: Tensor) -> None:
    out.view(self.size, -1).copy_(value.reshape(1, -1).expand(self.size, -1))


def steps_alike(**options: Any) -> None:
    """One rank of two, whose collectives move nothing, takes the same steps with graphs and without."""
    result = []
    recorder = FakeRecorder()
    for captured in (None, WindowGraphs(say, recorder)):
        with one_rank(recorder.cuda, **options) as (runner, window):
            optimizer = torch.optim.AdamW([p for p in runner.rank_units.stepped if p.numel()], lr=1e-2)
            losses = []
            for _ in range(4):
                losses.append(captured.train_window(runner, window) if captured else runner.train_window(window))
                optimizer.step()
                optimizer.zero_grad()
                losses.append([runner.evaluate(window[:1])[0]])
            result.append([torch.stack([loss for each in losses for loss in each]), *runner.rank_units.stepped])
    assert [graph.replays for graph in recorder.graphs] == [3]
    assert all(torch.equal(mine, wanted) for wanted, mine in zip(*result, strict=True))
