"""Small configurations: a model of the same class that a test can run in a second.

In:   a Transformers configuration of any size, or the name of a causal-LM class.
Out:  a copy with few and narrow layers, a small vocabulary and no dropout.
Must hold: what tells the class from others stays: every kind of layer that it has, whether heads are grouped, windows,
ropes, caps, multipliers, groups of experts, biases. Every size that ranks share divides by two.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PretrainedConfig

from hf_helix.models.small_config.fields import HEAD_SIZE, VOCABULARY, small_rope, small_value
from hf_helix.models.small_config.layers import FEWEST, shorten
from hf_helix.models.small_config.special import OPEN, SMALL

Values = dict[str, Any]

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS, EXPERTS_IN_GROUPS = 4, 8
GROUP_COUNTS = ("n_group", "num_expert_group")

MULTIPLIER = 0.75
"""What a multiplier is where its default is 1, which would hide that it was forgotten."""


def default_config(class_name: str, fewest_layers: int = FEWEST) -> PretrainedConfig:
    """Returns the small configuration of a class of Transformers that follows from the defaults of its config class.

    Args:
        class_name: a causal-LM class, such as `Gemma2ForCausalLM`.
        fewest_layers: see `small_config`.

    Raises:
        ValueError: Transformers has no such class.
    """
    kind = getattr(getattr(transformers, class_name, None), "config_class", None)
    if kind is None:
        raise ValueError(
            f"{class_name} is not a model class of Transformers {transformers.__version__}; give the name of a "
            "causal-LM class, such as LlamaForCausalLM"
        )
    config = kind(**OPEN.get(kind.model_type, {}))
    for name, value in config.to_dict().items():
        if value == 1.0 and isinstance(value, float) and _is_multiplier(name):
            setattr(config, name, MULTIPLIER)
    if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        config.is_decoder = True  # otherwise BERT and its like are encoders
    return small_config(config, fewest_layers)


def _is_multiplier(name: str) -> bool:
    """Returns whether a field scales activations; scores of attention are left to their own scale."""
    return name.endswith(("multiplier", "logits_scaling", "routed_scaling_factor"))


def small_config(config: PretrainedConfig, fewest_layers: int = FEWEST) -> PretrainedConfig:
    """Returns a small configuration of the same class; the given one stays as it is.

    Args:
        config: the configuration of a causal LM, of any size. Configurations within it (of text, of images) become
            small, too.
        fewest_layers: the number of layers that it has at least; a pipeline needs two for each of its ranks.
    """
    given = config.to_dict()
    standard = {name: word for word, name in (config.attribute_map or {}).items()}
    values = shorten(given, standard, fewest_layers)
    for name, value in values.items():
        values[name] = small_value(name, standard.get(name, name), value, given)
    _make_experts_few(values)
    _bring_token_ids_in_range(values)
    values.update(SMALL.get(config.model_type, {}))
    rotary = values.get("head_dim") or HEAD_SIZE
    for name in ("rope_parameters", "rope_scaling"):
        if name in values:
            values[name] = small_rope(values[name], rotary)
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PretrainedConfig):
            values[name] = small_config(part, fewest_layers).to_dict()
    if "use_cache" in values:
        values["use_cache"] = False  # training needs none, and some classes cannot make one
    small: PretrainedConfig = type(config).from_dict(values)
    small._attn_implementation = config._attn_implementation  # `to_dict` leaves it out
    return small


def _make_experts_few(values: Values) -> None:
    """Leaves four experts, eight where tokens choose groups first."""
    grouped = any((values.get(name) or 1) > 1 for name in GROUP_COUNTS)
    for name in EXPERT_COUNTS:
        if isinstance(values.get(name), int) and values[name] > 0:
            values[name] = EXPERTS_IN_GROUPS if grouped else EXPERTS


def _bring_token_ids_in_range(values: Values) -> None:
    """Gives special tokens the last ids of the vocabulary, each its own; padding and the ends of texts the first."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name in values:
        if name.endswith(("token_id", "token_index")) and name not in ids:
            ids[name] = VOCABULARY - 1 - (len(ids) - 3)
    for name, place in ids.items():
        if isinstance(values.get(name), int | list):
            values[name] = place
