"""Times of the operators of a model, single and concurrent: a `Profile`.

In:   a runner and a window of micro-batches.
Out:  a `Profile`, the same on every rank.
Must hold: operators are timed through the executor's own issue code, on the rank's own streams, with the values of a
step: computations in a running window, communication several times in a row. The shorter operator of a pair is repeated
to fill the longer, so that launches cost as in a step; both start together on every rank that shares them. Of a
computation the slowest rank counts, of a collective the fastest, since the other ranks only wait for the last to
arrive. Ranks cross the boundaries of the pipeline in the same order, so that both ends of a transfer are there.
Gradients are left as between two optimizer steps.
"""

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from hf_helix.measure.machine import machine
from hf_helix.measure.memory import operator_memory
from hf_helix.measure.overlap import transports
from hf_helix.measure.progress import Progress
from hf_helix.measure.timing import (
    ISSUING,
    ISSUING_SLOWEST,
    Work,
    apart,
    issue_together,
    meet,
    record,
    time_gradient_stream,
    time_in_a_row,
    traced,
)
from hf_helix.operators.base import OperatorContext, explicit_gradients
from hf_helix.operators.communication.transport import Recorder
from hf_helix.operators.parameters.host_shard import host_memory
from hf_helix.operators.zero.zero1 import Zero1FlatParameter
from hf_helix.planning.graph.backward import SEND
from hf_helix.planning.graph.operator import Kind, Operator, Part
from hf_helix.planning.timing.profile import OperatorMemory, Pair, Profile, slowdown_of
from hf_helix.planning.window.instructions import BARRIER_INSTRUCTION, Instruction, unit_instructions
from hf_helix.planning.window.layout import (
    Key,
    Name,
    named_operators,
    named_traffic,
)
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.executor import BoundComputation, BoundTransfer, bind, issue_gather, no_sources
from hf_helix.runtime.gradients.buckets import BoundBucket
from hf_helix.runtime.gradients.reduce import GradientReducer
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner, forget_gradients
from hf_helix.runtime.streams.streams import CudaStreams
from hf_helix.runtime.streams.trace import Span

LEAST = 1e-7  # seconds of a reduction of nothing; times are positive
ARRIVAL = 1e-6  # seconds of a receive: a transfer takes the time of its sender
Times = tuple[dict[Name, list[float]], dict[Name, int]]
"""By name, the seconds of every repeat, and the bytes that this rank sends."""


