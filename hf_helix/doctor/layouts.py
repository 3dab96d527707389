"""The search of layouts: every layout that can be built and fits, ranked by predicted tokens per second.

In:   a simulated model, a cluster, the tokens of a step, and the length of a sequence.
Out:  a `Ranking`: steps, the fastest first, and the reason for each dropped layout.
Must hold: all steps are predictions of the same clock, leading steps at higher fidelity; a layout that cannot be cut or
exceeds the memory of a device is never proposed; plain data parallelism is among the candidates, under the same rules.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

from hf_helix.config import AUTO, OFFLOAD, RECOMPUTE, REDUCE_GRADIENTS
from hf_helix.doctor.amounts.larger import larger_amounts
from hf_helix.doctor.amounts.records import GRADIENT, PARAMETER, Amounts
from hf_helix.doctor.case import Case
from hf_helix.doctor.memory import needs_text
from hf_helix.doctor.processes import in_processes
from hf_helix.doctor.rivals import RIVALS, RivalStep, rival_cases, simulate_rival
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import (
    OF_STEPS,
    Step,
    bound_step,
    detailed_step,
    even_counts,
    held_bytes,
    layout_of,
    memory_of_case,
    peaks_of_case,
    peaks_of_plan,
    simulate_step,
    usual_counts,
)
from hf_helix.doctor.window import Fidelity, WindowTime, possible_names
from hf_helix.measure.progress import StageProgress
from hf_helix.planning.choice.memory import Peak
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.schedule.named import FOLDED, NAMED_SCHEDULES
from hf_helix.planning.schedule.placement import split_layers, stage_ranks
from hf_helix.planning.timing.cluster import Cluster, divisors
from hf_helix.planning.timing.sizes import Sizes, is_named
from hf_helix.planning.window.layout import Layout

T = TypeVar("T")

BATCHES = (1, 2, 4, 8)  # candidates for the sequences in a micro-batch
SHORTEST_PART = 1024
"""Least tokens in each of the two parts of a sequence on a context-parallel rank; shorter parts never pay."""

UNEVEN = 1.05  # times the mean work of a rank, from which on slices of the vocabulary are tried
OFF = 0.1  # largest relative difference between the tokens of a step and the requested tokens
WIDEST = 8  # most ranks of tensor parallelism over several nodes of few devices
ONE_STRAND = "sequential"
CLOSE = 0.05  # of a step: predictions nearer to each other are too close to tell which is faster
ALIKE = 0.01  # of a step: the error of a quick prediction
HEADROOM = 0.05  # of a device's memory: the error of a prediction

NEGLIGIBLE = 0.001  # of a step: no way is tried that could save less

WITHOUT_ROOM = 0.5  # of the speed of layouts whose full weights do not fit: they are looked at last

FEW_LAYOUTS = 24
"""So few layouts, as of a dense model on 8 devices, are searched in one process: two do not share what they count, find
fewer layouts slower than known ones, and took more CPU seconds: 20.9 for 17.0 on a loaded machine."""

COUNTING, SIMULATING = "counting layouts", "simulating layouts"
TIMING, DETAILS = "timing the fastest layouts", "looking at waits of the fastest layouts"
"""The stages of a search."""


@dataclass(frozen=True)
class Dropped:
    """A layout that is not proposed, and the reason."""

    case: Case
    reason: str


@dataclass(frozen=True)
class Ranking:
    """Layouts by speed: the best of every combination of parallel sizes, and the layouts that cannot be built or do not
    fit. Rivals are outside the ranking, even if too large; none if they cannot be simulated."""

    steps: Sequence[Step]
    dropped: Sequence[Dropped]
    rivals: Sequence[RivalStep] = ()

    def plain(self) -> Step | None:
        """Returns the fastest step with only data parallelism; None if none fits."""
        return next((step for step in self.steps if is_plain(step.case)), None)

    def proposed(self, cluster: Cluster) -> Step:
        """Returns the step to train with: the fastest with `HEADROOM` of the memory free, among those too close to the
        first to tell which is faster; the first if none has as much."""
        best, room = self.steps[0], (1 - HEADROOM) * cluster.device.memory
        known = [step for step in self.steps if step.fidelity is not Fidelity.BOUND]
        near = [step for step in known if step.tokens_per_second > (1 - CLOSE) * best.tokens_per_second]
        return next((step for step in near if step.memory.total <= room), best)

    def fitting_rivals(self, cluster: Cluster) -> list[RivalStep]:
        """Returns the rivals that fit."""
        return [each for each in self.rivals if each.step.memory.total <= cluster.device.memory]


def is_plain(case: Case) -> bool:
    """Returns whether a case has only data parallelism."""
    return case.sizes.tp == case.sizes.pp == case.sizes.cp == case.sizes.ep == 1


def ranked(steps: Iterable[Step]) -> list[Step]:
    """Returns a step for each combination of parallel sizes, the fastest first; a later one of the given steps, with
    more on the host, only if it is clearly faster than those before. A bound counts if it could be right."""
    best: dict[Sizes, Step] = {}
    for step in steps:
        mine = best.get(step.case.sizes)
        margin = 1.0 if mine is not None and mine.fidelity is Fidelity.BOUND else 1 + CLOSE
        if mine is None or step.tokens_per_second > margin * mine.tokens_per_second:
            best[step.case.sizes] = step
    return sorted(best.values(), key=lambda step: -step.tokens_per_second)


@dataclass(frozen=True)
class _Found:
    """The fastest fitting case, or the reason for none, and whether more memory could give a faster case."""

    best: Step | Dropped
    is_scarce: bool

    @property
    def step(self) -> Step | None:
        """The fastest fitting case."""
        return self.best if isinstance(self.best, Step) else None


def _speed(step: Step | None) -> float:
    """Returns the tokens a second of a step; 0 of none."""
    return 0.0 if step is None else step.tokens_per_second


def open_bounds(steps: Iterable[Step], leading: Sequence[Step]) -> Iterator[Step]:
    """Yields the bounds among the steps that leading steps, of `ranked`, depend on: these themselves, and bounds of the
    same sizes than which they may not be clearly faster."""
    chosen = {step.case.sizes: step for step in leading}
    for step in steps:
        lead = chosen.get(step.case.sizes)
        is_open = lead is not None and (1 + CLOSE) * step.tokens_per_second >= lead.tokens_per_second
        if step.fidelity is Fidelity.BOUND and is_open:
            yield step
        if step is lead:  # later ones were not clearly faster
            del chosen[step.case.sizes]


class Leaders:
    """The speeds of layouts so far, shared by the processes of a search.

    Args:
        candidates: the parallel sizes of all layouts.
        count: of the layouts that are looked for.
    """

    def __init__(self, candidates: Sequence[Sizes], count: int) -> None:
        has_fork = "fork" in multiprocessing.get_all_start_methods()
        self._speeds: Any = multiprocessing.get_context("fork" if has_fork else None).Array("d", len(candidates))
        self._places = {sizes: place for place, sizes in enumerate(candidates)}
        self._count = min(count, len(candidates))

    @property
    def least(self) -> float:
        """The speed below which a layout is none of the fastest; 0 while fewer are known."""
        return float(sorted(self._speeds[:])[-self._count])

    def add(self, sizes: Sizes, speed: float) -> None:
        """Adds the speed of a layout; with more on the host, it counts if it is clearly faster, see `ranked`."""
        place = self._places[sizes]
        with self._speeds.get_lock():
            if speed > (1 + CLOSE) * self._speeds[place]:
                self._speeds[place] = speed


@dataclass
class Search:
    """The search of layouts for one model, cluster and number of tokens."""

    model: SimulatedModel
    cluster: Cluster
    batch_tokens: int  # requested tokens of a step; each layout takes the nearest possible number, within `off`
    # the options of all cases, without any that saves memory; sizes and micro-batches are searched. The plan is of two
    # strands; one strand is tried if two hide nothing or lack memory
    usual: Case
    progress: StageProgress | None = None
    workers: int = 1  # number of processes; 1 for no further process
    leading: int = 0  # number of leading steps predicted at higher fidelity, besides plain data parallelism
    layout: str = ""  # the name of a further layout to predict at higher fidelity
    off: float = OFF
    batches: Sequence[int] = BATCHES  # the sizes of micro-batches to choose from
    wanted: int = 0  # number of the fastest layouts to know; others may be of `Fidelity.BOUND`. 0 to know all
    enough: int = 0  # number of fitting layouts after which less promising ones are not looked at; 0 to look at all
    # what may lie on the host besides what `usual` has there, tried in turn while nothing fits; if true, also if the
    # fastest layout recomputes
    offloads: Mapping[str, bool] = field(default_factory=dict)
    _peaks: dict[Case, list[Peak]] = field(default_factory=dict)
    _gains: dict[Case, float] = field(default_factory=dict)
    _mosts: dict[Case, float] = field(default_factory=dict)
    _leaders: Leaders | None = None

    def run(self) -> Ranking:
        """Returns the layouts by speed, as found before if the question was asked before; none if nothing fits. Raises
        ValueError if the cluster has no rate for the type of matrix products."""
        step = self.batch_tokens, self.off, tuple(self.batches)
        wanted = self.leading, self.layout, self.wanted, self.enough
        question = "ranking", self.cluster, step, *wanted, tuple(self.offloads.items())
        return self.model.answer(question, self.usual, self._found, (Ranking, Dropped, RivalStep, *OF_STEPS))

    def _found(self) -> Ranking:
        candidates = list(layouts(self.cluster, self.model.experts > 1))
        self._leaders = Leaders(candidates, self.wanted) if self.wanted else None
        is_rival = Sizes(dp=self.cluster.devices) in candidates and self.cluster.devices > 1
        promising = self._promising(candidates)
        ahead = {each: self._on_host(each)._searched(candidates) for each in self._expected_on_host(promising)}
        steps, dropped, rivals = self._searched(candidates, RIVALS if is_rival else (), promising)
        offloads = dict(self.offloads)
        while True:
            while asked := self._asked_of_host(ranked(steps), offloads):
                del offloads[asked]
                further, dropped, _ = ahead.get(asked) or self._on_host(asked)._searched(candidates)
                steps += further
            steps, unfit = self._timed(steps)
            dropped += unfit
            if not self._asked_of_host(ranked(steps), offloads):
                break
        shown = self._with_details(steps)
        known = {step.case.sizes for step in shown}
        reasons = {each.case.sizes: each for each in dropped if each.case.sizes not in known}
        return Ranking(shown, sorted(reasons.values(), key=lambda each: candidates.index(each.case.sizes)), rivals)

    def _searched(
        self, candidates: Sequence[Sizes], rivals: Sequence[str] = (), promising: Sequence[Sizes] | None = None
    ) -> tuple[list[Step], list[Dropped], list[RivalStep]]:
        """Returns a step for each layout that fits, below `Fidelity.TIMED`; the other layouts; and the rivals.
        `promising` are the layouts in the order of `_promising`, if known."""
        reason = self._holds_never()
        pieces = [*(self._promising(candidates) if promising is None else promising), *rivals]
        made: list[Step | Dropped | RivalStep | None] = []
        for answer in self._told(SIMULATING, self._in_processes(self._answered, pieces), len(pieces)):
            made.append(answer)
            if self.enough and sum(isinstance(each, Step) for each in made) == self.enough:
                break
        dropped = [each for each in made if isinstance(each, Dropped)]
        if reason:
            dropped += [Dropped(self.usual.changed(sizes), reason) for sizes in candidates]
        rivaling = [each for each in made if isinstance(each, RivalStep)]
        return [each for each in made if isinstance(each, Step)], dropped, rivaling

    def _holds_never(self) -> str:
        """Returns why no layout fits, if the devices together hold no weights, gradients and states: nothing is
        counted then."""
        element = GRADIENT if self.usual.config.offload else PARAMETER + GRADIENT + self.usual.state_bytes
        held, budget = self.model.facts.trained * element / self.cluster.devices, self.cluster.device.memory
        what = "gradients" if self.usual.config.offload else "weights, gradients and states"
        return needs_text(held, budget, f"for {what} alone, if all devices share these") if held > budget else ""

    def _on_host(self, offload: str | None) -> Search:
        """Returns the search of layouts with states or weights on the host."""
        return replace(self, usual=self.usual.changed(offload=offload))

    def _expected_on_host(self, promising: Sequence[Sizes]) -> list[str]:
        """Returns what may lie on the host and will be asked of it, since the most promising layout recomputes: it is
        looked at first, and most layouts that recompute are then slower than known ones."""
        helping = [offload for offload, helps in self.offloads.items() if helps][:1]
        if not helping or not promising or self._leaders is None:
            return []
        try:
            recomputes = self._fitting(self._smallest(promising[0]), None)[0].recompute != "none"
        except ValueError:  # it does not fit with full weights
            recomputes = True
        return helping if recomputes else []

    def _asked_of_host(self, steps: Sequence[Step], offloads: Mapping[str, bool]) -> str | None:
        """Returns the first of what may lie on the host, if nothing fits, or if that may make the fastest of the steps
        faster, which recomputes; None otherwise."""
        recomputes = bool(steps) and steps[0].case.recompute != "none"
        first = next(iter(offloads), None)
        return first if first and (not steps or (recomputes and offloads[first])) else None

    def _in_processes(self, work: Callable[[Any], T], pieces: Sequence[Any]) -> Iterator[T]:
        """Yields the results of `work` for each piece, found in several processes if there are many layouts."""
        several = len(list(layouts(self.cluster, self.model.experts > 1))) > FEW_LAYOUTS
        return in_processes(work, pieces, self.workers if several else 1)

    def _told(self, stage: str, results: Iterable[T], count: int) -> Iterator[T]:
        """Yields the results of a stage, and reports the progress after each."""
        stage += f", offload {self.usual.config.offload}" if self.usual.config.offload else ""
        if self.progress is not None and count:
            self.progress(stage, 0.0)
        for place, each in enumerate(results, 1):
            if self.progress is not None:
                self.progress(stage, place / count)
            yield each

    def _answered(self, piece: Sizes | str) -> Step | Dropped | RivalStep | None:
        """Returns the best of some parallel sizes, or a rival by name."""
        return self.rival(piece) if isinstance(piece, str) else self._best(piece)

    def _promising(self, candidates: Sequence[Sizes]) -> list[Sizes]:
        """Returns the layouts, the most promising first: the earlier fast layouts are known, the fewer windows of
        others are predicted. As much is recomputed as fits, but where even without the layout is none of the first.
        None are promising if all devices together do not hold the model."""
        if self._holds_never():
            return []
        counted = self._told(COUNTING, map(self._promise, candidates), len(candidates))
        promises = dict(zip(candidates, counted, strict=True))
        found: list[float] = []
        for sizes in sorted(candidates, key=promises.__getitem__, reverse=True):
            if len(found) >= self.wanted and (not self.wanted or promises[sizes] <= found[self.wanted - 1]):
                break
            promises[sizes] = self._fitting_promise(sizes, promises[sizes])
            found = sorted((*found, promises[sizes]), reverse=True)
        return sorted(candidates, key=promises.__getitem__, reverse=True)

    def _promise(self, sizes: Sizes) -> float:
        """Returns about the most tokens a second of parallel sizes with the smallest micro-batches, with nothing
        recomputed; 0 if a model is not cut to them."""
        try:
            return self._most(self._smallest(sizes))
        except ValueError:
            return 0.0

    def _fitting_promise(self, sizes: Sizes, most: float) -> float:
        """Returns about the most tokens a second with as much recomputed as fits; `most` with nothing recomputed."""
        try:
            return min(most, self._most(self._fitting(self._smallest(sizes), None)[0]))
        except ValueError:  # may fit with sharded weights
            return WITHOUT_ROOM * most

    def _smallest(self, sizes: Sizes) -> Case:
        """Returns the case of parallel sizes with the smallest micro-batches. Raises ValueError for sizes that cannot
        be built or that take no number of micro-batches."""
        case = self.usual.changed(sizes, batch=self.batches[0])
        check_sizes(sizes, case.length, self.model.layers, self.model.experts, case.config.schedule)
        return replace(case, microbatches=self._microbatches(sizes, case.batch))

    def _timed(self, steps: Sequence[Step]) -> tuple[list[Step], list[Dropped]]:
        """Returns the steps that fit, in their order, and the layouts that turn out not to fit.

        The leading steps and the fastest step with only data parallelism are predicted at higher fidelity, repeatedly,
        until no leading step is quick: new predictions change the order. A bound becomes quick before.
        """
        unfit: list[Dropped] = []
        while True:
            leading = self._leading_of(ranked(steps))
            bounds = list(open_bounds(steps, leading))
            quick = bounds or [step for step in leading if step.fidelity is Fidelity.QUICK]
            if not quick:
                return list(steps), unfit
            cases = [step.case for step in quick]
            exact = self._in_processes(self._unbounded if bounds else self._exact, quick)
            made = dict(zip(cases, self._told(TIMING, exact, len(quick)), strict=True))
            unfit += [each for each in made.values() if isinstance(each, Dropped)]
            looked_at = [made.get(step.case, step) for step in steps]
            steps = [each for each in looked_at if isinstance(each, Step)]

    def _leading_of(self, steps: Sequence[Step]) -> list[Step]:
        """Returns the steps to show of those given, the fastest first; quick ones by what they may become."""
        first = sorted(steps, key=self._possible, reverse=True)[: self.leading]
        plain = [step for step in steps if is_plain(step.case)][: min(1, self.leading)]
        asked = [step for step in steps if self._is_asked(step.case.sizes)]
        return list({step.case: step for step in (*first, *plain, *asked)}.values())

    def _possible(self, step: Step) -> float:
        """Returns about the most tokens a second of a step at higher fidelity: of a quick step of a pipeline as if cut
        layers gave all ranks equal work."""
        case = step.case
        if step.fidelity is not Fidelity.QUICK or case.sizes.pp == 1:
            return step.tokens_per_second
        if case not in self._gains:
            bounds = [bound_step(self.model.of_window(case), case, self.cluster, split) for split in (True, False)]
            self._gains[case] = bounds[0].window / bounds[1].window
        return self._gains[case] * step.tokens_per_second

    def _with_details(self, steps: Sequence[Step]) -> list[Step]:
        """Returns the steps of each layout, the fastest first; those to show have exposed communication, bubble and
        waits."""
        found = ranked(steps)
        timed = {step.case: step for step in self._leading_of(found) if step.fidelity is Fidelity.TIMED}
        detailed = self._in_processes(self._detailed, list(timed.values()))
        made = dict(zip(timed, self._told(DETAILS, detailed, len(timed)), strict=True))
        return [replace(made.get(step.case, step), planned=None) for step in found]

    def _detailed(self, timed: Step) -> Step:
        return detailed_step(self.model.of_window(timed.case), timed, self.cluster)

    def _unbounded(self, bound: Step) -> Step | Dropped:
        """Returns the fastest fitting case of the parallel sizes of a bound, or the reason for none."""
        return self._of_sizes_alone(bound.case)._best(bound.case.sizes)

    def _of_sizes_alone(self, case: Case) -> Search:
        """Returns the search with a case's offload, in which no other sizes lead."""
        return replace(self._on_host(case.config.offload), _leaders=None)

    def _exact(self, quick: Step) -> Step | Dropped:
        """Returns a step at higher fidelity. Whether a pipeline whose layers do not communicate is faster with one
        strand or with two is too close to tell before: the other is timed as well if the first is slower than
        expected."""
        found, case = self._exact_way(quick), quick.case
        is_pipeline = case.sizes.pp > 1 and not communicates_in_layers(case.sizes)
        speed = found.tokens_per_second if isinstance(found, Step) else 0.0
        if not is_pipeline or self._is_one_strand or speed >= (1 - ALIKE) * self._possible(quick):
            return found
        plans = {ONE_STRAND, self.usual.config.plan} - {case.config.plan}
        other = self._of_sizes_alone(case)._fastest(case.sizes, plans.pop()).step
        if other is None or (1 + ALIKE) * other.tokens_per_second < quick.tokens_per_second:
            return found
        made = [each for each in (found, self._exact_way(other)) if isinstance(each, Step)]
        return max(made, key=_speed, default=found)

    @property
    def _is_one_strand(self) -> bool:
        """Whether no plan of two strands is looked at."""
        return self.usual.config.plan == ONE_STRAND

    def _exact_way(self, quick: Step) -> Step | Dropped:
        """Returns a step at higher fidelity, without `shard_optimizer` and with layers cut between stages if the step
        then fits and is faster.

        Programs may need more memory than the schedule predicted. Then the search is repeated with a memory budget
        smaller by this factor, and the fastest fitting case is returned, or the reason for none.

            budget = the memory of a device; allowed = budget
            repeat:
                needed = the memory by the programs of the case; seemed = by its schedule
                if needed <= budget: done
                allowed = min(0.99 allowed, min(0.99, budget / needed) * seemed)
                case = the fastest that seems to need at most `allowed`; done if none is left, or the same

        Example, in GB, with a budget of 80: a case seemed to need 78 and needs 84, so 80 / 84 * 78 = 74.3 is allowed.
        The next case seemed to need 74 and needs 79: it is returned.
        """
        found, way = quick, self._of_sizes_alone(quick.case)
        budget = self.cluster.device.memory
        allowed = budget  # falls in every round, so that two cases do not take turns for ever
        while True:
            found = self._with_unsharded_optimizer(found)
            case = found.case
            cut = self._with_cut_layers(found)
            if cut is not None and cut.tokens_per_second > min(found.tokens_per_second, self._most(case)):
                return cut
            needed, peaks = self._needed(case)
            if needed <= budget:
                step = self._simulated(case, Fidelity.TIMED, found.planned, peaks)
                return step if cut is None else max(step, cut, key=_speed)
            seemed = self._memory(case)
            allowed = min(0.99 * allowed, min(0.99, budget / needed) * seemed)
            device = replace(self.cluster.device, memory=allowed)
            smaller = replace(self.cluster, device=device)
            other = replace(way, cluster=smaller)._best(case.sizes)
            if isinstance(other, Dropped) or other.case == case:
                return Dropped(case, needs_text(needed, budget))
            found = other

    def _best(self, sizes: Sizes) -> Step | Dropped:
        """Returns the fastest fitting case of some parallel sizes, or the reason for none.

        `shard_optimizer` is on unless slower: a shard needs less memory, updates fewer weights, and sends the same
        bytes. The size of micro-batches matters little here, so only the fastest case is tried without shards. Weights
        are sharded only if full weights leave too little memory, since sharded weights move more bytes; and only
        without a pipeline, whose stages would gather weights for every one of many micro-batches.
        """
        found = self._hopeless(sizes) or self._best_way(sizes)
        if self._leaders is not None and isinstance(found, Step) and found.fidelity is not Fidelity.BOUND:
            self._leaders.add(sizes, found.tokens_per_second)
        return found

    def _hopeless(self, sizes: Sizes) -> Step | None:
        """Returns a bound if no fitting case of some parallel sizes is among the leading steps; None if one may be, or
        if none may fit."""
        try:
            case = self._smallest(sizes)
            if not self._leads_never(case) or not self._fits_saving(case):
                return None
        except ValueError:
            return None
        bound = bound_step(self.model.amounts(case), case, self.cluster)
        return replace(bound, window=case.tokens / self._most_of_sizes(case) - bound.optimizer)

    def _fits_saving(self, case: Case) -> bool:
        """Returns whether a case fits with nothing recomputed or with layers."""
        saving = case.changed(plan=ONE_STRAND, shard_optimizer=_shards_optimizer(case))
        modes = RECOMPUTE[0], RECOMPUTE[-1]
        return any(self._memory(saving.changed(recompute=mode)) <= self.cluster.device.memory for mode in modes)

    def _best_way(self, sizes: Sizes) -> Step | Dropped:
        full = self._fastest_of_strands(sizes)
        if not full.is_scarce or sizes.pp > 1 or not sizes.spread():
            return full.best
        return self._fastest_of_strands(sizes, full.step, shard_parameters=True).best

    def _fastest_of_strands(self, sizes: Sizes, known: Step | None = None, shard_parameters: bool = False) -> _Found:
        """Returns the fastest fitting case, with two strands or one; `known` if none is faster.

        Two strands hold one layer's activations more. So one strand is taken if two have nothing to hide, and tried if
        two need recomputation or do not fit.
        """
        plan = self.usual.config.plan
        if self._is_one_strand or not (sends_in_windows(sizes) or shard_parameters):
            return self._fastest(sizes, ONE_STRAND, known, shard_parameters)
        two = self._fastest(sizes, plan, known, shard_parameters)
        if two.step is not None and (two.step.case.recompute == "none" or self._leads_never(two.step.case)):
            return two
        return self._fastest(sizes, ONE_STRAND, two.step or known, shard_parameters)

    def _microbatches(self, sizes: Sizes, batch: int) -> int:
        """Returns the number of micro-batches of `batch` sequences nearest to the requested tokens, for a data-parallel
        rank. Raises ValueError if no number is within `off` of the requested tokens."""
        each = sizes.dp * batch * self.usual.length
        count = self._nearest(each)
        if abs(count * each - self.batch_tokens) > self.off * self.batch_tokens:
            raise ValueError(
                f"{sizes.dp} data-parallel ranks take {each // batch:,} tokens at a time; no step comes near "
                f"{self.batch_tokens:,}"
            )
        return count

    def _nearest(self, each: int) -> int:
        """Returns the number of micro-batches of `each` tokens in all nearest to the requested tokens."""
        return max(1, round(self.batch_tokens / each))

    def _of_batch(self, case: Case, batch: int) -> Case:
        """Returns a case with micro-batches of `batch` sequences, for a bound: also if no number of these is near the
        requested tokens."""
        return replace(case, batch=batch, microbatches=self._nearest(case.sizes.dp * batch * case.length))

    def _fastest(self, sizes: Sizes, plan: str, known: Step | None = None, shard_parameters: bool = False) -> _Found:
        """Returns the fastest fitting case of a plan, over the sizes of micro-batches; `known` if none is faster.

        Only cases whose bounds are above the fastest so far are predicted. Larger micro-batches are looked at while
        their ceiling, from the amounts of the size before, is above it, and while they are faster than smaller ones.
        """
        best, last, high = known, Dropped(self.usual.changed(sizes, plan=plan), ""), 0.0
        smaller: Sequence[Case] = ()  # the fitting cases of the largest micro-batches so far
        most, is_scarce = self._most_of_layout(sizes), False
        for batch in self.batches:
            case = self.usual.changed(sizes, batch=batch, plan=plan, shard_parameters=shard_parameters)
            if smaller:
                most = max(self._ceiling(each, [batch]) for each in smaller)
            if best is not None and most <= max(_speed(best), self._least_of_leading(case)):
                continue
            try:
                check_sizes(sizes, case.length, self.model.layers, self.model.experts, case.config.schedule)
                case = replace(case, microbatches=self._microbatches(sizes, batch))
            except ValueError as error:  # larger micro-batches come near less often
                last = last if last.reason else Dropped(case, str(error))
                continue
            try:
                smaller = self._fitting(case, smaller[-1] if smaller else None)
            except ValueError as error:  # larger micro-batches need more memory
                last, is_scarce = Dropped(case, str(error)), True
                break
            before, found = best, list[Step]()
            for bound in sorted(map(self._bound, self._with_slices(smaller)), key=_speed, reverse=True):
                found.append(self._quick(bound) if _speed(bound) > _speed(best) else bound)
                best = max(best or found[-1], found[-1], key=_speed)
            if best is before and max(map(_speed, found)) <= high:
                break
            # a bound is no prediction that larger micro-batches could be compared with
            high = max([high, *(_speed(step) for step in found if step.fidelity is not Fidelity.BOUND)])
        if best is None:
            return _Found(last, is_scarce)
        is_slowed = best.case.recompute != "none" and not self._leads_never(best.case)
        return _Found(best, is_slowed or (is_scarce and most > best.tokens_per_second))

    def _leads_never(self, case: Case) -> bool:
        """Returns whether no micro-batches of a case's sizes are among the leading steps, whatever they recompute."""
        return self._most_of_sizes(case) <= self._least_of_leading(case)

    def _most_of_sizes(self, case: Case) -> float:
        """Returns the most tokens a second of a case's sizes, with any micro-batches and whatever is recomputed."""
        plain = self._plain(case)
        if plain not in self._mosts:
            self._mosts[plain] = self._ceiling(plain, self.batches)
        return self._mosts[plain]

    def _plain(self, case: Case) -> Case:
        """Returns the case of the same sizes with the smallest micro-batches and nothing that saves memory but an
        offload, the first case that is counted."""
        usual = self.usual.config
        plain = self._of_batch(case, self.batches[0])
        return plain.changed(
            recompute="none", spread_vocabulary=False, shard_parameters=False, reduce_gradients=usual.reduce_gradients
        )

    def _most_of_layout(self, sizes: Sizes) -> float:
        """Returns the most tokens a second of some parallel sizes; infinity if it is not known."""
        try:
            return self._most_of_sizes(self._smallest(sizes))
        except ValueError:
            return math.inf

    def _ceiling(self, case: Case, batches: Sequence[int]) -> float:
        """Returns the most tokens a second of a case with micro-batches of any of these sizes, none smaller than its
        own, by its own amounts; 0 for no size."""
        most = 0.0
        for batch in batches:
            amounts = larger_amounts(self.model.amounts(case), batch / case.batch)
            most = max(most, bound_step(amounts, self._of_batch(case, batch), self.cluster).tokens_per_second)
        return most

    def _least_of_leading(self, case: Case) -> float:
        """Returns the speed below which a case is not among the leading steps; 0 if it is shown all the same."""
        is_shown = is_plain(case) or self._is_asked(case.sizes)
        return 0.0 if self._leaders is None or is_shown else self._leaders.least

    def _bound(self, case: Case) -> Step:
        """Returns the bound of a case with its layers on the stages as they are."""
        return bound_step(self.model.amounts(case), case, self.cluster, split=True)

    def _quick(self, bound: Step) -> Step:
        """Returns the step of a bound's case at `Fidelity.QUICK`; a bound of all numbers of layers on the stages if no
        step of the case can be among the leading steps."""
        case, leading = bound.case, self._least_of_leading(bound.case)
        if leading:
            even = bound_step(self.model.amounts(case), case, self.cluster)
            if even.tokens_per_second <= leading:
                return even
        return self._simulated(case, Fidelity.QUICK)

    def _simulated(
        self,
        case: Case,
        fidelity: Fidelity,
        known: tuple[Plan, WindowTime] | None = None,
        peaks: Sequence[Peak] | None = None,
    ) -> Step:
        amounts, of_window = self.model.amounts(case), self.model.of_window(case)
        return simulate_step(amounts, case, self.cluster, fidelity, of_window, known, peaks)

    def _is_asked(self, sizes: Sizes) -> bool:
        return is_named(sizes, self.layout)

    def _most(self, case: Case) -> float:
        """Returns the most tokens a second of a case with layers on the stages as they are."""
        return bound_step(self.model.of_window(case), case, self.cluster, split=True).tokens_per_second

    def _with_unsharded_optimizer(self, step: Step) -> Step:
        """Returns the step without `shard_optimizer` if it fits and is faster, else the given step. Where gathers, sums
        and updates take next to nothing, it is not tried."""
        case, apart = step.case.changed(shard_optimizer=False), step.gathers + step.sums + step.optimizer
        if case == step.case or apart <= NEGLIGIBLE * step.seconds or self._memory(case) > self.cluster.device.memory:
            return step
        whole = self._simulated(case, Fidelity.QUICK)
        return whole if whole.seconds < step.seconds else step

    def _with_cut_layers(self, step: Step) -> Step | None:
        """Returns the step of a pipeline with layers cut between stages, by the times of its units; None if it does not
        fit, or is the given step."""
        if step.case.sizes.pp == 1:
            return None
        usual = usual_counts(self.model.amounts(step.case), step.case)
        case = step.case.changed(layers_per_stage=usual)
        amounts = self.model.amounts(case)
        case = case.changed(layers_per_stage=even_counts(amounts, case, self.cluster))
        if case.config.layers_per_stage == usual:
            return None
        needed, peaks = self._needed(case)
        return self._simulated(case, Fidelity.TIMED, None, peaks) if needed <= self.cluster.device.memory else None

    def _needed(self, case: Case) -> tuple[float, list[Peak]]:
        """Returns the bytes that the fullest rank needs by its programs, and the peaks of all ranks."""
        amounts = self.model.amounts(case)
        peaks = peaks_of_plan(amounts, case, self.cluster)
        return memory_of_case(amounts, case, layout_of(amounts, case), peaks).total, peaks

    def _with_slices(self, cases: Sequence[Case]) -> list[Case]:
        """Returns the cases, and those with slices of the vocabulary for every pipeline rank that fit, if the rank with
        all of the vocabulary has more than its share of the work."""
        found = list(cases)
        for case in cases:
            if case.sizes.pp == 1 or case.config.schedule != AUTO:
                continue
            amounts, loads = self.model.amounts(case), [0.0] * case.sizes.pp
            for rank, count in zip(case.stage_ranks, usual_counts(amounts, case), strict=True):
                loads[rank] += count
            loads[case.stage_ranks[0]] += case.config.image_share * amounts.model.tower_cost
            loads[case.stage_ranks[-1]] += amounts.model.head_cost
            spread = case.changed(spread_vocabulary=True)
            with contextlib.suppress(ValueError):  # of a head without slices
                if max(loads) * len(loads) > UNEVEN * sum(loads) and self._memory(spread) <= self.cluster.device.memory:
                    found.append(spread)
        return found

    def rival(self, name: str) -> RivalStep | None:
        """Returns a rival over all devices with the fastest micro-batch; if nothing fits, with the least memory."""
        best: RivalStep | None = None
        sizes, modes = Sizes(dp=self.cluster.devices), ["none", "full"]
        for batch in self.batches:
            try:
                count = self._microbatches(sizes, batch)
            except ValueError:
                continue
            case = replace(self.usual, batch=batch, microbatches=count, whole_logits=True)
            # No rival drops rows; those with states on the host have formulas of their own.
            case = case.changed(sizes, plan=ONE_STRAND, expert_capacity_factor=None, offload=None)
            try:
                made = [*self._rival_ways(name, case, modes)]
            except ValueError:
                break  # the model cannot be cut, as its layouts say
            fitting = [each for each in made if each.step.memory.total <= self.cluster.device.memory]
            fastest = max(fitting, key=lambda each: each.step.tokens_per_second, default=None)
            if fastest is None:
                return best or min(made, key=lambda each: each.step.memory.total, default=None)
            if best is not None and fastest.step.tokens_per_second <= best.step.tokens_per_second:
                break
            best = fastest
            modes = [mode for mode in modes if _may_fit(mode, made, fitting)]
        return best

    def _rival_ways(self, name: str, case: Case, modes: Sequence[str]) -> Iterator[RivalStep]:
        """Yields the ways of a rival; with more recomputation only those that do not fit with less, which is faster."""
        fit: set[tuple[object, ...]] = set()
        for way, *options in rival_cases(name, case, self.cluster, modes):
            if (way.software, *options) in fit:
                continue
            made = simulate_rival(name, self.model.amounts(way), way, self.cluster, *options)
            if made.step.memory.total <= self.cluster.device.memory:
                fit.add((way.software, *options))
            yield made

    def _fitting(self, case: Case, smaller: Case | None) -> list[Case]:
        """Returns the cases with the least recomputation that fit, with `shard_optimizer` if possible; `smaller` is a
        fitting case with smaller micro-batches. The case that reduces gradients in every micro-batch follows if that
        saves recomputation; and under "auto" the case of a named schedule. The case of another placement, with
        more waiting, follows only if nothing fits on the fold. Raises ValueError if the model cannot be cut to these
        sizes, or does not fit."""
        shards = (True, False) if _shards_optimizer(case) else (False,)
        held = held_bytes(self.model.amounts(self._plain(case)), case.changed(shard_optimizer=shards[0]))
        if held > self.cluster.device.memory:
            raise ValueError(needs_text(held, self.cluster.device.memory, "for weights, gradients and states alone"))
        modes: Sequence[str] = (*RECOMPUTE, OFFLOAD) if case.config.offload else RECOMPUTE
        modes = modes[modes.index(smaller.recompute) :] if smaller is not None else modes
        reductions = (
            REDUCE_GRADIENTS[1:] if case.config.shard_parameters and case.microbatches > 1 else REDUCE_GRADIENTS[1:2]
        )
        fitting: list[Case] = []
        least = math.inf
        for reduction, schedule in product(reductions, self._schedules(case)):
            if not modes or (fitting and schedule not in (AUTO, *FOLDED)):
                break
            of_schedule = case.changed(schedule=schedule, reduce_gradients=reduction)
            ways = [of_schedule.changed(recompute=mode, shard_optimizer=shard) for mode in modes for shard in shards]
            found = self._first_fitting(ways)
            if found is not None:
                fitting.append(found)
                modes = modes[: modes.index(found.recompute)]
            elif not fitting:
                least = min(least, self._least(ways))
        if not fitting:
            raise ValueError(needs_text(least, self.cluster.device.memory, exact=self.model.is_counted(ways[-1])))
        return fitting

    def _schedules(self, case: Case) -> Sequence[str]:
        """Returns the schedules to look at, the fastest first; named schedules may need less memory than "auto"."""
        if case.config.schedule != AUTO or case.sizes.pp == 1:
            return (case.config.schedule,)
        return (AUTO, *(FOLDED if self.model.amounts(case).model.tied else NAMED_SCHEDULES))

    def _first_fitting(self, ways: Sequence[Case]) -> Case | None:
        """Returns the first case that fits; None if none does."""
        return next((way for way in ways if self._bytes(way) <= self.cluster.device.memory), None)

    def _least(self, ways: Sequence[Case]) -> float:
        """Returns the least memory of the cases with the most recomputation."""
        return min(self._bytes(way) for way in ways if way.recompute == ways[-1].recompute)

    def _bytes(self, case: Case) -> float:
        """Returns the memory of a case; less for one that then does not fit either, and is not counted."""
        least = self._least_bytes(case)
        return least if least > self.cluster.device.memory else self._memory(case)

    def _least_bytes(self, case: Case) -> float:
        """Returns the bytes that a case of sharded weights, or of weights on the host, needs at least: its weights,
        gradients and states, and the activations of full weights with micro-batches that are no larger; 0 if these are
        not counted."""
        if not (case.spread_weights or case.streams_weights) or self.model.is_counted(case):
            return 0.0
        offload = None if case.streams_weights else case.config.offload
        full = case.changed(shard_parameters=False, offload=offload, reduce_gradients=REDUCE_GRADIENTS[1])
        smaller = (replace(full, batch=batch) for batch in reversed(self.batches) if batch <= case.batch)
        counted = next(filter(self.model.is_counted, smaller), None)
        if counted is None:
            return 0.0
        amounts = self.model.amounts(counted)
        layout, without_copies = layout_of(amounts, case), replace(amounts, copies={})
        peaks = [Peak(peak.activations) for peak in self._peaks_of(counted, amounts, layout)]
        return memory_of_case(without_copies, case, layout, peaks).total

    def _memory(self, case: Case) -> float:
        named = possible_names(case.config.schedule, case.sizes.pp, case.config.spread_vocabulary)
        if len(named) > 1:
            return max(self._memory(case.changed(schedule=each)) for each in named)
        amounts = self.model.amounts(case)
        layout = layout_of(amounts, case)
        return memory_of_case(amounts, case, layout, self._peaks_of(case, amounts, layout)).total

    def _peaks_of(self, case: Case, amounts: Amounts, layout: Layout) -> list[Peak]:
        """Returns the peak memory of each rank, found once for both values of `shard_optimizer`."""
        whole = case.changed(shard_optimizer=False)
        if whole not in self._peaks:
            self._peaks[whole] = peaks_of_case(amounts, case, layout)
        return self._peaks[whole]


