"""The result of a tuning: the chosen plan, its measurement, and the reasons in words.

In:   windows that were timed under several plans, and predictions for them.
Out:  a `TuningResult`, the same on every rank; a sentence for the log; a paragraph with all figures.
Must hold: nothing here measures; where overlap gains nothing, the sentence says so, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_helix.config import AUTO
from hf_helix.measure.overlap import Overlap
from hf_helix.planning.timing.profile import Profile
from hf_helix.runtime.distributed.mesh import Mesh, world_size
from hf_helix.tuning.budget import BASELINE, FULL


@dataclass(frozen=True)
class TuningResult:
    """The measurement and the choice of `tune`."""

    chosen: str  # the candidate in use: the rule of its plan and, where there was a choice, its schedule
    overlaps: Mapping[str, Overlap]
    predicted: Mapping[str, float] = field(default_factory=dict)
    bound: float = 0.0  # seconds of the window that no plan can beat, by the measured operator times
    profile: Profile | None = None
    measured: str = ""
    gradient_bytes: int = 0  # bytes of the full gradients, which data parallelism would reduce in every step
    ranks: int = 1  # the number of ranks that share the layers, the experts or the sequences of a pipeline rank
    schedule: str = AUTO
    tier: str = FULL.name
    verdict: str = ""
    report: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}\n{self.report}"

    @property
    def gradient_seconds(self) -> float:
        """An estimate of the seconds of a reduction of all gradients, at the speed of the measured collectives."""
        chosen = self.overlaps[self.chosen]
        sent = 2 * self.gradient_bytes * (self.ranks - 1) / self.ranks
        return sent * chosen.communication / chosen.bytes_moved if chosen.bytes_moved else 0.0

    @property
    def baseline(self) -> str | None:
        """The candidate without overlap, on the first schedule where there was a choice; None if it was not timed."""
        return next((name for name in self.overlaps if _rule(name) == BASELINE), None)


# -- in words -------------------------------------------------------------------------------------------------------


SMALL = 1.05  # smaller gains are explained


def format_verdict(result: TuningResult, contention: str = "") -> str:
    """Returns the choice and its gain, in a sentence; without a gain, the reason. See `contention_of`."""
    chosen, baseline = result.overlaps[result.chosen], result.baseline
    plan = f"plan {_named(result.chosen)}"
    where = f" on an emulated link of {chosen.link}" if chosen.link else ""
    if baseline is None:
        return f"{plan}, as asked for{where}: {_worth(chosen)}"
    reason = _reason(chosen, contention)
    if result.chosen == baseline:
        return f"{plan}: overlap gains nothing here{where}, because {reason}"
    without = "without overlap"
    if _rule(result.chosen) == BASELINE:
        without = f"with {_named(baseline)}"
    gain = result.overlaps[baseline].step / chosen.step
    small = f"; overlap gains little here, because {reason}" if gain < SMALL else ""
    return f"{plan}, {gain:.2f}x as fast as {without}{where}{small}"


def contention_of(mesh: Mesh) -> str:
    """Returns the ranks that share cores with communication, in words; empty where devices have cores of their own."""
    cores, ranks = os.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    if mesh.device.type != "cpu" or 2 * ranks <= cores:
        return ""
    return f"{ranks} ranks compute and communicate on the same {cores} cores"


def _rule(label: str) -> str:
    """The rule of a candidate."""
    return label.split(" on ")[0]


def _named(label: str) -> str:
    """`search`, or `search` on the schedule `dualpipe_v`."""
    return " on the schedule ".join(f"`{part}`" for part in label.split(" on "))


def _worth(overlap: Overlap) -> str:
    if not overlap.communication:
        return "there are no collectives to hide"
    hidden = max(0.0, overlap.hidden_fraction)
    return f"{overlap.overlapped_fraction:.0%} of communication runs beside computation, {hidden:.0%} of it is hidden"


def _reason(overlap: Overlap, contention: str) -> str:
    """The reason of little or no gain."""
    if not overlap.communication:
        return "there are no collectives to hide"
    share = overlap.communication / (overlap.computation + overlap.communication)
    if share < 0.1:
        return f"communication is only {share:.0%} of the work"
    if contention:
        return contention
    return "computation beside communication loses as much time as it hides"


def format_tuning(result: TuningResult, share_of_step: float = 1.0) -> str:
    """Returns the choice and its reasons, in a paragraph; `share_of_step` of a step's micro-batches were timed."""
    chosen, baseline = result.overlaps[result.chosen], result.baseline
    predicted = {rule: f" (predicted {in_ms(seconds)})" for rule, seconds in result.predicted.items()}
    times = (f"{rule} {in_ms(each.step)}{predicted.get(rule, '')}" for rule, each in result.overlaps.items())
    waits = alone = ""
    if chosen.bubble_fraction:
        waits = f" (of which a rank of the pipeline waits {chosen.bubble_fraction:.0%} for others)"
    if chosen.communication:
        alone = f", its communication alone {in_ms(chosen.communication)}"
        if chosen.bound <= chosen.step:  # noise may make the step shorter than its bound
            alone += f", and no plan can beat {in_ms(chosen.bound)}"
    gain = ""
    if baseline is not None and result.chosen != baseline:
        gain = f", {result.overlaps[baseline].step / chosen.step:.2f} times as fast as {baseline}"
    when = f" (measured {result.measured})" if result.measured else ""
    when += f" on an emulated link of {chosen.link}" if chosen.link else ""
    sentences = [
        f"Plan {result.chosen} is kept{gain}{when}.",
        f"A window takes: {', '.join(times)}; its computation alone {in_ms(chosen.computation)}{waits}{alone}.",
        _hidden(chosen),
        *_why_small(result),
        *_alternative(result, share_of_step),
    ]
    return " ".join(sentences)


