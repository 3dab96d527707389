"""What declarations of a model depend on besides the model: the axes that it is cut over, and additions to its loss.

In:   nothing; these are plain data.
Out:  `ParallelContext`, `LossTweaks`, and rough times of operators for plans that are made without a profile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_helix.operators.communication.transport import Axis

GEMM = 4.0
ATTENTION = 4.0
TRANSFER = 4.0
LIGHT = 1.0

RING, ALL_GATHER = "ring", "all_gather"


@dataclass(frozen=True)
class ParallelContext:
    """The axes that a model is cut over, and how.

    Attributes:
        tp: the ranks of tensor and sequence parallelism.
        cp: the ranks of context parallelism.
        experts: the ranks that tokens go to their experts over: those of expert parallelism and of tp together.
        cp_method: see `HelixConfig`.
        capacity_factor: `HelixConfig.expert_capacity_factor`.
        device: the device that operators run on; the model may still lie on another one.
        compile: `HelixConfig.compile`.
    """

    tp: Axis = field(default_factory=Axis.single)
    cp: Axis = field(default_factory=Axis.single)
    experts: Axis = field(default_factory=Axis.single)
    cp_method: str = RING
    capacity_factor: float | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compile: bool = False

    @property
    def ep_size(self) -> int:
        return self.experts.size // self.tp.size


@dataclass(frozen=True)
class LossTweaks:
    """What training arguments add to the mathematics of every model. The stock Trainer adds it from outside.

    Attributes:
        label_smoothing: `TrainingArguments.label_smoothing_factor`; it applies in evaluation, too.
        neftune_alpha: `TrainingArguments.neftune_noise_alpha`; it applies in training only.
        figures: whether entropy and accuracy are found beside the loss, see `cross_entropy`.
    """

    label_smoothing: float = 0.0
    neftune_alpha: float | None = None
    figures: bool = False
