"""Losses of the user's own: which trainers have one.

In:   a trainer in `Trainer.__init__`, and its model before it is cut.
Out:  whether code above the decoder computes the loss; then the model is called, see `hf_helix.engine.called_decoder`.
Must hold: the built-in loss, which is computed within the plan, is that of causal language models, and nothing else.
"""

from typing import Any

from transformers import Trainer

from hf_helix.integrations.trainer.trl import SFT_TRAINER, name_of, settle_routers
from hf_helix.models.causal_lm import has_causal_head
from hf_helix.models.model_code import has_head_beside, has_stock_loss
from hf_helix.models.peft import base_of
from hf_helix.models.registry import REGISTERED


def has_own_loss(trainer: Any, model: Any, compute_loss_func: Any) -> bool:
    """Returns whether a trainer with its arguments, or its model before the cut, computes a loss other than the
    next-token loss of Transformers."""
    owner = next(base for base in type(trainer).__mro__ if "compute_loss" in vars(base))
    is_sft = name_of(owner) == SFT_TRAINER
    if (owner is not Trainer and not is_sft) or compute_loss_func is not None:
        return True
    if is_sft and (settle_routers(trainer.args, model) or trainer.args.loss_type != "nll"):
        return True
    base = base_of(model)
    is_declared = type(base).__name__ in REGISTERED
    return not has_causal_head(base) or not has_stock_loss(base) or (not is_declared and has_head_beside(base))
