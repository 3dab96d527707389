"""The recipes of the repository: where their files are, and what their page says."""

from typing import Any

from support.paths import ROOT
from transformers import AutoConfig

LAUNCH = ROOT / "accelerate_configs"
MODELS = ROOT / "recipes" / "models"
README = (ROOT / "recipes" / "README.md").read_text()
ALL_MODELS = sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def config_of(model: str) -> Any:
    return AutoConfig.from_pretrained(MODELS / model)


def row_of(link: str) -> str:
    """The row of a table in the recipes' page that holds a link, with single spaces."""
    (row,) = (line for line in README.splitlines() if line.startswith("|") and link in line)
    return " ".join(row.split())
