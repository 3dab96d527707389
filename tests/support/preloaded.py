"""What ranks of a `Cluster` need again and again, imported before they are forked: each would take seconds for it."""

import invariant.harness  # with pytest and hypothesis, which test files with jobs import
import networkx  # of torch.export, as what follows
import support.tuning_jobs
import torch._export
import torch._functorch.aot_autograd

__all__ = ["invariant", "networkx", "support", "torch"]
