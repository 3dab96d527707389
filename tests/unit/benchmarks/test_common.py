"""What benchmarks share: options from defaults, tables, and that every one of them starts."""

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from benchmarks.common import add_outputs, columns, markdown, options_of, save
from benchmarks.gpu.pieces import PIECES
from benchmarks.plans import STUDIES, contenders, read_options

NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "def main()" in path.read_text())


def test_options_and_tables() -> None:
    parser = options_of("doc", hidden=8, links=["even"], share=0.5)
    options = parser.parse_args(["--links", "a", "b", "--share", "1"])
    assert (options.hidden, options.links, options.share) == (8, ["a", "b"], 1.0)
    with pytest.raises(SystemExit):
        parser.parse_args(["--hidden", "wide"])
    # Numbers stand on the right.
    rows = [("a", "1.5"), ("bcd", "10.25")]
    assert columns(("name", "s"), rows).splitlines() == ["name      s", "----  -----", "a       1.5", "bcd   10.25"]
    assert markdown(("name", "s"), rows).splitlines()[1] == "| --- | ---: |"


def test_a_result_says_what_it_was_made_with(tmp_path: Path) -> None:
    parser = options_of("doc")
    add_outputs(parser)
    page, figures = tmp_path / "a.md", tmp_path / "a.json"
    options = parser.parse_args(["--markdown", str(page), "--json", str(figures)])
    save(options, "Title", "First.\n\nHow it measures.", "the table", [1])
    assert json.loads(figures.read_text())["results"] == [1]
    assert {"torch", "commit", "command"} <= json.loads(figures.read_text())["about"].keys()
    assert "How it measures.\n\n- command: " in page.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_explains_itself_and_is_listed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
    assert f"| `{name}` |" in (ROOT / "benchmarks" / "README.md").read_text()


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_has_rows_with_names_of_their_own(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["plans", study])
    names = [row.name for row in contenders(read_options())]
    assert len(names) == len(set(names)) > 2


def test_a_call_of_the_gpu_acceptance_takes_at_most_ten_minutes() -> None:
    seconds = Counter[int]()
    for piece in PIECES:
        seconds[piece.call] += piece.seconds
    assert sorted(seconds) == [1, 2, 3]
    assert max(seconds.values()) <= 600


def test_stock_software_runs_on_two_ranks_only(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["plans", "tp", "--rates", "300", "--dp_size", "2"])
    with pytest.raises(SystemExit):
        read_options()
    assert "--links even" in capsys.readouterr().err
