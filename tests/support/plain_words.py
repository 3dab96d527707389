"""The share of vague words among the words of docstrings, file by file; `make lint` runs it.

    python tests/support/plain_words.py

A pronoun in place of a noun makes a reader look back. In docstrings of torchtitan, TRL, PEFT and Accelerate 1.5 to
2.1 % of all words are vague. The command prints the files with the largest shares and fails where the package exceeds
`LIMIT`.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hf_helix"
VAGUE = {"what", "which", "that", "those", "it", "they", "such", "one"}
LIMIT = 0.04
SHOWN = 5  # files
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a file, without the names in backticks."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield re.sub(r"`[^`]*`", "", text)


def count(source: str) -> tuple[int, int]:
    """The vague words of a file's docstrings, and all words."""
    words = [word for text in docstrings(source) for word in re.findall("[a-z]+", text.lower())]
    return sum(word in VAGUE for word in words), len(words)


def main() -> int:
    """Prints the files with the largest shares. Returns 1 where the package has too many vague words."""
    counts = {path: count(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    vague, words = (sum(column) for column in zip(*counts.values(), strict=True))
    worst = sorted(counts, key=lambda path: counts[path][0] / (counts[path][1] or 1), reverse=True)
    print(f"vague words in docstrings: {vague / words:.1%} of {words:,}; at most {LIMIT:.0%}")
    for path in worst[:SHOWN]:
        print(f"  {counts[path][0] / counts[path][1]:.1%} of {counts[path][1]:,}: {path.relative_to(PACKAGE.parent)}")
    return int(vague > LIMIT * words)


if __name__ == "__main__":
    sys.exit(main())
