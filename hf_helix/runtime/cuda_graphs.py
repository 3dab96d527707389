"""CUDA graphs of windows: a window whose shapes repeat is captured once; each replay costs the host a single launch.

In:   a runner, and the micro-batches of a window to train.
Out:  the results of `Runner.train_window`, to the same bits: losses, gradients, counts of routers.
Must hold: everything that the host decides in a window is part of the key of its graph, so a replay does the same as
the window without a graph. All ranks of the run capture, replay or run a window operator by operator together, as NCCL
asks. The next window overwrites the gradients of a window, unless `keep_gradients` is called between. No graph outlives
the process groups of its communication: NCCL would wait for its end for ever.

The side inputs of a window are made as always, and copied to the graph's inputs. Casts of weights are part of the
graph, so they follow the optimizer. All graphs share one pool of memory, and the gradients of all lie at the addresses
of the first graph.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hf_helix.operators.moe.dispatch import RouterMeter
from hf_helix.operators.segment import has_hooks
from hf_helix.runtime.distributed.agreement import sum_over_ranks
from hf_helix.runtime.distributed.mesh import Mesh, rank
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner

MAX_GRAPHS = 8
"""How many graphs are kept. Windows of further shapes run operator by operator."""

NUM_WARMUPS = 1
"""How many windows of a shape run operator by operator first: they compile, choose kernels and make workspaces."""

MAX_REMEMBERED = 4096
"""How many shapes are remembered for a second occurrence."""

Recorded = tuple[Any, Any]
"""The result of the captured function, and the graph: `replay()` runs it, `reset()` frees it."""


class CudaRecorder:
    """Captures functions as CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, work: Callable[[], Any]) -> Recorded:
        """Captures a function without running its kernels. Waits for the device, and frees cached memory first.

        Raises:
            RuntimeError: the function does something that no graph can hold.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, first = torch.cuda.CUDAGraph(), None
        try:
            # Other threads (NCCL's watchdog, data loaders) may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                try:
                    result = work()
                except Exception as error:
                    first = error  # the end of the capture fails, too, without a reason
                    raise
        except Exception as error:
            cause = first or error
            raise RuntimeError(
                f"a window cannot be captured as a CUDA graph ({type(cause).__name__}: {cause}); "
                "use HelixConfig(cuda_graphs=False)"
            ) from cause
        return result, graph

    def forget(self) -> None:
        """Forgets the pool, which is freed with its last graph."""
        self._pool = None


@dataclass
class _Captured:
    """A window as a graph, with the tensors that the graph reads and fills.

    Attributes:
        inputs: copies of the tensors of the micro-batches, in their order.
        losses: of the micro-batches.
        counts: for every router, the tensor of earlier sums and the tensor of new sums.
    """

    graph: Any
    inputs: list[Tensor]
    losses: Tensor
    gradients: dict[nn.Parameter, Tensor]
    counts: dict[RouterMeter, tuple[Tensor, Tensor]]

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs the window with new side inputs; returns the losses."""
        torch._foreach_copy_(self.inputs, list(inputs))
        for meter, (before, _) in self.counts.items():
            before.zero_() if meter.sums is None else before.copy_(meter.sums)
        self.graph.replay()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        for meter, (_, after) in self.counts.items():
            meter.sums = after
        return list(self.losses.clone())


