"""Forked processes of a search."""

import os
import subprocess
import sys

SUMS = """
import torch
from hf_helix.doctor.processes import in_processes

torch.set_num_threads(2)
values = torch.ones(2**22)
values.exp().sum()  # makes torch's threads, which forked processes lack
print([*in_processes(lambda factor: float((factor * values).sum()), [1, 2], 2)])
"""


def test_torch_computes_in_forked_processes_after_its_threads_were_made() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", SUMS]
    said = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=True)
    assert said.stdout.strip() == str([2.0**22, 2.0**23])
