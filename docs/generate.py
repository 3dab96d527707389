"""Writes the parts of the pages that follow from the code: `python docs/generate.py`.

In:   `HelixConfig`'s docstring and defaults; `SUPPORTED`, the table of `hf-helix models`; the census; the
      folders of the package and their docstrings; `versions.json`, the runs that `pytest --record` has noted;
      `hardware.json`, the doctor's answers; the doctor's `published.json`; the
      census of native tensor parallelism.
Out:  the blocks between `<!-- generated: NAME -->` and `<!-- end -->` in the README, configuration.md, support.md,
      models.md, installation.md, doctor.md and CONTRIBUTING.md.
Must hold: it changes nothing outside the blocks; tests/test_docs.py compares the pages with what it would write.
"""

import ast
import dataclasses
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hf_helix
from hf_helix.cli.models import SUPPORTED, headline
from hf_helix.config import HelixConfig, described_options
from hf_helix.doctor.exactness import KINDS, published_runs, statistics_of
from hf_helix.models.stock.census import instead_of, read_census

DOCS = Path(__file__).parent
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed")


def options() -> str:
    """Every option of `HelixConfig` with its default, in the words of the docstring."""
    defaults = {field.name: field.default for field in dataclasses.fields(HelixConfig)}
    described = described_options()
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


def census() -> str:
    """How many classes are proven, and what was found for each."""
    taken = read_census()
    layouts = list(dict.fromkeys(layout for findings in taken.classes.values() for layout in findings))
    lines = [
        f"**{headline(taken)}.**",
        "",
        f"| class | {' | '.join(layouts)} | why not | instead |",
        "|---" * (len(layouts) + 3) + "|",
    ]
    for name, findings in taken.classes.items():
        statuses = [findings[layout].status if layout in findings else "" for layout in layouts]
        reasons = dict.fromkeys(found.reason for found in findings.values() if found.reason)
        cells = [f"`{name}`", *statuses, "<br>".join(_cell(reason) for reason in reasons)]
        cells.append("<br>".join(_cell(each) for each in dict.fromkeys(map(instead_of, reasons))))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


NATIVE = DOCS.parent / "benchmarks" / "results" / "native-census.json"
LOSS, GRADIENT = 1e-5, 1e-4  # relative differences up to which a value is right


def native() -> str:
    """What was found for each class that Transformers or DeepSpeed cuts, beside ours."""
    found, ours = json.loads(NATIVE.read_text()), read_census().classes
    plan, autotp = found["native"]["classes"], found.get("autotp", {}).get("classes", {})
    lines = [
        f"Native: {_taken(found['native'])}. AutoTP: {_taken(found['autotp'])}." if autotp else _taken(found["native"]),
        "",
        "| class | native loss | native gradients | native, two micro-batches | AutoTP | ours, tp2 |",
        "|---" * 6 + "|",
    ]
    for name in sorted({*plan, *autotp}):
        cells = [f"`{name}`", *_native_cells(plan.get(name)), _autotp_cell(autotp.get(name))]
        lines.append(f"| {' | '.join(cells)} | {ours[name]['tp2'].status if name in ours else ''} |")
    return "\n".join(lines)


def _taken(census: dict[str, Any]) -> str:
    return f"{', '.join(f'{name} {number}' for name, number in census['versions'].items())}, {census['date']}"


