"""The code of the page on adding a model runs: a class that nobody declared trains, and the family that the page
declares equals its unsplit model.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from invariant.classes import Case
from invariant.harness import check
from support.models import starcoder2
from support.paths import ROOT
from transformers import AutoModelForCausalLM, Starcoder2Config

from hf_helix.models.registry import REGISTERED

# What the ranks run

PAGE = ROOT / "docs" / "adding_a_model.md"
MODELS = ROOT / "hf_helix" / "models"


def blocks() -> dict[str, str]:
    """The Python of the page, by the file names that its docstrings begin with."""
    result = re.findall(r'```python\n("""(\w+\.py): .*?)```', PAGE.read_text(), re.DOTALL)
    return {name: code for code, name in result}


def register() -> None:
    """What `import starcoder2` does where the block of that name is a file."""
    if "starcoder2" not in sys.modules:
        module = ModuleType("starcoder2")
        exec(compile(blocks()["starcoder2.py"], "starcoder2.py", "exec"), module.__dict__)
        sys.modules["starcoder2"] = module


def declared(**changes: Any) -> Any:
    """The page's model, whose family is registered."""
    register()
    return starcoder2(**changes)


def train(folder: str) -> None:
    """Run the page's first script."""
    with contextlib.chdir(folder):
        exec(compile(blocks()["train.py"], "train.py", "exec"), {"__name__": "__main__"})


# Tests


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    """The registration ends with a test: processes that other tests start cannot import the module."""
    yield
    sys.modules.pop("starcoder2", None)
    REGISTERED.pop("Starcoder2ForCausalLM", None)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python process in a folder, whose files it can import."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(("layout", "kind"), [("tp2", "left"), ("cp2", "packed")])
def test_equals_the_unsplit_model(layout: str, kind: str, cluster_of: Any, tmp_path: Path) -> None:
    model = {"family": f"{__name__}:declared", "num_hidden_layers": 2}
    check(cluster_of, tmp_path, Case("starcoder2", model, layout, kind), ("sequential", "greedy"))


@pytest.mark.slow
def test_the_class_that_nobody_declared_trains(cluster_of: Any, tmp_path: Path) -> None:
    cluster_of(2).run(train, folder=str(tmp_path))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(saved).__name__ == "Gemma3ForCausalLM"
    assert "Gemma3ForCausalLM" not in REGISTERED


@pytest.mark.slow
def test_the_check_on_the_page_runs(tmp_path: Path) -> None:
    """As a script beside the file of the family, and as the command."""
    for name, text in blocks().items():
        (tmp_path / name).write_text(text)
    done = run(tmp_path, "check.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" (")[0] for line in lines] == [
        f"Starcoder2ForCausalLM at {layout}: equal"
        for layout in ("tp_size=2", "pp_size=2", "tp_size=2, pp_size=2", "cp_size=2")
    ]


@pytest.mark.slow
def test_the_check_finds_a_mistake(tmp_path: Path) -> None:
    """The window of the family on the page is forgotten."""
    family, check = blocks()["starcoder2.py"], blocks()["check.py"]
    (tmp_path / "starcoder2.py").write_text(family.replace("return attn.config.sliding_window", "return None"))
    (tmp_path / "check.py").write_text(check)
    done = run(tmp_path, "check.py")
    assert done.returncode == 1
    assert "AssertionError: Starcoder2ForCausalLM at tp_size=2: different (" in done.stderr
    Starcoder2Config(sliding_window=8).save_pretrained(tmp_path)
    done = run(tmp_path, "-m", "hf_helix", "check", ".", "--imports", "starcoder2", "--tp_size", "2")
    assert done.returncode == 1
    assert done.stdout.startswith("Starcoder2ForCausalLM at tp_size=2: different (")


def test_the_page_quotes_what_is_said() -> None:
    """Every sentence in the table of what cannot be derived is one of the code's."""
    assert blocks().keys() == {"train.py", "starcoder2.py", "check.py"}
    page, code = PAGE.read_text(), "\n".join(path.read_text() for path in MODELS.rglob("*.py"))
    rows = page.split("| what | for example | the sentence |")[1].split("\n\n")[0].splitlines()[2:]
    quoted = {text for row in rows for text in re.findall(r"`([^`]* [^`]*)`", row.split("|")[3])}
    assert len(quoted) > 6
    for text in quoted:
        parts = re.split(r"create_\w+\(|\.\.\.", text)
        assert all(part.strip(" ():,") in code for part in parts), text
