"""Impossible models, values and files are refused in one line by every command, before anything is measured."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.marks import slow
from support.paths import ROOT

from hf_helix.cli import main

TINY = str(ROOT / "recipes" / "models" / "tiny-llama")
CONFIG = json.loads((ROOT / "recipes" / "models" / "tiny-llama" / "config.json").read_text())
QUESTION = ("--cluster", "a40x64")
MODELS = (
    ({"num_hidden_layers": 0}, "num_hidden_layers=0, and no model has fewer than 1"),
    ({"num_hidden_layers": -2}, "num_hidden_layers=-2, and no model has fewer than 1"),
    ({"vocab_size": 0}, "vocab_size=0, and no model has fewer than 1"),
    ({"hidden_size": 100, "num_attention_heads": 3}, "correct its values"),
    ({"num_attention_heads": 8, "num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=8"),
)
VALUES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("check", TINY, "--tp_size", "0"), "--tp_size 0: give 1 or more"),
    (("profile", "--model", TINY, "--batch_size", "0"), "--batch_size 0: give 1 or more"),
    (("profile", "--model", TINY, "--sequence_length", "-1"), "--sequence_length -1: give 1 or more"),
    (("profile", "--model", TINY, "--output", "nowhere/profile.json"), "there is no folder nowhere"),
    (("profile", "--model", TINY, "--trace", "."), "--trace . is a folder; give a file"),
    (("profile", "--model", TINY, "--schedule", "BINARY"), "BINARY: it is no text"),
    (("plan", "profile.json", "--microbatches", "0"), "--microbatches 0: give 1 or more"),
    (("plan", "profile.json", "--output", "nowhere/plan.json"), "there is no folder nowhere"),
    (("show", "plan.json", "--width", "0"), "--width 0: give 1 or more"),
    (("show", "--schedule", "1f1b", "--layers", "0"), "--layers 0: give 1 or more"),
    (("show", "--schedule", "1f1b", "--forward", "nan"), "--forward nan: give more than 0"),
    (("show", "--schedule", "1f1b", "--html", "nowhere/page.html"), "there is no folder nowhere"),
    (("show", "--schedule", "BINARY"), "BINARY: it is no text"),
    (("simulate", "--model", TINY, *QUESTION, "--pp_size", "-1"), "--pp_size -1: give 1 or more"),
    (("simulate", "--model", TINY, *QUESTION, "--batch_size", "0"), "--batch_size 0: give 1 or more"),
    (("simulate", "--model", TINY, *QUESTION, "--schedule", "BINARY"), "BINARY: it is no text"),
    (("doctor", "--model", TINY, *QUESTION, "--write", "nowhere/helix.yaml"), "there is no folder nowhere"),
    (
        ("doctor", "--model", TINY, *QUESTION, "--write", "/proc/helix.yaml"),
        "--write /proc/helix.yaml cannot be",
    ),
    (("doctor", "--model", TINY, *QUESTION, "--top", "0"), "--top 0: give 1 or more"),
    (("doctor", "--model", TINY, *QUESTION, "--sequence_length", "1000G"), "give 16,777,216 or less"),
    (
        ("simulate", "--model", TINY, *QUESTION, "--batch_size", "5000"),
        "a micro-batch of 20,480,000 tokens; give 16,",
    ),
    (("show", "--schedule", "1f1b", "--layers", "9999999"), "--layers 9999999: give 1,000,000 or less"),
    (("cluster", "--processes", "0"), "--processes 0: give 1 or more"),
    (("cluster", "--output", "nowhere/here.yaml"), "there is no folder nowhere"),
    (("models", "nosuchmodel"), "no class has 'nosuchmodel' in its name"),
)


def said(words: list[str], capsys: Any, monkeypatch: Any) -> str:
    """What a command says that ends with status 2 and starts nothing."""
    for module in ("profile", "cluster"):
        monkeypatch.setattr(f"hf_helix.cli.{module}.start", lambda *given: pytest.fail("started"))
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    text: str = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize(("changes", "message"), [slow(*case, when=place > 0) for place, case in enumerate(MODELS)])
def test_a_model_that_cannot_be(
    changes: dict[str, int], message: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    model = str(tmp_path)
    for words in (
        ["check", model],
        ["profile", "--model", model],
        ["simulate", "--model", model, *QUESTION],
        ["doctor", "--model", model, *QUESTION],
    ):
        assert message in said(words, capsys, monkeypatch)


@pytest.mark.parametrize(("words", "message"), [slow(*case, when=place % 5 > 0) for place, case in enumerate(VALUES)])
def test_a_value_that_cannot_be(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("BINARY").write_bytes(bytes(range(128, 256)))
    assert message in said(list(words), capsys, monkeypatch)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_the_right_to_write(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    tmp_path.chmod(0o500)
    words = ["plan", "profile.json", "--output", str(tmp_path / "plan.json")]
    assert "cannot be written; give a file in a folder of yours" in said(words, capsys, monkeypatch)