class WindowGraphs:
    """Trains windows, from graphs where their shapes repeat.

    Args:
        say: tells the user, once, which windows are not captured and why.
        recorder: captures functions; tests give a fake for CPU.
    """

    def __init__(self, say: Callable[[str], object], recorder: Any = None) -> None:
        self._tell = say
        self._recorder = recorder or CudaRecorder()
        self._captured: dict[int, _Captured] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._seen: Counter[int] = Counter()
        self._runner: Runner | None = None
        self._places: list[tuple[int, bool]] = []
        self._said: set[str] = set()
        _alive.add(self)

    def train_window(self, runner: Runner, window: Sequence[MicroBatch]) -> list[Tensor]:
        """Trains a window as `Runner.train_window` does, while no parameter has a gradient. Collective.

        Raises:
            RuntimeError: the window cannot be captured.
        """
        sides = [batch.prepare() for batch in window]
        leaves, form = tree_flatten(sides, is_leaf=_is_leaf)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        number = self._agreed(runner, leaves, form)
        captured = self._captured.get(number)
        if captured is None:
            if not self._is_due(number):
                return runner.train_window(_prepared(window, sides))
            captured = self._captured[number] = self._capture(runner, window, leaves, form)
        losses = captured.run(inputs)
        runner.stage.mark_weights_stale()  # as `Runner.train_window`: a step follows
        return losses

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

    def _agreed(self, runner: Runner, leaves: Sequence[Any], form: TreeSpec) -> int:
        """Returns a number for this window on all ranks together; 0 where a rank cannot capture it. Collective."""
        held = (*runner.stage.placements, *runner.stage.stepped)
        places = [(parameter.data_ptr(), parameter.requires_grad) for parameter in held]
        moved = runner is not self._runner or places != self._places
        reason = reason_against_graph(runner, leaves)
        # The digest covers the rank, since a sum over ranks does not tell windows of two ranks apart.
        about = (rank(), [_describe(leaf) for leaf in leaves], str(form))
        digest = hashlib.blake2b(repr(about).encode(), digest_size=6).digest()
        number, num_moved, num_reasons = sum_over_ranks([int.from_bytes(digest, "big"), moved, reason is not None])
        if num_moved:
            self.release()
            self._seen.clear()
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
                f"windows of {MAX_GRAPHS} different shapes are kept as CUDA graphs, and no more; others run operator "
                "by operator. Pad batches to fewer lengths (pad_to_multiple_of of the data collator) to capture all"
            )
            return False
        if len(self._seen) >= MAX_REMEMBERED:
            self._seen.clear()
        self._seen[number] += 1
        return self._seen[number] > NUM_WARMUPS

    def _capture(
        self, runner: Runner, window: Sequence[MicroBatch], leaves: Sequence[Any], form: TreeSpec
    ) -> _Captured:
        """Returns the window as a graph. Nothing is computed yet."""
        _release_before_groups()
        still = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        batches = _prepared(window, tree_unflatten(still, form))
        parameters = runner.stage.stepped
        meters = [meter for unit in runner.stage.units.values() for meter in unit.meters]
        counted = {meter: meter.sums for meter in meters}
        before = {meter: torch.zeros(meter.num_experts + 3, device=runner.mesh.device) for meter in meters}
        for meter, sums in before.items():
            meter.sums = sums

        def work() -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
            losses = torch.stack(runner.train_window(batches))
            return losses, self._in_their_place({p: p.grad for p in parameters if p.grad is not None})

        try:
            (losses, gradients), graph = self._recorder.record(work)
            after: dict[RouterMeter, Any] = {meter: meter.sums for meter in meters}
        finally:
            for parameter in parameters:
                parameter.grad = None
            for meter, sums_before in counted.items():
                meter.sums = sums_before
        inputs = [leaf for leaf in still if isinstance(leaf, Tensor)]
        return _Captured(graph, inputs, losses, gradients, {meter: (before[meter], after[meter]) for meter in meters})

    def _in_their_place(self, gradients: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Moves gradients to the addresses of the first graph, so that further graphs need no more memory."""
        known = [parameter for parameter in gradients if parameter in self._gradients]
        if known:
            torch._foreach_copy_([self._gradients[p] for p in known], [gradients[p] for p in known])
        self._gradients = {**gradients, **self._gradients}
        return {parameter: self._gradients[parameter] for parameter in gradients}

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._tell(f"cuda_graphs=True: {text}")


def reason_against_all_graphs(mesh: Mesh, runner: Runner, capacity: float | None, is_peft: bool) -> str | None:
    """Returns why no window of a run can be captured, if so; the same on every rank.

    Args:
        is_peft: whether the model has adapters, which a script may switch and scale at any time.
    """
    if mesh.device.type != "cuda":
        return f"the model is on a {mesh.device.type} device"
    if mesh.pipe.size > 1:
        return f"pp_size={mesh.pipe.size}, whose transfers are not built for graphs"
    if is_peft:
        return "the model has adapters of PEFT"
    if capacity is None and any(unit.meters for unit in runner.stage.units.values()):
        return (
            "the host must know how many rows go to which expert; with HelixConfig(expert_capacity_factor=...), such "
            "as 1.25, shapes do not depend on it"
        )
    return None


def reason_against_graph(runner: Runner, leaves: Iterable[Any]) -> str | None:
    """Returns why a window with these side inputs (leaves) cannot be captured, if so."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device.type != runner.mesh.device.type:
            return f"a batch brings a tensor on a {leaf.device.type} device"
        if not isinstance(leaf, Tensor | int | float | str | None):
            return f"attention takes a {type(leaf).__name__} with every batch, which is no tensor"
    for unit in runner.stage.units.values():
        for name, operator in unit.operators.items():
            if operator.draws():
                return f"{unit.label}.{name} draws random numbers, which a graph would repeat; use dropout of 0"
        for module in unit.called:
            if any(map(has_hooks, module.modules())):
                return f"a part of {unit.label} ({type(module).__name__}) has hooks, which a graph would not call"
    return None


def _prepared(window: Sequence[MicroBatch], sides: Sequence[Any]) -> list[MicroBatch]:
    """The micro-batches with side inputs that are made already."""
    return [replace(batch, prepare=functools.partial(dict, side)) for batch, side in zip(window, sides, strict=True)]


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
    """From now on, `torch.distributed.destroy_process_group` releases graphs first; where a script does not call it,
    `hf_helix.runtime.failures.heartbeat` does at the end of the process."""
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def release_and_destroy(*args: Any, **options: Any) -> Any:
        _release_all()
        return destroy(*args, **options)

    dist.destroy_process_group = release_and_destroy
