"""The profiler: how long each operator takes on this machine, at these shapes, on this mesh, alone and beside another.

In:   a runner and a window of micro-batches.
Out:  a `Profile`, the same on every rank.
Must hold: operators are timed through the executor's own issue code, on the rank's own streams. Computations are timed
in a running step; collectives in trains of repeats, since a single one can look faster than a link is; of a pair, the
shorter as often as fits beside the longer, since in a step what starts costs is spread over all that is beside it. Of a
computation the slowest rank counts; of a collective the fastest, since the others only wait for the last to arrive.
A GPU is held until the host has issued what is timed, so that times are those of the device and not of launching
kernels. Gradients are left as between two optimizer steps.
"""

from __future__ import annotations

import functools
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.operators.base import Call, explicit_gradients
from hf_helix.operators.link import bare
from hf_helix.operators.transport import Recorder
from hf_helix.planning.graph import SEND, Kind, Operator, Part
from hf_helix.planning.profile import Name, Pair, Profile, named_operators, slowdown_of
from hf_helix.planning.window import BARRIER_INSTRUCTION, Instruction, Key, unit_instructions
from hf_helix.runtime.groups import host_name
from hf_helix.runtime.measure import forget_gradients, over_ranks, transports
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.strand import MicroBatch
from hf_helix.runtime.streams import CudaStreams, Streams
from hf_helix.runtime.trace import Span, Trace

TRAIN = 6  # repeats in a row; the first warms up
ARRIVAL = 1e-6  # seconds: what another rank sends takes the time of the sender
SHORTEST = 0.02  # computations shorter than this part of a collective are not paired with it: it would be noise
# Seconds for which a GPU is held for each operator, so that the host has issued it: in a window, where the host gets
# further ahead with each, more than the mean (0.16 ms beside an H100); else more than the slowest (attention, 0.63 ms).
ISSUING, ISSUING_SLOWEST = 3e-4, 1e-3
CLOCK = 2.5e9  # cycles of a GPU in a second; one with a slower clock is held longer

Progress = Callable[[float], object]
"""Told how much of the work is done, from 0 to 1."""


@dataclass(frozen=True)
class _Timed:
    """An operator as it is timed: of which unit of the rank, and what must run before."""

    name: Name
    unit: int
    op: Operator


def measure_profile(
    runner: Runner,
    window: Sequence[MicroBatch],
    about: Mapping[str, str] | None = None,
    pairs: bool = True,
    progress: Progress | None = None,
) -> Profile:
    """Measure every operator and every pair that can meet. Collective; call it when there are no gradients.

    Args:
        runner: under `sequential`, so that computations are seen alone.
        about: what the caller knows: model, mesh, shapes.
        pairs: whether to measure operators beside each other, too.
    """
    with runner.precision.weights.kept():  # as in a window, in which they are cast once
        profile = _measure(runner, window, about or {}, pairs, progress)
    forget_gradients(runner)
    return profile


def _measure(
    runner: Runner, window: Sequence[MicroBatch], about: Mapping[str, str], pairs: bool, progress: Progress | None
) -> Profile:
    bench = _Bench(runner, window[0])
    moving, sent = _moving(bench)
    mine = _in_steps(runner, window) | moving
    medians = {name: statistics.median(found) for name, found in mine.items()}
    names = [name for name, _ in named_operators(runner.layout)]
    # Ranks of a pipeline hold different units.
    ranks = over_ranks((medians, {name: _spread(found) for name, found in mine.items()}, bench.alike(), sent))
    kinds = {name: op.kind for name, op in named_operators(runner.layout)}
    times = {name: _agreed(kinds[name], [found[name] for found, *_ in ranks if name in found]) for name in names}
    spread = {name: max(found[name] for _, found, *_ in ranks if name in found) for name in names}
    like = {name: other for _, _, found, _ in ranks for name, other in found.items()}
    moved = {name: max(found[name] for *_, found in ranks if name in found) for *_, each in ranks for name in each}
    without = _without_link(bench)
    found = _measure_pairs(bench, times, like, progress) if pairs else {}
    return Profile({**machine(runner), **about}, runner.layout, times, spread, found, like, moved, without)


