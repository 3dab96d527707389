"""A table or figure of the paper: numbers as text, and a picture.

In:   a header and rows of cells.
Out:  `Artifact`: text for a terminal, Markdown, and a file with the picture where the paper has one.
Must hold: cells are texts; what a number means stands in the header.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import columns, markdown


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
