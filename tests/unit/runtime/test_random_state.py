"""The number of a random state is the same in every process with that state, and another after every draw."""

import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hf_helix.runtime.distributed.random_state import random_number

CPU = torch.device("cpu")
SCRIPT = """
import torch
from transformers import set_seed
from hf_helix.runtime.distributed.random_state import random_number
set_seed(3)
print(random_number(torch.device("cpu")))
"""


def test_two_processes_with_one_seed_have_one_number() -> None:
    # Started anew, not forked: forks share the addresses that some hashes are made of.
    found = {subprocess.check_output([sys.executable, "-c", SCRIPT], text=True) for _ in range(2)}
    assert len(found) == 1


@pytest.mark.parametrize("draw", [random.random, lambda: random.gauss(0, 1), np.random.rand, lambda: torch.rand(1)])
def test_a_draw_makes_another_number(draw: Callable[[], object]) -> None:
    before = random_number(CPU)
    draw()
    assert random_number(CPU) != before
