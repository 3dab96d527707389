"""Result files: what was found, with the machine and the versions, as JSON and as a page.

In:   the environment and the outcomes of pieces.
Out:  `<date>-gpu.json` and `<date>-gpu.md` in a folder.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import markdown
from benchmarks.gpu.launch import Outcome


def write_results(folder: Path, name: str, environment: Mapping[str, str], outcomes: Sequence[Outcome]) -> list[Path]:
    """Write both files, over those of the same name.

    Args:
        folder: made where it is missing.
        name: of the files, without the ending.
        environment: see `environment.describe`.
        outcomes: of the pieces that were asked for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [
        {"name": o.piece.name, "ending": o.ending, "seconds": round(o.seconds, 1), "entries": o.entries}
        for o in outcomes
    ]
    data = {"environment": dict(environment), "pieces": pieces}
    files = [folder / f"{name}.json", folder / f"{name}.md"]
    files[0].write_text(json.dumps(data, indent=1) + "\n")
    files[1].write_text(page(environment, outcomes))
    return files


def page(environment: Mapping[str, str], outcomes: Sequence[Outcome]) -> str:
    """The Markdown page."""
    facts = "\n".join(f"- {name}: {value}" for name, value in environment.items())
    parts = ["# Acceptance on a GPU", "Made by `python -m benchmarks.gpu`.", facts]
    for outcome in outcomes:
        about = outcome.piece.about[0].upper() + outcome.piece.about[1:]
        parts += [f"## {outcome.piece.name}: {verdict(outcome)}", f"{about}. {outcome.seconds:.0f} s."]
        rows = [(entry["outcome"], entry["name"], entry["figure"]) for entry in outcome.entries]
        parts += [markdown(("", "what", "found"), rows)] if rows else []
    return "\n\n".join(parts) + "\n"


def verdict(outcome: Outcome) -> str:
    """Such as `PASS`, or `FAIL (2 of 9 checks)`."""
    checks = [entry for entry in outcome.entries if entry["outcome"] != "note"]
    counts = f"{len(outcome.failures)} of {len(checks)} checks" if outcome.failures else ""
    ending = "" if outcome.ending == "done" else outcome.ending
    reasons = ", ".join(filter(None, [counts, ending]))
    return f"PASS ({len(checks)} checks)" if outcome.passed else f"FAIL ({reasons})"