def _moving(bench: _Bench) -> tuple[dict[Name, list[float]], dict[Name, int]]:
    """Seconds of everything that communicates, and the bytes that this rank sends in it."""
    found, sent = _transfers(bench.runner, bench.batch)
    for timed in bench.moving:
        found[timed.name], sent[timed.name] = bench.train(timed), bench.bytes_sent(timed)
    return found, sent


def _without_link(bench: _Bench) -> dict[Name, float]:
    """What communication takes without the emulated link; nothing where there is none."""
    link = bench.runner.mesh.link
    if link is None:
        return {}
    with bare(link):
        found, _ = _moving(bench)
    ranks = over_ranks({name: statistics.median(seconds) for name, seconds in found.items()})
    return {name: min(each[name] for each in ranks if name in each) for mine in ranks for name in mine}


def machine(runner: Runner) -> dict[str, str]:
    """The hardware, the versions and the settings that times depend on, of rank 0."""
    device = runner.mesh.device
    known = {
        **(_gpu(device) if device.type == "cuda" else {"device": _cpu_name(), "threads": str(torch.get_num_threads())}),
        "backend": str(dist.get_backend()) if dist.is_initialized() else "none",
        "hosts": str(len(set(over_ranks(host_name())))),
        "torch": torch.__version__,
        "emulated_link": runner.mesh.link.speed_now.text if runner.mesh.link is not None else "",
    }
    return over_ranks({key: value for key, value in known.items() if value})[0]


def _gpu(device: torch.device) -> dict[str, str]:
    """Which GPU, how many of them are in this host, and how NCCL moves data between them."""
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    quiet = {name: value for name, value in settings.items() if not name.startswith("NCCL_DEBUG")}
    return {
        "device": torch.cuda.get_device_name(device),
        "devices_per_host": str(torch.cuda.device_count()),
        "cuda": str(torch.version.cuda or torch.version.hip),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "",
        "nccl_settings": " ".join(f"{name}={value}" for name, value in quiet.items()),
        "max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
    }


