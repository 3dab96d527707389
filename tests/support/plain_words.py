"""Counts turns of phrase that make a reader stumble, in code and in pages; `make lint` runs it.

    python tests/support/plain_words.py

Fourteen markers of a private idiom, each with its cure: "None where every rank keeps it" -> "None if replicated", "what
users see of it" -> "the user's view of it", "alone" -> "only" or "by itself". Docstrings and comments of torchtitan,
PEFT and torch's pipelining have 8 to 12 of them in 10,000 words, their pages 11 to 14. The command prints the files
with the most and fails if the package or the pages exceed `LIMIT`.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIMIT = 20  # markers in 10,000 words
SHOWN = 5  # files
MARKERS = re.compile(
    r"\bwhere\b|\blets\b|\balone\b|\bbeside\b|\bbehind\b|, too\b|\b(?:that|those) of\b|\b(?:so|as) many\b|\blikewise\b"
    r"|\bas of\b|\b(?:says|said|told|tells)\b|\bat present\b|\bmeanwhile\b|\bthereof\b"
    r"|(?:^|[.;:] )(?-i:Of) (?:a|an|the|each|all|equal|several)\b|\b(?:has|have|holds) (?:none|nothing|all)\b"
    r"|\bwhat (?:is|are|it|they|a|the|was|has|must|users|follows|runs|leaves|enters|hosts|ranks)\b",
    re.IGNORECASE | re.MULTILINE,
)


class Count(NamedTuple):
    """The markers and the words of a text."""

    markers: int
    words: int

    @property
    def share(self) -> float:
        """The markers in 10,000 words."""
        return 10_000 * self.markers / (self.words or 1)


def prose_of_code(source: str) -> Iterator[str]:
    """The docstrings and comments of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string[1:]


def prose_of_page(text: str) -> Iterator[str]:
    """A page without blocks of code, and without the parts that are taken from the code."""
    yield re.sub(r"```.*?```|<!-- generated.*?<!-- end -->", "", text, flags=re.DOTALL)


def count(texts: Iterator[str]) -> Count:
    """Counts markers and words."""
    text = "\n".join(texts)
    return Count(len(MARKERS.findall(text)), len(re.findall("[A-Za-z']+", text)))


def main() -> int:
    """Prints both shares and the files with the most markers. Returns 1 if a share exceeds the limit."""
    pages = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
    parts = {
        "code": {path: count(prose_of_code(path.read_text())) for path in sorted((ROOT / "hf_helix").rglob("*.py"))},
        "pages": {path: count(prose_of_page(path.read_text())) for path in pages},
    }
    fails = False
    for name, counts in parts.items():
        total = Count(*(sum(column) for column in zip(*counts.values(), strict=True)))
        print(f"{name}: {total.share:.0f} markers in 10,000 of {total.words:,} words; at most {LIMIT}")
        for path in sorted(counts, key=lambda path: counts[path].markers, reverse=True)[:SHOWN]:
            print(f"  {counts[path].markers} in {path.relative_to(ROOT)}")
        fails = fails or total.share > LIMIT
    return int(fails)


if __name__ == "__main__":
    sys.exit(main())
