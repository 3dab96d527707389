"""Comparisons of plans as text: the gain of the plan in use.

In:   a measured `Comparison`.
Out:  text, and the files of its picture, plan and profile.
Must hold: a measurement on an emulated link is marked as one; a loss is printed as a loss.
"""

from pathlib import Path

from hf_helix.planning.timing.profile_file import save_profile
from hf_helix.report.strands import Strip, draw_strips, note_of, strips_of_plans, text_strips
from hf_helix.tuning.budget import BASELINE
from hf_helix.tuning.candidates import Comparison
from hf_helix.tuning.result_text import format_plans, in_ms


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
