"""The page of all tables and figures.

In:   artifacts, and README.md of this folder, whose text before the numbers begins the page.
Out:  a Markdown file; pictures in the folder `images` beside it.
Must hold: the page says what it was made with, and when.
"""

import datetime
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from benchmarks.paper.table import Artifact
from hf_helix import __version__

PACKAGES = ("torch", "transformers")
README = Path(__file__).with_name("README.md")
NUMBERS = "## The numbers"


def write_page(path: Path, artifacts: Iterable[Artifact]) -> None:
    """Writes the page.

    Args:
        path: of the Markdown file.
        artifacts: in their order.

    Raises:
        ValueError: the path does not end with ".md".
    """
    if path.suffix != ".md":
        raise ValueError(f"--all writes a page, so --output {str(path)!r} must end with .md, such as paper.md")
    path.parent.mkdir(parents=True, exist_ok=True)
    words = README.read_text().partition(NUMBERS)[0]
    used = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    made = f"Made on {datetime.date.today()} by hf_helix {__version__} with {used}."
    parts = [words.strip(), f"{NUMBERS}\n\n{made}"]
    for artifact in artifacts:
        parts.append(artifact.markdown())
        if artifact.draw is not None:
            parts += [f"![{artifact.name}]({each})" for each in _pictures(path, artifact)]
        path.write_text("\n\n".join(parts) + "\n")  # so far: the whole takes minutes


def _pictures(page: Path, artifact: Artifact) -> list[str]:
    """Draws an artifact and returns where, relative to the page."""
    assert artifact.draw is not None
    name = artifact.name.lower().replace(" ", "-").replace("(", "").replace(")", "")
    folder = page.parent / "images"
    folder.mkdir(parents=True, exist_ok=True)
    artifact.draw(folder / f"{name}.svg")
    return [str(file.relative_to(page.parent)) for file in sorted(folder.glob(f"{name}*.svg"))]
