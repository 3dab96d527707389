"""What a model card says."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard


def card_in(folder: Path) -> Any:
    return ModelCard.load(folder / "README.md")


def cells(card: Any) -> dict[str, str]:
    """The first two columns of all tables; the first row of a name counts."""
    rows = [line.split(" | ") for line in card.text.splitlines() if line.startswith("| ")]
    return {row[0].strip("|* "): row[1].strip("| ") for row in reversed(rows)}


def launch_file(card: Any, folder: Path) -> Path:
    """The YAML of a card, as a file."""
    path = folder / "launch.yaml"
    path.write_text(card.text.partition("```yaml\n")[2].partition("```")[0])
    return path
