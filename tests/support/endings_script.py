"""Ranks that say which options they found, and then communicate until something ends them; see test_endings.py."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hf_helix.config import HelixConfig
from hf_helix.runtime.distributed.endings import advise_on_interrupt
from hf_helix.runtime.failures.heartbeat import start_watch, watched

RANK = int(os.environ["RANK"])


def give_wrong_options() -> None:
    from hf_helix import HelixPlugin  # as a script does before it makes its options

    HelixPlugin(HelixConfig(tp_size=0))


def say_options() -> None:
    """The options that the launcher gave; and Accelerators are made that ignore them."""
    from accelerate import Accelerator

    from hf_helix import HelixPlugin
    from hf_helix.integrations.accelerate.launcher import resolve_config

    config = resolve_config(None, None)
    print(f"rank {RANK}: tp_size={config.tp_size} plan={config.plan} {HelixPlugin.__name__}", flush=True)
    for _ in range(2):
        Accelerator(cpu=True)


def main(how: str) -> None:
    if how == "options":
        give_wrong_options()
    if how == "raise":
        say_options()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    start_watch()
    advise_on_interrupt(lambda: "stopped after step 2; out/checkpoint-2 is there")
    with watched():
        while True:
            dist.all_reduce(torch.ones(1))
            Path(f"communicating-{RANK}").touch()
            if how == "raise" and RANK == 1:
                raise RuntimeError("boom on one rank\nand what to do about it")


if __name__ == "__main__":
    main(sys.argv[1])
