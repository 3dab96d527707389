"""docs/trainer.md is complete and true: it lists every training argument, and what it calls refused is refused."""

import ast
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.models import arguments, llama
from support.paths import ROOT
from transformers import TrainingArguments

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.integrations.trainer.checks import check_arguments

PAGE = ROOT / "docs" / "trainer.md"


@dataclass(frozen=True)
class Row:
    """A line of the page."""

    name: str
    fate: str
    refused: tuple[Any, ...]
    everywhere: bool  # whether all supported versions of Transformers have the field


def rows() -> list[Row]:
    result = []
    for line in PAGE.read_text().partition("\n## Habits")[0].splitlines():
        if match := re.match(r"\| `(\w+)`( \(not in 5\.17\))? \| (\w+) \| (.*?) ?\| ", line):
            name, mark, fate, values = match.groups()
            refused = tuple(ast.literal_eval(value) for value in re.findall(r"`(.+?)`", values))
            result.append(Row(name, fate, refused, not mark))
    return result


REFUSED = [(row.name, value) for row in rows() for value in row.refused]


def test_every_field_has_a_line() -> None:
    fields = [field.name for field in dataclasses.fields(TrainingArguments)]
    listed = [row.name for row in rows()]
    assert len(listed) == len(set(listed))
    assert set(fields) <= set(listed), "fields that docs/trainer.md#training-arguments does not list"
    assert {row.name for row in rows() if row.everywhere} <= set(fields), "lines for fields that do not exist"
    # Fates.
    assert {row.fate for row in rows()} == {"honoured", "refused", "irrelevant"}
    for row in rows():
        assert row.refused or row.fate != "refused", row.name
        assert not row.refused or row.fate != "irrelevant", row.name


def test_the_defaults_are_accepted(tmp_path: Path) -> None:
    check_arguments(TrainingArguments(str(tmp_path), use_cpu=True), HelixConfig())


def test_torch_compile_compiles_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `HelixConfig(compile=True)`: Accelerate would compile the model as a whole."""
    for name in ("BACKEND", "MODE"):
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "")  # set anew by the arguments, restored after the test
    args = arguments(str(tmp_path), torch_compile=True)
    trainer = HelixTrainer(model=llama(num_hidden_layers=1), args=args, helix_config=HelixConfig())
    assert trainer.helix_config == HelixConfig(compile=True)
    assert trainer.accelerator.state.dynamo_plugin.backend.value == "NO"


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[f"{name}={value}" for name, value in REFUSED])
def test_refused_values(name: str, value: Any, tmp_path: Path) -> None:
    """Set by hand, since some cannot be given on CPU. The error names a value, and that one is accepted."""
    args = arguments(str(tmp_path))
    if name == "accelerator_config":
        value = dataclasses.replace(args.accelerator_config, **value)
    setattr(args, name, value)
    with pytest.raises(ValueError, match="cannot honour") as caught:
        HelixTrainer(model=llama(num_hidden_layers=1), args=args, helix_config=HelixConfig())
    (line,) = str(caught.value).splitlines()
    line = line.removeprefix("HelixTrainer cannot honour ")
    assert line.startswith(f"{name}=")
    option, works = re.search(r": .*?use ['\"]?(\w+)['\"]?[=:] ?([^:;,]+)", line.partition("=")[2]).groups()  # type: ignore[union-attr]
    if name == "accelerator_config":
        args.accelerator_config.gradient_accumulation_kwargs[option] = ast.literal_eval(works)
    else:
        setattr(args, option, ast.literal_eval(works))
    check_arguments(args, HelixConfig())
