"""CUDA graphs of windows: a window whose shapes repeat is captured once; each replay costs the host a single launch.

In:   a runner, and the micro-batches of a window to train or to evaluate.
Out:  the results of `Runner.train_window` and `Runner.evaluate`, to the same bits: losses, gradients, logits, counts of
      routers.
Must hold: everything that the host decides in a window is part of the key of its graph, so a replay does the same as
the window without a graph. All ranks of the run capture, replay or run a window operator by operator together, as NCCL
asks; after a failed capture on any rank, no rank has graphs. The next window overwrites the gradients of a
window, unless `keep_gradients` is called between. No graph outlives the process groups of its communication: NCCL
would wait for its end for ever.

The side inputs of a window are made as always, and copied to the graph's inputs. Casts of weights are part of the
graph, so they follow the optimizer. Every draw of random numbers has a generator of its own, which gets its seed before
a replay. All graphs share one pool of memory, and the gradients of all lie at the addresses of the first graph.
"""

import contextlib
import functools
import gc
import hashlib
import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hf_helix.config import AUTO, OFFLOAD, HelixConfig
from hf_helix.operators.autograd_operator import has_hooks
from hf_helix.operators.experts.moe import RouterMeter
from hf_helix.operators.random_numbers import Source, drawing_from
from hf_helix.runtime.distributed.agreement import sum_over_ranks
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.microbatch import MicroBatch, derive_seed
from hf_helix.runtime.runner import Runner, counting_apart, forget_gradients

MAX_GRAPHS = 8
"""How many graphs are kept. Windows of further shapes run operator by operator."""

NUM_WARMUPS = 1
"""How many windows of a shape run operator by operator first: they compile, choose kernels and make workspaces. A
further shape must have come as often as there are graphs."""

MAX_REMEMBERED = 4096
"""How many shapes are remembered for a second occurrence."""

T = TypeVar("T")
Work = Callable[[], Any]
Recorded = tuple[Any, Any]
"""The result of the captured function, and the graph: `replay()` runs it, `reset()` frees it."""


class _Counted(Source):
    """The draws of a window that runs operator by operator, counted."""

    def __init__(self) -> None:
        self.count = 0

    def generator(self, device: torch.device, seed: int) -> torch.Generator:
        self.count += 1
        return super().generator(device, seed)

    def seeded(self, device: torch.device, seed: int) -> contextlib.AbstractContextManager[None]:
        self.count += 1
        return super().seeded(device, seed)


class CapturedDraws(Source):
    """The draws of a captured window: a generator for each, since a graph reads the seeds of generators that were
    registered before.

    Attributes:
        seeds: of the draws while the window was captured, in the order of `generators`.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.generators = [torch.Generator(device) for _ in range(count)]
        self.seeds: list[int] = []

    def generator(self, device: torch.device, seed: int) -> torch.Generator:
        if len(self.seeds) == len(self.generators):
            raise RuntimeError(f"a captured window draws more than {len(self.seeds)} times, as it did before")
        self.seeds.append(seed)
        return self.generators[len(self.seeds) - 1]

    @contextlib.contextmanager
    def seeded(self, device: torch.device, seed: int) -> Iterator[None]:
        with default_state(device.index, self.generator(device, seed)):
            yield


@contextlib.contextmanager
def default_state(index: int, state: torch.Generator) -> Iterator[None]:
    """Returns a context in which the default generator of a GPU has the state of another generator."""
    default: Any = torch.cuda.default_generators[index]
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(state)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)


class CudaRecorder:
    """Captures functions as CUDA graphs that share one pool of memory.

    Attributes:
        bytes_held: of the pool, after the last capture.
    """

    draws = CapturedDraws

    def __init__(self) -> None:
        self._pool: Any = None
        self.bytes_held = self._unused = 0

    def record(self, work: Work, draws: CapturedDraws) -> Recorded:
        """Captures a function without running its kernels. Waits for the device, and frees cached memory first.

        Raises:
            RuntimeError: the function does something that no graph can hold, or memory is short. Streams, generators
                and the allocator are then as before.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, first = torch.cuda.CUDAGraph(), None
        for generator in draws.generators:
            graph.register_generator_state(generator)
        index, stream = torch.cuda.current_device(), torch.cuda.current_stream()
        state: Any = torch.cuda.default_generators[index]
        # torch 2.11 leaves the state of the default generator captured after a failed capture: a copy, here.
        with default_state(index, state.clone_state()):
            try:
                # Other threads (NCCL's watchdog, data loaders) may call CUDA during a capture.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    try:
                        result = work()
                    except Exception as error:
                        first = error  # the end of the capture fails as well, without a reason
                        raise
            except Exception as error:
                self._leave(index, stream)
                cause = first or error
                raise RuntimeError(f"{type(cause).__name__}: {cause}") from cause
        pool = tuple(self._pool)
        segments = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) == pool]
        self.bytes_held = sum(each["total_size"] for each in segments)
        self._unused = self.bytes_held - sum(each["allocated_size"] for each in segments)
        return result, graph

    def _leave(self, index: int, stream: torch.cuda.Stream) -> None:
        """Cleanup that `torch.cuda.graph` skips if the end of a capture fails."""
        torch.cuda.set_stream(stream)
        with contextlib.suppress(RuntimeError):  # the allocator has left the pool already
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)

    def has_room(self) -> bool:
        """Returns whether as much memory is free as the pool holds."""
        free, _ = torch.cuda.mem_get_info()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - self._unused
        return free + cached >= self.bytes_held

    def forget(self) -> None:
        """Forgets the pool, which is freed with its last graph."""
        self._pool = None
        self.bytes_held = self._unused = 0


