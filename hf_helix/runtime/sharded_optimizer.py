"""An optimizer whose states are spread over the data-parallel ranks (ZeRO-1).

In:   parameter groups, an optimizer's class and options, and the group of ranks that hold the same parameters.
Out:  an optimizer that steps this rank's share, and gives and gets the new parameters.
Must hold: the same steps as the optimizer itself. The work is torch's `ZeroRedundancyOptimizer`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from hf_helix.upstream.check import check_class

PIECE_BYTES = 25 * 2**20


@check_class
class ShardedOptimizer(ZeroRedundancyOptimizer):
    """torch's, with what Accelerate and many small parameters need."""

    def state_dict(self) -> dict[str, Any]:
        """As torch's; Accelerate asks for it before there are any states."""
        return super().state_dict() if self.optim.state else Optimizer.state_dict(self)

    def _sync_params(self) -> None:
        """As torch's, which broadcasts every parameter by itself: small ones go together, `PIECE_BYTES` at once."""
        group, pending = self.process_group, []
        for source, rows in enumerate(self._partition_parameters()):  # type: ignore[attr-defined]
            values = [parameter.data for row in rows for parameter in row["params"]]
            # A large one needs no copy into a piece, which would take as much memory again.
            large = [value for value in values if value.nbytes >= PIECE_BYTES]
            small = [value for value in values if 0 < value.nbytes < PIECE_BYTES]
            if small:
                _broadcast_coalesced(group, small, PIECE_BYTES, source)
            root = dist.get_global_rank(group, source)
            pending += [dist.broadcast(value, root, group=group, async_op=True) for value in large]
        for work in pending:
            work.wait()
