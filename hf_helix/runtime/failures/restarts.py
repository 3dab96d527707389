"""Restarts: a store for this run, and a rendezvous in which processes that torchrun has started again find each other.

In:   the process group; the environment of a process that torchrun has started.
Out:  an empty store, shared by all ranks; a rendezvous with names of its own for every start of the processes, where
      all starts share a store.
Must hold: nothing else uses the keys of the store; a read of several keys is one request; no rank waits for requests of
another thread of its process. A first start stays as it is, and so does a start with a store of its own.

The rendezvous mends a fault of torch 2.5 to 2.13. Without `--rdzv-backend`, torchrun and `accelerate launch` use the
static rendezvous: its agent keeps one `TCPStore` over all restarts, which the ranks use (TORCHELASTIC_USE_AGENT_STORE).
Since https://github.com/pytorch/pytorch/pull/135957, the fix of https://github.com/pytorch/pytorch/issues/135712 for
`--rdzv-backend=c10d`, `_create_c10d_store` no longer puts `/worker/attempt_N` before names in the store ("We create a
new TCPStore for every retry", true of c10d only). Restarted ranks then read the addresses of ended processes, and wait
for these until `ddp_timeout`, half an hour. To reproduce: `torchrun --nproc_per_node 2 --max_restarts 1` with a script
that calls `init_process_group("gloo")` and a barrier, and raises on rank 1 if TORCHELASTIC_RESTART_COUNT is 0.
`--standalone` and `--rdzv-backend=c10d` do not have the fault.
"""

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
    """Returns a new connection to the store of the process group, since another thread may wait on the existing
    connection.

    Under torchrun the store is the launcher's, which outlives the ranks. Where a store cannot read several keys at once
    (a file), rank 0 opens another. Collective.
    """
    store: Any = _get_default_store()
    if store.has_extended_api():
        return PrefixStore(f"hf_helix/{decide_on_rank_0(lambda: uuid.uuid4().hex)}", store.clone())
    host = os.environ.get("MASTER_ADDR", "localhost")
    server = TCPStore(host, 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port = decide_on_rank_0(lambda: server.port if server else 0)
    return server or TCPStore(host, port, is_master=False)


# -- restarts ------------------------------------------------------------------------------------------------------

_PREFIX = "hf_helix/start"


def separate_starts() -> None:
    """Puts the entries of this start's ranks in the store under names of their own.

    Replaces torch's handler of `env://`, since `register_rendezvous_handler` refuses to, and is called on import:
    training arguments and the Accelerator make the process group before any call of ours.
    """
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # `torch.distributed.rendezvous` is also a function.
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
    """Whether torchrun's agents use the same store, which then serves all starts.

    Where every start has its own store, the counts of restarts may differ between hosts
    (https://github.com/pytorch/pytorch/issues/108158), and so would the names.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return store.check([f"{run}/torchelastic/role_info/0"])
