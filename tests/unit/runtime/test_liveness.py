"""What a rank says last is seen, whatever its main thread is doing at that moment."""

import io
import os
import sys
import threading

import pytest

from hf_helix.runtime.failures import heartbeat


class Ended(Exception):
    pass


def test_the_last_word_does_not_go_into_a_replaced_stderr(monkeypatch, capfd) -> None:
    """torch.distributed's exception hook replaces sys.stderr while it formats a traceback."""

    def end(status: int) -> None:
        raise Ended

    watch = heartbeat.Watch.__new__(heartbeat.Watch)
    watch.rank = 0
    watch._stop = threading.Event()
    monkeypatch.setattr(heartbeat, "GRACE", 0.01)
    monkeypatch.setattr(os, "_exit", end)
    seen = sys.stderr
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(Ended):
        watch._end("rank 1 failed: RuntimeError: broken")
    monkeypatch.setattr(sys, "stderr", seen)
    assert "rank 0 ends because rank 1 failed: RuntimeError: broken" in capfd.readouterr().err