def _shards_optimizer(case: Case) -> bool:
    """Returns whether replicas may step shards of their weights."""
    return bool(case.sizes.spread()) and not (case.config.shard_parameters or case.streams_weights)


def _may_fit(mode: str, made: Sequence[RivalStep], fitting: Sequence[RivalStep]) -> bool:
    """Returns whether larger micro-batches may fit with a mode of recomputation: it fits, or was not needed."""
    tried, fits = ([each for each in ways if each.step.case.recompute == mode] for ways in (made, fitting))
    return bool(fits) or not tried


def shared_samples(wanted: int, devices: Sequence[int]) -> int:
    """Returns a number of samples near `wanted`, within `OFF`, that as many data-parallel ranks as possible divide.

    Args:
        wanted: the samples of a step.
        devices: the numbers of devices that shall take as many samples in a step.
    """
    shared = math.lcm(*devices)
    smaller = (part for part in range(min(shared, 2 * wanted), 0, -1) if shared % part == 0)
    near = (round(wanted / part) * part for part in (*(shared * batch for batch in reversed(BATCHES)), *smaller))
    return next(samples for samples in near if samples and abs(samples - wanted) <= OFF * wanted)


def check_sizes(sizes: Sizes, length: int, layers: int, experts: int = 1, schedule: str = "auto") -> None:
    """Raises ValueError for sizes of a layout that cannot be built or never pay, with the reason, before counting."""
    if sizes.cp > 1 and length // (2 * sizes.cp) < SHORTEST_PART:
        raise ValueError(f"cp_size={sizes.cp} leaves less than {2 * SHORTEST_PART:,} of {length:,} tokens to a rank")
    if experts > 1 and experts % (sizes.ep * sizes.tp):
        raise ValueError(f"ep_size x tp_size = {sizes.ep * sizes.tp} does not divide the {experts} experts")
    split_layers(layers, stage_ranks(Scheduler(schedule, sizes.pp).placement, sizes.pp))


def sends_in_windows(sizes: Sizes) -> bool:
    """Returns whether micro-batches communicate in ways a second strand could hide. One strand hides prefetches and
    communication once in a window as well."""
    return sizes.pp > 1 or communicates_in_layers(sizes)


def communicates_in_layers(sizes: Sizes) -> bool:
    """Returns whether layers have collectives."""
    return sizes.tp > 1 or sizes.cp > 1 or sizes.ep > 1


def layouts(cluster: Cluster, with_experts: bool = False) -> Iterator[Sizes]:
    """Yields parallel sizes for all devices; tensor parallelism is inside a node, or over whole nodes of few."""
    per_node = cluster.devices_per_node
    for tp in divisors(cluster.devices):
        if per_node % tp and (tp > WIDEST or tp % per_node):
            continue
        for pp in divisors(cluster.devices // tp):
            for cp in divisors(cluster.devices // tp // pp):
                dp = cluster.devices // (tp * pp * cp)
                for ep in divisors(dp) if with_experts else [1]:
                    yield Sizes(tp, cp, pp, dp, ep)
