"""Prints the options that a rank of a launch finds. Started by test_launch.py."""

from __future__ import annotations

import os

from hf_helix.integrations.accelerate.launcher import resolve_config

if __name__ == "__main__":
    config = resolve_config(None, None)
    print(f"rank {os.environ['RANK']}: tp_size={config.tp_size} plan={config.plan}", flush=True)
