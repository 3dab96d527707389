"""A connection of our own to the store that the process group was made with.

In:   the process group.
Out:  a store that all ranks have in common, empty.
Must hold: nothing else uses its keys; reading several keys is one request; no rank waits for what another thread of its
process asks of the store.
"""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public all the same
from torch.distributed.distributed_c10d import _get_default_store

from hf_helix.runtime.distributed.agreement import decide_on_rank_0


def connect_store() -> Store:
    """A connection of our own to the store of the process group, since another thread may wait on the one there is.

    Under torchrun that store is the launcher's, which outlives the ranks. Where it is one that cannot read several keys
    at once, such as a file, rank 0 opens another. Collective.
    """
    store: Any = _get_default_store()
    if store.has_extended_api():
        return PrefixStore(f"hf_helix/{decide_on_rank_0(lambda: uuid.uuid4().hex)}", store.clone())
    host = os.environ.get("MASTER_ADDR", "localhost")
    server = TCPStore(host, 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port = decide_on_rank_0(lambda: server.port if server else 0)
    return server or TCPStore(host, port, is_master=False)


# -- restarts ------------------------------------------------------------------------------------------------------
# Restarts: processes that torchrun has started again find each other, not those before them.
#
# In:   the environment of a process that torchrun has started.
# Out:  a rendezvous in which every start of the processes has names of its own, where they share one store.
# Must hold: a first start is left alone, and so is a start with a store of its own.
#
# The fault is torch's (2.5 to 2.13). Without `--rdzv-backend`, torchrun and `accelerate launch` use the static
# rendezvous, whose agent keeps one `TCPStore` over all restarts and lets the ranks use it
# (TORCHELASTIC_USE_AGENT_STORE).
# Since https://github.com/pytorch/pytorch/pull/135957, which mended https://github.com/pytorch/pytorch/issues/135712
# for
# `--rdzv-backend=c10d`, `_create_c10d_store` puts no `/worker/attempt_N` before names in that store any more: "We
# create
# a new TCPStore for every retry". That is true of c10d and not of the static rendezvous, so ranks that were started
# again
# read the addresses of processes that are gone, and wait for them until `ddp_timeout`, half an hour. To see it:
# `torchrun
# --nproc_per_node 2 --max_restarts 1` with a script that calls `init_process_group("gloo")` and a barrier, and raises
# on
# rank 1 if TORCHELASTIC_RESTART_COUNT is 0. `--standalone` and `--rdzv-backend=c10d` do not have the fault.


_PREFIX = "hf_helix/start"


def separate_starts() -> None:
    """Puts what the ranks of this start tell each other under names of their own.

    This replaces torch's handler of `env://`, since `register_rendezvous_handler` refuses to, and is called on import:
    training arguments and the Accelerator make the process group before anything of ours is called.
    """
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # `torch.distributed.rendezvous` is a function, too.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    original = handlers["env"]
    if start == "0" or getattr(original, "separates", False):
        return

    def handler(*args: Any, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        for store, rank, world in original(*args, **kwargs):
            yield PrefixStore(f"{_PREFIX}/{start}", store) if _is_the_agents(store) else store, rank, world

    handler.separates = True  # type: ignore[attr-defined]
    handlers["env"] = handler


def _is_the_agents(store: Store) -> bool:
    """Whether torchrun's agents tell each other their roles in the same store, which then is one for all starts.

    Where every start has a store, the counts of restarts may differ between hosts
    (https://github.com/pytorch/pytorch/issues/108158), and so would the names.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return store.check([f"{run}/torchelastic/role_info/0"])
