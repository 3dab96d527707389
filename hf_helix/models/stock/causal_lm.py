"""Causal language models: recognises the classes of Transformers, and refuses all others.

In:   the name of a class, a model, or a folder with a configuration.
Out:  nothing, the configuration, the model of a configuration, or an error with the class to use.
Must hold: code that a folder brings is neither run nor asked for. A model without a next-token head, or with a loss
other than next-token loss, is refused before anything is derived from the model.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from hf_helix.models.stock.census import read_census


def causal_lm_classes() -> list[str]:
    """Returns the names of all causal-LM classes of the installed Transformers."""
    return sorted({name for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES for name in _classes_of(model_type)})


def _multimodal_classes() -> set[str]:
    """Returns the names of classes that read images or sound as well as text."""
    names: set[str] = set()
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
        for classes in mapping.values():
            names |= {classes} if isinstance(classes, str) else {*classes}
    return names


def text_classes() -> set[str]:
    """Returns the names of classes with towers that can train on text only, without causal-LM classes."""
    return _multimodal_classes() - {*causal_lm_classes()}


def classifier_classes() -> set[str]:
    """Returns the names of classes with a head for sequence classification."""
    return {*MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()}


def _language_models() -> set[str]:
    """Returns the names of all classes of Transformers that text trains."""
    return {*causal_lm_classes(), *_multimodal_classes()}


def has_towers(model: Any) -> bool:
    """Returns whether a model, or the class above a user's, has towers next to a causal language model."""
    is_composite = model.config.get_text_config() is not model.config
    return is_composite and not _multimodal_classes().isdisjoint(kind.__name__ for kind in type(model).__mro__)


def is_stock(model: Any) -> bool:
    """Returns whether a model is of a language-model class of Transformers itself, not of a class above."""
    return type(model).__name__ in _language_models() and type(model).__module__.startswith("transformers.")


def check_causal_lm_class(name: str, instead: str = "") -> None:
    """Refuses a model class of Transformers that is no causal language model.

    Raises:
        ValueError: names the class to use, or the causal-LM class of the same configuration, if any.
    """
    if name not in _language_models():
        advice = instead or _advice(getattr(transformers, name).config_class)
        raise ValueError(f"{name} is no causal language model: {advice}")


def has_causal_head(model: Any) -> bool:
    """Returns whether a model has a language-model head, and is no other class of Transformers."""
    has_head = getattr(model, "get_output_embeddings", lambda: None)() is not None
    return has_head and (is_stock(model) or not type(model).__module__.startswith("transformers."))


def check_head(model: Any) -> None:
    """Refuses a model of Transformers without a language-model head.

    Raises:
        ValueError: names the class with a language-model head of the same configuration, if any.
    """
    name = type(model).__name__
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no language-model head: {_advice(type(model.config))}")
    if not has_causal_head(model):
        check_causal_lm_class(name, text_part(model))


def read_config(path: str | PathLike[str]) -> PretrainedConfig:
    """Returns the configuration of a folder or file by the classes of Transformers; custom code is left out.

    Raises:
        ValueError: Transformers has no class for it; names the `model_type` of the class that its model has, if any.
    """
    values, _ = PretrainedConfig.get_config_dict(path)
    model_type, name = values.get("model_type"), next(iter(values.get("architectures") or ()), "")
    if model_type not in CONFIG_MAPPING:
        known = [each for each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in _classes_of(each)]
        instead = (
            f'its class {name} has model_type {known[0]!r}: write "model_type": "{known[0]}" into a copy of it'
            if known
            else "give a model that your script has made to hf_helix.testing.check_family(model)"
        )
        raise ValueError(
            f"{path}: Transformers {transformers.__version__} has no class for model_type {model_type!r}, and code in "
            f"a folder is never run here; {instead}"
        )
    values.pop("auto_map", None)
    _check_sizes(values, path)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # of a check of the class, each of its own kind
        raise ValueError(f"{path}: {' '.join(str(error).split())}; correct its values") from error
    _check_possible(config.get_text_config(), path)
    return config


SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")


def _check_sizes(values: Mapping[str, Any], path: Any) -> None:
    """Raises ValueError for sizes below 1."""
    for name in SIZES:
        if isinstance(value := values.get(name), int) and value < 1:
            raise ValueError(f"{path}: {name}={value}, and no model has fewer than 1; correct it")


def _check_possible(config: PretrainedConfig, path: Any) -> None:
    """Raises ValueError for sizes that no model has."""
    for layer in {id(layer): layer for layer in layer_configs(config)}.values() or (config,):
        _check_sizes({name: getattr(layer, name, None) for name in SIZES}, path)
        heads, keys = (getattr(layer, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
        if isinstance(heads, int) and isinstance(keys, int) and heads % keys:
            raise ValueError(f"{path}: num_key_value_heads={keys} must divide num_attention_heads={heads}; correct it")


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Returns the configuration of every decoder layer: one for all, unless layers have values of their own."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * (getattr(config, "num_hidden_layers", None) or 1)


def build_causal_lm(config: Any, **options: Any) -> Any:
    """Returns the causal language model of a configuration, as `AutoModelForCausalLM.from_config` makes it.

    Raises:
        ValueError: Transformers has no causal-LM class for the configuration.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        text = config.get_text_config()
        part = "" if text is config else f"; its text part has a {type(text).__name__}, config.text_config"
        name, advice = type(config).__name__, _advice(type(config))
        raise ValueError(f"Transformers has no causal language model for {name}: {advice}{part}")
    return AutoModelForCausalLM.from_config(config, **options)


def build_language_model(config: Any, **options: Any) -> Any:
    """Returns the model that a configuration names: with towers of images, or else its causal language model.

    Raises:
        ValueError: Transformers has neither for the configuration.
    """
    named = (getattr(config, "architectures", None) or ("",))[0]
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "auto_map")
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and (not is_causal or named in text_classes()):
        return AutoModelForImageTextToText.from_config(config, **options)
    return build_causal_lm(config, **options)


def text_part(model: Any) -> str:
    """Returns how to train only the text part of a model with further inputs; "" for a model without a text part."""
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
    """Returns advice for a configuration: the class to use, and the trainers of other classes."""
    classes = _usable(getattr(config_class, "model_type", ""))
    first = f"use {' or '.join(classes)}" if classes else "hf_helix cuts decoders of causal language models"
    others = (
        "HelixTrainer trains other heads on a decoder by their own code (docs/losses.md), the stock Trainer all else"
    )
    return f"{first}; {others}"


def _usable(model_type: str) -> list[str]:
    """Returns the causal-LM classes of a `model_type`, without the classes refused by the census."""
    census = read_census()
    return [name for name in _classes_of(model_type) if name not in {*census.names} - {*census.proven_on("pp2")}]


def _classes_of(model_type: str) -> tuple[str, ...]:
    """Returns the causal-LM classes of a `model_type`."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    return (classes,) if isinstance(classes, str) else tuple(classes)
