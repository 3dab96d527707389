"""CUDA's streams and events on a CPU, with everything that is out of order.

In:   a `FakeCuda` in the place of `torch.cuda`, given to `CudaStreams`, and code that runs inside its `watch()`.
Out:  `mistakes`: reads, writes and frees of memory that no event puts in order, each with both places; and `waits`:
      where the host waits for the device.
Must hold: what is ordered here is ordered on a GPU, whatever the speed of its streams. Operators run at once, in the
order of issue; what is watched is only the order that events and streams promise.

Every stream has a vector clock: how far it is behind itself and behind every other stream. An operator ticks the clock
of the current stream, an event copies it, who waits takes it over. An access to a storage is in order if the stream's
clock has reached the access before it. Memory belongs to the stream that allocated it, whose next allocation may get it
as soon as it is freed: so a free is an access, too, of that stream.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Of these only shape and type of the inputs matter.
FACTORIES = ("new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like")
# On CUDA, the host waits for what these find.
WAITING = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique2", "unique_dim", "lift_fresh")
WAITING_METHODS = ("tolist", "numpy", "cpu")
OVERWRITTEN = ("allreduce_", "broadcast_", "recv_", "allreduce_coalesced_", "reduce_")  # of their `tensors`

Clock = dict["FakeStream", int]


class FakeStream:
    """A queue on the device.

    Attributes:
        clock: of every stream, how many of its operators are over when the next one of this stream begins.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {self: 0}

    def wait_event(self, event: FakeEvent) -> None:
        assert event.clock is not None, "an event that was never recorded orders nothing"
        self.take_over(event.clock)

    def take_over(self, clock: Clock) -> None:
        for stream, now in clock.items():
            self.clock[stream] = max(now, self.clock.get(stream, 0))

    def tick(self) -> int:
        self.clock[self] += 1
        return self.clock[self]

    def is_behind(self, access: Access) -> bool:
        return self.clock.get(access.stream, 0) >= access.time


class FakeEvent:
    """A place in a stream. `prompt`: whether the host finds it passed as soon as it asks; otherwise never."""

    def __init__(self, cuda: FakeCuda, prompt: bool) -> None:
        self._cuda = cuda
        self._prompt = prompt
        self.clock: Clock | None = None
        self.number = 0

    def record(self, stream: FakeStream | None = None) -> None:
        self.clock = dict((stream or self._cuda.current).clock)
        self._cuda.recorded += 1
        self.number = self._cuda.recorded

    def query(self) -> bool:
        assert not self._cuda.captures, "the host asks for the end of what is only captured"
        return self._prompt

    def synchronize(self) -> None:
        self._cuda.host_waits("Event.synchronize")
        if self.clock is not None:  # what the host issues from now on comes later
            for stream in self._cuda.streams:
                stream.take_over(self.clock)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.clock is not None
        assert end.clock is not None
        return float(end.number - self.number)  # as good as any; later is more


@dataclass(frozen=True)
class Access:
    """One operator's use of a storage: on which stream, at which of its times, and where in the code."""

    stream: FakeStream
    time: int
    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.what} on {self.stream.name} at {self.place}"


@dataclass
class Memory:
    """What happened to a storage. `owner`: the stream that it was allocated on."""

    owner: FakeStream
    born: str
    written: Access | None = None
    read: dict[FakeStream, Access] = field(default_factory=dict)
    watch: object = None


@dataclass(frozen=True)
class Mistake:
    """Two uses of one storage that nothing orders. `kind`: READ, WRITE or FREED, the later one in the program."""

    kind: str
    later: str
    earlier: Access
    born: str

    def __str__(self) -> str:
        return (
            f"{self.kind} too early: {self.later}, while this may still run: {self.earlier} (memory from {self.born})"
        )


