"""What a rank prints at its end, and what it leaves for the launcher and for the other ranks of its host."""

import json
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_helix.checkpoint.manifest import NAME
from hf_helix.config import HelixConfig
from hf_helix.integrations.trainer.decisions import describe_stop
from hf_helix.runtime.distributed import endings


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As torchrun names it for rank 1."""
    file = tmp_path / "attempt_0" / "1" / "error.json"
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    return file


def shown(fail: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        fail()
    except Exception as error:
        endings.print_error(error, error.__traceback__, traceback.print_exception)
    return capsys.readouterr().err


def test_a_check_shows_the_frame_of_the_user_and_the_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(lambda: HelixConfig.from_mapping({"tp_size": 0}, "helix.yaml"), capsys)
    assert said.splitlines()[-1] == "ValueError: helix.yaml: tp_size must be at least 1, such as tp_size=1; got 0"
    assert 'HelixConfig.from_mapping({"tp_size": 0}' in said
    assert said.count("Traceback") == 1
    assert "__post_init__" not in said
    # An error that hf helix has not foreseen keeps its traceback.
    said = shown(lambda: HelixConfig.from_file(3.5), capsys)  # type: ignore[arg-type]
    assert "TypeError" in said
    assert "in from_file" in said


def test_a_rank_waits_for_the_one_that_says_it(error_file: Path) -> None:
    """Else torchrun would end that one in the middle of its sentence."""
    endings.wait_for_full_error(60)  # nobody says anything
    claimed = error_file.parents[1] / "hf_helix_failure"
    claimed.write_text("rank 0 failed: ValueError: no")
    said = claimed.with_name("hf_helix_failure.said")
    threading.Timer(0.3, said.touch).start()
    endings.wait_for_full_error(60)
    assert said.exists()
    # The rank that says it does not wait.
    endings.claim_full_error("rank 1 failed: ValueError: no")
    endings.wait_for_full_error(60)
    assert (error_file.parents[1] / "hf_helix_failure.said").exists()


def test_without_a_launcher_nobody_knows_who_was_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert endings.claim_full_error("rank 1 failed: ValueError: no") == ""


def test_the_error_file_is_what_torch_reads(error_file: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    endings.record("ValueError: no")
    endings.record("written twice")
    known = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(error_file))
    late = error_file.with_name("late.json")
    late.write_text(error_file.read_text())
    error_file.unlink()
    endings.record("rank 1 failed: ValueError: no", late=True)
    follows = ProcessFailure(local_rank=0, pid=2, exitcode=1, error_file=str(error_file))
    summary = ChildFailedError("train.py", {0: follows, 1: known}).format_msg()
    root = summary[summary.index("Root Cause") :]
    assert "rank      : 1 " in root
    assert "traceback : ValueError: no" in root
    assert json.loads(late.read_text())["message"]["message"] == "ValueError: no"


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "_advice", lambda: describe_stop("out", 37))
    endings.print_error(KeyboardInterrupt(), None, sys.__excepthook__)
    said = capsys.readouterr().err
    assert said.startswith("hf_helix: interrupted; stopped after step 37, and nothing was saved; ")
    assert "save_steps" in said


def test_a_stopped_run_goes_on_from_its_last_complete_checkpoint(tmp_path: Path) -> None:
    for step in (9, 30, 36):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (9, 30):
        (tmp_path / f"checkpoint-{step}" / NAME).touch()
    said = describe_stop(str(tmp_path), 37)
    assert said == (
        f"stopped after step 37; trainer.train(resume_from_checkpoint=True) goes on from {tmp_path}/checkpoint-30"
    )
