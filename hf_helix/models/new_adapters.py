"""New adapters of PEFT, for models that are measured or proven rather than trained.

In:   a Transformers model.
Out:  the model with LoRA adapters inside, far from zero.
Must hold: peft is imported when adapters are asked for.
"""

import importlib
import logging
from typing import Any


def import_peft() -> Any:
    """Returns the package peft.

    Raises:
        ValueError: it is not installed.
    """
    # bitsandbytes, imported by PEFT, warns of a kernel that no adapter here needs.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ValueError("adapters need the package peft: pip install peft") from error


def adapt_experts(model: Any, rank: int = 3) -> Any:
    """Returns a model with LoRA adapters of all its experts inside, and nothing else trained.

    Raises:
        ValueError: PEFT is not installed, or the model has no parameter with a matrix for each expert.
    """
    peft = import_peft()
    stacked = [name for name, value in model.named_parameters() if ".experts." in name and value.dim() == 3]
    if not stacked:
        raise ValueError(
            f"{type(model).__name__} has no parameter with a matrix for each expert, which target_parameters could name"
        )
    names = sorted({".".join(name.split(".")[-2:]) for name in stacked})
    config = peft.LoraConfig(r=rank, target_modules=[], target_parameters=names, init_lora_weights=False)
    return peft.inject_adapter_in_model(config, model)
