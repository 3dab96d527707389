"""Hooks of mkdocs (see `mkdocs.yml`): navigation, links into the repository, pages of the API and of the commands.

In:   docs/README.md, the index of the pages; `API`, the public names; the parser of `hf-helix`.
Out:  the navigation in the order of the index; pages `api.md`, with the docstrings, and `commands.md`, with the help of
      each command; links such as `../tests/conftest.py` as addresses in the repository.
Must hold: a link to a file that does not exist is an error, as it is among the pages.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from hf_helix.cli import command_parsers

ROOT = Path(__file__).parents[1]
MEASUREMENTS = ["plan", "tuning", "measure_overlap", "compare_plans", "measure_memory", "trace"]
API = {
    "Training": {
        "hf_helix.HelixConfig": ["from_file", "from_mapping"],
        "hf_helix.HelixTrainer": MEASUREMENTS,
        "hf_helix.HelixTrainerMixin": MEASUREMENTS,
        "hf_helix.HelixPlugin": ["prepare", "build_mesh"],
    },
    "A cut model: `trainer.helix`": {
        "hf_helix.engine.engine.Engine": [],
        "hf_helix.engine.weights.Weights": [
            "full_weight",
            "full_gradient",
            "full_weights",
            "gradient_norm",
            "save_pretrained",
            "load_weights",
        ],
        "hf_helix.engine.session.Session": ["evaluate"],
        "hf_helix.engine.diagnostics.Diagnostics": None,
    },
    "Model families": {
        "hf_helix.register_model": None,
        "hf_helix.models.derived.family.Family": None,
        "hf_helix.models.graph.builder.Builder": None,
        "hf_helix.testing.check_family": None,
    },
    "Plans and figures": {
        "hf_helix.planning.plan.plan.Plan": ["save", "to_json"],
        "hf_helix.measure.overlap.Overlap": None,
        "hf_helix.tuning.candidates.Comparison": None,
        "hf_helix.tuning.result_text.format_scorecard": None,
        "hf_helix.report.comparison": ["format_comparison", "save_comparison"],
    },
}
"""The public names by chapter, each with the members to list, or None for all."""


def on_config(config: Any) -> Any:
    """Takes the navigation from the index: a section for each bold word, an item for each page below it."""
    sections: list[dict[str, list[Any]]] = []
    seen = {"README.md"}
    for line in (ROOT / "docs" / "README.md").read_text().splitlines():
        if title := re.match(r"\*\*(.+?)\*\*", line):
            sections.append({title[1]: []})
        for page in re.findall(r"\]\((\w+\.md)\)", line):
            if sections and page not in seen:
                seen.add(page)
                next(iter(sections[-1].values())).append(page)
    config.nav = [{"Documentation": "README.md"}, *sections, {"Reference": ["api.md", "commands.md"]}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made of the code."""
    files.append(File.generated(config, "api.md", content=_api()))
    files.append(File.generated(config, "commands.md", content=_commands()))
    return files


def _api() -> str:
    lines = ["# API", "", "The public names, from their docstrings. Options: [configuration.md](configuration.md)."]
    for chapter, names in API.items():
        lines += ["", f"## {chapter}"]
        for name, members in names.items():
            lines += ["", f"::: {name}"]
            if members is not None:
                lines += ["    options:", f"      members: {members}"]
    return "\n".join(lines)


def _commands() -> str:
    """The help of `hf-helix` and of each of its commands."""
    helps = {name: parser.format_help().strip() for name, parser in command_parsers().items()}
    texts = (f"## `{name}`\n\n```text\n{text}\n```" for name, text in helps.items())
    return "# Command line\n\n" + "\n\n".join(texts)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links that leave docs/ into addresses in the repository."""

    def address(link: re.Match[str]) -> str:
        path, mark, anchor = link[1].partition("#")
        target = (ROOT / "docs" / path).resolve()
        if not target.exists():
            raise PluginError(f"{page.file.src_uri}: {link[1]} leads to no file of the repository")
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{target.relative_to(ROOT)}{mark}{anchor})"

    return re.sub(r"\]\((\.\./[^)\s]+)\)", address, markdown)
