"""`hf-helix show ... | head`: a reader that has seen enough is no error."""

from __future__ import annotations

import os
import subprocess
import sys


def test_a_reader_that_has_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        command = [sys.executable, "-m", "hf_helix", "show", "--schedule", "w"]
        ran = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ran.stderr, ran.returncode) == ("", 0)
