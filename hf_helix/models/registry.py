"""The registry of model families: Transformers classes and their families.

In:   families of the package, and families that `register_model` adds from outside.
Out:  the family of a model.
Must hold: a family is found by the name of the model's class, stated in the family's file (`model_class`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from hf_helix.models.derived.derived import DerivedFamily, check_heads
from hf_helix.models.derived.family import Family
from hf_helix.models.derived.model_code import check_traceable, other_code
from hf_helix.models.families.gpt2 import GPT2
from hf_helix.models.families.llama import Llama
from hf_helix.models.families.phimoe import Phimoe
from hf_helix.models.stock.alike import unchanged

REGISTERED: dict[str, Family] = {family.model_class: family for family in (GPT2(), Llama(), Phimoe())}
"""The declared families, by the name of the model's class. Those of the package are what a reader opens first, and what
tests compare derived families with: derived, their classes have the same operators, cuts and gradients
(tests/invariant/test_same_graphs.py). `register_model` adds to them."""


def register_model(family: Family) -> None:
    """Adds a model family. A later registration for the same class replaces the earlier registration."""
    REGISTERED[family.model_class] = family


def registered_elsewhere() -> list[str]:
    """Returns the modules outside the package that registered families; other processes import these modules."""
    homes = [type(family).__module__ for family in REGISTERED.values()]
    return [home for home in dict.fromkeys(homes) if home.partition(".")[0] != __name__.partition(".")[0]]


def family_of(model: Any) -> Family:
    """Returns the family of a model: the family declared for its class, or a derived family if no family is declared
    or the model contains code other than the declared code.

    Raises:
        ValueError: the class is not declared and cannot be derived; with the reason, and the way to declare a family.
    """
    # A subclass written by a user is run as its base; a subclass in Transformers is another model.
    kinds = type(model).__mro__[: 1 if type(model).__module__.startswith("transformers.") else None]
    names = (kind.__name__ for kind in kinds if kind.__name__ in REGISTERED)
    # A class may have the name of a class in Transformers that it is not made of.
    name = next((name for name in names if isinstance(model, getattr(transformers, name, object))), None)
    if name is None:
        return _derived(model)
    family = _known(model) or REGISTERED[name]
    is_settled = bool(family.traced) or getattr(model, "_is_cut_by_helix", False) or _SETTLED in vars(model)
    is_ours = type(family).__module__ not in registered_elsewhere()
    return _derived(model) if is_ours and not is_settled and other_code(model) else family


@contextmanager
def settled(model: Any, texts: dict[nn.Module, str] | None = None) -> Iterator[None]:
    """Within, `family_of` takes the code of a model as read, since nobody changes it, and the texts of its layers are
    found once, and kept in `texts`."""
    vars(model)[_SETTLED] = True
    try:
        with unchanged({} if texts is None else texts):
            yield
    finally:
        del vars(model)[_SETTLED]


_SETTLED = "code_is_read_by_helix"
"""The attribute of a model within `settled`."""


def family_for(model: Any, tp_size: int) -> Family:
    """Returns the family of a model for a number of ranks. Ranks can share a key-value head only in a derived family:
    then the model gets one, which `family_of` returns from then on.

    Raises:
        ValueError: see `check_ranks` and `family_of`.
    """
    check_ranks(model, tp_size)
    return _derived(model) if _shares_keys(model, tp_size) else family_of(model)


def check_ranks(model: Any, tp_size: int) -> None:
    """Raises ValueError, with the option and a value that works, if `tp_size` ranks cannot share the model. The model
    keeps its family."""
    check = check_heads if _shares_keys(model, tp_size) else family_of(model).check
    check(model.config, tp_size)


def _shares_keys(model: Any, tp_size: int) -> bool:
    """Returns whether several ranks share a key-value head of a model whose family the package declares."""
    family = family_of(model)
    if family.needs_proof or type(family).__module__ in registered_elsewhere():
        return False
    count = getattr(model.config, "num_key_value_heads", None)
    return isinstance(count, int) and count < tp_size and tp_size % count == 0


_FAMILY = "family_of_helix"
"""The attribute of a model for the family derived from it. The family refers to the model, so a dictionary outside of
it, even of weak references to models, would keep both for ever."""


def _derived(model: Any) -> Family:
    """Returns the family derived from a model, which is derived once."""
    family: Family | None = _known(model)
    if family is None:
        if hasattr(model, "_orig_mod"):
            raise ValueError(f"{type(model).__name__} is not supported: pass the model without torch.compile")
        if not isinstance(model, PreTrainedModel):
            raise ValueError(
                f"{type(model).__name__} is not supported: it is neither a model of Transformers, which a family would "
                "be derived from, nor one that a family is registered for; docs/adding_a_model.md shows how to "
                "register one"
            )
        check_traceable(model)
        family = vars(model)[_FAMILY] = DerivedFamily(model)
    return family


def _known(model: Any) -> Family | None:
    """Returns the family that was derived from a model; None before, and for other objects than models."""
    return getattr(model, "__dict__", {}).get(_FAMILY)
