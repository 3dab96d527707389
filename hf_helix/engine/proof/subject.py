"""What is proven: a small model, made anew in every process.

In:   a Transformers configuration, the name of a class, or a model.
Out:  a model in fp32 with random weights, the same in every process, small and yet large enough for a layout.
Must hold: the random state of the process is as before; a model that was given is not changed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from hf_helix.config import HelixConfig
from hf_helix.models.causal_lm import build_causal_lm, check_causal_lm_class
from hf_helix.models.copies import copy_module
from hf_helix.models.small_config import EXPERT_COUNTS, default_config, small_config

IMPLEMENTATIONS = ("eager", "sdpa", None)
"""Attention that runs in fp32 on every device. Where a model uses another one, Transformers chooses one of these."""

HEADS = ("num_attention_heads", "num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True)
class Subject:
    """A model that can be made anew.

    Attributes:
        config: its configuration; None where a class of Transformers alone, or a model, is given.
        kind: its class; None for the causal LM of the configuration.
        model: the model itself, taken as it is.
        as_is: whether the configuration is taken as it is, not made small.
    """

    config: PretrainedConfig | None = None
    kind: type[Any] | None = None
    model: Any = None
    as_is: bool = False

    @classmethod
    def of(cls, given: Any, as_is: bool = False) -> Subject:
        """Returns the subject that is given.

        Args:
            given: a model, a configuration, the name of a causal-LM class of Transformers, or a folder or file with a
                configuration.
            as_is: whether a configuration is taken as it is.

        Raises:
            ValueError: it is none of these.
        """
        if isinstance(given, nn.Module):
            return cls(model=given, as_is=True)
        if isinstance(given, PretrainedConfig):
            return cls(given, as_is=as_is)
        if not isinstance(given, str | Path):
            raise ValueError(
                f"{given!r} is no model to check; give a model, a configuration, the name of a causal-LM class such as "
                "'LlamaForCausalLM', or a folder with a config.json"
            )
        if is_class(given):
            check_causal_lm_class(str(given))
            if as_is:
                raise ValueError(
                    f"{given} is a class, which has no sizes of its own; leave as_is out, or give a config"
                )
            return cls(kind=getattr(transformers, str(given)))
        return cls(AutoConfig.from_pretrained(given), as_is=as_is)

    def build(self, config: HelixConfig | None = None) -> Any:
        """Returns the model for a layout; None for the smallest."""
        if self.model is not None:
            return copy_module(self.model).float()
        layout = config or HelixConfig()
        made = self._sized(layout)
        if made._attn_implementation not in IMPLEMENTATIONS:
            made._attn_implementation = None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed generators of GPUs as well
            if self.kind is not None:
                return self.kind(made).float()
            return build_causal_lm(made, dtype=torch.float32)

    @property
    def name(self) -> str:
        """The class, or the configuration where only that is known."""
        return (self.kind or type(self.config if self.model is None else self.model)).__name__

    def _sized(self, layout: HelixConfig) -> PretrainedConfig:
        """The configuration for a layout: a pipeline has two virtual stages a rank, each with a layer or more."""
        if self.as_is and self.config is not None:
            return copy.deepcopy(self.config)
        layers = 2 * layout.pp_size if layout.pp_size > 1 else 2
        if self.config is not None:
            return _widened(small_config(self.config, layers), layout)
        assert self.kind is not None
        return _widened(default_config(self.kind.__name__, layers), layout)


def is_class(given: str | Path) -> bool:
    """Returns whether a text is the name of a model class of Transformers."""
    return (
        str(given).isidentifier() and getattr(getattr(transformers, str(given), None), "config_class", None) is not None
    )


def has_experts(model: nn.Module) -> bool:
    """Returns whether a model has a mixture of experts."""
    return any(".experts." in name for name, _ in model.named_parameters())


def default_layouts(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the layouts that a model is checked on if none is asked for, as options of `HelixConfig`."""
    two: tuple[dict[str, Any], ...] = ({"tp_size": 2}, {"pp_size": 2}, {"tp_size": 2, "pp_size": 2}, {"cp_size": 2})
    return [*two, *([{"ep_size": 2}] if has_experts(model) else [])]


def _widened(config: PretrainedConfig, layout: HelixConfig) -> PretrainedConfig:
    """A small configuration with so many heads and experts that all ranks get some; two ranks always do."""
    options = config.get_text_config()
    factor = -(-layout.tp_size // 2)
    if factor > 1:
        is_free = not getattr(options, "head_dim", None)  # else heads have a size of their own
        for name in (*HEADS, *(["hidden_size"] if is_free else [])):
            if isinstance(value := getattr(options, name, None), int):
                setattr(options, name, value * factor)
    ranks = layout.tp_size * layout.ep_size
    for name in EXPERT_COUNTS:
        if isinstance(value := getattr(options, name, None), int) and value % ranks:
            setattr(options, name, ranks * -(-value // ranks))
    return config
