"""The result of a tuning: the chosen plan, its measurement, and the reasons in words.

In:   windows that were timed under several plans, and predictions for them.
Out:  a `TuningResult`, the same on every rank; a sentence for the log; tables of plans, and the scorecard of one.
Must hold: nothing here measures; if overlap gains nothing, the sentence gives the reason. Overlapped and hidden are
    always printed together, with the bound; a loss is printed as a loss.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hf_helix.config import AUTO
from hf_helix.measure.overlap import Overlap
from hf_helix.planning.timing.profile import Profile
from hf_helix.runtime.distributed.mesh import Mesh, ranks_of_host
from hf_helix.tuning.budget import BASELINE, FULL


@dataclass(frozen=True)
class TuningResult:
    """The measurement and the choice of `tune`."""

    chosen: str  # the candidate in use: the rule of its plan and, if there was a choice, its schedule
    overlaps: Mapping[str, Overlap]
    predicted: Mapping[str, float] = field(default_factory=dict)
    bound: float = 0.0  # seconds of the window that no plan can beat, by the measured operator times
    profile: Profile | None = None
    measured: str = ""
    gradient_bytes: int = 0  # bytes of the full gradients, which data parallelism would reduce in every step
    ranks: int = 1  # the number of ranks that share the layers, the experts or the sequences of a pipeline rank
    schedule: str = AUTO
    tier: str = FULL.name
    summary: str = ""
    report: str = ""

    def __str__(self) -> str:
        return f"{self.summary}\n{self.report}"

    @property
    def gradient_seconds(self) -> float:
        """An estimate of the seconds of a reduction of all gradients, at the speed of the measured collectives."""
        chosen = self.overlaps[self.chosen]
        sent = 2 * self.gradient_bytes * (self.ranks - 1) / self.ranks
        return sent * chosen.communication / chosen.bytes_moved if chosen.bytes_moved else 0.0


# -- in words -------------------------------------------------------------------------------------------------------


SMALL = 1.05  # smaller gains are explained


def format_summary(result: TuningResult, contention: str = "") -> str:
    """Returns the choice and its gain, in a sentence; without a gain, the reason. See `contention_of`."""
    chosen, baseline = result.overlaps[result.chosen], baseline_of(result.overlaps)
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
    """Returns the ranks that share cores with communication, in words; empty if devices have cores of their own."""
    cores, ranks = os.cpu_count() or 1, ranks_of_host()
    if mesh.device.type != "cpu" or 2 * ranks <= cores:
        return ""
    return f"{ranks} ranks compute and communicate on the same {cores} cores"


def baseline_of(candidates: Iterable[str]) -> str | None:
    """Returns the candidate without overlap, on the first schedule if there was a choice; None if not timed."""
    return next((name for name in candidates if _rule(name) == BASELINE), None)


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


def format_plans(overlaps: Mapping[str, Overlap], chosen: str, predicted: Mapping[str, float], day: str = "") -> str:
    """Returns a table of timed plans, the plan in use last, with the bound that no plan can beat.

    Args:
        overlaps: by candidate, windows that were timed in turn.
        chosen: the candidate in use.
        predicted: seconds by candidate; empty for no such column.
        day: of the measurement.
    """
    kept, base = overlaps[chosen], overlaps.get(baseline_of(overlaps) or "")
    where = f", over an emulated link of {kept.link}; everything else is real" if kept.link else ""
    when = f" on {day}" if day else ""
    width, column = max(12, *map(len, overlaps)), f" {'predicted':>11}" if predicted else ""
    lines = [
        f"measured{when}: a window of {kept.tokens:,} tokens under each plan, all in turn{where}",
        f"  {'plan':<{width}} {'window':>11}{column} {'gain':>7} {'hidden':>8} {'overlapped':>11} {'of the bound':>13}",
    ]
    for name, each in sorted(overlaps.items(), key=lambda item: item[0] == chosen):
        gain = f"{base.step / each.step:.2f}x" if base is not None else ""
        column = f" {in_ms(predicted[name]) if name in predicted else '':>11}" if predicted else ""
        lines.append(
            f"  {name:<{width}} {in_ms(each.step):>11}{column} {gain:>7} {each.hidden_fraction:8.0%} "
            f"{each.overlapped_fraction:11.0%} {each.bound / each.step:13.2f}"
        )
    return "\n".join(lines)


def format_tuning(result: TuningResult, share_of_step: float = 1.0) -> str:
    """Returns the timed plans and the scorecard of the chosen one; `share_of_step` of a step's micro-batches were
    timed."""
    plans = format_plans(result.overlaps, result.chosen, result.predicted, result.measured)
    card = format_scorecard(result.overlaps[result.chosen], result.chosen)
    return "\n".join([plans, card, *hint(result, share_of_step)])


def hint(result: TuningResult, share_of_step: float) -> list[str]:
    """Returns a sentence on data parallelism if it would be faster."""
    chosen = result.overlaps[result.chosen]
    step = chosen.step / share_of_step
    other = chosen.computation / share_of_step + result.gradient_seconds
    if result.ranks == 1 or chosen.bubble_fraction or other >= step:  # fewer micro-batches make a pipeline wait more
        return []
    return [
        f"Data parallelism alone would take about {in_ms(other)} a step instead of {in_ms(step)} (an estimate "
        "from these figures), if the whole model fits on every rank."
    ]


# -- the scorecard ---------------------------------------------------------------------------------------------------


def format_scorecard(overlap: Overlap, rule: str) -> str:
    """Returns a short report of a window, and of the rule of its plan."""
    lines = [
        f"plan {rule}: {overlap.tokens_per_second:,.0f} tokens/s, {in_ms(overlap.step)} a window of "
        f"{overlap.tokens:,} tokens (optimizer not counted)",
        *([f"  on an emulated link of {overlap.link}"] if overlap.link else []),
        f"  computation alone    {in_ms(overlap.computation):>12}",
    ]
    if overlap.bubble_fraction:
        lines.append(
            f"  pipeline bubbles     {overlap.bubble_fraction:12.0%}   of it a rank waits for others (mean over ranks)"
        )
    if not overlap.communication:
        alone = "no collectives to hide" if overlap.bubble_fraction else "one rank: there is no communication to hide"
        return "\n".join([*lines, f"  {alone}"])
    lines += [
        f"  communication alone  {in_ms(overlap.communication):>12}",
        *_sums(overlap),
        *_bytes(overlap),
        *_overlapped(overlap),
        f"  hidden               {overlap.hidden_fraction:12.0%}   of its time was saved; "
        f"{in_ms(overlap.exposed)} are exposed",
        f"  one after the other  {in_ms(overlap.computation + overlap.communication):>12}",
        f"  no plan can beat     {in_ms(overlap.bound):>12}",
    ]
    if overlap.hidden_fraction < 0:
        lines.append("  communication slows computation down, as where both share the same cores")
    return "\n".join(lines)


def _sums(overlap: Overlap) -> list[str]:
    """The line of the gradient reductions, if there are any."""
    if not overlap.sums:
        return []
    note = f"of it gradient sums (data parallel); {overlap.sums_overlapped:.0%} of their time ran beside computation"
    return [f"                       {in_ms(overlap.sums):>12}   {note}"]


def _bytes(overlap: Overlap) -> list[str]:
    """The lines of the bytes that data-parallel ranks send, and save by sharding."""
    texts = {
        "bytes_summed": "sent by a rank in gradient sums, by formula",
        "bytes_gathered": "sent by a rank in gathers of weights",
        "bytes_spared": "of weights and AdamW's states fewer on a rank, since they are spread; by formula",
    }
    lines = ((getattr(overlap, name) / 1e6, words) for name, words in texts.items())
    return [f"                       {megabytes:9,.1f} MB   {words}" for megabytes, words in lines if megabytes]


def _overlapped(overlap: Overlap) -> list[str]:
    """The line of the overlapped fraction, or a line only about gradient reductions, which no plan orders."""
    if not (overlap.overlapped_by_kind or overlap.overlapped_fraction):
        return ["                                    (only the sums of gradients)"]
    words, by_kind = "of communication ran beside computation", overlap.overlapped_by_kind
    if len(by_kind) > 1:
        words += f" ({', '.join(f'{kind} {share:.0%}' for kind, share in by_kind.items())})"
    return [f"  overlapped           {overlap.overlapped_fraction:12.0%}   {words}"]


def in_ms(seconds: float) -> str:
    """Returns seconds as text in milliseconds."""
    return f"{seconds * 1e3:,.1f} ms"
