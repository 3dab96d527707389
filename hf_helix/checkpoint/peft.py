"""The adapters of a cut PEFT model in PEFT's own files.

In:   a `PeftModel` with cut weights; a folder written by `save.save_full`.
Out:  the names of the tensors that PEFT saves; the contents of the files in the cut model.
Must hold: PEFT selects the saved tensors and their names. Nothing is loaded before every rank has checked its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_helix.checkpoint.cut_parameters import UnshardedParameters
from hf_helix.checkpoint.load import ModelTensor, model_tensors
from hf_helix.checkpoint.reader import open_safetensors
from hf_helix.runtime.distributed.agreement import on_all_ranks
from hf_helix.runtime.distributed.groups import control_group
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.stage import Stage

FILE = "adapter_model.safetensors"

Names = dict[str, dict[str, str]]
"""For every adapter, the names of its tensors in its file, each with the name of the weight in the model."""


@torch.no_grad()
def load_adapters(model: Any, stage: Stage, mesh: Mesh, folder: str | Path) -> None:
    """Reads the adapters of a cut model from a folder of `save_full`, written on any layout. Collective. Raises
    ValueError, on every rank and before anything is written, if a file is missing or damaged, or holds other tensors.
    """
    tensors = model_tensors(model, stage, mesh)
    files = {adapter_file(folder, adapter): names for adapter, names in adapter_names(model).items()}

    def check() -> None:
        for path, names in files.items():
            _check(path, names, tensors)

    on_all_ranks(check)
    with UnshardedParameters(stage, written=True) as unsharded:
        for path, names in files.items():
            with open_safetensors(path) as file:
                for key, name in names.items():
                    weight = model.get_parameter(name)
                    unsharded.unshard(weight)
                    if tensors[name].is_local:
                        tensors[name].copy_slice(file.get_slice(key), weight)


def adapter_file(folder: str | Path, adapter: str) -> Path:
    """Returns the path of PEFT's file for an adapter."""
    return Path(folder, FILE) if adapter == "default" else Path(folder, adapter, FILE)


def _check(path: Path, names: dict[str, str], tensors: Mapping[str, ModelTensor]) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing; give a folder to which the adapters of this model were saved")
    with open_safetensors(path) as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    strange = sorted(shapes.keys() ^ names.keys())
    if strange:
        where = "the model has no place for it" if strange[0] in shapes else "it is not there"
        raise ValueError(f"{path} does not fit the adapters of this model: {strange[0]}: {where}")
    for key, name in names.items():
        wanted = tensors[name].shape  # unknown for weights of other pipeline ranks
        if wanted not in (None, shapes[key]):
            raise ValueError(f"{path}: {key} is {list(shapes[key])} there, and {list(wanted or ())} in the model")


def adapter_names(model: Any) -> Names:
    """Returns the weights that PEFT saves: of adapters, of `modules_to_save`, of trained embeddings. Rank 0 asks.
    Collective."""
    box: list[Names] = [{}]
    if rank() == 0:
        from peft import get_peft_model_state_dict  # an optional dependency

        own = {name: name for name, _ in model.named_parameters(remove_duplicate=False)}  # PEFT reads the keys only
        for adapter in model.peft_config:
            box[0][adapter] = get_peft_model_state_dict(model, state_dict=own, adapter_name=adapter)
    if world_size() > 1:
        dist.broadcast_object_list(box, src=0, group=control_group())
    return box[0]
