"""Bars are for terminals; a file gets a line for each stage."""

import io
import itertools
import sys
import time

import pytest

from hf_helix.measure.progress import progress_bar


def work(is_shown: bool = True) -> None:
    with progress_bar(is_shown) as show:
        for stage in ("measuring operators", "timing plans"):
            for done in range(11):
                show(stage, done / 10)


def test_a_file_gets_a_line_for_each_stage_and_hears_how_far_a_long_one_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work()
    assert capsys.readouterr().err == "hf_helix: measuring operators ...\nhf_helix: timing plans ...\n"
    work(is_shown=False)  # other ranks stay silent
    assert capsys.readouterr() == ("", "")
    clock = itertools.count(0.0, 4.0)  # seconds, at each call
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    work()
    stages = [
        (stage, done)
        for stage in ("measuring operators", "timing plans")
        for done in ("", " 40%, about 24 s left", " 80%, about 8 s left")
    ]
    assert capsys.readouterr().err == "".join(f"hf_helix: {stage} ...{done}\n" for stage, done in stages)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    work()
    assert "hf_helix: timing plans:  99%|" in terminal.getvalue()
    assert "100%" not in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
