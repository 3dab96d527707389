"""Prints the options that a rank of a launch finds, and makes Accelerators without them. Started by test_launch.py."""

from __future__ import annotations

import os

from accelerate import Accelerator

from hf_helix import HelixPlugin
from hf_helix.integrations.accelerate.launcher import resolve_config

if __name__ == "__main__":
    config = resolve_config(None, None)
    print(f"rank {os.environ['RANK']}: tp_size={config.tp_size} plan={config.plan} {HelixPlugin.__name__}", flush=True)
    for _ in range(2):
        Accelerator(cpu=True)
