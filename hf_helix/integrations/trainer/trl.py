"""TRL's SFTTrainer under `HelixTrainerMixin`: what of it can be honoured.

In:   the class of a trainer, what it was called with, and its arguments.
Out:  nothing, or an error that names what cannot be honoured and what works.
Must hold: the loss is the model's own (`loss_type="nll"`), so that `SFTTrainer.compute_loss`, which computes the same
and figures for the logs, need not be called. TRL is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

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
    """Whether a class is TRL's SFTTrainer, or made of it."""
    return any(name_of(base) == SFT_TRAINER for base in kind.__mro__)


def name_of(kind: type) -> str:
    """A class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def check_sft(kind: type, given: Mapping[str, Any], args: Any) -> None:
    """Refuse what SFTTrainer would do to a model that is cut already, or with logits that no rank has.

    Args:
        given: what the trainer is called with, by name.

    Raises:
        ValueError: names every such option and a value that works.
    """
    name = kind.__name__
    if not hasattr(args, "loss_type"):
        raise ValueError(f"{name} needs the arguments of TRL: args=SFTConfig(...); got {type(args).__name__}")
    problems = [
        f"{field}={getattr(args, field, None)!r}: use {instead}"
        for field, bad, instead in _REFUSED
        if bad(getattr(args, field, None))
    ]
    if given.get("peft_config") is not None and not isinstance(given.get("model"), nn.Module):
        problems.append("peft_config=... with a model that is not there yet: use from_pretrained(folder) before")
    if problems:
        raise ValueError(f"{name} cannot honour:\n  " + "\n  ".join(problems))


def adapted(model: Any, config: Any) -> Any:
    """The model with adapters, as SFTTrainer would make them: it would after the cut."""
    from peft import get_peft_model

    return get_peft_model(model, config)


def check_routers(model: Any, args: Any) -> None:
    """Refuse a loss of routers, which TRL switches on by itself and weighs otherwise than the stock Trainer.

    Raises:
        ValueError: says how to switch it off.
    """
    config = model.config.get_text_config()
    if not hasattr(config, "output_router_logits"):
        return
    asked = getattr(args, "router_aux_loss_coef", None)
    coefficient = getattr(config, "router_aux_loss_coef", 0.0) if asked is None else asked
    if coefficient or config.output_router_logits:
        raise ValueError(
            f"router_aux_loss_coef={asked!r} with output_router_logits={config.output_router_logits}: use "
            "SFTConfig(router_aux_loss_coef=0.0), and model.config.output_router_logits = False; the loss of routers "
            "is built for HelixTrainer only"
        )
