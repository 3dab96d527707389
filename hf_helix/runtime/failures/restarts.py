"""Restarts: processes that torchrun has started again find each other, not those before them.

In:   the environment of a process that torchrun has started.
Out:  a rendezvous in which every start of the processes has names of its own.
Must hold: a first start is left alone. Called on import, since training arguments and the Accelerator make the process
group before anything of ours is called.

Without `--rdzv-backend`, torchrun (and `accelerate launch`) keeps one store over all restarts, and torch 2.13 does not
tell the starts apart in it: ranks read the addresses of processes that are gone, and wait for them until `ddp_timeout`,
half an hour. `torchrun --standalone` and `--rdzv-backend=c10d` make a new store each time.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

_PREFIX = "hf_helix/start"


def separate_starts() -> None:
    """Put what the ranks of this start tell each other under names of their own."""
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # `torch.distributed.rendezvous` is a function, too.
    handlers = getattr(importlib.import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    original = handlers.get("env")
    if start == "0" or original is None or getattr(original, "separates", False):
        return

    def handler(*args: Any, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        for store, rank, world in original(*args, **kwargs):
            yield PrefixStore(f"{_PREFIX}/{start}", store), rank, world

    handler.separates = True  # type: ignore[attr-defined]
    handlers["env"] = handler
