"""Pages are true where a test can tell: links, anchors, commands, extras, and what is generated from the code."""

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

import hf_helix
from hf_helix.cli import build_parser
from hf_helix.config import PLANS, HelixConfig

README = ROOT / "README.md"
PAGES = sorted(
    page
    for folder in (".", "docs", "recipes", "benchmarks", "benchmarks/paper")
    for page in (ROOT / folder).glob("*.md")
)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def project() -> dict[str, Any]:
    return pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", page.read_text())


def anchor_of(title: str) -> str:
    """The name under which GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {anchor_of(title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def check_target(page: Path, anchor: str) -> None:
    assert page.exists(), page
    assert not anchor or anchor in anchors(page), f"{page.relative_to(ROOT)} has no heading #{anchor}"


def test_links_of_the_first_page_work_on_a_package_index() -> None:
    """Absolute, and to files that exist."""
    home = project()["urls"]["Homepage"]
    inside = [link for link in links(README) if link.startswith(home)]
    assert len(inside) > 10
    for link in inside:
        path, _, anchor = link.removeprefix(home).partition("#")
        assert re.match(r"/(blob|raw)/main/", path), link
        check_target(ROOT / path.split("/", 3)[3], anchor)
    for link in set(links(README)) - set(inside):
        assert re.match(r"https://(?!github\.com)", link), f"{link} is neither outside nor below {home}"
    assert all(url.startswith(home) for url in project()["urls"].values())


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            check_target((page.parent / path).resolve() if path else page, anchor)


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link).resolve() for link in links(index)}
    assert {page for page in PAGES if page.parent == index.parent} - {index} <= listed


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command in a block of code; `NAME` and `...` stand for what the reader puts in."""
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"^(?:    )?((?:\w+=\S+ )*(?:sudo )?(?:\.venv/bin/)?[a-z][\w-]* .*)$", text, re.MULTILINE):
        words = line.partition("   #")[0].partition(" && ")[0]
        if re.match(r"(\w+=\S+ )*(sudo )?(\.venv/bin/)?(hf-helix|accelerate|python|make|pip|torchrun) ", words):
            try:
                split = shlex.split(words)
            except ValueError:
                continue  # prose with an apostrophe
            yield [word for word in split if "=" not in word or word.startswith("-")]


def test_every_technique_is_described_in_one_form() -> None:
    """Those of the table of layouts.md, each in the section or on the page to which its row leads."""
    page = ROOT / "docs" / "layouts.md"
    rows = re.findall(r"^\| .* \|$", page.read_text().partition("\n## ")[0], re.MULTILINE)
    targets = [link for row in rows for link in re.findall(r"\]\(([^)]+)\) \|$", row)]
    assert len(targets) >= 8
    for target in targets:
        name, _, anchor = target.partition("#")
        text = (page.parent / name if name else page).read_text()
        _, *parts = re.split(r"^##? (.*)$", text, flags=re.MULTILINE)
        sections = dict(zip(map(anchor_of, parts[::2]), parts[1::2], strict=True))
        described = sections[anchor or anchor_of(parts[0])]
        form = ["When to use", "When not", "Expected change", "Known limits", "Evidence"]
        assert re.findall(r"^\| \*\*(.*?)\*\* \|", described, re.MULTILINE) == form, target


def test_there_are_commands() -> None:
    result = {Path(words[0]).name for page in PAGES for words in commands(page)}
    assert {"hf-helix", "accelerate", "make", "pip"} <= result


@every_page
def test_commands_name_what_exists(page: Path) -> None:
    """Options of `hf-helix`, targets of make, extras, and files of the repository."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(page):
        program = Path(words[0]).name
        if program == "hf-helix" and "..." not in words and words[1] != "--help":
            build_parser().parse_args(words[1:])
        if program == "make":
            assert words[1] in targets, words
        if program == "pip":
            for extra in re.findall(r"\[([\w,-]+)\]", " ".join(words)):
                assert set(extra.split(",")) <= project()["optional-dependencies"].keys(), words
        for word in words:
            if re.match(r"(recipes|accelerate_configs|benchmarks|docs)/", word):
                assert (ROOT / word).exists(), words
    for module in re.findall(r"python -m (benchmarks\.[a-z][\w.]*\w)", page.read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_every_extra_is_described() -> None:
    page = (ROOT / "docs" / "installation.md").read_text()
    for extra in project()["optional-dependencies"]:
        assert f"| `{extra}` |" in page


def test_no_message_installs_from_an_index_that_does_not_have_it() -> None:
    for path in [*(ROOT / "hf_helix").rglob("*.py"), *PAGES]:
        assert not re.search(r"pip install '?\"?hf_helix", path.read_text()), path


def generator(name: str = "generate") -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_generated_is_up_to_date() -> None:
    made = generator()
    for page in {page for page, _ in made.BLOCKS.values()}:
        assert made.filled(page) == (ROOT / "docs" / page).read_text(), f"run `python docs/generate.py`: docs/{page}"


@pytest.mark.slow
def test_the_site_has_every_page_and_every_public_name(tmp_path: Path) -> None:
    """Broken links, names without a docstring's parameters and pages outside of the navigation are errors of mkdocs."""
    run = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    named = set(re.findall(r'<h3 id="hf_helix\.(\w+)"', (tmp_path / "api" / "index.html").read_text()))
    assert set(hf_helix.__all__) - {"__version__"} <= named
    commands = (tmp_path / "commands" / "index.html").read_text()
    assert all(f'id="hf-helix-{name}"' in commands for name in ("check", "doctor", "simulate", "show"))


def test_the_first_page_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert any(line.startswith("make demo") for line in lines[:40])


@pytest.mark.slow
def test_the_doctor_answers_as_the_first_page_says() -> None:
    made = generator("hardware")
    assert made.answers() == made.json.loads(made.ANSWERS.read_text())


def test_the_file_to_copy_has_every_option() -> None:
    text = (ROOT / "accelerate_configs" / "helix.yaml").read_text()
    for option in generator().dataclasses.fields(generator().HelixConfig):
        assert re.search(rf"^ +(# )?{option.name}: ", text, re.MULTILINE), option.name


def test_every_option_is_described() -> None:
    """A field without a word in the docstring is an error, not a gap."""
    made = generator()
    assert made.options().count("\n### `") + 1 == len(made.dataclasses.fields(made.HelixConfig))
    documented = made.HelixConfig.__doc__
    try:
        made.HelixConfig.__doc__ = documented.replace("tp_size: ranks", "tp: ranks")
        with pytest.raises(ValueError, match="differ in tp, tp_size"):
            made.options()
    finally:
        made.HelixConfig.__doc__ = documented


def test_every_plan_is_described() -> None:
    table = (ROOT / "docs" / "plans.md").read_text().partition("\n## The rules\n")[2].partition("\n## ")[0]
    _, *rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)  # the first is the head
    assert sorted(rows) == sorted(PLANS)
    described = (HelixConfig.__doc__ or "").partition(" plan: ")[2].partition(" tuning_share: ")[0]
    assert all(f"`{plan}`:" in described for plan in PLANS)
