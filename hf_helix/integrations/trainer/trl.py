"""TRL's `SFTTrainer` under `HelixTrainerMixin`.

In:   what the trainer is made with, and its model before it is cut.
Out:  the model with its adapters, or an error that names what cannot be honoured and what works.
Must hold: the loss is the model's own (`loss_type="nll"`), so that `SFTTrainer.compute_loss`, which computes the same
loss and figures for the logs, need not be called. TRL is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import set_seed

from hf_helix.integrations.trainer.stock import StockTrainer, TrainerCall

SFT_TRAINER = "trl.trainer.sft_trainer.SFTTrainer"

# Field of SFTConfig, whether its value is refused, what to do instead.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("loss_type", lambda kind: kind != "nll", "loss_type='nll': others are not computed over a cut vocabulary yet"),
    ("activation_offloading", bool, "activation_offloading=False: operators keep activations, not autograd"),
    (
        "chat_template_path",
        lambda path: path is not None and Path(path).suffix not in (".jinja", ".j2"),
        "the path of a .jinja file, or trl.clone_chat_template(model, tokenizer, path) before: it may add tokens",
    ),
)


def is_sft(kind: type) -> bool:
    """Whether a class is TRL's SFTTrainer or a subclass of it."""
    return any(name_of(base) == SFT_TRAINER for base in kind.__mro__)


def name_of(kind: type) -> str:
    """The name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


class StockSFTTrainer(StockTrainer):
    """TRL's `SFTTrainer`, which reads a model in fp32, adds adapters to it, and adds the loss of routers."""

    def model_options(self, args: Any) -> dict[str, Any]:
        """The options as SFTTrainer has them, which reads a model in fp32 unless the arguments say otherwise."""
        return {"dtype": torch.float32, **super().model_options(args)}

    def check_call(self, kind: type, call: TrainerCall) -> None:
        """Refuses what SFTTrainer would do to a model that is cut already, or with logits that no rank has."""
        name, args = kind.__name__, call.get("args")
        if not hasattr(args, "loss_type"):
            raise ValueError(f"{name} needs the arguments of TRL: args=SFTConfig(...); got {type(args).__name__}")
        problems = [
            f"{field}={getattr(args, field, None)!r}: use {instead}"
            for field, is_refused, instead in _REFUSED
            if is_refused(getattr(args, field, None))
        ]
        if call.get("peft_config") is not None and not isinstance(call.get("model"), nn.Module):
            problems.append("peft_config=... with a model that is not there yet: use from_pretrained(folder) before")
        if problems:
            raise ValueError(f"{name} cannot honour " + "\n  ".join(problems))

    def add_adapters(self, model: Any, call: TrainerCall) -> Any:
        """The model with the adapters of `peft_config`, drawn with the same seed as in SFTTrainer."""
        if call.get("peft_config") is None:
            return model
        from peft import get_peft_model  # only scripts that give a `peft_config` need PEFT

        set_seed(call.get("args").seed)
        adapted = get_peft_model(model, call.get("peft_config"))
        call.set("peft_config", None)
        return adapted

    def check_model(self, model: Any, args: Any) -> None:
        """Refuses a loss of routers, which TRL switches on by itself and weighs otherwise than the stock Trainer."""
        config = model.config.get_text_config()
        if not hasattr(config, "output_router_logits"):
            return
        asked = getattr(args, "router_aux_loss_coef", None)
        coefficient = getattr(config, "router_aux_loss_coef", 0.0) if asked is None else asked
        if coefficient or config.output_router_logits:
            raise ValueError(
                f"router_aux_loss_coef={asked!r} with output_router_logits={config.output_router_logits}: use "
                "SFTConfig(router_aux_loss_coef=0.0), and model.config.output_router_logits = False; the loss of "
                "routers is built for HelixTrainer only"
            )
