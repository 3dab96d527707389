"""The profiler: how long each operator takes on this machine, at these shapes, on this mesh, alone and beside another.

In:   a runner and a window of micro-batches.
Out:  a `Profile`, the same on every rank.
Must hold: operators are timed through the executor's own issue code, on the rank's own streams. Computations are timed
in a running step. Collectives are timed several in a row, since a single one can look faster than the link is. Of a
pair, the shorter one is repeated to fill the longer, so that launch overhead is amortised as in a real step. For a
computation the slowest rank counts; for a collective the fastest, since the others only wait for the last to arrive.
A GPU is held until the host has issued what is timed, so that times are those of the device and not of launching
kernels. Gradients are left as between two optimizer steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from hf_helix.measure.bench import Bench, TimedOperator
from hf_helix.measure.gather_times import time_gathers
from hf_helix.measure.machine import machine
from hf_helix.measure.overlap import forget_gradients
from hf_helix.measure.progress import Progress
from hf_helix.measure.sum_times import time_sums
from hf_helix.measure.timing import ISSUING, apart, traced
from hf_helix.measure.transfer_times import time_transfers
from hf_helix.operators.communication.emulated_link import bare
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.instructions import Instruction
from hf_helix.planning.profile import Name, Pair, Profile, named_of_window, named_operators, slowdown_of
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams import CudaStreams

TRAIN = 6  # repeats in a row; the first warms up
SHORTEST = 0.02  # computations shorter than this part of a collective are not paired with it: it would be noise


def measure_profile(
    runner: Runner,
    window: Sequence[MicroBatch],
    about: Mapping[str, str] | None = None,
    pairs: bool = True,
    progress: Progress | None = None,
) -> Profile:
    """Measures every operator and every pair that can run at the same time. Collective; call it without gradients.

    Args:
        runner: a runner under `sequential`, so that computations run alone.
        window: the micro-batches that are measured with.
        about: what the caller knows of the case: model, mesh, shapes.
        pairs: whether operators are measured beside each other, too.
        progress: called while pairs are measured.
    """
    with runner.precision.weights.kept():  # as in a window, in which they are cast once
        profile = _measure(runner, window, about or {}, pairs, progress)
    forget_gradients(runner)
    for flat in runner.stage.flats:
        flat.take_back()  # what operators read that ran by themselves
    return profile


def _measure(
    runner: Runner, window: Sequence[MicroBatch], about: Mapping[str, str], pairs: bool, progress: Progress | None
) -> Profile:
    bench = Bench(runner, window[0], TRAIN)
    moving, sent = _measure_communication(bench)
    mine = _measure_computation(runner, window) | moving
    medians = {name: statistics.median(seconds) for name, seconds in mine.items()}
    kinds = {name: op.kind for name, op in (*named_operators(runner.layout), *named_of_window(runner.layout))}
    names = list(kinds)
    # Ranks of a pipeline hold different units.
    ranks = all_gather_object(
        (medians, {name: _spread(seconds) for name, seconds in mine.items()}, bench.alike(), sent)
    )
    times = {name: _agreed(kinds[name], [theirs[name] for theirs, *_ in ranks if name in theirs]) for name in names}
    spread = {name: max(theirs[name] for _, theirs, *_ in ranks if name in theirs) for name in names}
    like = {name: other for _, _, theirs, _ in ranks for name, other in theirs.items()}
    moved = {name: max(theirs[name] for *_, theirs in ranks if name in theirs) for *_, each in ranks for name in each}
    without = _without_link(bench)
    measured_pairs = _measure_pairs(bench, times, like, progress) if pairs else {}
    return Profile({**machine(runner), **about}, runner.layout, times, spread, measured_pairs, like, moved, without)


def _measure_communication(bench: Bench) -> tuple[dict[Name, list[float]], dict[Name, int]]:
    """Seconds of every operator that communicates, and the bytes that this rank sends in it."""
    seconds, sent = time_transfers(bench.runner, bench.batch, bench.length)
    summing, summed = time_sums(bench.runner, bench.length)
    gathering, gathered = time_gathers(bench.runner, bench.length)
    seconds, sent = seconds | summing | gathering, sent | summed | gathered
    for timed in bench.moving:
        seconds[timed.name], sent[timed.name] = bench.time_repeats(timed), bench.bytes_sent(timed)
    return seconds, sent


def _without_link(bench: Bench) -> dict[Name, float]:
    """What communication takes without the emulated link; nothing where there is none."""
    link = bench.runner.mesh.link
    if link is None:
        return {}
    with bare(link):
        seconds_by_name, _ = _measure_communication(bench)
    ranks = all_gather_object({name: statistics.median(seconds) for name, seconds in seconds_by_name.items()})
    return {name: min(each[name] for each in ranks if name in each) for mine in ranks for name in mine}


def _measure_computation(runner: Runner, window: Sequence[MicroBatch]) -> dict[Name, list[float]]:
    """Seconds of every computation in a running window."""
    program: Sequence[Instruction] = runner.program(len(window))
    if isinstance(runner.executor.streams, CudaStreams):
        program = apart(program)
    names = {unit.label: unit.name for unit in runner.stage.model.values()}
    seconds: dict[Name, list[float]] = {}
    for is_warm in (False, True):
        for span in traced(runner, program, window, runner.sources(), ISSUING):
            if is_warm and span.stream == Kind.COMPUTE.value:
                seconds.setdefault(_split_label(span.label, names), []).append(span.seconds)
        forget_gradients(runner)
    return seconds


def _measure_pairs(
    bench: Bench, times: Mapping[Name, float], like: Mapping[Name, Name], progress: Progress | None
) -> dict[tuple[Name, Name], Pair]:
    """Times of every computation of a layer beside every collective, and of two operators of one kind.

    The latter show that it does not pay to run two computations, or two collectives of one link, at once.
    """
    moving = [timed for timed in bench.moving if timed.name not in like and bench.repeats(timed)]
    shortest = SHORTEST * max((times[timed.name] for timed in moving), default=0.0)
    computing = [timed for timed in bench.computing if bench.repeats(timed) and times[timed.name] > shortest]
    couples = [(a, b) for a in computing for b in moving]
    couples += [(a, b) for a in moving for b in moving if a.op.kind is Kind.INTRA_NODE and b.op.kind is Kind.INTER_NODE]
    couples += [(a, a) for a in moving]
    if not isinstance(bench.runner.executor.streams, CudaStreams):
        # On a GPU two computations on two streams would write the same gradients and saved activations at once.
        longest = sorted(computing, key=lambda timed: -times[timed.name])[:3]
        couples += [(a, b) for a in longest for b in longest if a.name <= b.name]
    pairs = {}
    for place, (a, b) in enumerate(couples):
        counts = _counts(a, b, times)
        mine = [statistics.median(column) for column in zip(*bench.together(a, b, counts), strict=True)]
        first, second = zip(*all_gather_object(mine), strict=True)
        alone = times[a.name], times[b.name]
        trains = [count * seconds for count, seconds in zip(counts, alone, strict=True)]
        beside = _agreed(a.op.kind, first), _agreed(b.op.kind, second)
        slow = slowdown_of(trains[0], *beside), slowdown_of(trains[1], *reversed(beside))
        pairs[a.name, b.name] = Pair.of(*alone, *slow)
        if progress is not None:
            progress((place + 1) / len(couples))
    return pairs


def _counts(a: TimedOperator, b: TimedOperator, times: Mapping[Name, float]) -> tuple[int, int]:
    """How often each of two operators runs, so that the shorter one fills the longer."""
    if a.op.kind is b.op.kind:
        return 1, 1
    first, second = times[a.name], times[b.name]
    return min(TRAIN, max(1, int(second / first))), min(TRAIN, max(1, int(first / second)))


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
