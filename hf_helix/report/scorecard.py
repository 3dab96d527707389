"""The scorecard: the worth of overlap under a plan, in a few lines.

In:   an `Overlap` and the rule of its plan.
Out:  text. The words of `plan="auto"` are in `hf_helix.tuning.verdict`.
Must hold: overlapped and hidden are always printed together, beside the bound; a loss is printed as a loss.
"""

from __future__ import annotations

from hf_helix.measure.overlap import Overlap
from hf_helix.tuning.verdict import in_ms


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
    """The line of the gradient reductions, where there are any."""
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
    """The line of the overlapped fraction, or a line about gradient reductions alone, which no plan orders."""
    if not (overlap.overlapped_by_kind or overlap.overlapped_fraction):
        return ["                                    (only the sums of gradients)"]
    return [f"  overlapped           {overlap.overlapped_fraction:12.0%}   of communication ran beside computation"]
