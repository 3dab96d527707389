"""The first line of an error holds the reason: launchers and logs show no more of it."""

import ast
from pathlib import Path

import pytest
from transformers import TrainingArguments

import hf_helix
from hf_helix import HelixConfig
from hf_helix.integrations.accelerate.launcher import CONFIG_FILE_VARIABLE, resolve_config
from hf_helix.integrations.trainer.checks import check_arguments

PACKAGE = Path(hf_helix.__file__).parent

PICTURES = {"planning/plan/block_plan.py", "planning/schedule/actions.py", "planning/schedule/validate.py"}
"""Files whose errors show the order or the schedule that they are about, below a line with the reason."""


def test_no_reason_begins_on_the_second_line() -> None:
    """What is raised is never a heading that ends with a colon."""
    headings = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and ":\n" in part.value
    }
    assert headings - PICTURES <= {"planning/schedule/scheduler.py"}


def first_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    return str(error.value).splitlines()[0]


def test_arguments_that_are_refused(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, torch_empty_cache_steps=2, label_names=["x"])
    with pytest.raises(ValueError, match="label_names") as error:
        check_arguments(args, HelixConfig())
    words = "HelixTrainer cannot honour torch_empty_cache_steps=2: use torch_empty_cache_steps=None"
    assert first_line(error).startswith(words)


def test_no_options_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_FILE_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="no helix options") as error:
        resolve_config(None, None)
    assert "helix_config=HelixConfig(tp_size=2)" in first_line(error)
