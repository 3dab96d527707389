"""Which layout is best: every one that can be built and fits, by predicted tokens per second.

In:   a model on paper, a cluster, the tokens of a step, and the length of a sequence.
Out:  a `Ranking`: steps, the fastest first, and why each other layout was dropped.
Must hold: a layout that cannot be cut, or needs more memory than a device has, is never proposed; plain data
parallelism is among the candidates, and judged by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hf_helix.config import RECOMPUTE
from hf_helix.planning.pipeline.placement import split_layers, stage_ranks
from hf_helix.planning.pipeline.scheduler import Scheduler
from hf_helix.simulation.amounts import Amounts
from hf_helix.simulation.cluster import Cluster, divisors
from hf_helix.simulation.fsdp import FSDP, simulate_fsdp
from hf_helix.simulation.memory import bytes_text
from hf_helix.simulation.sizes import Sizes
from hf_helix.simulation.step import Case, Step, memory_of_case, simulate_step

BATCHES = (1, 2, 4, 8)
"""Sequences in a micro-batch that are tried."""

SHORTEST_PART = 1024
"""Tokens that each of the two parts of a sequence has at least that a context-parallel rank holds; shorter parts only
cost."""

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
        fsdp: plain FSDP as the stock Trainer runs it, which is none of the layouts, whether it fits or not; None where
            it cannot be simulated.
    """

    steps: Sequence[Step]
    dropped: Sequence[Dropped]
    fsdp: FSDP | None = None

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
        imbalance: see `Case`.
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
    imbalance: float = 1.0
    progress: Callable[[float], object] | None = None
    dropped: list[Dropped] = field(default_factory=list)

    def run(self) -> Ranking:
        """Returns the layouts by speed; none where nothing fits.

        Raises:
            ValueError: the cluster has no rate for the type of matrix products.
        """
        found: list[Step] = []
        candidates = list(layouts(self.cluster, self.experts > 1))
        for place, sizes in enumerate(candidates):
            best = self._best(sizes)
            found += [best] if best is not None else []
            if self.progress is not None:
                self.progress((place + 1) / len(candidates))
        found.sort(key=lambda step: -step.tokens_per_second)
        return Ranking(found, self.dropped, self._fsdp())

    def _best(self, sizes: Sizes) -> Step | None:
        """Returns the fastest case of some parallel sizes that fits."""
        best: Step | None = None
        for batch in BATCHES:
            microbatches = self.batch_tokens // (sizes.dp * batch * self.length)
            case = self._case(sizes, batch, microbatches)
            try:
                check_sizes(sizes, self.length, self.layers, self.experts, self.schedule)
                if microbatches < 1:
                    raise ValueError(f"{sizes.dp} data-parallel ranks need {sizes.dp * self.length:,} tokens in a step")
                case = self._fitting(case, best.case if best is not None else case)
            except ValueError as error:
                if best is None:
                    self.dropped.append(Dropped(case, str(error)))
                return best  # a larger micro-batch needs more memory
            step = simulate_step(self.amounts(case), case, self.cluster)
            if best is not None and step.tokens_per_second <= best.tokens_per_second:
                break
            best = step
        return best

    def _case(self, sizes: Sizes, batch: int, microbatches: int) -> Case:
        """Returns a case without anything that saves memory."""
        return Case(
            sizes,
            batch,
            self.length,
            microbatches,
            self.plan,
            self.schedule,
            dtype=self.dtype,
            imbalance=self.imbalance,
        )

    def _fsdp(self) -> FSDP | None:
        """Returns FSDP over all devices, with the fastest micro-batch; where nothing fits, what needs least."""
        best: FSDP | None = None
        for batch in BATCHES:
            microbatches = self.batch_tokens // (self.cluster.devices * batch * self.length)
            sizes = Sizes(dp=self.cluster.devices)
            case = replace(self._case(sizes, batch, microbatches), plan="sequential")
            if microbatches < 1 or sizes.dp == 1:
                break
            try:
                found = [
                    simulate_fsdp(self.amounts(way), way, self.cluster, sync)
                    for way in (case, replace(case, recompute="full"))
                    for sync in (False, True)
                ]
            except ValueError:
                break  # the model cannot be cut, as its layouts say
            fitting = [each for each in found if each.step.memory.total <= self.cluster.device.memory]
            fastest = max(fitting, key=lambda each: each.step.tokens_per_second, default=None)
            if fastest is None:
                return best or min(found, key=lambda each: each.step.memory.total)
            if best is not None and fastest.step.tokens_per_second <= best.step.tokens_per_second:
                break
            best = fastest
        return best

    def _fitting(self, case: Case, smaller: Case) -> Case:
        """Returns the case as it fits: with no more recomputation than needs be, and states kept whole if possible.

        Args:
            case: without anything that saves memory.
            smaller: needs no more memory, and fits as it is, or may.

        Raises:
            ValueError: the model cannot be cut like this, or does not fit.
        """
        shards = (False, True) if case.sizes.dp > 1 and case.sizes.ep == 1 else (False,)
        saving = [(mode, shard) for mode in RECOMPUTE for shard in shards]
        saving = saving[saving.index((smaller.recompute, smaller.shard_optimizer)) :]
        ways = [replace(case, recompute=mode, shard_optimizer=shard) for mode, shard in saving]
        least = self._memory(ways[-1])
        if least > self.cluster.device.memory:
            room = f"of a device that has {bytes_text(self.cluster.device.memory)}"
            raise ValueError(f"needs {bytes_text(least)} {room}, with all that saves memory")
        return next(way for way in ways if self._memory(way) <= self.cluster.device.memory)

    def _memory(self, case: Case) -> float:
        return memory_of_case(self.amounts(case), case).total


def check_sizes(sizes: Sizes, length: int, layers: int, experts: int = 1, schedule: str = "auto") -> None:
    """Checks what can be known of a layout before anything is counted.

    Args:
        sizes: of the layout.
        length: tokens in a sequence.
        layers: of the model.
        experts: of a layer; 1 for a dense model.
        schedule: as in `HelixConfig`.

    Raises:
        ValueError: the layout cannot be built, or is never worth it; says why.
    """
    if sizes.cp > 1 and length // (2 * sizes.cp) < SHORTEST_PART:
        raise ValueError(f"cp_size={sizes.cp} leaves less than {2 * SHORTEST_PART:,} of {length:,} tokens to a rank")
    if experts > 1 and experts % (sizes.ep * sizes.tp):
        raise ValueError(f"ep_size x tp_size = {sizes.ep * sizes.tp} does not divide the {experts} experts")
    split_layers(layers, stage_ranks(Scheduler(schedule, sizes.pp).placement, sizes.pp))


def layouts(cluster: Cluster, with_experts: bool = False) -> Iterator[Sizes]:
    """Yields parallel sizes that use every device, with tensor parallelism inside a node.

    Args:
        cluster: its devices.
        with_experts: whether the model has experts, which data-parallel ranks may share.
    """
    for tp in divisors(cluster.devices_per_node):
        for pp in divisors(cluster.devices // tp):
            for cp in divisors(cluster.devices // tp // pp):
                dp = cluster.devices // (tp * pp * cp)
                for ep in divisors(dp) if with_experts else [1]:
                    yield Sizes(tp, cp, pp, dp, ep)
