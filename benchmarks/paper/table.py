"""A table or figure of the paper: numbers as text, and a picture; and the page of all of them.

In:   a header and rows of cells; for the page README.md of this folder, whose text before the numbers begins it.
Out:  `Artifact`: text for a terminal, Markdown, and a file with the picture where the paper has one; a Markdown file,
      with pictures in the folder `images` beside it.
Must hold: cells are texts; what a number means stands in the header; the page says what it was made with, and when.
"""

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from benchmarks.common import columns, markdown
from hf_helix import __version__

PACKAGES = ("torch", "transformers")
README = Path(__file__).with_name("README.md")
NUMBERS = "## The numbers"


@dataclass(frozen=True)
class Artifact:
    """What is shown of one table or figure.

    Attributes:
        name: as the paper calls it, such as "Figure 11".
        title: what it shows.
        header: of the columns.
        rows: of cells.
        notes: lines below the table.
        draw: makes the picture; None for a table.
    """

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    draw: Callable[[Path], None] | None = field(default=None, compare=False)

    def text(self) -> str:
        """Returns it for a terminal, numbers on the right."""
        table = columns(self.header, self.rows)
        return "\n".join([f"{self.name}: {self.title}", table, *self.notes])

    def markdown(self) -> str:
        """Returns it as a section of a page."""
        notes = ["", *(f"{note}  " for note in self.notes)] if self.notes else []
        return "\n".join(
            [f"### {self.name}: {self.title}", "", markdown(self.header, self.rows), *[note.rstrip() for note in notes]]
        )


def signed(value: float) -> str:
    """Returns an error in percent with its sign."""
    return f"{100 * value:+.1f} %"


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
