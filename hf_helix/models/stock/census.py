"""The census: causal-LM classes of Transformers, proven equal to their unsplit models or not.

In:   `census.json` next to this file, written by `python -m benchmarks.census`.
Out:  a finding for each class and layout.
Must hold: a finding holds for a small model with the defaults of the class, on the versions of Transformers and torch
named in the file; with other versions, nothing is proven.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

FORMAT = "hf_helix.census/1"
FILE = Path(__file__).parent / "census.json"

PROVEN, REFUSED, FAILED = "proven", "refused", "failed"

TEXT = "[text]"
"""The suffix of the name of a class with towers next to a causal language model that is proven on text only."""

CLASSIFIER = "[classifier]"
"""What the name of a sequence classifier ends with: its decoder is proven, its head is the model's own code above."""

ADAPTERS = "[LoRA on experts]"
"""What the name of a mixture ends with if only LoRA adapters of its experts are trained."""

INSTEAD = {
    r"requires the .* library|No module named": "install the package that is named, then hf-helix check FOLDER",
    r"pixel_values|image_embeds|flattened_patches|'state'|input_features|encoder_outputs|inputs_embeds": "the stock "
    "Trainer: the model does not train without its other inputs",
    r"the unsplit model does not train": "hf-helix check FOLDER with a real configuration: the sizes of the small one "
    "may be at fault",
    r"^cp_size=": "tp_size or pp_size, with cp_size=1; for long rows tp_size with recompute='full'",
    r"^ep_size": "ep_size=1: the class has no experts on the layers that are cut",
    r"the experts .* cannot be spread": "tp_size or pp_size, with ep_size=1",
    r"train its text part by itself": "the text part as a causal language model, as the message says",
    r"heads|cut values|cut again|several values|laid out by tokens|tensor of constants": "pp_size where it is "
    "proven; else the stock Trainer, or a family that you declare: docs/adding_a_model.md",
    r"decoder layers|without its layers|every layer|cannot trace it|has no operator|loss of its own|not built|"
    r"not followed|something else for rows|mixes tokens|get_input_embeddings|has no attribute|"
    r"after its last hidden states": "the stock Trainer, or another class, proven here",
    r"^different ": "the stock Trainer: the cut model computes other results",
}
"""What a user does instead, by a pattern in the reason of a finding; the first that is found counts."""


def instead_of(reason: str) -> str:
    """Returns the advice for a class that is refused, or failed, for a reason; "" for an unknown reason."""
    return next((instead for pattern, instead in INSTEAD.items() if re.search(pattern, reason)), "")


class Finding(NamedTuple):
    """The finding for a class on a layout.

    Attributes:
        status: `PROVEN`; `REFUSED` if the class cannot be cut on the layout; `FAILED` if the cut model computes
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

    def proven_on(self, *layouts: str, kind: str = "") -> list[str]:
        """Returns the classes that are proven, with their defaults, on all given layouts; or the classes of a kind,
        `TEXT`, `CLASSIFIER` or `ADAPTERS`."""
        names = [name for name in self.classes if name.endswith(kind)] if kind else self.names
        none = Finding(REFUSED)
        return [
            name for name in names if all(self.classes[name].get(layout, none).status == PROVEN for layout in layouts)
        ]

    @property
    def names(self) -> list[str]:
        """The classes without variants."""
        return [name for name in self.classes if "[" not in name]

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
