"""A case: a layout with its micro-batches and options.

In:   the options of `HelixConfig` that a prediction reads, the sizes of a micro-batch, and further conditions of a
    prediction.
Out:  a `Case`, with its consequences: ranks of stages, and the ranks that share weights and gradients.
Must hold: nothing here imports torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

from hf_helix.config import EVERY_MICROBATCH, HelixConfig
from hf_helix.doctor.amounts.records import STATES, copies_axis
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.parameters import EXPERTS, TP, VOCABULARY, Place, Ranks, Sharers
from hf_helix.planning.schedule.placement import layer_ranks, stage_ranks
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES, Sizes

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

    config: HelixConfig  # without "auto" for its plan, its recomputation and its gradient reductions
    dp: int  # data-parallel ranks
    batch: int  # sequences of a micro-batch
    length: int  # tokens of a sequence
    microbatches: int  # micro-batches of a window, on each data-parallel rank
    dtype: str = "bf16"
    # rows of the experts on the busiest rank relative to the mean. Routing depends on the data, so the factor is given,
    # not predicted. Time and memory are for a rank with this factor in every layer: an upper estimate if layers differ.
    # With the factor of the most uneven layer, the predicted memory of a small mixture on two ranks was 1.27 to 1.50
    # times the counted memory
    imbalance: float = 1.0
    state_bytes: float = STATES  # bytes of the optimizer's states for an element
    whole_logits: bool = False  # of rivals: a loss is never computed in tiles, see `hf_helix.operators.vocabulary.head`
    software: Software = HELIX  # of a run that is predicted, and is not of hf_helix
    stages_outermost: bool = False  # see `Sizes`

    @classmethod
    def of(cls, sizes: Sizes, batch: int, length: int, microbatches: int, **options: Any) -> Case:
        """Returns the case of parallel sizes.

        Args:
            sizes: of the layout.
            batch: see `Case`.
            length: see `Case`.
            microbatches: see `Case`.
            options: further fields of `Case`, and options of `HelixConfig`.
        """
        usual = HelixConfig(plan="greedy", recompute="none", reduce_gradients="window")
        return cls(usual, 1, batch, length, microbatches).changed(sizes, **options)

    def changed(self, sizes: Sizes | None = None, **options: Any) -> Case:
        """Returns the case with other sizes, fields of `Case`, or options of `HelixConfig`. Raises ValueError for
        options that exclude each other."""
        own = {name: options.pop(name) for name in _FIELDS.intersection(options)}
        if sizes is not None:
            own |= {"dp": sizes.dp, "stages_outermost": sizes.stages_outermost}
            options |= {f"{axis}_size": getattr(sizes, axis) for axis in ("tp", "cp", "pp", "ep")}
        return replace(self, config=replace(self.config, **options) if options else self.config, **own)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The parallel sizes."""
        config = self.config
        sizes = config.tp_size, config.cp_size, config.pp_size, self.dp, config.ep_size
        return Sizes(*sizes, self.stages_outermost)

    @property
    def recompute(self) -> str:
        """The operators that backward runs again."""
        return self.config.recompute or "none"

    @functools.cached_property
    def place(self) -> Place:
        """The place of the first rank, as parameters know it."""
        sizes, shards = self.sizes, self.spread_gradients
        slices = {TP: sizes.tp, EXPERTS: sizes.tp * sizes.ep, VOCABULARY: sizes.tp * self.counted.pp_size}
        axes: dict[str, Sharers] = {}
        for axis, size in slices.items():
            replicas = sizes.expert_copies if axis == EXPERTS else sizes.copies
            axes[axis] = Sharers(Ranks(size), Ranks(replicas), Ranks(shards.get(copies_axis(axis), 1)))
        return Place(axes, num_sequence_parts=sizes.cp, num_batches=sizes.dp)

    @functools.cached_property
    def counted(self) -> HelixConfig:
        """The options that the amounts of a rank depend on."""
        config, spreads = self.config, self.config.spread_vocabulary
        return HelixConfig(
            tp_size=config.tp_size,
            pp_size=config.pp_size if spreads else 1,
            cp_size=config.cp_size,
            ep_size=config.ep_size,
            recompute=config.recompute,
            shard_parameters=bool(self.spread_weights),
            offload=config.offload if self.streams_weights else None,
            expert_capacity_factor=config.expert_capacity_factor,
            spread_vocabulary=spreads,
            float8=config.float8,
            fused_kernels=self.software.fused,
        )

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
        return Scheduler(self.config.schedule, self.config.pp_size, spread=self.config.spread_vocabulary).placement

    @property
    def streams_weights(self) -> bool:
        """Whether every use of weights copies them from the host."""
        return self.config.streams_weights

    @property
    def spread_weights(self) -> dict[str, int]:
        """Number of ranks by axis over which weights are sharded."""
        return self.sizes.spread() if self.config.shard_parameters else {}

    @property
    def spread_gradients(self) -> dict[str, int]:
        """Number of ranks by axis over which gradients are reduce-scattered; other axes all-reduce gradients."""
        return self.sizes.spread() if self.config.zero_stage else {}

    def stepped(self, count: float, of_experts: float) -> float:
        """Returns the part that a rank steps of its weights or gradients, experts' counted apart."""
        ranks = self.spread_gradients
        return count / ranks.get(COPIES, 1) + of_experts / ranks.get(EXPERT_COPIES, 1)

    @property
    def keeps_copies(self) -> bool:
        """Whether the host has the trained weights, and the device keeps their copies between uses."""
        return bool(self.config.offload) and not self.streams_weights

    @property
    def reduces_often(self) -> bool:
        """Whether gradients of shards are reduced in every micro-batch."""
        return self.config.reduce_gradients == EVERY_MICROBATCH


_FIELDS = frozenset(each.name for each in fields(Case))