def _cpu_name() -> str:
    """Model and number of cores, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{model} CPU, {os.cpu_count()} cores"


def _in_steps(runner: Runner, window: Sequence[MicroBatch]) -> dict[Name, list[float]]:
    """Seconds of every computation in a running window."""
    program = runner.program(len(window))
    if isinstance(runner.executor.streams, CudaStreams):
        program = _apart(program)
    names = {unit.label: unit.name for unit in runner.stage.model.values()}
    found: dict[Name, list[float]] = {}
    for is_warm in (False, True):
        for span in _traced(runner, program, window, runner.sources(), ISSUING):
            if is_warm and span.stream == Kind.COMPUTE.value:
                found.setdefault(_split_label(span.label, names), []).append(span.seconds)
        forget_gradients(runner)
    return found


def _apart(program: Iterable[Instruction]) -> list[Instruction]:
    """The program with a barrier before every computation, at which a GPU can be held."""
    found: list[Instruction] = []
    for instruction in program:
        if instruction.operator is not None and not instruction.operator.kind.communicates:
            found.append(BARRIER_INSTRUCTION)
        found.append(instruction)
    return found


def _traced(
    runner: Runner,
    program: Sequence[Instruction],
    batches: Sequence[MicroBatch],
    values: Mapping[Key, Tensor],
    issuing: float = ISSUING_SLOWEST,
) -> list[Span]:
    """What runs of a program, and when, in order. A GPU is held at every barrier until the host is at the next.

    Args:
        program: what is to be timed on a GPU stands behind a barrier.
        batches: by the number of the micro-batch.
        values: that every micro-batch starts with.
        issuing: seconds for the host to issue an operator.
    """
    streams = runner.executor.streams
    counts = _counts_behind_barriers(program)

    def hold() -> None:
        _hold(streams, next(counts) * issuing)

    streams.trace = trace = Trace()
    try:
        runner.executor.run(program, batches, values, training=True, at_barrier=hold)
        streams.synchronize()
    finally:
        streams.trace = None
    return sorted(trace.spans, key=lambda span: span.start)


def _counts_behind_barriers(program: Iterable[Instruction]) -> Iterator[int]:
    """For each barrier, how many operators are issued between it and the next."""
    counts: list[int] = []
    for instruction in program:
        if instruction.operator is None:
            counts.append(0)
        elif counts:
            counts[-1] += 1
    return iter(counts)


def _hold(streams: Streams, seconds: float) -> None:
    """Keep the compute stream of a GPU, which all other streams wait for, from running what is issued meanwhile.

    Without it the device would wait for the host, and the time of an operator of a few small kernels would be that of
    launching them. An operator in which the host waits for the device still takes as long as that wait, as in a step.
    """
    if isinstance(streams, CudaStreams):
        torch.cuda._sleep(int(seconds * CLOCK))


def _transfers(runner: Runner, batch: MicroBatch) -> tuple[dict[Name, list[float]], dict[Name, int]]:
    """Seconds from rank to rank, and bytes: on every way in turn a train forward, then one back. Arriving takes no
    time itself."""
    found: dict[Name, list[float]] = {}
    sent: dict[Name, int] = {}
    ends = {operator.boundary: (index, operator) for index, operator in runner.stage.transfers()}
    side = batch.prepare() if ends else {}
    for boundary in range(len(runner.layout.chunks) - 1):
        if boundary not in ends:
            continue
        index, operator = ends[boundary]
        outward = runner.layout.units[index] == SEND
        values = [value.zero_() for value in operator.empty(side)]
        for forward in (True, False):
            sends = outward is forward
            move = functools.partial(operator.send if sends else operator.receive, values, forward)
            times = _transfer_train(runner, move, operator.lane(Part.F if forward else Part.B))
            name = runner.layout.units[index], f"{'F' if forward else 'B'}.transfer"
            found.setdefault(name, []).extend(times[1:] if sends else [ARRIVAL])
            if sends:
                sent[name] = sum(value.nbytes for value in values)
    return found, sent


def _transfer_train(runner: Runner, move: Callable[[], object], lane: str) -> list[float]:
    """Seconds of a transfer on its stream, `TRAIN` times in a row."""
    streams = runner.executor.streams
    streams.synchronize()
    streams.trace = trace = Trace()
    try:
        _hold(streams, TRAIN * ISSUING_SLOWEST)
        for event in [streams.issue(Kind.PIPELINE, move, (), "transfer", lane) for _ in range(TRAIN)]:
            streams.wait(event)
        streams.synchronize()
    finally:
        streams.trace = None
    return [span.seconds for span in sorted(trace.spans, key=lambda span: span.start)]


def _measure_pairs(
    bench: _Bench, times: Mapping[Name, float], like: Mapping[Name, Name], progress: Progress | None
) -> dict[tuple[Name, Name], Pair]:
    """Every computation of a layer beside every collective, and what does not pay, to show it: like beside like."""
    moving = [timed for timed in bench.moving if timed.name not in like and bench.repeats(timed)]
    shortest = SHORTEST * max((times[timed.name] for timed in moving), default=0.0)
    computing = [timed for timed in bench.computing if bench.repeats(timed) and times[timed.name] > shortest]
    couples = [(a, b) for a in computing for b in moving]
    couples += [(a, b) for a in moving for b in moving if a.op.kind is Kind.LOCAL and b.op.kind is Kind.CROSS]
    couples += [(a, a) for a in moving]
    if not isinstance(bench.runner.executor.streams, CudaStreams):
        # On a GPU two computations on two streams would write the same gradients and saved activations at once.
        longest = sorted(computing, key=lambda timed: -times[timed.name])[:3]
        couples += [(a, b) for a in longest for b in longest if a.name <= b.name]
    found = {}
    for place, (a, b) in enumerate(couples):
        counts = _counts(a, b, times)
        mine = [statistics.median(column) for column in zip(*bench.together(a, b, counts), strict=True)]
        first, second = zip(*over_ranks(mine), strict=True)
        alone = times[a.name], times[b.name]
        trains = [count * seconds for count, seconds in zip(counts, alone, strict=True)]
        beside = _agreed(a.op.kind, first), _agreed(b.op.kind, second)
        slow = slowdown_of(trains[0], *beside), slowdown_of(trains[1], *reversed(beside))
        found[a.name, b.name] = Pair.of(*alone, *slow)
        if progress is not None:
            progress((place + 1) / len(couples))
    return found


def _counts(a: _Timed, b: _Timed, times: Mapping[Name, float]) -> tuple[int, int]:
    """How often each of a pair runs beside the other."""
    if a.op.kind is b.op.kind:
        return 1, 1
    first, second = times[a.name], times[b.name]
    return min(TRAIN, max(1, int(second / first))), min(TRAIN, max(1, int(first / second)))


class _Bench:
    """Runs one or two operators again and again, with the values they have in a step."""

    def __init__(self, runner: Runner, batch: MicroBatch) -> None:
        self.runner = runner
        self.batch = batch
        self.values = _capture(runner, batch)
        first = _first_units(runner)
        every = [_Timed(name, first[name[0]], op) for name, op in named_operators(runner.layout) if name[0] in first]
        self.computing = [timed for timed in every if timed.op.kind is Kind.COMPUTE]
        self.moving = [timed for timed in every if timed.op.kind in (Kind.LOCAL, Kind.CROSS)]

    def repeats(self, timed: _Timed) -> bool:
        """Whether it belongs to a decoder layer."""
        return self.runner.layout.graphs[timed.name[0]].forward.repeats

    def alike(self) -> dict[Name, Name]:
        """Collectives that move the same as an earlier one."""
        first: dict[object, Name] = {}
        found = {}
        for timed in sorted(self.moving, key=lambda timed: not self.repeats(timed)):
            operator: Any = self.runner.executor.units[timed.unit].operators[timed.op.of]
            inputs = [self.values[source] for source in self._instruction(0, timed).reads]
            outputs, _ = operator.prepare(self._call(timed), timed.op.part, *inputs)
            moves = (timed.op.kind, *((tuple(value.shape), value.dtype) for value in (*outputs, *inputs)))
            other = first.setdefault(moves, timed.name)
            if other != timed.name:
                found[timed.name] = other
        return found

    def train(self, timed: _Timed) -> list[float]:
        """Seconds of an operator, `TRAIN` times in a row."""
        program: list[Instruction] = []
        for repeat in range(TRAIN):
            program += [*self._before(repeat, timed), BARRIER_INSTRUCTION, self._instruction(repeat, timed, ends=True)]
        label = self._label(timed)
        return [span.seconds for span in self._run(program) if span.label == label][1:]

    def bytes_sent(self, timed: _Timed) -> int:
        """What this rank sends in a collective. Collective."""
        axes = self.runner.mesh.axes
        recorders = [Recorder(axis.transport) for axis in axes]
        with transports(axes, recorders):
            self._work(timed)()
        return sum(recorder.bytes_sent for recorder in recorders)

    def together(self, first: _Timed, second: _Timed, counts: tuple[int, int]) -> list[tuple[float, float]]:
        """Seconds of two operators that start together on every rank, each so many times in a row; `TRAIN` times."""
        if first.op.kind is second.op.kind:
            # Two that draw random numbers at once would leave each other's state behind.
            device = self.runner.mesh.device
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), explicit_gradients():
                return self._aside(first, second)
        # Each is of micro-batches of its own, or one that reads what the other makes would wait for it.
        trains = [
            (timed, place * TRAIN + repeat)
            for place, (timed, count) in enumerate(zip((first, second), counts, strict=True))
            for repeat in range(count)
        ]
        # Communication is issued first: a computation issued before it would hold it up.
        trains.sort(key=lambda each: each[0].op.kind is Kind.COMPUTE)
        program = [before for timed, repeat in trains for before in self._before(repeat, timed)]
        issued = [self._instruction(repeat, timed) for timed, repeat in trains]
        program += [BARRIER_INSTRUCTION, *issued, BARRIER_INSTRUCTION]
        labels = [self._label(first), self._label(second)]
        rows = []
        for _ in range(TRAIN):
            spans = self._run(program)
            ran = [[span.seconds for span in spans if span.label == label] for label in labels]
            rows.append((sum(ran[0][-counts[0] :]), sum(ran[1][-counts[1] :])))
        return rows[1:]

    def _aside(self, first: _Timed, second: _Timed) -> list[tuple[float, float]]:
        """Two operators of one kind: the second goes through the stream of another kind."""
        streams = self.runner.executor.streams
        rows = []
        for _ in range(TRAIN):
            works = [self._work(timed) for timed in (first, second)]
            _meet(self.runner)
            _hold(streams, 2 * ISSUING_SLOWEST)
            streams.trace = trace = Trace()
            try:
                side = Kind.LOCAL if first.op.kind is Kind.COMPUTE else Kind.CROSS
                event = streams.issue(side, works[1], (), "second")
                if first.op.kind is Kind.COMPUTE:
                    streams.compute(works[0], "first")
                else:
                    streams.wait(streams.issue(first.op.kind, works[0], (), "first"))
                streams.wait(event)
                streams.synchronize()
            finally:
                streams.trace = None
            by_label = {span.label: span.seconds for span in trace.spans}
            rows.append((by_label["first"], by_label["second"]))
        return rows[1:]

    def _work(self, timed: _Timed) -> Callable[[], object]:
        unit = self.runner.executor.units[timed.unit]
        operator: Any = unit.operators[timed.op.of]
        inputs = [self.values[key] for key in self._instruction(0, timed).reads]
        call = self._call(timed)
        if timed.op.kind.communicates:
            return operator.prepare(call, timed.op.part, *inputs)[1]
        for setup in self._before(0, timed):
            operator.forward(call, *(self.values[key] for key in setup.reads))
        call.training = not (timed.op.again and timed.op.part is Part.F)
        run = {Part.F: "forward", Part.B: "backward", Part.I: "input_gradient", Part.W: "weight_gradient"}
        return lambda: getattr(operator, run.get(timed.op.part, "again"))(call, *inputs)

    def _call(self, timed: _Timed) -> Call:
        unit = self.runner.executor.units[timed.unit]
        return self.runner.executor.strand(self.batch, {}, training=True).call(timed.unit, timed.op.of, unit)

    def _before(self, repeat: int, timed: _Timed) -> list[Instruction]:
        """The forward that a backward operator needs, or the one that runs again."""
        if timed.op.part in (Part.F, Part.R) or timed.op.kind.communicates:
            return []
        made = unit_instructions(self.runner.layout, (repeat, timed.unit), forward=not timed.op.again)
        found = [i for i in made if i.operator and i.operator.of == timed.op.of and not i.operator.kind.communicates]
        return [i for i in found if i.operator and i.operator.part in (Part.F, Part.R)]

    def _instruction(self, repeat: int, timed: _Timed, ends: bool = False) -> Instruction:
        made = unit_instructions(self.runner.layout, (repeat, timed.unit), forward=timed.op.part is Part.F)
        found = next(i for i in made if i.operator is not None and i.operator.name == timed.op.name)
        return replace(found, ends=ends)

    def _run(self, program: Sequence[Instruction]) -> list[Span]:
        _meet(self.runner)
        return _traced(self.runner, program, [self.batch] * 2 * TRAIN, self.values)

    def _label(self, timed: _Timed) -> str:
        return self.runner.executor.label(self.batch.key[1], timed.unit, timed.op)


def _first_units(runner: Runner) -> dict[str, int]:
    """The first unit of this rank of every name, ways to other ranks left out."""
    first: dict[str, int] = {}
    for index, unit in runner.stage.units.items():
        if not runner.layout.transfers(index):
            first.setdefault(unit.name, index)
    return first


def _capture(runner: Runner, batch: MicroBatch) -> dict[Key, Tensor]:
    """Every value of a micro-batch in the first unit of each name, forward and backward. Collective."""
    layout = runner.layout
    keep: set[Key] = set()
    for unit in _first_units(runner).values():
        for forward in (True, False):
            for instruction in unit_instructions(layout, (0, unit), forward):
                keep.update(instruction.needs + instruction.writes)
    program = runner.build_program(runner.scheduler(1), keep)
    values = runner.executor.run(program, [batch], runner.sources(), training=True)[0]
    forget_gradients(runner)
    return {key: value for key, value in values.items() if key in keep}


def _meet(runner: Runner) -> None:
    """Ranks that share every layer start together."""
    runner.executor.streams.synchronize()
    for axis in runner.mesh.axes:
        if axis.group is not None:
            dist.barrier(group=axis.group)


def _agreed(kind: Kind, ranks: Sequence[float]) -> float:
    return (max if kind is Kind.COMPUTE else min)(ranks)


def _spread(found: Sequence[float]) -> float:
    """The distance between the quartiles, in parts of the median."""
    if len(found) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(found, n=4)
    return (third - first) / middle


def _split_label(label: str, names: dict[str, str]) -> Name:
    """('layer', 'B.mlp.down.W') of 'B2.layers.3.mlp.down.W'."""
    strand, _, rest = label.partition(".")
    unit = next(name for name in names if rest.startswith(name + "."))
    return names[unit], f"{strand[0]}.{rest.removeprefix(unit + '.')}"
