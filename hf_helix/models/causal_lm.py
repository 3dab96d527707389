"""Causal language models: which classes of Transformers are some, and the refusal of what is none.

In:   the name of a class, or a model.
Out:  nothing or the model of a configuration, or an error that says what else to use.
Must hold: what has no head that predicts the next token, or another loss than that of the next token, is refused before
anything is derived from it.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_helix.models.census import read_census


def causal_lm_classes() -> list[str]:
    """Returns the names of all causal-LM classes of the installed Transformers."""
    return sorted({name for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES for name in _classes_of(model_type)})


def check_causal_lm_class(name: str, instead: str = "") -> None:
    """Refuses a model class of Transformers that is no causal language model.

    Raises:
        ValueError: says what to use instead, or else which class belongs to the same configuration, if there is one.
    """
    if name not in causal_lm_classes():
        advice = instead or _advice(getattr(transformers, name).config_class)
        raise ValueError(f"{name} is no causal language model: {advice}")


def check_head(model: Any) -> None:
    """Refuses a model of Transformers without a language-model head.

    Raises:
        ValueError: names the class with a language-model head that belongs to the same configuration, if there is one.
    """
    name, is_stock = type(model).__name__, type(model).__module__.startswith("transformers.")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no language-model head: {_advice(type(model.config))}")
    if is_stock and name not in causal_lm_classes():
        check_causal_lm_class(name, text_part(model))


def build_causal_lm(config: Any, **options: Any) -> Any:
    """Returns the causal language model of a configuration, as `AutoModelForCausalLM.from_config` makes it.

    Raises:
        ValueError: Transformers has none for it.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        text = config.get_text_config()
        part = "" if text is config else f"; its text part has a {type(text).__name__}, config.text_config"
        name, advice = type(config).__name__, _advice(type(config))
        raise ValueError(f"Transformers has no causal language model for {name}: {advice}{part}")
    return AutoModelForCausalLM.from_config(config, **options)


def text_part(model: Any) -> str:
    """Returns how the text part of a model that takes more than text is trained by itself; "" where it has none."""
    text = model.config.get_text_config()
    classes = _usable(text.model_type) if text is not model.config else ()
    if not classes:
        return ""
    names = {id(module): name for name, module in model.named_modules()}
    decoder, head = names[id(model.get_decoder())], names[id(model.get_output_embeddings())]
    return (
        f"train its text part by itself: text = {classes[0]}(model.config.text_config), text.model = model.{decoder}, "
        f"text.lm_head = model.{head}"
    )


def _advice(config_class: Any) -> str:
    """Returns what is trained and what else to use, for a configuration."""
    classes = _usable(getattr(config_class, "model_type", ""))
    instead = f"use {' or '.join(classes)} for it, and " if classes else "use "
    return f"hf_helix trains the loss of the next token alone; {instead}the stock Trainer for other tasks and models"


def _usable(model_type: str) -> list[str]:
    """Returns the causal-LM classes of a `model_type`, without those that the census found to be refused."""
    census = read_census()
    return [name for name in _classes_of(model_type) if name not in {*census.names} - {*census.proven_on("pp2")}]


def _classes_of(model_type: str) -> tuple[str, ...]:
    """Returns the causal-LM classes of a `model_type`."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    return (classes,) if isinstance(classes, str) else tuple(classes)
