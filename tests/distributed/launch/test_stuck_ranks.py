"""A rank that lives and makes no progress is named with its place, and the run ends within `ddp_timeout`."""

import platform
import time
from pathlib import Path

import pytest
from support.forked_ranks import fork_ranks
from support.launches import SUPPORT
from support.marks import slow

from hf_helix.runtime.failures.heartbeat import GRACE

TIMEOUT = 20
ENDING = 2 * GRACE + 10  # seconds in which ranks that know of the end print it, on a busy machine
HOST = platform.node()

IN_LOOP = f"({HOST}) is in callbacks of on_step_begin (fault_script.py:"
CASES = [
    ("for ever in a callback", 0, IN_LOOP),
    slow("for ever in a callback", 1, IN_LOOP),
    slow("for ever in the data", 1, f"({HOST}) is in data loading (fault_script.py:"),
    slow("for ever in an operator", 1, f"({HOST}) is in training, "),
    slow("stopped", 1, f" (last seen on {HOST} in "),
]


@pytest.mark.parametrize(("fault", "victim", "place"), CASES)
def test_a_stuck_rank_is_named_and_the_run_ends(fault: str, victim: int, place: str, tmp_path: Path) -> None:
    words = ("--fault", fault, "--victim", victim, "--training", f'{{"ddp_timeout": {TIMEOUT}}}')
    ranks = fork_ranks(tmp_path, SUPPORT / "fault_script.py", *words, helix="tp_size: 2\nplan: sequential\n")
    other = ranks[1 - victim]
    try:
        assert other.wait(timeout=150) != 0
        ended = time.time()
        if fault != "stopped":
            assert ranks[victim].wait(timeout=ENDING) != 0
    finally:
        for rank in ranks:
            rank.kill()
    stuck, said = ((tmp_path / f"{rank}.log").read_text() for rank in (victim, 1 - victim))
    began = float(stuck.partition("failing at ")[2].split()[0])
    assert ended - began < TIMEOUT + ENDING
    assert f"ends because rank {victim} " in said, said
    assert place in said, said
