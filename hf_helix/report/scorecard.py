"""The scorecard: what overlap is worth, in a few lines that tell the truth.

In:   an `Overlap` and the plan it was measured with, or what `plan="auto"` measured.
Out:  text.
Must hold: overlapped and hidden are always printed together, beside the bound; a loss is printed as a loss.
"""

from __future__ import annotations

from hf_helix.runtime.measure import Overlap
from hf_helix.runtime.tuning import BASELINE, Tuning


def format_scorecard(overlap: Overlap, rule: str) -> str:
    """A short report of one window."""
    lines = [
        f"plan {rule}: {overlap.tokens_per_second:,.0f} tokens/s, {_ms(overlap.step)} a window of "
        f"{overlap.tokens:,} tokens (optimizer not counted)",
        f"  computation alone    {_ms(overlap.computation):>12}",
    ]
    if not overlap.communication:
        return "\n".join([*lines, "  one rank: there is no communication to hide"])
    lines += [
        f"  communication alone  {_ms(overlap.communication):>12}",
        f"  overlapped           {overlap.overlapped_fraction:12.0%}   of communication ran beside computation",
        f"  hidden               {overlap.hidden_fraction:12.0%}   of its time was saved; "
        f"{_ms(overlap.exposed)} are exposed",
        f"  one after the other  {_ms(overlap.computation + overlap.communication):>12}",
        f"  no plan can beat     {_ms(overlap.bound):>12}",
    ]
    if overlap.hidden_fraction < 0:
        lines.append("  communication slows computation down, as where both share the same cores")
    return "\n".join(lines)


def format_tuning(tuning: Tuning) -> str:
    """What was chosen and why, in one paragraph."""
    kept = tuning.overlaps[tuning.kept]
    others = ", ".join(f"{rule} {_ms(overlap.step)}" for rule, overlap in tuning.overlaps.items())
    text = (
        f"hf_helix: plan {tuning.kept} is kept. A window takes, by plan: {others}; its computation alone "
        f"{_ms(kept.computation)}, its communication alone {_ms(kept.communication)}. "
        f"{kept.overlapped_fraction:.0%} of communication runs beside computation, "
        f"{_saved(kept)}, {_ms(kept.exposed)} are exposed."
    )
    baseline = tuning.overlaps.get(BASELINE)
    if tuning.kept == BASELINE:
        text += " No plan that overlaps is faster here."
    elif baseline is not None and baseline.step < 1.05 * kept.step:
        share = kept.communication / (kept.computation + kept.communication)
        text += (
            f" The gain over {BASELINE} is small: communication is {share:.0%} of the work, or it takes the cores "
            "that computation needs."
        )
    return text


def _saved(overlap: Overlap) -> str:
    if overlap.hidden_fraction < 0:
        return f"none of its time is saved ({overlap.hidden_fraction:.0%}: it also slows computation down)"
    return f"{overlap.hidden_fraction:.0%} of its time is saved"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
