"""Writes the parts of the pages that follow from the code: `python docs/generate.py`.

In:   `HelixConfig`'s docstring and defaults; `SUPPORTED`, the table of `hf-helix models`.
Out:  the blocks between `<!-- generated: NAME -->` and `<!-- end -->` in configuration.md and support.md.
Must hold: it changes nothing outside the blocks; tests/unit/test_docs.py compares the pages with what it would write.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path

from hf_helix.cli.models import SUPPORTED
from hf_helix.config import HelixConfig

DOCS = Path(__file__).parent


def options() -> str:
    """Every option of `HelixConfig` with its default, in the words of the docstring."""
    defaults = {field.name: field.default for field in dataclasses.fields(HelixConfig)}
    text = inspect.cleandoc(HelixConfig.__doc__ or "")
    body = text.partition("Args:\n")[2].partition("\nRaises:")[0]
    described = dict(re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", body, re.MULTILINE))
    missing = defaults.keys() ^ described.keys()
    if missing:
        raise ValueError(f"HelixConfig's fields and docstring differ in {', '.join(sorted(missing))}")
    return "\n\n".join(_option(name, defaults[name], words) for name, words in described.items())


def _option(name: str, default: object, words: str) -> str:
    """A heading, a paragraph, and an item for each value that has a line of its own."""
    text = _joined([line.strip() for line in words.splitlines()])
    return f"### `{name}`\n\nDefault: `{default!r}`. {text[0].upper()}{text[1:]}"


def _joined(lines: list[str]) -> str:
    """The lines as one paragraph; from the first that starts with a value, such as "`ring`: ...", as a list."""
    parts: list[str] = []
    for line in lines:
        starts = bool(re.match(r"(`[\w./]+`:|or the path|None )", line))
        if parts and not (starts and (parts[0].rstrip().endswith(":") or len(parts) > 1)):
            parts[-1] += f" {line}"
        else:
            parts.append(line)
    return parts[0] + "".join(("\n\n- " if place == 0 else "\n- ") + part for place, part in enumerate(parts[1:]))


def models() -> str:
    """The classes, a checkpoint of each, and the layouts that were tested."""
    rows = [f"| `{name}` | {model.checkpoint} | {', '.join(model.layouts)} |" for name, model in SUPPORTED.items()]
    return "\n".join(["| class | for example | layouts compared |", "|---|---|---|", *rows])


BLOCKS: dict[str, tuple[str, Callable[[], str]]] = {
    "options": ("configuration.md", options),
    "models": ("support.md", models),
}


def filled(page: str) -> str:
    """The text of a page with its blocks as they should be."""
    text = (DOCS / page).read_text()
    for name, (where, block) in BLOCKS.items():
        if where == page:
            begin, end = f"<!-- generated: {name} -->", "<!-- end -->"
            pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
            if len(pattern.findall(text)) != 1:
                raise ValueError(f"docs/{page} must have one block {begin} ... {end}")
            written = f"{begin}\n\n{block()}\n\n{end}"
            text = pattern.sub(lambda _, written=written: written, text)
    return text


if __name__ == "__main__":
    for page in sorted({page for page, _ in BLOCKS.values()}):
        (DOCS / page).write_text(filled(page))