def _native_cells(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["no plan", "", ""]
    if found["error"]:
        return [_error(found["error"]), "", ""]
    weights = f"; weights off {found['weights']:.0e}" if found["weights"] > LOSS else ""
    of_gradients = [_difference(found[key], GRADIENT) for key in ("gradients", "accumulated")]
    return [_difference(found["loss"], LOSS) + weights, *of_gradients]


def _autotp_cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if found["error"]:
        return _error(found["error"])
    return _difference(max(found["loss"], found["stepped"]), LOSS)


def _error(text: str) -> str:
    return "not run" if text.startswith("not run") else f"raises: {_cell(text[:120])}"


def _difference(value: float, limit: float) -> str:
    return "right" if value <= limit else f"**off {value:.0e}**"


def _native_number(page: str) -> str:
    """How many classes train right under Transformers' own tensor parallelism, and here."""
    found, ours = json.loads(NATIVE.read_text())["native"]["classes"], read_census().classes
    cells = {name: cells for name, each in found.items() if (cells := _native_cells(each))[0] != "not run"}
    once = sum(each[:2] == ["right", "right"] for each in cells.values())
    twice = sum(each == ["right"] * 3 for each in cells.values())
    proven = sum(name in ours and ours[name]["tp2"].status == "proven" for name in cells)
    return (
        f"Of the {len(cells)} causal-LM classes that Transformers cuts by a plan of its own, {once} train right there "
        f"with one micro-batch and {twice} with two; {proven} are proven here, always with several: "
        f"[class by class]({page}#tensor-parallelism-of-transformers-and-deepspeed)."
    )


def census_number() -> str:
    """How many classes are proven, here and natively, for the first page, whose links are absolute."""
    page = "https://github.com/hf-helix/hf_helix/blob/main/docs/models.md"
    return f"**{headline(read_census())}**: [which, and why not the others]({page}). {_native_number(page)}"


def versions() -> str:
    """The runs of tests with their versions, as `pytest --record` has noted them; the oldest versions first."""
    runs = json.loads((DOCS / "versions.json").read_text())
    packages = list(dict.fromkeys(name for run in runs for name in run["versions"]))
    lines = [f"| date | {' | '.join(packages)} | device | tests | outcome |", "|---" * (len(packages) + 4) + "|"]
    for run in sorted(
        runs, key=lambda run: [[int(n) for n in re.findall(r"\d+", run["versions"]["torch"])], run["date"]]
    ):
        outcome = ", ".join(f"{run[name]} {name}" for name in OUTCOMES if name in run)
        installed = [run["versions"].get(name, "") for name in packages]
        tests = run["tests"].replace("tests/", "")
        lines.append(f"| {run['date']} | {' | '.join(installed)} | {run['device']} | `{tests}` | {outcome} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """A text that may stand in a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def tree() -> str:
    """The package's folders, each with the first line of its docstring and the names of its files."""
    package = Path(hf_helix.__file__).parent
    return "\n".join(["```", "hf_helix/", *_folder(package, "  "), "```"])


def _folder(folder: Path, indent: str) -> Iterator[str]:
    """The lines of a folder: its files, and the folders in it."""
    files = [path.stem for path in sorted(folder.glob("*.py")) if not path.stem.startswith("__")]
    if files:
        yield from textwrap.wrap("  ".join(files), 118, initial_indent=indent, subsequent_indent=indent)
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        docstring = ast.get_docstring(ast.parse((inner / "__init__.py").read_text())) or ""
        summary = docstring.partition("\n")[0]
        yield f"{indent}{inner.name + '/':<{22 - len(indent)}}{summary}"
        yield from _folder(inner, indent + "    ")


def hardware() -> str:
    """The doctor's answers of `docs/hardware.py`, and the commands that give them."""
    rows, found = [], json.loads((DOCS / "hardware.json").read_text())
    for command, row in found.items():
        machine = command.partition("--cluster ")[2].partition(" --batch_tokens")[0]
        trained = "LoRA" if "--lora_r" in command else "full"
        cells = (f"`{machine}`", trained, row["layout"], row["rate"], row["gain"], row["rival"])
        rows.append(f"| {' | '.join(cells)} |")
    head = "| `--cluster` | training | best layout | tokens/s | gain from overlap | best rival: tokens/s |"
    first = next(iter(found))
    return "\n".join([head, "|---|---|---|---:|---:|---|", *rows, "", f"`{first}`; with `--lora_r 16` for LoRA."])


def published() -> str:
    """The error of predictions of published runs: of all, by hardware and by kind; and every run."""
    runs = published_runs()
    groups = {"all": runs}
    for hardware in sorted({run.hardware for run in runs}):
        groups[hardware.upper()] = tuple(run for run in runs if run.hardware == hardware)
    for kind in KINDS:
        groups[kind] = tuple(run for run in runs if run.kind == kind)
    lines = [
        "| of | rows | median ratio | mean of abs(log ratio) | within 15 % | all ratios |",
        "|---|---:|---:|---:|---:|---|",
    ]
    lines += [_errors(name, [run.ratio for run in found]) for name, found in groups.items() if found]
    lines += ["", "| row | source | kind | published | predicted | ratio |", "|---|---|---|---:|---:|---:|"]
    for run in runs:
        cells = (
            run.name,
            _cell(run.source),
            run.kind,
            f"{run.published:,.0f}",
            f"{run.predicted:,.0f}",
            f"{run.ratio:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _errors(name: str, ratios: list[float]) -> str:
    middle, errors, within = statistics_of(ratios)
    ends = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"| {name} | {len(ratios)} | {middle:.2f} | {errors:.3f} | {within:.0%} | {ends} |"


BLOCKS: dict[str, tuple[str, Callable[[], str]]] = {
    "tree": ("../CONTRIBUTING.md", tree),
    "options": ("configuration.md", options),
    "models": ("support.md", models),
    "census": ("models.md", census),
    "versions": ("installation.md", versions),
    "hardware": ("../README.md", hardware),
    "published": ("doctor.md", published),
    "census number": ("../README.md", census_number),
    "native": ("models.md", native),
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
