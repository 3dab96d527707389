"""Transformers models as operator graphs: one file per family, one `register_layer` call each.

Families are looked up by the name of the model's class. `register_layer` adds one from outside the package.
"""

from __future__ import annotations

from typing import Any

from hf_helix.models.families.gpt2 import GPT2
from hf_helix.models.families.gpt_neox import GPTNeoX
from hf_helix.models.families.llama import Llama, Mistral
from hf_helix.models.families.mixtral import Mixtral
from hf_helix.models.families.phimoe import Phimoe
from hf_helix.models.families.qwen import Qwen2, Qwen3
from hf_helix.models.families.qwen_moe import Qwen3Moe
from hf_helix.models.family import Family
from hf_helix.models.model_code import check_class

_FAMILIES: dict[str, Family] = {}


def register_layer(family: Family) -> None:
    """Make a model family known. A later registration for the same class replaces an earlier one."""
    _FAMILIES[family.model_class] = family


def supported_models() -> list[str]:
    """Names of the model classes that can be trained."""
    return sorted(_FAMILIES)


def family_of(model: Any) -> Family:
    """The family of a model.

    Raises:
        ValueError: its class, and none that it is made of, is registered; lists those that are, and how to add one.
    """
    kind = type(model)
    # A subclass of the user's own is run as what it is made of; one of Transformers' is another model.
    names = [base.__name__ for base in kind.__mro__] if not kind.__module__.startswith("transformers.") else []
    name = next((name for name in (kind.__name__, *names) if name in _FAMILIES), None)
    if name is None:
        compiled = hasattr(model, "_orig_mod")
        raise ValueError(
            f"{kind.__name__} is not supported{': pass the model without torch.compile' if compiled else ''}. "
            f"Supported: {', '.join(supported_models())}. To add another, describe its decoder layer in a subclass of "
            "hf_helix.models.family.Family and call hf_helix.register_layer(YourFamily()); docs/adding_a_model.md "
            "shows how"
        )
    check_class(model, name)
    return _FAMILIES[name]


register_layer(GPT2())
register_layer(GPTNeoX())
register_layer(Llama())
register_layer(Mistral())
register_layer(Qwen2())
register_layer(Qwen3())
register_layer(Mixtral())
register_layer(Phimoe())
register_layer(Qwen3Moe())
