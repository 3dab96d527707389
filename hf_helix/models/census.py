"""The census: causal-LM classes of Transformers, proven equal to their unsplit models or not.

In:   `census.json` beside this file, written by `python -m benchmarks.census`.
Out:  a finding for each class and layout.
Must hold: a finding holds for a small model with the defaults of the class, on the versions of Transformers and torch
named in the file; with other versions, nothing is proven.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

FORMAT = "hf_helix.census/1"
FILE = Path(__file__).parent / "census.json"

PROVEN, REFUSED, FAILED = "proven", "refused", "failed"

TEXT = "[text]"
"""What the name of a class ends with that has towers beside a causal language model, and is proven on text alone."""

CLASSIFIER = "[classifier]"
"""What the name of a sequence classifier ends with: its decoder is proven, its head is the model's own code above."""


class Finding(NamedTuple):
    """The finding for a class on a layout.

    Attributes:
        status: `PROVEN`; `REFUSED`, where the class cannot be cut on the layout; `FAILED`, where the cut model computes
            other results or ends in an error.
        reason: of a refusal, or the difference; empty for `PROVEN`.
    """

    status: str
    reason: str = ""


Findings = Mapping[str, Finding]
"""By layout, such as `tp2`."""


@dataclass(frozen=True)
class Census:
    """The findings for all classes.

    Attributes:
        versions: versions of `transformers` and `torch`.
        date: of the last finding.
        classes: the findings by class; the variants of a class follow the class, with the options that differ from the
            defaults in brackets, for example `OlmoForCausalLM[clip_qkv=5]`.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    classes: Mapping[str, Findings] = field(default_factory=dict)

    def proven_on(self, *layouts: str) -> list[str]:
        """Returns the classes that are proven, with their defaults, on all given layouts."""
        none = Finding(REFUSED)
        return [
            name
            for name in self.names
            if all(self.classes[name].get(layout, none).status == PROVEN for layout in layouts)
        ]

    @property
    def names(self) -> list[str]:
        """The classes without variants."""
        return [name for name in self.classes if "[" not in name]

    def proven_as(self, kind: str, *layouts: str) -> list[str]:
        """Returns the classes of a kind, `TEXT` or `CLASSIFIER`, that are proven on all given layouts."""
        named = [name for name in self.classes if name.endswith(kind)]
        return [name for name in named if all(self.classes[name][layout].status == PROVEN for layout in layouts)]

    @property
    def is_current(self) -> bool:
        """Whether the census was made with the installed versions."""
        return self.versions == installed_versions()


def installed_versions() -> dict[str, str]:
    """Returns the installed versions of `transformers` and `torch`; all builds of a torch version count as equal."""
    return {name: version(name).partition("+")[0] for name in ("transformers", "torch")}


def read_census(path: Path = FILE) -> Census:
    """Returns the census of a file; an empty census if the file does not exist.

    Raises:
        ValueError: the file is no census.
    """
    if not path.exists():
        return Census()
    data = json.loads(path.read_text())
    if data.get("format") != FORMAT:
        raise ValueError(f"{path} is no census of format {FORMAT}; `python -m benchmarks.census` writes one")
    classes = {
        name: {layout: Finding(*fields) for layout, fields in findings.items()}
        for name, findings in data["classes"].items()
    }
    return Census(data["versions"], data["date"], classes)


def format_census(census: Census) -> str:
    """Returns the text of a file, with a line for each class."""
    classes = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps({layout: [*finding] for layout, finding in findings.items()})}"
        for name, findings in sorted(census.classes.items())
    )
    head = {"format": FORMAT, "versions": dict(census.versions), "date": census.date}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    return "\n".join(["{", *lines, ' "classes": {', *([classes] if classes else []), " }", "}", ""])
