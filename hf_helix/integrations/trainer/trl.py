"""TRL's `SFTTrainer` under `HelixTrainerMixin`.

In:   the arguments of the trainer, and its model before the cut.
Out:  the model with its adapters, or an error with the option that cannot be honoured and an alternative.
Must hold: the loss is the model's own (`loss_type="nll"`), so `SFTTrainer.compute_loss`, which computes the same loss
and figures for the logs, need not be called. TRL is not imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, set_seed

from hf_helix.engine.evaluate import count_targets
from hf_helix.integrations.metrics import gather_samples
from hf_helix.integrations.trainer.stock import StockTrainer, TrainerCall

_MODULE = "trl.trainer.sft_trainer"
SFT_TRAINER = f"{_MODULE}.SFTTrainer"

# Field of SFTConfig, test for refused values, alternative.
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
    """Returns whether a class is TRL's SFTTrainer or a subclass."""
    return any(name_of(base) == SFT_TRAINER for base in kind.__mro__)


def name_of(kind: type) -> str:
    """Returns the name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _tokens_of(batch: Any) -> Tensor:
    """Returns the number of tokens of a micro-batch without padding, as a scalar; joined rows have no padding."""
    return batch["attention_mask"].sum() if "attention_mask" in batch else (batch["position_ids"][0] >= 0).sum()


class StockSFTTrainer(StockTrainer):
    """TRL's `SFTTrainer`, which reads a model in fp32, adds adapters, and adds the loss of routers."""

    figures = True

    def __init__(self) -> None:
        self._kept: dict[bool, list[Tensor]] = {True: [], False: []}
        self._tokens: Any = 0

    def take_losses(self, trainer: Any, batches: Sequence[Any], found: Tensor) -> Tensor:
        """Keeps entropy, right predictions, targets and tokens [micro-batches, 4], summed as SFTTrainer does."""
        counts = torch.stack([torch.stack((count_targets(batch), _tokens_of(batch))) for batch in batches])
        rows = torch.cat((found[:, 1:], counts.to(found)), 1)[None]
        rows = gather_samples(rows, trainer.helix.mesh, trainer.accelerator.gradient_state).sum(0)
        self._kept[trainer.model.training].append(rows)
        self._tokens += rows[:, 3].sum(dtype=torch.float64) if trainer.model.training else 0
        return found[:, 0]

    def log_entries(self, training: bool) -> dict[str, float]:
        """Returns the figures since the last log, with SFTTrainer's names and averages."""
        kept, self._kept[training] = self._kept[training], []
        if not kept:
            return {}
        entropy, right, targets, _ = torch.cat(kept).unbind(1)
        means = {"entropy": entropy, "mean_token_accuracy": right}
        entries = {name: float((sums / targets.clamp(min=1)).mean()) for name, sums in means.items()}
        entries["num_tokens"] = int(self._tokens)
        return entries if training else {f"eval_{name}": value for name, value in entries.items()}

    def settle(self, call: TrainerCall) -> None:
        """Makes an `SFTConfig` of other arguments as SFTTrainer does, and reads a model given by name that gets
        adapters: no folder has the weights of model and adapters.
        """
        args, model, config = call.get("args"), call.get("model"), sys.modules[_MODULE].SFTConfig
        is_named = isinstance(model, (str, os.PathLike))
        if args is None:
            call.set("args", config(f"{Path(model if is_named else model.config.name_or_path).name}-SFT"))
        elif not isinstance(args, config):
            call.set("args", config(**{each.name: getattr(args, each.name) for each in fields(args) if each.init}))
        if is_named and call.get("peft_config") is not None:
            options = self.model_options(call.get("args"))
            if call.get("quantization_config") is not None:
                options["quantization_config"] = call.get("quantization_config")
                call.set("quantization_config", None)
            call.set("model", AutoModelForCausalLM.from_pretrained(model, **options))

    def model_options(self, args: Any) -> dict[str, Any]:
        """Returns the options of SFTTrainer, which reads a model in fp32 unless the arguments have another dtype."""
        return {"dtype": torch.float32, **super().model_options(args)}

    def check_call(self, kind: type, call: TrainerCall) -> None:
        """Refuses features of SFTTrainer that need an uncut model, or full logits, which no rank has."""
        name, args = kind.__name__, call.get("args")
        problems = [
            f"{field}={getattr(args, field, None)!r}: use {instead}"
            for field, is_refused, instead in _REFUSED
            if is_refused(getattr(args, field, None))
        ]
        if problems:
            raise ValueError(f"{name} cannot honour " + "\n  ".join(problems))

    def add_adapters(self, model: Any, call: TrainerCall) -> Any:
        """Returns the model with the adapters of `peft_config`, drawn with SFTTrainer's seed. Adapters of a base in 4
        bits are in bfloat16, as SFTTrainer makes them."""
        if call.get("peft_config") is not None:
            from peft import get_peft_model  # only scripts with a `peft_config` need PEFT

            set_seed(call.get("args").seed)
            model = get_peft_model(model, call.get("peft_config"))
            call.set("peft_config", None)
        if getattr(model, "is_loaded_in_4bit", False):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)
        return model

    def check_model(self, model: Any, args: Any) -> None:
        """Refuses the loss of routers, which TRL activates by itself and weighs differently from the stock Trainer."""
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