def time_reductions(runner: Runner, repeats: int) -> Times:
    """Returns the times of every gradient reduction of this rank. Collective. The smallest and the largest are timed,
    others lie between by their bytes: a reduction takes a latency and a time per byte."""
    own = [each for each in runner.layout.traffic_of(runner.rank_units.rank) if each.adders]
    held = {each.named_operators[0][0]: each.bytes for each in own}
    planned = [bucket for bucket in runner.buckets if bucket.row.is_planned]
    if not held or not planned:  # the user may have frozen everything here since the layout was made
        return {name: [LEAST] * (repeats - 1) for name in held}, dict.fromkeys(held, 0)
    small, large = (pick(planned, key=lambda bucket: bucket.row.bytes) for pick in (min, max))
    shortest, longest = (_time_reduction(runner, bucket, repeats) for bucket in (small, large))
    times = {}
    for name, count in held.items():
        share = (count - small.row.bytes) / max(1, large.row.bytes - small.row.bytes)
        seconds = ((1 - share) * first + share * second for first, second in zip(shortest, longest, strict=True))
        times[name] = [max(LEAST, each) for each in seconds]
    cuts = (row.cut for bucket in planned for row in bucket.rows.values())
    groups = map(runner.mesh.replica_group_of, cuts)
    size = max((dist.get_world_size(group) for group in groups if group is not None), default=1)  # of a ring
    ways = 1 if all(bucket.flat is not None for bucket in planned) else 2  # sharded gradients do not come back
    return times, {name: ways * count * (size - 1) // size for name, count in held.items()}


def _time_reduction(runner: Runner, bucket: BoundBucket, repeats: int) -> list[float]:
    streams = runner.executor.streams

    def reduce() -> None:
        for parameter in bucket.rows:
            if parameter.grad is None:  # the first time, or again if the reduction leaves parts of it
                parameter.grad = torch.zeros_like(parameter)
        GradientReducer([bucket], runner.mesh, streams).finish()

    issuing = ISSUING_SLOWEST + ISSUING * len(bucket.rows)  # their gradients are made, and moved
    try:
        return time_gradient_stream(streams, reduce, repeats, issuing)
    finally:
        forget_gradients(runner)


def time_gathers(runner: Runner, repeats: int) -> Times:
    """Returns the times of every weight gather of this rank; of equal lengths the first is timed. Collective."""
    streams = runner.executor.streams
    known: dict[tuple[object, int], list[float]] = {}
    seconds: dict[Name, list[float]] = {}
    sent: dict[Name, int] = {}
    for name, flat in _gathered(runner):

        def refresh(flat: Zero1FlatParameter = flat) -> None:
            streams.wait(issue_gather(streams, flat, flat.name))

        length = flat.gather_axis, flat.buffer.nbytes
        if length not in known:
            known[length] = time_gradient_stream(streams, refresh, repeats, ISSUING_SLOWEST)
        seconds[name] = known[length]
        sent[name] = flat.buffer.nbytes // flat.gather_axis.size * (flat.gather_axis.size - 1)
    return seconds, sent


def _gathered(runner: Runner, kind: Kind = Kind.GRADIENTS) -> Iterator[tuple[Name, Zero1FlatParameter]]:
    """Yields the ZeRO-1 weights of this rank, each with the name of their operator of a kind."""
    units, rank = runner.rank_units.all_units, runner.rank_units.rank
    for traffic in (each for each in runner.layout.traffic_of(rank) if each.readers):
        for name, op in traffic.named_operators:
            flat = units[traffic.readers[0]].flat_parameters[op.forward_name]
            assert isinstance(flat, Zero1FlatParameter)
            if op.kind is kind:
                yield name, flat


def time_copies(runner: Runner, repeats: int) -> Times:
    """Returns the times of every copy between host and device of this rank. The largest is timed in both directions,
    others take as long for a byte."""
    hosts = runner.rank_units.host_shards
    if not hosts:
        return {}, {}
    host = max(hosts, key=lambda each: each.crossing.nbytes)
    copy = torch.empty_like(host.crossing, device=runner.mesh.device)
    on_host = host_memory(copy.shape, copy.dtype, copy.device)
    streams, layout = runner.executor.streams, runner.layout
    up = time_in_a_row(streams, Kind.UP, lambda: host.up(copy), repeats)
    down = time_in_a_row(streams, Kind.DOWN, lambda: host.link.down(on_host, copy), repeats)
    planned = [bucket.flat for bucket in runner.buckets if bucket.row.is_planned]
    own = [each for each in layout.traffic_of(runner.rank_units.rank) if each.adders]
    moved = {name: (up, flat.host.crossing.nbytes) for name, flat in _gathered(runner, Kind.UP) if flat.host}
    for traffic, reduced in zip(own, planned, strict=True):
        nbytes = 0 if reduced is None or reduced.host is None else reduced.shard.nbytes
        moved |= {name: (down, nbytes) for name, op in traffic.named_operators if op.kind is Kind.DOWN}
    rate = 1 / copy.nbytes
    return {name: [max(LEAST, each * nbytes * rate) for each in row] for name, (row, nbytes) in moved.items()}, {}


def time_transfers(runner: Runner, batch: MicroBatch, repeats: int) -> Times:
    """Returns the times of the pipeline transfers of this rank. Collective. The boundaries of the pipeline take turns;
    each is crossed `repeats` times forward, then `repeats` times back."""
    seconds: dict[Name, list[float]] = {}
    sent: dict[Name, int] = {}
    ends = {operator.boundary: (index, operator) for index, operator in runner.rank_units.transfers()}
    side = batch.prepare() if ends else {}
    for boundary in range(len(runner.layout.chunks) - 1):
        if boundary not in ends:
            continue
        index, operator = ends[boundary]
        outward = runner.layout.units[index].startswith(SEND)
        values = [value.zero_() for value in operator.make_buffers(side)]
        for forward in (True, False):
            sends = outward is forward
            move = functools.partial(operator.send if sends else operator.receive, values, forward)
            lane = operator.lane(Part.F if forward else Part.B)
            times = time_in_a_row(runner.executor.streams, Kind.PIPELINE, move, repeats, lane)
            name = runner.layout.units[index], f"{'F' if forward else 'B'}.transfer"
            seconds.setdefault(name, []).extend(times[1:] if sends else [ARRIVAL])
            if sends:
                sent[name] = sum(value.nbytes for value in values)
    return seconds, sent


IN_A_ROW = 4  # repeats of an operator; the first warms up
PAIRED = 2  # collectives of each kind of communication that are paired, the longest; others slow down as these do
UNPAIRED = 0.1  # of the time of all computations, in the shortest of them, whose slowdowns would be noise


@dataclass(frozen=True)
class TimedOperator:
    """An operator of the first unit of its name on this rank, with its name in a profile and the number of the unit."""

    name: Name
    unit: int
    op: Operator


class Bench:
    """The operators of a runner, ready to run `length` times in a row with the values of a micro-batch."""

    def __init__(self, runner: Runner, batch: MicroBatch, length: int) -> None:
        self.length = length
        self.runner = runner
        self.batch = batch
        self.values = _capture(runner, batch)
        first = _first_units(runner)
        every = [
            TimedOperator(name, first[name[0]], op) for name, op in named_operators(runner.layout) if name[0] in first
        ]
        self.computing = [timed for timed in every if timed.op.kind is Kind.COMPUTE]
        self.moving = [timed for timed in every if timed.op.kind.communicates]  # without transfers of a pipeline

    def repeats(self, timed: TimedOperator) -> bool:
        """Whether an operator belongs to a decoder layer."""
        return self.runner.layout.graphs[timed.name[0]].forward.repeats

    def equal_collectives(self) -> dict[Name, Name]:
        """Returns, by the name of a collective, an earlier collective that moves equal shapes and types."""
        first: dict[object, Name] = {}
        others = {}
        for timed in sorted(self.moving, key=lambda timed: not self.repeats(timed)):
            step = self._step(self._instruction(0, timed))
            assert isinstance(step, BoundTransfer)
            inputs = [self.values[source] for source in step.reads]
            outputs, _ = step.prepare(self._context(timed), timed.op.part, *inputs)
            moves = (timed.op.kind, *((tuple(value.shape), value.dtype) for value in (*outputs, *inputs)))
            other = first.setdefault(moves, timed.name)
            if other != timed.name:
                others[timed.name] = other
        return others

    def time_repeats(self, timed: TimedOperator) -> list[float]:
        """Returns the seconds of a collective in a row of repeats, without the first. Collective."""
        assert timed.op.kind.communicates
        program: list[Instruction] = []
        for repeat in range(self.length):
            program += [BARRIER_INSTRUCTION, self._instruction(repeat, timed, ends=True)]
        label = self._label(timed)
        return [span.seconds for span in self._run(program) if span.label == label][1:]

    def bytes_sent(self, timed: TimedOperator) -> int:
        """Returns the bytes that this rank sends in a collective. Collective."""
        axes = self.runner.mesh.axes
        recorders = [Recorder(axis.transport) for axis in axes]
        with transports(axes, recorders):
            self._work(timed)()
        return sum(recorder.bytes_sent for recorder in recorders)

    def time_pair(
        self, first: TimedOperator, second: TimedOperator, counts: tuple[int, int]
    ) -> list[tuple[float, float]]:
        """Returns the seconds of two operators in every round; `counts` repeats of each start together. Collective."""
        if first.op.kind is second.op.kind:
            # Two operators that draw random numbers at once would leave each other's state.
            device = self.runner.mesh.device
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                return self._on_two_streams(first, second)
        # Each has its own micro-batches, or an operator that reads the result of the other would wait for it.
        repeats = [
            (timed, place * self.length + repeat)
            for place, (timed, count) in enumerate(zip((first, second), counts, strict=True))
            for repeat in range(count)
        ]
        # Communication is issued first: a computation issued before it would hold it up.
        repeats.sort(key=lambda each: each[0].op.kind is Kind.COMPUTE)
        program = [before for timed, repeat in repeats for before in self._before(repeat, timed)]
        issued = [self._instruction(repeat, timed) for timed, repeat in repeats]
        program += [BARRIER_INSTRUCTION, *issued, BARRIER_INSTRUCTION]
        labels = [self._label(first), self._label(second)]
        rows = []
        for _ in range(self.length):
            spans = self._run(program)
            ran = [[span.seconds for span in spans if span.label == label] for label in labels]
            rows.append((sum(ran[0][-counts[0] :]), sum(ran[1][-counts[1] :])))
        return rows[1:]

    def _on_two_streams(self, first: TimedOperator, second: TimedOperator) -> list[tuple[float, float]]:
        """The seconds of two operators of the same kind; the second runs on the stream of another kind."""
        streams = self.runner.executor.streams
        rows = []
        for _ in range(self.length):
            with explicit_gradients():
                works = [self._work(timed) for timed in (first, second)]
            meet(self.runner)

            side = Kind.INTRA_NODE if first.op.kind is Kind.COMPUTE else Kind.INTER_NODE
            together = (side, works[1], "second"), (first.op.kind, works[0], "first")
            spans = record(streams, functools.partial(issue_together, streams, together), 2 * ISSUING_SLOWEST)
            by_label = {span.label: span.seconds for span in spans}
            rows.append((by_label["first"], by_label["second"]))
        return rows[1:]

    def _work(self, timed: TimedOperator) -> Work:
        step = self._step(self._instruction(0, timed))
        inputs = [self.values[key] for key in step.reads]
        ctx = self._context(timed)
        if isinstance(step, BoundTransfer):
            return step.prepare(ctx, timed.op.part, *inputs)[1]
        for setup in map(self._step, self._before(0, timed)):
            assert isinstance(setup, BoundComputation)
            setup.method(self.values)(ctx, *(self.values[key] for key in setup.reads))
        ctx.saves_for_backward = step.saves_for_backward
        run = step.method(self.values)

        def compute() -> None:
            with explicit_gradients():  # holds for a thread, and the work may run in the thread of a stream
                run(ctx, *inputs)

        return compute

    def _step(self, instruction: Instruction) -> BoundComputation | BoundTransfer:
        bound = bind(instruction, self.runner.executor.units, self.runner.layout)
        assert isinstance(bound, (BoundComputation, BoundTransfer))
        return bound

    def _context(self, timed: TimedOperator) -> OperatorContext:
        unit = self.runner.executor.units[timed.unit]
        return self.runner.executor.begin(self.batch, no_sources, saves_for_backward=True).context_of(
            timed.unit, timed.op.forward_name, unit
        )

    def _before(self, repeat: int, timed: TimedOperator) -> list[Instruction]:
        """The forward operators that a backward operator needs; of recompute if it is recomputed."""
        if timed.op.part in (Part.F, Part.R) or timed.op.kind.communicates:
            return []
        made = unit_instructions(self.runner.layout, (repeat, timed.unit, not timed.op.recomputed))
        before = [
            i
            for i in made
            if i.operator and i.operator.forward_name == timed.op.forward_name and not i.operator.kind.communicates
        ]
        return [i for i in before if i.operator and i.operator.part in (Part.F, Part.R)]

    def _instruction(self, repeat: int, timed: TimedOperator, ends: bool = False) -> Instruction:
        made = unit_instructions(self.runner.layout, (repeat, timed.unit, timed.op.part is Part.F))
        instruction = next(i for i in made if i.operator is not None and i.operator.name == timed.op.name)
        return instruction._replace(ends=ends)

    def _run(self, program: Sequence[Instruction]) -> list[Span]:
        meet(self.runner)
        return traced(self.runner, program, [self.batch] * 2 * self.length, lambda _: self.values)

    def _label(self, timed: TimedOperator) -> str:
        return self.runner.executor.label(self.batch.key[1], timed.unit, timed.op)


def _first_units(runner: Runner) -> dict[str, int]:
    """The first unit of each name on this rank, without transfers."""
    first: dict[str, int] = {}
    for index, unit in runner.rank_units.units.items():
        if not runner.layout.transfers(index):
            first.setdefault(unit.name, index)
    return first


def _capture(runner: Runner, batch: MicroBatch) -> dict[Key, Tensor]:
    """The values of a micro-batch in the first unit of each name, forward and backward. Collective."""
    layout = runner.layout
    keep: set[Key] = set()
    for unit in _first_units(runner).values():
        for forward in (True, False):
            for instruction in unit_instructions(layout, (0, unit, forward)):
                keep.update(instruction.needs + instruction.writes)
    program = runner.build_program(runner.scheduler(1), keep)
    values = runner.executor.run(program, [batch], runner.sources(), saves_for_backward=True)[0]
    forget_gradients(runner)
    return {key: value for key, value in values.items() if key in keep}


# -- the profile -----------------------------------------------------------------------------------------------------


def measure_profile(
    runner: Runner,
    window: Sequence[MicroBatch],
    about: Mapping[str, str] | None = None,
    pairs: bool = True,
    progress: Progress | None = None,
) -> Profile:
    """Returns the times of every operator and of every pair that can run concurrently. Collective.

    Args:
        runner: a runner under `sequential`, so that computations run by themselves; it has no gradients.
        window: the micro-batches.
        about: the case as the caller knows it: model, mesh, shapes.
        pairs: whether pairs of operators are timed.
        progress: called while pairs are timed.
    """
    with runner.precision.in_window():
        profile = _measure(runner, window, about or {}, pairs, progress)
    forget_gradients(runner)
    return profile


def _measure(
    runner: Runner, window: Sequence[MicroBatch], about: Mapping[str, str], pairs: bool, progress: Progress | None
) -> Profile:
    bench = Bench(runner, window[0], IN_A_ROW)
    moving, sent = _measure_communication(bench)
    mine = _measure_computation(runner, window) | moving
    medians = {name: statistics.median(seconds) for name, seconds in mine.items()}
    kinds = {name: op.kind for name, op in (*named_operators(runner.layout), *named_traffic(runner.layout))}
    names = list(kinds)
    # Ranks of a pipeline hold different units.
    ranks = all_gather_object(
        (medians, {name: _spread(seconds) for name, seconds in mine.items()}, bench.equal_collectives(), sent)
    )
    times = {name: _agreed(kinds[name], [theirs[name] for theirs, *_ in ranks if name in theirs]) for name in names}
    spread = {name: max(theirs[name] for _, theirs, *_ in ranks if name in theirs) for name in names}
    like = {name: other for _, _, theirs, _ in ranks for name, other in theirs.items()}
    moved = {name: max(theirs[name] for *_, theirs in ranks if name in theirs) for *_, each in ranks for name in each}
    measured_pairs = _measure_pairs(bench, times, like, progress) if pairs else {}
    for flat in runner.rank_units.flat_parameters:
        flat.reshard()  # gathered for operators that ran outside a window
    memory: dict[Name, OperatorMemory] = {}
    if runner.layout.num_ranks > 1:  # schedules are chosen by memory
        for mine_of in all_gather_object(operator_memory(runner, window[0])):
            memory |= mine_of
    return Profile({**machine(runner), **about}, runner.layout, times, spread, measured_pairs, like, moved, memory)


def _measure_communication(bench: Bench) -> tuple[dict[Name, list[float]], dict[Name, int]]:
    """The seconds of every communication, and the bytes that this rank sends in it."""
    seconds: dict[Name, list[float]] = {}
    sent: dict[Name, int] = {}
    for times, moved in (
        time_transfers(bench.runner, bench.batch, bench.length),
        time_reductions(bench.runner, bench.length),
        time_gathers(bench.runner, bench.length),
        time_copies(bench.runner, bench.length),
    ):
        seconds |= times
        sent |= moved
    for timed in bench.moving:
        seconds[timed.name], sent[timed.name] = bench.time_repeats(timed), bench.bytes_sent(timed)
    return seconds, sent


def _measure_computation(runner: Runner, window: Sequence[MicroBatch]) -> dict[Name, list[float]]:
    """The seconds of every computation in a running window, whose first micro-batch warms up."""
    program: Sequence[Instruction] = runner.program(len(window))
    if isinstance(runner.executor.streams, CudaStreams):
        program = apart(program)
    names = {unit.label: unit.name for unit in runner.rank_units.all_units.values()}
    cold = f"{window[0].key[1]}" if len(window) > 1 else ""
    seconds: dict[Name, list[float]] = {}
    for span in traced(runner, program, window, runner.sources(), ISSUING):
        if span.stream == Kind.COMPUTE.value and span.label.partition(".")[0][1:] != cold:
            seconds.setdefault(_split_label(span.label, names), []).append(span.seconds)
    forget_gradients(runner)
    return seconds


def _measure_pairs(
    bench: Bench, times: Mapping[Name, float], like: Mapping[Name, Name], progress: Progress | None
) -> dict[tuple[Name, Name], Pair]:
    """The times of every computation of a layer concurrently with the longest collectives of each kind, and of pairs of
    the same kind, to show that two computations, or two collectives of a link, do not gain by running at once."""
    distinct = [timed for timed in bench.moving if timed.name not in like and bench.repeats(timed)]
    distinct.sort(key=lambda timed: -times[timed.name])
    moving = [timed for kind in Kind for timed in [each for each in distinct if each.op.kind is kind][:PAIRED]]
    computing = _longest([timed for timed in bench.computing if bench.repeats(timed)], times)
    couples = [(a, b) for a in computing for b in moving]
    couples += [(a, b) for a in moving for b in moving if a.op.kind is Kind.INTRA_NODE and b.op.kind is Kind.INTER_NODE]
    couples += [(a, a) for a in moving]
    if not isinstance(bench.runner.executor.streams, CudaStreams):
        # On a GPU two computations on two streams would write the same gradients and saved activations at once.
        couples += [(a, b) for a in computing[:3] for b in computing[:3] if a.name <= b.name]
    pairs = {}
    for place, (a, b) in enumerate(couples):
        counts = _counts(a, b, times)
        mine = [statistics.median(column) for column in zip(*bench.time_pair(a, b, counts), strict=True)]
        first, second = zip(*all_gather_object(mine), strict=True)
        alone = times[a.name], times[b.name]
        rows = [count * seconds for count, seconds in zip(counts, alone, strict=True)]
        paired = _agreed(a.op.kind, first), _agreed(b.op.kind, second)
        slow = slowdown_of(rows[0], *paired), slowdown_of(rows[1], *reversed(paired))
        pairs[a.name, b.name] = Pair.of(*alone, *slow)
        if progress is not None:
            progress((place + 1) / len(couples))
    return pairs


def _longest(computing: Sequence[TimedOperator], times: Mapping[Name, float]) -> list[TimedOperator]:
    """The computations in falling order of their times, without the shortest."""
    longest = sorted(computing, key=lambda timed: -times[timed.name])
    before = [0.0, *accumulate(times[timed.name] for timed in longest)]
    return [timed for timed, seconds in zip(longest, before, strict=False) if seconds < (1 - UNPAIRED) * before[-1]]


def _counts(a: TimedOperator, b: TimedOperator, times: Mapping[Name, float]) -> tuple[int, int]:
    """The repeats of each of two operators, so that the shorter fills the longer."""
    if a.op.kind is b.op.kind:
        return 1, 1
    first, second = times[a.name], times[b.name]
    return min(IN_A_ROW, max(1, int(second / first))), min(IN_A_ROW, max(1, int(first / second)))


def _agreed(kind: Kind, ranks: Sequence[float]) -> float:
    return (max if kind is Kind.COMPUTE else min)(ranks)


def _spread(seconds: Sequence[float]) -> float:
    """The distance between the quartiles, as a share of the median."""
    if len(seconds) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(seconds, n=4)
    return (third - first) / middle


def _split_label(label: str, names: dict[str, str]) -> Name:
    """('layer', 'B.mlp.down.W') of 'B2.layers.3.mlp.down.W'."""
    strand, _, rest = label.partition(".")
    unit = next(name for name in names if rest.startswith(name + "."))
    return names[unit], f"{strand[0]}.{rest.removeprefix(unit + '.')}"
