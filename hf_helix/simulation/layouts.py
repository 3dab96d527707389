"""Which layout is best: every one that can be built and fits, by predicted tokens per second.

In:   a model on paper, a cluster, the tokens of a step, and the length of a sequence.
Out:  a `Ranking`: steps, the fastest first, and why each other layout was dropped.
Must hold: a layout that cannot be cut, or needs more memory than a device has, is never proposed; plain data
parallelism is among the candidates, and judged by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hf_helix.simulation.amounts import Amounts
from hf_helix.simulation.cluster import Cluster
from hf_helix.simulation.estimate import Sizes
from hf_helix.simulation.step import Case, Step, memory_of_case, simulate_step

RECOMPUTE = ("none", "selective", "full")
"""Modes of recomputation, the fastest first; the next is tried where one does not fit."""

BATCHES = (1, 2, 4, 8)
"""Sequences in a micro-batch that are tried."""

SHORTEST_PART = 1024
"""Tokens of a sequence that a context-parallel rank has at least; shorter parts only cost."""

AmountsOf = Callable[[Case], Amounts]


@dataclass(frozen=True)
class Dropped:
    """A layout that is not proposed.

    Attributes:
        case: the layout.
        reason: why.
    """

    case: Case
    reason: str


@dataclass(frozen=True)
class Ranking:
    """Layouts by speed.

    Attributes:
        steps: the best of every combination of parallel sizes, the fastest first.
        dropped: what cannot be built, or does not fit.
    """

    steps: Sequence[Step]
    dropped: Sequence[Dropped]

    def plain(self) -> Step | None:
        """Returns the fastest with data parallelism alone; None where none fits."""
        return next((step for step in self.steps if is_plain(step.case)), None)


def is_plain(case: Case) -> bool:
    """Returns whether a case has data parallelism alone."""
    return case.sizes.tp == case.sizes.pp == case.sizes.cp == case.sizes.ep == 1


@dataclass
class Search:
    """What is searched.

    Attributes:
        amounts: counts a case; raises ValueError where the model cannot be cut like this.
        cluster: what it runs on.
        batch_tokens: of a step; what divides best is taken, never more.
        length: tokens in a sequence.
        layers: of the model.
        experts: of a layer; 1 for a dense model.
        plan: the name of a rule.
        schedule: as in `HelixConfig`.
        dtype: the type of matrix products.
        progress: told which part of the cases is done.
    """

    amounts: AmountsOf
    cluster: Cluster
    batch_tokens: int
    length: int
    layers: int
    experts: int = 1
    plan: str = "greedy"
    schedule: str = "auto"
    dtype: str = "bf16"
    progress: Callable[[float], object] | None = None
    dropped: list[Dropped] = field(default_factory=list)

    def run(self) -> Ranking:
        """Returns the layouts by speed.

        Raises:
            ValueError: the step is shorter than a sequence for every data-parallel rank could be, or nothing fits.
        """
        found: list[Step] = []
        candidates = list(layouts(self.cluster, self.length, self.layers, self.experts))
        for place, sizes in enumerate(candidates):
            best = self._best(sizes)
            found += [best] if best is not None else []
            if self.progress is not None:
                self.progress((place + 1) / len(candidates))
        found.sort(key=lambda step: -step.tokens_per_second)
        return Ranking(found, self.dropped)

    def _best(self, sizes: Sizes) -> Step | None:
        """Returns the fastest case of some parallel sizes that fits."""
        best: Step | None = None
        for batch in BATCHES:
            microbatches = self.batch_tokens // (sizes.dp * batch * self.length)
            case = Case(sizes, batch, self.length, microbatches, self.plan, self.schedule, "none", False, self.dtype)
            if microbatches < 1:
                if batch == 1:
                    self._drop(case, f"{sizes.dp} data-parallel ranks need {sizes.dp * self.length:,} tokens in a step")
                break
            try:
                fitting = self._fitting(case)
            except ValueError as error:
                fitting = None
                self._drop(case, str(error))
            if fitting is None:
                break  # a larger micro-batch needs more memory
            step = simulate_step(self.amounts(fitting), fitting, self.cluster)
            if best is not None and step.tokens_per_second <= best.tokens_per_second:
                break
            best = step
        return best

    def _fitting(self, case: Case) -> Case | None:
        """Returns the case as it fits: with no more recomputation than needs be, and states kept whole if possible."""
        shards = (False, True) if case.sizes.dp > 1 and case.sizes.ep == 1 else (False,)
        ways = [replace(case, recompute=mode, shard_optimizer=shard) for mode in RECOMPUTE for shard in shards]
        least = self._memory(ways[-1])
        if least > self.cluster.device.memory:
            needed = f"needs {least / 1e9:.1f} GB of a device that has {self.cluster.device.memory / 1e9:.1f}"
            self._drop(ways[-1], f"{needed}, with all that saves memory")
            return None
        return next(way for way in ways if self._memory(way) <= self.cluster.device.memory)

    def _memory(self, case: Case) -> float:
        return memory_of_case(self.amounts(case), case).total

    def _drop(self, case: Case, reason: str) -> None:
        self.dropped.append(Dropped(case, reason))


def layouts(cluster: Cluster, length: int, layers: int, experts: int = 1) -> Iterator[Sizes]:
    """Yields parallel sizes that use every device: tensor parallelism inside a node, and what divides.

    Args:
        cluster: its devices.
        length: tokens in a sequence.
        layers: of the model.
        experts: of a layer; 1 for a dense model.
    """
    for tp in divisors(cluster.devices_per_node):
        for pp in divisors(cluster.devices // tp):
            if pp > 1 and layers < 2 * pp:
                continue
            for cp in divisors(cluster.devices // tp // pp):
                if cp > 1 and length // (2 * cp) < SHORTEST_PART:
                    continue
                dp = cluster.devices // (tp * pp * cp)
                for ep in divisors(dp) if experts > 1 else [1]:
                    if experts == 1 or experts % (ep * tp) == 0:
                        yield Sizes(tp, cp, pp, dp, ep)


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, the smallest first."""
    return [each for each in range(1, number + 1) if number % each == 0]
