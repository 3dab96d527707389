"""Memory on a rank: the peak of a window, of single operators, and the room for a window.

In:   a runner and a window of micro-batches.
Out:  bytes of activations and buffers, without parameters, gradients and the batch itself; bytes of a device.
Must hold: counted, not estimated: by CUDA's own allocator, on a CPU by a tally of every storage that an operator makes.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_helix.measure.overlap import STATES
from hf_helix.operators.zero.zero1 import zero1_flat_parameters
from hf_helix.planning.choice.memory import MemoryLimit, Passes
from hf_helix.planning.graph.backward import SEND
from hf_helix.planning.timing.profile import OperatorMemory, Profile
from hf_helix.planning.window.layout import Name
from hf_helix.planning.window.passes import MAX_COPIES
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner, forget_gradients
from hf_helix.runtime.streams.trace import Trace

FRAGMENTS = 0.05
"""The part of a GPU's memory that its allocator may lose between blocks."""


class LiveBytes(TorchDispatchMode):
    """A tally of the live bytes of every storage that an operator returns, except of `existing` and of meta tensors."""

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._existing = {tensor.untyped_storage().data_ptr() for tensor in existing}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._upper_bound = 0  # bytes of these, also of storages freed since the last look
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.is_meta:
                continue
            if leaf.untyped_storage().data_ptr() not in self._existing:
                reference, size = StorageWeakRef(leaf.untyped_storage()), leaf.untyped_storage().nbytes()
                _, before = self._live.get(reference.cdata, (None, 0))  # no other has the address while this is kept
                self._live[reference.cdata] = reference, size
                self._upper_bound += size - before
        if self._upper_bound > self.peak:  # looking at all of them for every operator would take most of the time
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Returns the live bytes."""
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        self._upper_bound = sum(size for _, size in self._live.values())
        return self._upper_bound


class _OperatorTrace(Trace):
    """Notes live bytes before and after every operator, by label, and the peak between."""

    def __init__(self, device: torch.device, tally: LiveBytes) -> None:
        super().__init__()
        self.changes: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # by label: change, and most above the start
        self._device, self._tally, self._label = device, tally, ""
        self._start = self._now()

    def note(self, verb: str, label: str) -> None:
        if verb != "wait":
            self.begin(label)

    def begin(self, label: str) -> None:
        """Ends an operator, and begins another."""
        now, most = self._now(), self._most()
        if self._label:
            change = self.changes[self._label]
            change[1] = max(change[1], change[0] + most - self._start)
            change[0] += now - self._start
        self._label, self._start = label, now

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else self._tally.now()

    def _most(self) -> int:
        """Returns the most live bytes since the last call."""
        if self._device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return most
        most, self._tally.peak = max(self._tally.peak, self._tally.now()), 0
        return most


def operator_memory(runner: Runner, batch: MicroBatch) -> dict[Name, OperatorMemory]:
    """Returns the memory of every operator of this rank in the order of one strand, by a single micro-batch.
    Collective. The runner is under `sequential`, and is left with gradients.
    """
    window, sides = _prepared([batch])
    names: dict[str, Name] = {}
    for index in runner.layout.units_of(runner.rank_units.rank):
        for entry, op in runner.layout.graphs[runner.layout.units[index]].entries():
            if not runner.layout.transfers(index):
                names[runner.executor.label(batch.key[1], index, op)] = (runner.layout.units[index], entry)
    runner.train_window(window, complete=False)  # makes the gradients
    streams = runner.executor.streams
    with LiveBytes(_existing(runner, sides)) as tally:
        trace, before = _OperatorTrace(runner.mesh.device, tally), streams.trace
        streams.trace = trace
        try:
            runner.train_window(window, complete=False)
            trace.begin("")
        finally:
            streams.trace = before
    found: dict[Name, OperatorMemory] = {}
    for label, (change, most) in trace.changes.items():
        if label in names:  # further units of a name need as much as the first
            found.setdefault(names[label], OperatorMemory(change, max(most, change, 0)))
    return found


def memory_limit(
    profile: Profile | None, runner: Runner, has_stepped: bool, gigabytes: float | None
) -> MemoryLimit | None:
    """Returns the `MemoryLimit` of a run's windows, the same on every rank; None without a limit. Collective.

    Args:
        profile: the memory of operators; None before a measurement.
        has_stepped: whether the optimizer has its states; otherwise two in fp32 are expected, as AdamW's.
        gigabytes: the limit of a device; None for all of a GPU, and for no limit on a CPU.
    """
    room = _room(runner, has_stepped, gigabytes)
    if room is None:
        return None
    rooms = all_gather_object((runner.rank_units.rank, room))
    of_ranks = [min(room for rank, room in rooms if rank == each) for each in range(runner.layout.num_ranks)]
    if profile is None or not profile.memory:
        return MemoryLimit()
    handed_on = profile.bytes.get((SEND, "F.transfer"), 0)
    return MemoryLimit(Passes(profile.memory, profile.layout, handed_on), of_ranks)


def _room(runner: Runner, has_stepped: bool, gigabytes: float | None) -> float | None:
    """Returns the bytes that a window may hold on this rank; None without a limit."""
    flats, device = runner.rank_units.flat_parameters, runner.mesh.device
    on_host = {id(shard) for flat in flats if flat.host is not None for shard in flat.shards.values()}
    stepped = [each for each in runner.rank_units.stepped if each.requires_grad and id(each) not in on_host]
    missing = sum(each.nbytes for each in stepped if each.grad is None)
    # A window also has the full gradients of sharded weights: all, or few if every micro-batch reduces them.
    trained = [flat for flat in flats if flat.is_trained]
    often = [runner.buckets[number].flat for number in runner.buckets_reduced_often]
    sizes = {flat: flat.length * flat.shard.element_size() for flat in trained}
    missing += sum(size for flat, size in sizes.items() if flat not in often)
    missing += sum(sorted(size for flat, size in sizes.items() if flat in often)[-MAX_COPIES - 2 :])
    states = STATES * sum(each.numel() for each in stepped)
    if device.type != "cuda":
        if gigabytes is None:
            return None
        of_host = sum(flat.shard.nbytes for flat in flats if flat.host is not None)
        held = sum(each.nbytes for each in _existing(runner)) - of_host + missing + states
        return gigabytes * 1e9 - held
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    may_use = (1 - FRAGMENTS) * (total - others) if gigabytes is None else gigabytes * 1e9
    return may_use - torch.cuda.memory_allocated(device) - missing - (0 if has_stepped else states)


def _existing(runner: Runner, sides: Sequence[Any] = ()) -> list[Tensor]:
    """Returns the tensors that live between windows, and the tensors of batches."""
    existing: list[Tensor] = [flat.buffer for flat in zero1_flat_parameters(runner.rank_units.flat_parameters)]
    for parameter in runner.rank_units.stepped:
        existing += [parameter] if parameter.grad is None else [parameter, parameter.grad]
    return existing + [value for side in sides for value in side.values() if isinstance(value, Tensor)]


def _prepared(window: Sequence[MicroBatch]) -> tuple[list[MicroBatch], list[dict[str, Any]]]:
    """Returns micro-batches whose side inputs exist already, and these inputs."""
    sides = [dict(batch.prepare()) for batch in window]
    return [replace(batch, prepare=partial(dict, side)) for batch, side in zip(window, sides, strict=True)], sides


def peak_bytes(runner: Runner, window: Sequence[MicroBatch]) -> int:
    """Returns the peak memory of a window on this rank. Collective; there must be no gradients."""
    window, sides = _prepared(window)
    runner.train_window(window)  # makes the gradients
    device = runner.mesh.device
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            runner.train_window(window)
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_allocated(device) - before
        with LiveBytes(_existing(runner, sides)) as tally:
            runner.train_window(window)
        return tally.peak
    finally:
        forget_gradients(runner)
