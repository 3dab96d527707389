"""What a tuning found: the plan that is kept, and the measurements that speak for it.

In:   windows that were timed under several plans, and what the cost function predicted for them.
Out:  a `TuningResult`, the same on every rank.
Must hold: it is data only; nothing here measures.
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
    """What `tune` measured and chose.

    Attributes:
        kept: the candidate that is in use: the rule of its plan and, where there was a choice, its schedule.
        overlaps: by candidate, the measurement of a window under it.
        predicted: by candidate, the seconds that the cost function predicted for the same window.
        bound: seconds of that window that no plan can beat, by the measured operator times.
        profile: the operator times that the plans were made with.
        measured: the date of the measurement, as text.
        gradient_bytes: bytes of the gradients of the whole model, which data parallelism would sum in every step.
        ranks: the number of ranks that share the layers, the experts or the sequences of one pipeline rank.
        schedule: the name of the schedule that is in use.
        effort: the name of the effort that was made, see `hf_helix.tuning.budget`.
        verdict: the choice and its reason, in one sentence.
        report: all figures, in one paragraph.
    """

    kept: str
    overlaps: Mapping[str, Overlap]
    predicted: Mapping[str, float] = field(default_factory=dict)
    bound: float = 0.0
    profile: Profile | None = None
    measured: str = ""
    gradient_bytes: int = 0
    ranks: int = 1
    schedule: str = AUTO
    effort: str = FULL.name
    verdict: str = ""
    report: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}\n{self.report}"

    @property
    def gradient_seconds(self) -> float:
        """An estimate of the seconds of one sum of all gradients, at the speed of the measured collectives."""
        kept = self.overlaps[self.kept]
        sent = 2 * self.gradient_bytes * (self.ranks - 1) / self.ranks
        return sent * kept.communication / kept.bytes_moved if kept.bytes_moved else 0.0


# -- verdict -------------------------------------------------------------------------------------------------------
# What tuning found, in words.
#
# In:   a `TuningResult`.
# Out:  one sentence for the log; a paragraph with all figures and reasons.
# Must hold: where overlap gains nothing, the sentence says so and why.


SMALL = 1.05  # a gain below this is explained


def format_verdict(result: TuningResult, contention: str = "") -> str:
    """What was chosen and what it gains, in one sentence; where it gains nothing, the reason.

    Args:
        result: what was measured.
        contention: who shares the cores with communication; empty where devices have their own.
    """
    kept, baseline = result.overlaps[result.chosen], _baseline(result)
    plan = f"plan {_named(result.chosen)}"
    where = f" on an emulated link of {kept.link}" if kept.link else ""
    if baseline is None:
        return f"{plan}, as asked for{where}: {_worth(kept)}"
    reason = _reason(kept, contention)
    if result.chosen == baseline:
        return f"{plan}: overlap gains nothing here{where}, because {reason}"
    without = "without overlap"
    if result.chosen.split(" on ")[0] == BASELINE:
        without = f"with {_named(baseline)}"
    gain = result.overlaps[baseline].step / kept.step
    small = f"; overlap gains little here, because {reason}" if gain < SMALL else ""
    return f"{plan}, {gain:.2f}x as fast as {without}{where}{small}"


def contention_of(mesh: Mesh) -> str:
    """Who shares the cores with communication, in words; empty where devices have their own."""
    cores, ranks = os.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    if mesh.device.type != "cpu" or 2 * ranks <= cores:
        return ""
    return f"{ranks} ranks compute and communicate on the same {cores} cores"


def _named(label: str) -> str:
    """`search`, or `search` on the schedule `dualpipe_v`."""
    return " on the schedule ".join(f"`{part}`" for part in label.split(" on "))


def _worth(overlap: Overlap) -> str:
    if not overlap.communication:
        return "there are no collectives to hide"
    hidden = max(0.0, overlap.hidden_fraction)
    return f"{overlap.overlapped_fraction:.0%} of communication runs beside computation, {hidden:.0%} of it is hidden"


def _reason(overlap: Overlap, contention: str) -> str:
    """Why there is little or no gain."""
    if not overlap.communication:
        return "there are no collectives to hide"
    share = overlap.communication / (overlap.computation + overlap.communication)
    if share < 0.1:
        return f"communication is only {share:.0%} of the work"
    if contention:
        return contention
    return "computation beside communication loses as much time as it hides"


def format_tuning(result: TuningResult, share_of_step: float = 1.0) -> str:
    """What was chosen and why, in one paragraph.

    Args:
        share_of_step: the part of an optimizer step's micro-batches that was timed.
    """
    kept = result.overlaps[result.chosen]
    others = ", ".join(_timed(rule, result) for rule in result.overlaps)
    baseline = _baseline(result)
    gain = ""
    if baseline is not None and result.chosen != baseline:
        gain = f", {result.overlaps[baseline].step / kept.step:.2f} times as fast as {baseline}"
    when = f" (measured {result.measured})" if result.measured else ""
    when += f" on an emulated link of {kept.link}" if kept.link else ""
    sentences = [
        f"Plan {result.chosen} is kept{gain}{when}.",
        f"A window takes: {others}; its computation alone {in_ms(kept.computation)}{_bubbles(kept)}{_alone(kept)}.",
        _hidden(kept),
        *_why_small(result),
        *_alternative(result, share_of_step),
    ]
    return " ".join(sentences)


def _baseline(result: TuningResult) -> str | None:
    """What gains are told against: without overlap, on the first schedule where there was a choice."""
    return next((name for name in result.overlaps if name.split(" on ")[0] == BASELINE), None)


def _bubbles(overlap: Overlap) -> str:
    if not overlap.bubble_fraction:
        return ""
    return f" (of which a rank of the pipeline waits {overlap.bubble_fraction:.0%} for others)"


def _alone(overlap: Overlap) -> str:
    return f", its communication alone {in_ms(overlap.communication)}{_bound(overlap)}" if overlap.communication else ""


def _hidden(overlap: Overlap) -> str:
    if not overlap.communication:
        return "There are no collectives to hide."
    if not (overlap.overlapped_by_kind or overlap.overlapped_fraction):
        return f"Communication is sums of gradients only: {_saved(overlap)}, {in_ms(overlap.exposed)} are exposed."
    return (
        f"{overlap.overlapped_fraction:.0%} of communication runs beside computation{_by_kind(overlap)}, "
        f"{_saved(overlap)}, {in_ms(overlap.exposed)} are exposed."
    )


def _bound(overlap: Overlap) -> str:
    """Nothing where noise has made the step shorter than its bound."""
    return f", and no plan can beat {in_ms(overlap.bound)}" if overlap.bound <= overlap.step else ""


def _timed(rule: str, result: TuningResult) -> str:
    predicted = result.predicted.get(rule)
    said = f" (predicted {in_ms(predicted)})" if predicted is not None else ""
    return f"{rule} {in_ms(result.overlaps[rule].step)}{said}"


def _by_kind(overlap: Overlap) -> str:
    if len(overlap.overlapped_by_kind) < 2:
        return ""
    return f" ({', '.join(f'{kind} {share:.0%}' for kind, share in overlap.overlapped_by_kind.items())})"


def _why_small(result: TuningResult) -> list[str]:
    """The reason, where there is little or no gain."""
    kept, baseline = result.overlaps[result.chosen], _baseline(result)
    if baseline is None or not kept.communication or result.overlaps[baseline].step >= SMALL * kept.step:
        return []
    start = f"The gain over {baseline} is small"
    if result.chosen.split(" on ")[0] == BASELINE:
        start = "No plan that overlaps is faster here"
    share = kept.communication / (kept.computation + kept.communication)
    if share < 0.1:
        return [f"{start}: communication is only {share:.0%} of the work."]
    if kept.exposed > kept.communication or kept.overlapped_fraction - max(0.0, kept.hidden_fraction) > 0.3:
        return [f"{start}: communication runs beside computation, but takes the cores or the memory that it needs."]
    return [f"{start}: communication is {share:.0%} of the work, and computation waits for it."]


def _alternative(result: TuningResult, share_of_step: float) -> list[str]:
    """Where another layout would be faster, say so."""
    kept = result.overlaps[result.chosen]
    step = kept.step / share_of_step
    other = kept.computation / share_of_step + result.gradient_seconds
    if result.ranks == 1 or kept.bubble_fraction or other >= step:  # fewer micro-batches make a pipeline wait more
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
