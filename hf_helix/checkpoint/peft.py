"""The adapters of a PEFT model: their files, and the names of their tensors.

In:   a `PeftModel`, cut or not.
Out:  the tensors that PEFT saves, by the names in its own files.
Must hold: PEFT selects the saved tensors and their names.
"""

from pathlib import Path
from typing import Any

from hf_helix.runtime.distributed.agreement import decide_on_rank_0

FILE = "adapter_model.safetensors"

Names = dict[str, dict[str, str]]
"""For every adapter, the names of its tensors in its file, each with the name of the weight in the model."""


def adapter_file(folder: str | Path, adapter: str) -> Path:
    """Returns the path of PEFT's file for an adapter."""
    return Path(folder, FILE) if adapter == "default" else Path(folder, adapter, FILE)


def adapter_names(model: Any) -> Names:
    """Returns the weights that PEFT saves: of adapters, of `modules_to_save`, of trained embeddings. Rank 0 asks.
    Collective."""

    def ask() -> Names:
        from peft import get_peft_model_state_dict  # an optional dependency

        own = {name: name for name, _ in model.named_parameters(remove_duplicate=False)}  # PEFT reads the keys only
        return {
            adapter: get_peft_model_state_dict(model, state_dict=own, adapter_name=adapter)
            for adapter in model.peft_config
        }

    return decide_on_rank_0(ask)
