"""The context of a model's declaration: the axes to cut the model over, and additions to its loss.

In:   nothing; these are plain data.
Out:  `ParallelContext`, `LossTweaks` with `TokenLoss`, and rough times of operators for plans made without a profile.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.vocabulary.log_probs import LogProbs, numbers_of
from hf_helix.operators.vocabulary.statistics import FIGURES, LOSS

GEMM = 4.0
ATTENTION = 4.0
TRANSFER = 4.0
LIGHT = 1.0

RING, ALL_GATHER = "ring", "all_gather"
HEADS, STATES = "heads", "states"


@dataclass(frozen=True)
class ParallelContext:
    """The axes to cut a model over, with the method for each axis.

    Attributes:
        tp: the ranks of tensor and sequence parallelism.
        cp: the ranks of context parallelism.
        vocabulary: the ranks with slices of the vocabulary, if these are others than the ranks of tp.
        experts: the ranks that exchange tokens of experts: the ranks of expert parallelism and of tp together.
        cp_method, cp_recurrence: see `HelixConfig`.
        capacity_factor: `HelixConfig.expert_capacity_factor`.
        device: the device of the operators; the model may still lie on another device.
        compile: `HelixConfig.compile`.
        recomputes: whether layers run again in backward (`HelixConfig.recompute`), which gives time for memory.
    """

    tp: Axis = field(default_factory=Axis.single)
    cp: Axis = field(default_factory=Axis.single)
    experts: Axis = field(default_factory=Axis.single)
    cp_method: str = RING
    capacity_factor: float | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compile: bool = False
    vocabulary: Axis | None = None
    cp_recurrence: str = HEADS
    recomputes: bool = False

    @property
    def ep_size(self) -> int:
        return self.experts.size // self.tp.size


@dataclass(frozen=True)
class TokenLoss:
    """A loss of a micro-batch as a function of the log-probabilities of its tokens, see `models.graph.token_loss`.

    Attributes:
        function: returns the loss, a scalar, from log-probabilities and figures [rows, sequence - 1], which are 0
            without a target, and the tensors of the batch.
        outputs: the names of the figures wanted besides log-probabilities, see `LogProbs`; they have no gradient.
        router_coefficient: the factor of the loss of routers; None for the model's own.
    """

    function: Callable[[LogProbs, Mapping[str, Tensor]], Tensor]
    outputs: tuple[str, ...] = ()
    router_coefficient: float | None = None


@dataclass(frozen=True)
class LossTweaks:
    """Additions of training arguments to the loss of every model; the stock Trainer adds them outside the model.

    Attributes:
        label_smoothing: `TrainingArguments.label_smoothing_factor`; also applies in evaluation.
        neftune_alpha: `TrainingArguments.neftune_noise_alpha`; applies in training only.
        figures: whether entropy and accuracy are computed with the loss, see `cross_entropy`.
        ends_at_decoder: whether the last unit ends at the decoder's output, since the caller's own code computes the
            loss.
        token_loss: a loss in place of the model's; None for the model's.
    """

    label_smoothing: float = 0.0
    neftune_alpha: float | None = None
    figures: bool = False
    ends_at_decoder: bool = False
    token_loss: TokenLoss | None = None

    @property
    def wanted(self) -> tuple[int, ...]:
        """The numbers of the statistics of logits that the loss and its figures need."""
        if self.token_loss is not None:
            return numbers_of(self.token_loss.outputs)
        return FIGURES if self.figures else LOSS

    @property
    def lists_figures(self) -> bool:
        """Whether figures follow the loss, in a vector."""
        return self.figures or self.token_loss is not None
