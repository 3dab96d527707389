"""Comparisons of plans as text: the gain of the plan in use, here and on other links.

In:   a measured `Comparison`, and predictions for links of other speeds.
Out:  text, and the files of its picture, plan and profile.
Must hold: a measurement on an emulated link says so; a prediction says so; a loss is printed as a loss.
"""

from collections.abc import Sequence
from pathlib import Path

from hf_helix.config import LinkSpeed
from hf_helix.planning.plan.link_speeds import Predicted, link_of, predict_speeds
from hf_helix.planning.timing.profile_file import save_profile
from hf_helix.report.strands import Strip, draw_strips, note_of, strips_of_plans, text_strips
from hf_helix.tuning.budget import BASELINE
from hf_helix.tuning.candidates import Comparison
from hf_helix.tuning.result_text import format_plans, in_ms

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # speeds of predicted links, in parts of the speed of the measured link


def format_comparison(comparison: Comparison) -> str:
    """Returns a table of the plans, the plan in use last, with the bound that no plan can beat."""
    kept = comparison.overlaps[comparison.chosen]
    lines = [
        format_plans(comparison.overlaps, comparison.chosen, {}),
        f"  computation alone takes {in_ms(kept.computation)}, communication alone {in_ms(kept.communication)}: no "
        f"plan can beat {in_ms(kept.bound)}",
    ]
    return "\n".join([*lines, *_without_link(comparison)])


def _without_link(comparison: Comparison) -> list[str]:
    """A line without the emulated link."""
    if BASELINE not in comparison.bare or comparison.chosen == BASELINE:
        return []
    one, two = comparison.bare[BASELINE], comparison.bare[comparison.chosen]
    gain = one / two
    verdict = "a gain" if gain > 1.02 else "a loss" if gain < 0.98 else "no gain"
    times = f"{BASELINE} {in_ms(one)}, {comparison.chosen} {in_ms(two)} ({gain:.2f}x, {verdict})"
    why = "transfers between processes of one machine run on the cores that compute"
    return [f"  without the emulated link, measured: {times}: {why}"]


def speeds_around(comparison: Comparison) -> list[LinkSpeed]:
    """Returns links slower and faster than the measured link; none without an emulated link."""
    here = link_of(comparison.profile)
    if here.rate is None:
        return []
    rates = [here.rate if factor == 1 else float(f"{here.rate * factor:.3g}") for factor in FACTORS]
    return [LinkSpeed(rate, here.latency) for rate in rates]


def predict_around(comparison: Comparison) -> list[Predicted]:
    """Returns predictions of the compared rules on slower and faster links."""
    return predict_speeds(comparison.profile, comparison.schedule, speeds_around(comparison), comparison.plans)


def format_speeds(predicted: Sequence[Predicted], comparison: Comparison) -> str:
    """Returns a table with a row for every link, and a row of the measurement."""
    here, kept = link_of(comparison.profile), comparison.chosen
    others = [rule for rule in comparison.overlaps if rule != kept]
    lines = [
        "predicted for slower and faster links, with plans for each, from the operators as they were measured here:",
        f"  {'emulated link':<16} {'communication':>13} " + " ".join(f"{rule:>11}" for rule in (*others, kept))
        + "".join(f" {f'over {rule}':>16}" for rule in others),
        f"  {'':<16} {'/ computation':>13}",
    ]  # fmt: skip
    for row in predicted:
        lines.append(_row(str(row.speed), row.communication / row.computation, dict(row.plans), others, kept))
        if row.speed == here:
            measured = {rule: overlap.step for rule, overlap in comparison.overlaps.items()}
            alone = comparison.overlaps[kept]
            lines.append(_row("  measured", alone.communication / alone.computation, measured, others, kept))
    return "\n".join(lines)


def _row(name: str, share: float, seconds: dict[str, float], others: Sequence[str], kept: str) -> str:
    times = " ".join(f"{seconds[rule] * 1e3:8,.1f} ms" for rule in (*others, kept))
    gains = "".join(f" {seconds[rule] / seconds[kept]:15.2f}x" for rule in others)
    return f"  {name:<16} {share:13.2f} {times}{gains}"


def strips_of(comparison: Comparison) -> list[Strip]:
    """Returns the halves of the picture: without overlap, and under the plan in use."""
    return strips_of_plans(
        comparison.profile, [comparison.plans[rule] for rule in dict.fromkeys((BASELINE, comparison.chosen))]
    )


def text_of(comparison: Comparison, width: int = 100) -> str:
    """Returns the picture for a terminal."""
    return f"two decoder layers ({note_of(comparison.profile)}):\n{text_strips(strips_of(comparison), width)}"


def save_comparison(comparison: Comparison, folder: str | Path) -> list[Path]:
    """Writes the plan, the profile, and the picture as SVG (needs matplotlib); returns the files."""
    plan, profile, picture = (Path(folder, name) for name in ("plan.json", "profile.json", "plan.svg"))
    comparison.plans[comparison.chosen].save(plan)
    save_profile(comparison.profile, profile)
    draw_strips(strips_of(comparison), picture, note_of(comparison.profile))
    return [plan, profile, picture]