@dataclass
class _Captured:
    """A window as a graph, with the tensors that the graph reads and fills.

    Attributes:
        inputs: copies of the tensors of the micro-batches, in their order.
        results: of the captured function.
        counts: for every router, the tensor of earlier sums and the tensor of new sums.
        draws: for every draw, its generator, the place of its micro-batch in the window, and further parts of its seed.
    """

    graph: Any
    inputs: list[Tensor]
    results: list[Tensor]
    gradients: dict[nn.Parameter, Tensor]
    counts: dict[RouterMeter, tuple[Tensor, Tensor]]
    draws: list[tuple[torch.Generator, int, tuple[str, str]]]

    def run(self, runner: Runner, window: Sequence[MicroBatch], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs the window with new side inputs; returns the results."""
        torch._foreach_copy_(self.inputs, list(inputs))
        for generator, place, operator in self.draws:
            generator.manual_seed(derive_seed(runner.executor.seed, *window[place].key, *operator))
        for meter, (before, _) in self.counts.items():
            before.zero_() if meter.sums is None else before.copy_(meter.sums)
        self.graph.replay()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        for meter, (_, after) in self.counts.items():
            meter.sums = after
        return [result.clone() for result in self.results]


class WindowGraphs:
    """Runs windows, from graphs if their shapes repeat.

    Args:
        say: prints, once, which windows are not captured and why.
        recorder: captures functions; tests give a fake for CPU.
        option: `HelixConfig.cuda_graphs`. With "auto", a failed capture is printed, and windows run operator by
            operator from there on; with True, an error.
        switches: returns what operators read of modules in every window, which is a part of the key.

    Attributes:
        has_given_up: whether a capture has failed.
    """

    def __init__(
        self,
        say: Callable[[str], object],
        recorder: Any = None,
        option: bool | str = True,
        switches: Callable[[], object] = lambda: None,
    ) -> None:
        self._tell = say
        self._recorder = recorder or CudaRecorder()
        self._option = option
        self._switches = switches
        self.has_given_up = False
        self._num_warmups = NUM_WARMUPS
        self._captured: dict[int, _Captured] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._seen: Counter[int] = Counter()
        self._draws: dict[int, int] = {}
        self._runner: Runner | None = None
        self._places: list[tuple[int, bool]] = []
        self._said: set[str] = set()
        _alive.add(self)

    def train_window(self, runner: Runner, window: Sequence[MicroBatch]) -> list[Tensor]:
        """Trains a window as `Runner.train_window` does, while no parameter has a gradient. Collective.

        Raises:
            RuntimeError: the window cannot be captured, with `option=True`.
        """
        losses = self._run(runner, window, "train", runner.train_window)
        runner.rank_units.mark_weights_stale()  # as `Runner.train_window`: a step follows
        return losses

    def evaluate(
        self, runner: Runner, window: Sequence[MicroBatch], keep_logits: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Evaluates a window as `Runner.evaluate` does. Collective.

        Args:
            keep_logits: whether to return logits.

        Raises:
            RuntimeError: the window cannot be captured, with `option=True`.
        """
        if keep_logits and runner.mesh.pipe.size > 1:  # hosts tell each other their shape
            return runner.evaluate(window, keep_logits)

        def evaluate(batches: Sequence[MicroBatch]) -> list[Tensor]:
            return [result for result in runner.evaluate(batches, keep_logits) if result is not None]

        loss, *logits = self._run(runner, window, f"evaluate {keep_logits}", evaluate)
        return loss, logits[0] if logits else None

    def _run(
        self,
        runner: Runner,
        window: Sequence[MicroBatch],
        kind: str,
        work: Callable[[Sequence[MicroBatch]], list[Tensor]],
    ) -> list[Tensor]:
        """Returns the results of a kind of work on a window."""
        if self.has_given_up:
            return work(window)
        sides = [batch.prepare() for batch in window]
        leaves, form = tree_flatten(sides, is_leaf=_is_leaf)
        trains = kind == "train"
        number = self._agreed(runner, (kind, [_describe(leaf) for leaf in leaves], str(form)), leaves)
        captured = self._captured.get(number)
        if captured is None and self._is_due(number):
            _release_before_groups()
            parameters = runner.rank_units.stepped if trains else ()
            capture = functools.partial(self._capture, runner, window, (leaves, form), self._draws[number], work)
            captured = self._on_all_ranks(runner, functools.partial(capture, parameters))
            if captured is not None:
                self._captured[number] = captured
                self._say(f"windows whose shapes repeat run as CUDA graphs; the first holds {self._held()}")
        if captured is None:
            self._make_room(trains)
            with drawing_from(_Counted()) as counted:
                result = work(_prepared(window, sides))
            self._draws[number] = counted.count
            return result
        return captured.run(runner, window, [leaf for leaf in leaves if isinstance(leaf, Tensor)])

    @property
    def num_captured(self) -> int:
        """The number of windows kept as graphs."""
        return len(self._captured)

    def keep_gradients(self) -> None:
        """Copies remaining gradients out of the memory that the next window overwrites."""
        for parameter, gradient in self._gradients.items():
            if parameter.grad is not None and parameter.grad.data_ptr() == gradient.data_ptr():
                parameter.grad = gradient.clone()

    def release(self) -> None:
        """Frees all graphs and their memory; windows are captured anew."""
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()
        self._gradients.clear()
        self._recorder.forget()

    @contextlib.contextmanager
    def replays(
        self, runner: Runner, window: Sequence[MicroBatch], make: Callable[[Sequence[MicroBatch]], Sequence[Work]]
    ) -> Iterator[Sequence[Work]]:
        """Yields works over a window as replays, only for their times; unchanged if any cannot be captured.
        Collective; there must be no gradients. Other graphs are released before, these at the end, and operators that
        run between need as much memory again.

        Args:
            make: makes the works, with the micro-batches that they run.
        """
        self.release()
        leaves, form = tree_flatten([batch.prepare() for batch in window], is_leaf=_is_leaf)
        (num_reasons,) = sum_over_ranks([self.has_given_up or reason_against_graph(runner, leaves) is not None])
        if num_reasons:
            yield make(window)
            return
        still, batches = _kept(window, leaves, form)
        works, counts = make(batches), []
        recorded: list[Any] = []
        for work in works:  # on every rank before any capture, which may fail on one
            with drawing_from(_Counted()) as counted:
                work()
            counts.append(counted.count)
            forget_gradients(runner)

        def capture() -> list[Work]:
            for work, count in zip(works, counts, strict=True):
                draws = self._recorder.draws(runner.mesh.device, count)
                with drawing_from(draws), _counting_from_zero(runner):
                    recorded.append(self._recorder.record(work, draws)[1])
                    forget_gradients(runner)
            return [graph.replay for graph in recorded]

        try:
            yield self._on_all_ranks(runner, capture) or make(window)
        finally:
            for graph in recorded:
                graph.reset()
            self._recorder.forget()
            del still

    def _agreed(self, runner: Runner, about: object, leaves: Sequence[Any]) -> int:
        """Returns a number for this window on all ranks together; 0 if a rank cannot capture it. Collective."""
        held = (*runner.rank_units.own_rows, *runner.rank_units.stepped)
        places = [(parameter.data_ptr(), parameter.requires_grad) for parameter in held]
        moved = runner is not self._runner or places != self._places
        reason = reason_against_graph(runner, leaves)
        # The digest covers the rank, since a sum over ranks does not tell windows of two ranks apart.
        key = repr((rank(), about, self._switches())).encode()
        digest = int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big")
        number, num_moved, num_reasons = sum_over_ranks([digest, moved, reason is not None])
        if num_moved:
            self.release()
            self._forget_shapes()
            self._runner, self._places = runner, places
        if num_reasons:
            self._say(f"a window runs without a CUDA graph: {reason or 'another rank cannot capture it'}")
        return 0 if num_reasons else number

    def _is_due(self, number: int) -> bool:
        """Returns whether to capture a window now."""
        if not number:
            return False
        if self.num_captured >= MAX_GRAPHS:
            self._say(
                f"windows of {MAX_GRAPHS} different shapes are kept as CUDA graphs, which hold {self._held()}, and no "
                "more; others run operator by operator. Pad batches to fewer lengths (pad_to_multiple_of of the data "
                "collator) to capture all"
            )
            return False
        if len(self._seen) >= MAX_REMEMBERED:
            self._forget_shapes()
        self._seen[number] += 1
        return number in self._draws and self._seen[number] > max(self._num_warmups, self.num_captured)

    def _make_room(self, trains: bool) -> None:
        """Releases the graphs if a rank has no memory for a window and the graphs. After a window to train, shapes must
        come twice as often before they are captured again, so that captures get rare. Collective."""
        if not self._captured or not sum_over_ranks([not self._recorder.has_room()])[0]:
            return
        self._say(
            f"CUDA graphs hold {self._held()}, and a window of another shape has no memory beside them: they are given "
            "back before it, and captured again later. Pad batches to fewer lengths, or use smaller micro-batches"
        )
        self.release()
        if trains:
            self._forget_shapes()
            self._num_warmups *= 2

    def _forget_shapes(self) -> None:
        self._seen.clear()
        self._draws.clear()

    def _on_all_ranks(self, runner: Runner, capture: Callable[[], T]) -> T | None:
        """Returns the capture; None, and gives up, if the capture of a rank fails. Collective.

        Raises:
            RuntimeError: with `option=True`, on every rank.
        """
        why, error, result = "", None, None
        try:
            result = capture()
        except Exception as raised:  # with its values, which hold memory, unless it is raised again
            why = str(raised).partition("\n")[0] or type(raised).__name__
            error = raised if self._option is True else None
        if not sum_over_ranks([bool(why)])[0]:
            return result
        result = None
        why = why or "another rank could not capture its part"
        if self._option is True:
            raise RuntimeError(
                f"a window cannot be captured as a CUDA graph ({why}); use HelixConfig(cuda_graphs=False)"
            ) from error
        self.has_given_up = True
        self.release()
        gc.collect()  # the values of the window hang on its error
        runner.executor.streams.close()  # they were captured; others are made
        runner.rank_units.mark_weights_stale()  # nothing was gathered
        self._say(f"windows run without CUDA graphs from here on, since one could not be captured ({why})")
        return None

    def _capture(
        self,
        runner: Runner,
        window: Sequence[MicroBatch],
        sides: tuple[Sequence[Any], TreeSpec],
        num_draws: int,
        work: Callable[[Sequence[MicroBatch]], list[Tensor]],
        parameters: Collection[nn.Parameter],
    ) -> _Captured:
        """Returns the window as a graph. Nothing is computed yet.

        Args:
            sides: the leaves and the form of the side inputs.
            num_draws: how often the window draws random numbers.
            work: the work on the micro-batches; returns the results.
            parameters: their gradients belong to the graph.
        """
        inputs, batches = _kept(window, *sides)
        draws = self._recorder.draws(runner.mesh.device, num_draws)
        runner.rank_units.mark_weights_stale()  # a graph gathers them itself

        def record() -> tuple[list[Tensor], dict[nn.Parameter, Tensor]]:
            results = work(batches)
            return results, self._in_their_place({p: p.grad for p in parameters if p.grad is not None})

        try:
            with drawing_from(draws), _counting_from_zero(runner) as before:
                (results, gradients), graph = self._recorder.record(record, draws)
                counts: dict[RouterMeter, Any] = {meter: (sums, meter.sums) for meter, sums in before.items()}
        finally:
            for parameter in parameters:
                parameter.grad = None
        places = {
            derive_seed(runner.executor.seed, *batch.key, unit.label, name): (place, (unit.label, name))
            for place, batch in enumerate(window if draws.seeds else ())
            for unit in runner.executor.units.values()
            for name in unit.operators
        }
        drawn = [(each, *places[seed]) for each, seed in zip(draws.generators, draws.seeds, strict=False)]
        return _Captured(graph, inputs, results, gradients, counts, drawn)

    def _in_their_place(self, gradients: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Moves gradients to the addresses of the first graph, so that further graphs need no more memory."""
        known = [parameter for parameter in gradients if parameter in self._gradients]
        if known:
            torch._foreach_copy_([self._gradients[p] for p in known], [gradients[p] for p in known])
        self._gradients = {**gradients, **self._gradients}
        return {parameter: self._gradients[parameter] for parameter in gradients}

    def _held(self) -> str:
        return f"{self._recorder.bytes_held / 1e9:.1f} GB"

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._tell(f"cuda_graphs={self._option!r}: {text}")


def reason_against_all_graphs(mesh: Mesh, runner: Runner, config: HelixConfig, ends_at_decoder: bool) -> str | None:
    """Returns why no window of a run is captured, if so; with `ends_at_decoder` the caller computes the loss between
    the passes."""
    if mesh.device.type != "cuda":
        return f"the model is on a {mesh.device.type} device"
    if config.verify_every:
        return f"verify_every={config.verify_every} computes gradients in a second order, and a graph has one"
    if ends_at_decoder:
        return "the loss is computed by code outside of the model, between passes whose values move from call to call"
    if config.offload or config.recompute == OFFLOAD:
        return "gradients lie elsewhere on the host in every window (offload), and a graph copies them where they lay"
    if config.expert_capacity_factor is None and any(unit.meters for unit in runner.rank_units.all_units.values()):
        return (
            "the host must know how many rows go to which expert; with HelixConfig(expert_capacity_factor=...), such "
            "as 1.25, shapes do not depend on it"
        )
    if blocks := [unit.label for unit in runner.rank_units.all_units.values() if unit.by_data]:
        return f"a block of {blocks[0]} reads values on the host, and decides by them what it computes"
    settings = (os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if config.cuda_graphs == AUTO and world_size() > 1 and "expandable_segments:True" in ",".join(settings):
        return (
            "the environment sets expandable_segments:True, with which graphs of several GPUs have been seen to hang; "
            "leave it out, or try cuda_graphs=True"
        )
    return None


def reason_against_graph(runner: Runner, leaves: Iterable[Any]) -> str | None:
    """Returns why a window with these side inputs (leaves) cannot be captured, if so."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device.type != runner.mesh.device.type:
            return f"a batch brings a tensor on a {leaf.device.type} device"
        if not isinstance(leaf, Tensor | int | float | str | None):
            return f"attention takes a {type(leaf).__name__} with every batch, which is no tensor"
    for unit in runner.rank_units.units.values():
        for module in unit.modules_run_as_is:
            if any(map(has_hooks, module.modules())):
                return f"a part of {unit.label} ({type(module).__name__}) has hooks, which a graph would not call"
    return None


def _prepared(window: Sequence[MicroBatch], sides: Sequence[Any]) -> list[MicroBatch]:
    """The micro-batches with side inputs that are made already."""
    return [replace(batch, prepare=functools.partial(dict, side)) for batch, side in zip(window, sides, strict=True)]


def _kept(window: Sequence[MicroBatch], leaves: Sequence[Any], form: TreeSpec) -> tuple[list[Tensor], list[MicroBatch]]:
    """Copies of the side inputs at fixed addresses, and the micro-batches with them."""
    still = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return [leaf for leaf in still if isinstance(leaf, Tensor)], _prepared(window, tree_unflatten(still, form))


@contextlib.contextmanager
def _counting_from_zero(runner: Runner) -> Iterator[dict[RouterMeter, Tensor]]:
    """Zeroes the router counters inside of the context, in the yielded tensor; restores them after it."""
    with counting_apart(runner) as meters:
        before = {meter: torch.zeros(meter.num_experts + 3, device=runner.mesh.device) for meter in meters}
        for meter, sums in before.items():
            meter.sums = sums
        yield before


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, dict | list | tuple)


def _describe(leaf: Any) -> object:
    return (leaf.dtype, leaf.shape, leaf.stride()) if isinstance(leaf, Tensor) else leaf


_alive: weakref.WeakSet[WindowGraphs] = weakref.WeakSet()


def _release_all() -> None:
    for graphs in list(_alive):
        graphs.release()


@functools.cache
def _release_before_groups() -> None:
    """From now on, `torch.distributed.destroy_process_group` releases graphs first; if a script does not call it,
    `hf_helix.runtime.failures.heartbeat` does at the end of the process."""
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def release_and_destroy(*args: Any, **options: Any) -> Any:
        _release_all()
        return destroy(*args, **options)

    dist.destroy_process_group = release_and_destroy
