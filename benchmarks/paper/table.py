"""A table or figure of the paper: numbers as text, and a picture.

In:   a header and rows of cells.
Out:  `Artifact`: text for a terminal, Markdown, and a file with the picture where the paper has one.
Must hold: cells are texts; what a number means stands in the header.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


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
        widths = [max(len(cells[place]) for cells in (self.header, *self.rows)) for place in range(len(self.header))]

        def line(cells: Sequence[str]) -> str:
            padded = (
                cell.rjust(width) if _is_number(self, place) else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            return "  ".join(padded).rstrip()

        rule = "  ".join("-" * width for width in widths)
        return "\n".join([f"{self.name}: {self.title}", line(self.header), rule, *map(line, self.rows), *self.notes])

    def markdown(self) -> str:
        """Returns it as a section of a page."""
        marks = ["---:" if _is_number(self, place) else "---" for place in range(len(self.header))]
        table = ["| " + " | ".join(cells) + " |" for cells in (self.header, marks, *self.rows)]
        notes = ["", *(f"{note}  " for note in self.notes)] if self.notes else []
        return "\n".join([f"### {self.name}: {self.title}", "", *table, *[note.rstrip() for note in notes]])


def _is_number(table: Artifact, place: int) -> bool:
    cells = [cells[place] for cells in table.rows if cells[place]]
    return bool(cells) and all(cell[0] in "+-.0123456789" for cell in cells)


def signed(value: float) -> str:
    """Returns an error in percent with its sign."""
    return f"{100 * value:+.1f} %"
