"""A connection of our own to the store that the process group was made with.

In:   the process group.
Out:  a store that all ranks have in common, empty.
Must hold: nothing else uses its keys; reading several keys is one request; no rank waits for what another thread of its
process asks of the store.
"""

from __future__ import annotations

import os
import uuid
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
