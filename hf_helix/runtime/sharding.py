"""An optimizer whose states are spread over the data-parallel ranks (ZeRO-1).

In:   parameter groups, an optimizer's class and options, and the group of ranks that hold the same parameters.
Out:  an optimizer that steps this rank's share, and gives and gets the new parameters.
Must hold: the same steps as the optimizer itself. The work is torch's `ZeroRedundancyOptimizer`.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """torch's, through Accelerate, which asks an optimizer for its states before it has any."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.optim.state else Optimizer.state_dict(self)