class FakeCuda:
    """What `CudaStreams` takes from `torch.cuda`.

    Args:
        prompt: see `FakeEvent`.

    Attributes:
        mistakes: what is out of order.
        waits: where the host waits for the device, and how often.
        asynchronous: collectives that run on a stream of torch's own.
        operators: how many were seen.
        captures: whether a graph is being captured.
        on_cpu_only: inside of what waits on a CPU only: `one_hot` looks at its input, a number is put into a tensor.
    """

    def __init__(self, prompt: bool = False) -> None:
        self.current = self.default = FakeStream("compute")
        self.streams = [self.default]
        self.mistakes: list[Mistake] = []
        self.waits: Counter[str] = Counter()
        self.asynchronous: Counter[str] = Counter()
        self.operators = self.recorded = 0
        self.captures = self.on_cpu_only = False
        self.storages: dict[int, Memory] = {}
        self._prompt = prompt

    # -- torch.cuda ------------------------------------------------------------------------------------------------

    def Stream(self, device: torch.device, priority: int = 0) -> FakeStream:
        self.streams.append(FakeStream(f"stream {len(self.streams)}"))
        return self.streams[-1]

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self, self._prompt)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    def is_current_stream_capturing(self) -> bool:
        return self.captures

    def synchronize(self, device: torch.device) -> None:
        assert not self.captures, "the host waits for what is only captured"
        for stream in self.streams:
            for other in self.streams:
                stream.take_over(other.clock)

    # -- watching --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Note everything that torch runs inside. What exists before belongs to the compute stream."""
        with _Calls(self), _Operators(self):
            yield

    def ran(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], makes: Sequence[Tensor]) -> None:
        """An operator was issued on the current stream. `makes`: what it returns."""
        self.operators += 1
        stream, place = self.current, _place()
        access = Access(stream, stream.tick(), name, place)
        for value in reads:
            self._read(self._memory(value, self.default, "before"), access)
        for value in writes:
            self._write(self._memory(value, self.default, "before"), access)
        for value in makes:
            if value.untyped_storage()._cdata not in self.storages:
                self._memory(value, stream, str(access)).written = access

    def host_waits(self, name: str) -> None:
        """The host waits for the device."""
        if not self.on_cpu_only:
            self.waits[f"{_place(lines=False)} {name}"] += 1

    def _memory(self, value: Tensor, owner: FakeStream, born: str) -> Memory:
        storage = value.untyped_storage()
        key = storage._cdata
        result = self.storages.get(key)
        if result is None:
            result = self.storages[key] = Memory(owner, born)
            # torch keeps one Python object for a storage as long as that lives.
            result.watch = weakref.ref(storage, lambda _: self._freed(self.storages.pop(key)))
        return result

    def _read(self, memory: Memory, access: Access) -> None:
        self._check("READ", memory, access, [memory.written])
        memory.read[access.stream] = access

    def _write(self, memory: Memory, access: Access) -> None:
        self._check("WRITE", memory, access, [memory.written, *memory.read.values()])
        memory.written = access
        memory.read = {}

    def _check(self, kind: str, memory: Memory, access: Access, before: Sequence[Access | None]) -> None:
        for earlier in before:
            if earlier is not None and not access.stream.is_behind(earlier):
                self.mistakes.append(Mistake(kind, str(access), earlier, memory.born))

    def _freed(self, memory: Memory) -> None:
        for earlier in (memory.written, *memory.read.values()):
            if earlier is not None and not memory.owner.is_behind(earlier):
                self.mistakes.append(Mistake("FREED", f"freed at {_place()}", earlier, memory.born))


class _Operators(TorchDispatchMode):
    """Hands every operator to a `FakeCuda`, those of autograd's backward and of c10d included."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema, name = func._schema, func._schema.name.split("::")[1]
        given = {**dict(zip((each.name for each in schema.arguments), args, strict=False)), **kwargs}
        if func.namespace == "c10d":
            _fill(name, given)
            result = func(*args, **kwargs)
            reads, writes = _moved(name, given)
            self._cuda.ran(f"c10d.{name}", reads, writes, ())
            if given.get("async_op"):
                self._cuda.asynchronous[f"{_place(lines=False)} {name}"] += 1
            return result
        result = func(*args, **kwargs)
        if name in WAITING or _finds_lengths(name, given):
            self._cuda.host_waits(name)
        if not is_view(schema):
            written = {
                each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write
            }
            reads = [] if name in FACTORIES else tensors_in([given[key] for key in given if key not in written])
            writes = tensors_in([given[key] for key in given if key in written])
            self._cuda.ran(name, reads, writes, tensors_in(result))
        return result


class _Calls(TorchFunctionMode):
    """Hands over what the host waits for and no operator shows on a CPU."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITING_METHODS and args and isinstance(args[0], Tensor):
            self._cuda.host_waits(name)
            self._cuda.ran(name, [args[0]], (), ())
        before, puts_number = self._cuda.on_cpu_only, name == "__setitem__" and isinstance(args[2], int | float)
        self._cuda.on_cpu_only = before or puts_number or name == "one_hot"
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._cuda.on_cpu_only = before


def is_view(schema: Any) -> bool:
    """Whether an operator gives another view of a storage and touches nothing."""
    aliases = [each.alias_info for each in schema.returns]
    return bool(aliases) and all(info is not None and not info.is_write for info in aliases)


def _finds_lengths(name: str, given: dict[str, Any]) -> bool:
    """Whether the shape of what comes out depends on values."""
    if name == "repeat_interleave":
        return given.get("output_size") is None
    if name not in ("index", "index_put", "index_put_"):
        return False
    return any(each.dtype in (torch.bool, torch.uint8) for each in tensors_in(given["indices"]))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _moved(name: str, given: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """What a collective reads and what it writes; its schema does not say so."""
    reads, writes = [], []
    for key, value in given.items():
        if key.startswith("output") or (key.startswith("tensor") and name in OVERWRITTEN):
            writes += tensors_in(value)
        elif name != "barrier":
            reads += tensors_in(value)
    return reads, writes


def _fill(name: str, given: dict[str, Any]) -> None:
    """The fake process group moves nothing; as if all ranks held the same, as far as it has room."""
    outputs = tensors_in([given[key] for key in given if key.startswith("output")])
    inputs = tensors_in([given[key] for key in given if key.startswith("input")])
    for out, value in zip(outputs, inputs, strict=False):
        flat = value.reshape(-1)
        repeats = -(-out.numel() // max(1, flat.numel()))
        out.copy_(flat.repeat(repeats)[: out.numel()].view_as(out) if flat.numel() else torch.zeros_like(out))
    if name == "recv_":
        for out in tensors_in(given["tensors"]):
            out.zero_()


def _place(lines: bool = True) -> str:
    """Where in the code that uses torch the program is: the file and the line, or the function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "nowhere"
    file = frame.f_code.co_filename.rpartition("/site-packages/")[2]
    file = "/".join(file.split("/")[-2:])
    return f"{file}:{frame.f_lineno}" if lines else f"{file}:{frame.f_code.co_qualname}"


def _is_between(file: str) -> bool:
    return file == __file__ or "/torch/" in file or file.endswith("contextlib.py") or file.startswith("<")
