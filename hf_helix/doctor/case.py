"""A case: a layout with its micro-batches and options.

In:   the options of `HelixConfig` that a prediction reads, the sizes of a micro-batch, and further conditions of a
    prediction.
Out:  a `Case`, with its consequences: ranks of stages, and the ranks that share weights and gradients.
Must hold: nothing here imports torch.
"""

from dataclasses import dataclass

from hf_helix.config import AUTO, EVERY_MICROBATCH, PARAMETERS
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.schedule.placement import layer_ranks, stage_ranks
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES, Sizes

PARAMETER, GRADIENT, STATES = 4, 4, 8
"""Bytes of an element: trained weights and gradients in fp32, and the two states of Adam."""

FLASH1, FLASH2, RING = "flash1", "flash2", "ring"
"""Kernels of attention in the files of clusters: the first FlashAttention; the second, of torch's
`scaled_dot_product_attention`; and torch's ring over context-parallel ranks, which merges parts outside of kernels."""

ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of an element of cast weights, by the type of matrix products


@dataclass(frozen=True)
class Software:
    """The code of a run, as far as the times of its kernels depend on it; by default hf_helix's."""

    fused: bool = True  # whether norms, gates and ropes are a kernel each, of Triton, Liger, a compiler or Megatron
    attention: str = ""  # a kernel of `Device.attention_kernels`; "" for the kernel of `Device.attention`
    all_in_float8: bool = False  # whether float8 also multiplies weight gradients and frozen weights in fp8
    products: float = 1.0  # rate of matrix products in parts of the cluster's, for older libraries, or at less power
    memory: float = 1.0  # the same of the device's memory
    # whether collectives have kernels of their own: hf_helix adds up exchanged parts in fp32, NCCL does so on their way
    exchanges: bool = True
    # bytes of rows to experts of other nodes, in parts of a row for each expert: DeepEP sends a row once to a node
    once_a_node: float = 1.0
    sums: str = ""  # the type of gradients in a reduction; "" for fp32 of hf_helix, and for the type of each rival


HELIX = Software()
MEGATRON = Software(all_in_float8=True, exchanges=False)
STOCK = Software(fused=False, attention=FLASH2, exchanges=False)
COMPILED = Software(attention=FLASH2, all_in_float8=True, exchanges=False)


@dataclass(frozen=True)
class Case:
    """A layout with its micro-batches and options."""

    sizes: Sizes
    batch: int  # sequences of a micro-batch
    length: int  # tokens of a sequence
    microbatches: int  # micro-batches of a window, on each data-parallel rank
    plan: str = "greedy"
    schedule: str = "auto"
    recompute: str = "none"
    # as in `HelixConfig`: each replica updates a shard of the weights, with reduce-scattered gradients, and weights are
    # gathered once in a window, overlapped with its first forward pass
    shard_optimizer: bool = False
    shard_parameters: bool = False
    reduce_gradients: str = "window"  # as in `HelixConfig`: "window" or "microbatch", see `with_usual_reduction`
    dtype: str = "bf16"
    # rows of the experts on the busiest rank relative to the mean. Routing depends on the data, so the factor is given,
    # not predicted. Time and memory are for a rank with this factor in every layer: an upper estimate if layers differ.
    # With the factor of the most uneven layer, the predicted memory of a small mixture on two ranks was 1.27 to 1.50
    # times the counted memory
    imbalance: float = 1.0
    expert_capacity_factor: float | None = None  # as in `HelixConfig`: all experts get equal rows, for any routing
    state_bytes: float = STATES  # bytes of the optimizer's states for an element
    layers_per_stage: tuple[float, ...] | None = None  # as in `HelixConfig`
    cuda_graphs: str = AUTO  # as in `HelixConfig`: "auto", "true" or "false"
    offload: str | None = None  # as in `HelixConfig`
    spread_vocabulary: bool = False  # as in `HelixConfig`
    image_share: float = 0.0  # as in `HelixConfig`
    whole_logits: bool = False  # of rivals: a loss is never computed in tiles, see `hf_helix.operators.vocabulary.head`
    float8: str | None = None  # as in `HelixConfig`
    software: Software = HELIX  # of a run that is predicted, and is not of hf_helix

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all data-parallel ranks."""
        return self.batch * self.length * self.microbatches * self.sizes.dp

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each virtual stage."""
        return stage_ranks(self._placement, self.sizes.pp)

    @property
    def layer_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each virtual stage with layers."""
        return layer_ranks(self._placement, self.sizes.pp)

    @property
    def _placement(self) -> str:
        return Scheduler(self.schedule, self.sizes.pp, spread=self.spread_vocabulary).placement

    @property
    def streams_weights(self) -> bool:
        """Whether every use of weights copies them from the host."""
        return self.offload == PARAMETERS

    @property
    def spread_weights(self) -> dict[str, int]:
        """Number of ranks by axis over which weights are sharded."""
        return self.sizes.spread() if self.shard_parameters else {}

    @property
    def spread_gradients(self) -> dict[str, int]:
        """Number of ranks by axis over which gradients are reduce-scattered; other axes all-reduce gradients."""
        return self.sizes.spread() if self.shard_parameters or self.shard_optimizer else {}

    def stepped(self, count: float, of_experts: float) -> float:
        """Returns the part that a rank steps of its weights or gradients, experts' counted apart."""
        ranks = self.spread_gradients
        return count / ranks.get(COPIES, 1) + of_experts / ranks.get(EXPERT_COPIES, 1)

    @property
    def keeps_copies(self) -> bool:
        """Whether the host has the trained weights, and the device keeps their copies between uses."""
        return bool(self.offload) and not self.streams_weights

    @property
    def reduces_often(self) -> bool:
        """Whether gradients of shards are reduced in every micro-batch."""
        return self.shard_parameters and self.reduce_gradients == EVERY_MICROBATCH
