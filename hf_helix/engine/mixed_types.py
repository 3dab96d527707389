"""Parameters of several types in a model, such as norms or the head in fp32 in a model in bf16.

In:   the model of a run, its options, and the type of matrix products under autocast.
Out:  the type of the values between layers, for transfers of a pipeline; or an error on a model that Transformers
      itself could not run.
Must hold: Transformers' own code decides, by a forward pass of a small model of the class with the same types.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_helix.config import HelixConfig
from hf_helix.engine.proof.first_use import carry_patches
from hf_helix.engine.proof.prove import Subject
from hf_helix.models.stock.four_bit import four_bit_weights
from hf_helix.models.stock.peft import adapter_weights, base_of
from hf_helix.models.trace.calls import Decoder
from hf_helix.operators.base import Precision

INSTEAD = (
    "train with bf16=True, which casts the factors of products; or load the model with one type for all: "
    "from_pretrained(..., dtype=torch.float32), or dtype=torch.bfloat16"
)


def type_between_layers(
    model: Any, config: HelixConfig, device: torch.device, autocast_dtype: torch.dtype | None
) -> torch.dtype | None:
    """Returns the type of the values between layers of a model with parameters of several types; None for a model with
    one type.

    Args:
        model: the full model.
        config: the options of its cut.
        device: runs the small model.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.

    Raises:
        ValueError: the model's own code does not compute with these types, or layers of a pipeline hand on several.
    """
    base, odd = base_of(model), next(_other_types(model), None)
    if odd is None:
        return None
    name, dtype = odd
    about = f"parameter {name} is {dtype}, others are {base.dtype}"
    try:
        small = Subject(base.config, type(base)).build(config)
        carry_patches(base, small)
        _copy_types(base, small)
        handed_on = _types_of_layers(
            small.to(device), Precision(device.type, autocast_dtype, fused=config.fused_kernels)
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{about}, and Transformers cannot compute with both ({reason}); {INSTEAD}") from error
    if config.pp_size > 1 and len(set(handed_on)) > 1:
        raise ValueError(
            f"{about}, so that some layers hand on {handed_on[0]} and others not, and with pp_size={config.pp_size} "
            "all stages hand on one type; use pp_size=1, or load the model with one type for all: "
            "from_pretrained(..., dtype=torch.float32)"
        )
    return handed_on[-1]


def _other_types(model: Any) -> Iterator[tuple[str, torch.dtype]]:
    """Yields the parameters, other than adapters and packed weights, of another type than the model."""
    dtype = base_of(model).dtype
    may_differ = {*adapter_weights(model), *four_bit_weights(model)}
    for name, parameter in model.named_parameters():
        if parameter.dtype is not dtype and parameter not in may_differ:
            yield name, parameter.dtype


def _copy_types(base: nn.Module, small: nn.Module) -> None:
    """Gives the parameters and buffers of a small model the types of parameters of the same names, or of the same names
    in other layers."""
    types = {_plain(name): tensor.dtype for name, tensor in reversed([*_tensors(base)])}
    anywhere = {_without_numbers(name): dtype for name, dtype in types.items()}
    for name, tensor in _tensors(small):
        dtype = types.get(name) or anywhere.get(_without_numbers(name))
        if dtype is not None and dtype.is_floating_point:
            tensor.data = tensor.data.to(dtype)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of floating-point types."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return ((name, tensor) for name, tensor in named if tensor.is_floating_point())


def _plain(name: str) -> str:
    """Returns the name of a parameter without PEFT's wrappers."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "", name)


@torch.no_grad()
def _types_of_layers(model: Any, precision: Precision) -> list[torch.dtype]:
    """Returns the types of the values between the layers of a model, in a forward pass."""
    types: list[torch.dtype] = []

    def note(module: nn.Module, args: Any, result: Any) -> None:
        types.append((result[0] if isinstance(result, tuple) else result).dtype)

    for layer in Decoder(model).layers:
        layer.register_forward_hook(note)
    ids = torch.ones((1, 8), dtype=torch.long, device=model.device)
    with precision.autocast():
        model(input_ids=ids, use_cache=False)
    return types