def _hidden(overlap: Overlap) -> str:
    if not overlap.communication:
        return "There are no collectives to hide."
    if not (overlap.overlapped_by_kind or overlap.overlapped_fraction):
        return f"Communication is sums of gradients only: {_saved(overlap)}, {in_ms(overlap.exposed)} are exposed."
    by_kind = ", ".join(f"{kind} {share:.0%}" for kind, share in overlap.overlapped_by_kind.items())
    return (
        f"{overlap.overlapped_fraction:.0%} of communication runs beside computation"
        f"{f' ({by_kind})' if len(overlap.overlapped_by_kind) > 1 else ''}, "
        f"{_saved(overlap)}, {in_ms(overlap.exposed)} are exposed."
    )


def _why_small(result: TuningResult) -> list[str]:
    """The reason of little or no gain; empty with a gain."""
    chosen, baseline = result.overlaps[result.chosen], result.baseline
    if baseline is None or not chosen.communication or result.overlaps[baseline].step >= SMALL * chosen.step:
        return []
    start = f"The gain over {baseline} is small"
    if _rule(result.chosen) == BASELINE:
        start = "No plan that overlaps is faster here"
    share = chosen.communication / (chosen.computation + chosen.communication)
    if share < 0.1:
        return [f"{start}: communication is only {share:.0%} of the work."]
    if chosen.exposed > chosen.communication or chosen.overlapped_fraction - max(0.0, chosen.hidden_fraction) > 0.3:
        return [f"{start}: communication runs beside computation, but takes the cores or the memory that it needs."]
    return [f"{start}: communication is {share:.0%} of the work, and computation waits for it."]


def _alternative(result: TuningResult, share_of_step: float) -> list[str]:
    """A hint to data parallelism, where it would be faster."""
    chosen = result.overlaps[result.chosen]
    step = chosen.step / share_of_step
    other = chosen.computation / share_of_step + result.gradient_seconds
    if result.ranks == 1 or chosen.bubble_fraction or other >= step:  # fewer micro-batches make a pipeline wait more
        return []
    return [
        f"Data parallelism alone would take about {in_ms(other)} a step instead of {in_ms(step)} (an estimate "
        "from these figures), if the whole model fits on every rank."
    ]


def _saved(overlap: Overlap) -> str:
    if overlap.hidden_fraction < 0:
        return f"none of its time is saved ({overlap.hidden_fraction:.0%}: it also slows computation down)"
    return f"{overlap.hidden_fraction:.0%} of its time is saved"


def in_ms(seconds: float) -> str:
    """Returns seconds as text in milliseconds."""
    return f"{seconds * 1e3:,.1f} ms"
