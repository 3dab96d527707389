"""Causal language models: which classes of Transformers are some, and the refusal of what is none.

In:   the name of a class, or a model.
Out:  nothing, or an error that names the class with a language-model head.
Must hold: what has no head that predicts the next token, or another loss than that of the next token, is refused before
anything is derived from it.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def causal_lm_classes() -> list[str]:
    """Returns the names of all causal-LM classes of the installed Transformers."""
    return sorted({name for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES for name in _classes_of(model_type)})


def check_causal_lm_class(name: str) -> None:
    """Refuses a model class of Transformers that is no causal language model.

    Raises:
        ValueError: names the class with a language-model head that belongs to the same configuration, if there is one.
    """
    if name not in causal_lm_classes():
        raise ValueError(f"{name} is no causal language model: {_advice(getattr(transformers, name).config_class)}")


def check_head(model: Any) -> None:
    """Refuses a model of Transformers without a language-model head.

    Raises:
        ValueError: names the class with a language-model head that belongs to the same configuration, if there is one.
    """
    name, is_stock = type(model).__name__, type(model).__module__.startswith("transformers.")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no language-model head: {_advice(type(model.config))}")
    if is_stock:
        check_causal_lm_class(name)


def _advice(config_class: Any) -> str:
    """Returns what is needed, for a configuration."""
    classes = _classes_of(getattr(config_class, "model_type", ""))
    instead = f"use {' or '.join(classes)}" if classes else "Transformers has none for its configuration"
    return f"what is trained is a model with a head that predicts the next token, and its loss; {instead}"


def _classes_of(model_type: str) -> tuple[str, ...]:
    """Returns the causal-LM classes of a `model_type`."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    return (classes,) if isinstance(classes, str) else tuple(classes)
