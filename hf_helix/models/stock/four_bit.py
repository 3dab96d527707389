"""Linears of bitsandbytes with a weight in 4 bits, for declarations.

In:   a model with `bitsandbytes.nn.Linear4bit` in place of linears.
Out:  the same modules, whose weights can be cut like matrices; the reasons against models that cannot.
Must hold: until it is cut, an opened model computes the same bits. bitsandbytes is not imported here: such a module
exists only after an import of bitsandbytes.
"""

import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hf_helix.operators.linears.four_bit import FourBit
from hf_helix.planning.text import shorten_lines

LOAD = "from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True))"


def is_four_bit(module: Any) -> bool:
    """Returns whether a module is a linear of bitsandbytes with a weight in 4 bits."""
    library: Any = sys.modules.get("bitsandbytes")
    return library is not None and type(module) in (
        library.nn.Linear4bit,
        library.nn.LinearNF4,
        library.nn.LinearFP4,
    )


def four_bit_of(module: Any) -> FourBit | None:
    """Returns the weight in 4 bits of a linear, after `open_four_bit`; None for other modules."""
    if not is_four_bit(module):
        return None
    state = module.weight.quant_state
    return FourBit(module.weight, module.absmax, state.blocksize, state.quant_type, state.dtype, module.compute_dtype)


def four_bit_weights(model: nn.Module) -> set[Tensor]:
    """Returns the packed weights of a model, and their scales once opened."""
    linears: list[Any] = [module for module in model.modules() if is_four_bit(module)]
    return {*(each.weight for each in linears), *(each.absmax for each in linears if hasattr(each, "absmax"))}


def value_dtype(module: nn.Module) -> torch.dtype:
    """Returns the type in which the linears of a module read and give values without autocast."""
    packed: Any = next((each for each in module.modules() if is_four_bit(each)), None)
    return next(module.parameters()).dtype if packed is None else packed.value_dtype


def matrix_sizes(model: nn.Module) -> dict[Tensor, int]:
    """Returns the elements of every matrix of a model; a weight in 4 bits under its codes."""
    linears: list[Any] = [module for module in model.modules() if is_four_bit(module)]
    packed: dict[Tensor, int] = {linear.weight: linear.in_features * linear.out_features for linear in linears}
    scales = four_bit_weights(model) - packed.keys()
    return {p: packed.get(p, p.numel()) for p in model.parameters() if p.dim() > 1 and p not in scales}


def check_storage(model: Any) -> None:
    """Refuses weights that are stored in a way in which they cannot be cut.

    Raises:
        ValueError: names the modules, and an alternative.
    """
    problems = list(_problems(model))
    if problems:
        raise ValueError(f"HelixTrainer cannot cut these weights: {shorten_lines(problems)}")


def _problems(model: Any) -> Iterator[str]:
    quantizer = getattr(model, "hf_quantizer", None)
    named = ((name.removesuffix(".base_layer"), module) for name, module in model.named_modules())
    found = {name: module for name, module in named if is_four_bit(module)}
    if quantizer is not None and not found:
        yield (
            f"the model is quantised ({type(quantizer).__name__}), and of quantised weights only those of bitsandbytes "
            f"in 4 bits can be cut: load it with {LOAD}, or without quantization_config"
        )
    for name, module in found.items():
        state = getattr(module.weight, "quant_state", None)
        if state is None:
            yield f"the 4-bit weight of {name} is not packed yet: {LOAD} packs it"
        elif getattr(state, "packing_format_for_cpu", False):
            yield f"{name} was called in evaluation, which packs its weight in another way on this CPU: load it anew"
        elif module.in_features % state.blocksize:
            yield (
                f"the 4-bit weight of {name} has blocks of {state.blocksize} elements, and rows of "
                f"{module.in_features}, so that a block spans rows and no rank could hold rows: leave it in 16 bits, "
                f"BitsAndBytesConfig(..., llm_int8_skip_modules=[{name.rpartition('.')[2]!r}])"
            )


def open_four_bit(model: Any) -> None:
    """Gives packed weights the shape of matrices, in place, and makes their scales parameters of the same modules.

    Scales that are in 8 bits themselves (`bnb_4bit_use_double_quant`) become float32 values: their own blocks lie
    across the rows. Their adapters refuse to be merged.
    """
    for module in model.modules():
        if is_four_bit(getattr(module, "base_layer", None)):
            module.merge = _refuse_merging
        if not is_four_bit(module) or hasattr(module, "absmax"):
            continue
        weight, rows = module.weight, module.out_features
        state, packed = weight.quant_state, weight.data.as_subclass(Tensor)
        codes = packed.view(torch.uint8).view(rows, module.in_features // 2)
        module.absmax = nn.Parameter(_scales(state).view(rows, -1), requires_grad=False)
        state.absmax, state.offset, state.state2, state.nested = module.absmax, None, None, False
        module.value_dtype = model.dtype
        weight.__class__ = nn.Parameter
        weight.data = codes
        module.support_avx512bf16_for_cpu = False  # or evaluation would pack the weight in another way


def _refuse_merging(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "adapters of a base in 4 bits cannot be merged here: the sums would be rounded to 4 bits; save them with "
        "trainer.save_model(folder), load the base in 16 bits, and merge there: "
        "PeftModel.from_pretrained(base, folder).merge_and_unload()"
    )


def _scales(state: Any) -> Tensor:
    """Returns the scales of all blocks in float32, as bitsandbytes reads them."""
    if not state.nested:
        return state.absmax.float()
    from bitsandbytes.functional import dequantize_blockwise

    return (dequantize_blockwise(state.absmax, state.state2) + state.offset).float()
