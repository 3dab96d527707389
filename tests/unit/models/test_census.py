"""The file of the census, and what is taken from it."""

import re
from pathlib import Path

import pytest

from hf_helix.cli import main
from hf_helix.models.stock.causal_lm import causal_lm_classes
from hf_helix.models.stock.census import (
    FAILED,
    INSTEAD,
    PROVEN,
    REFUSED,
    Census,
    Finding,
    format_census,
    installed_versions,
    instead_of,
    read_census,
)

VERSIONS = installed_versions()
CLASSES = {
    "LlamaForCausalLM": {"tp2": Finding(PROVEN), "pp2": Finding(PROVEN), "cp2": Finding(PROVEN)},
    "Gemma2ForCausalLM": {"tp2": Finding(PROVEN), "pp2": Finding(FAILED, "loss 2.0e-01"), "cp2": Finding(PROVEN)},
    "LlamaForCausalLM[tied=True]": {"tp2": Finding(PROVEN), "pp2": Finding(PROVEN)},
    "MixtralForCausalLM[LoRA on experts]": {"tp2": Finding(PROVEN), "ep2": Finding(PROVEN)},
    "MambaForCausalLM": {"tp2": Finding(REFUSED, 'it has "no" attention'), "pp2": Finding(REFUSED, "likewise")},
}


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A census of the installed versions in the place of the package's."""
    path = tmp_path / "census.json"
    path.write_text(format_census(Census(VERSIONS, "2026-11-23", CLASSES)))
    census = read_census(path)
    monkeypatch.setattr("hf_helix.cli.models.read_census", lambda: census)
    return path


def test_what_is_written_is_read_again(shipped: Path) -> None:
    census = read_census(shipped)
    assert (census.versions, census.date, census.classes) == (VERSIONS, "2026-11-23", CLASSES)
    assert census.proven_on("tp2") == ["Gemma2ForCausalLM", "LlamaForCausalLM"]
    assert census.proven_on("tp2", "pp2") == ["LlamaForCausalLM"]


def test_without_a_file_nothing_is_proven_and_another_file_is_refused(tmp_path: Path) -> None:
    assert read_census(tmp_path / "none.json") == Census()
    assert not Census().is_current
    (tmp_path / "other.json").write_text('{"format": "else"}')
    with pytest.raises(ValueError, match=r"other.json is no census .* benchmarks.census"):
        read_census(tmp_path / "other.json")


def test_the_command_prints_every_class_and_why_it_is_refused(
    shipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["models"])
    out = capsys.readouterr().out
    assert "meta-llama/Llama-3.1-8B" in out
    assert "Gemma2ForCausalLM                  tp2 cp2 proven; pp2 failed: loss 2.0e-01\n" in out
    assert out.index("Gemma2ForCausalLM") < out.index('tp2 refused: it has "no" attention; pp2 refused: likewise')
    assert f"1 of 3 causal-LM classes of Transformers {VERSIONS['transformers']} are proven at tp2 and pp2" in out
    assert "tp2 and pp2, and LoRA on the experts of 1 mixtures at tp2 and ep2 (torch" in out


def test_the_command_prints_the_classes_of_a_name(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["models", "Gemma"])
    out = capsys.readouterr().out
    assert "Gemma2ForCausalLM" in out
    assert "LlamaForCausalLM" not in out


def test_every_reason_has_what_to_do_instead() -> None:
    """And every way is of some reason, so none is left over."""
    reasons = {result.reason for findings in read_census().classes.values() for result in findings.values()} - {""}
    without = [reason for reason in reasons if not instead_of(reason)]
    assert not without
    firsts = {next(pattern for pattern in INSTEAD if re.search(pattern, reason)) for reason in reasons}
    assert set(INSTEAD) - firsts <= {"^different "}, "a way for a reason that no class has"
    assert not instead_of("a reason that nobody has")


def test_the_shipped_census_is_of_classes_that_are_there() -> None:
    census = read_census()
    if census.is_current:  # with another Transformers there are other classes
        assert set(census.names) <= set(causal_lm_classes())
    assert all(
        result.reason for findings in census.classes.values() for result in findings.values() if result[0] != PROVEN
    )
