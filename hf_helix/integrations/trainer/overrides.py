"""Refuses overrides of methods and attributes of the stock Trainer that would have no effect.

In:   a trainer, whose class or attributes may have replaced something that is never called here.
Out:  nothing, or an error that names what would be ignored and what works.
Must hold: no hook of the stock Trainer is silently without effect.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from hf_helix.integrations.trainer.trl import SFT_TRAINER, name_of

# Methods of the stock Trainer that are not called, and what to do instead.
_NEVER_CALLED = {
    "compute_loss": "the loss is computed over a cut vocabulary; remove the override",
    "compute_loss_context_manager": "no model is called under it; use bf16=True for autocast",
    "autocast_smart_context_manager": "no model is called under it; use bf16=True for autocast",
    "_prepare_context_parallel_inputs": "sequences are cut by HelixConfig(cp_size=...)",
    "_wrap_model": "the cut model is not called; change the model before it is given to the trainer",
}


def check_overrides(trainer: Any) -> None:
    """Refuses overrides without effect. Called before every training and evaluation, since attributes can be set later.

    Raises:
        ValueError: names it, and what works.
    """
    name = type(trainer).__name__
    for hook, instead in _NEVER_CALLED.items():
        owner = next(kind for kind in type(trainer).__mro__ if hook in vars(kind))
        if hook in vars(trainer) or (owner is not Trainer and name_of(owner) != SFT_TRAINER):
            if owner.__module__.startswith("trl."):
                without = f"use {owner.__name__} without HelixTrainerMixin, or SFTTrainer with it"
                raise ValueError(f"{name}: the loss of TRL's {owner.__name__} is not built; {without}")
            raise ValueError(f"{name} overrides {hook}, which is never called: {instead}")
    if trainer.compute_loss_func is not None:
        raise ValueError("compute_loss_func is not built yet: the loss is the model's own; leave it out")
    if not trainer.model_accepts_loss_kwargs:
        raise ValueError(
            f"{name}.model_accepts_loss_kwargs is False, so the stock Trainer would take the mean loss of every "
            "micro-batch by itself; here tokens are counted over the window: leave model_accepts_loss_kwargs, and "
            "model.accepts_loss_kwargs, True"
        )
    if getattr(trainer, "loss_is_scaled_for_ga", None) is False:
        raise ValueError(f"{name}.loss_is_scaled_for_ga is False, and the loss of a window is scaled: leave it None")
    smoother, factor = trainer.label_smoother, trainer.args.label_smoothing_factor
    usual = smoother is None if factor == 0 else type(smoother) is LabelSmoother and smoother.epsilon == factor
    if not usual:
        raise ValueError(f"{name}.label_smoother is set by hand; use TrainingArguments(label_smoothing_factor=...)")
    if trainer.model is not trainer.helix.model:
        raise ValueError(
            f"{name} has replaced the model after it was cut, by a {type(trainer.model).__name__}; "
            "change it before, such as with peft.get_peft_model(model, config)"
        )
