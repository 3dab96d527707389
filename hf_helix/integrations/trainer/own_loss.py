"""Losses of the user's own: which trainers have one.

In:   the class of a trainer, the arguments of its constructor, and the model.
Out:  whether code above the decoder computes the loss; then the model is called, see `hf_helix.engine.seam`.
Must hold: the built-in loss, which is computed within the plan, is that of causal language models, and nothing else.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from hf_helix.integrations.trainer.stock import TrainerCall
from hf_helix.integrations.trainer.trl import SFT_TRAINER, name_of
from hf_helix.models.causal_lm import has_causal_head
from hf_helix.models.model_code import has_head_beside, has_stock_loss
from hf_helix.models.peft import base_of
from hf_helix.models.registry import REGISTERED


def has_own_loss(kind: type, call: TrainerCall, model: Any) -> bool:
    """Returns whether a trainer, or its model, computes a loss other than the next-token loss of Transformers.

    Args:
        kind: the class of the trainer.
        call: the arguments of its constructor.
        model: the model, before it is cut; None if the trainer makes it.
    """
    owner = next(base for base in kind.__mro__ if "compute_loss" in vars(base))
    if (owner is not Trainer and name_of(owner) != SFT_TRAINER) or call.get("compute_loss_func") is not None:
        return True
    if model is None:
        return False
    base = base_of(model)
    is_declared = type(base).__name__ in REGISTERED
    return not has_causal_head(base) or not has_stock_loss(base) or (not is_declared and has_head_beside(base))
