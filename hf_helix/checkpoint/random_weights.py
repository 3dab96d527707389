"""Makes models on the meta device, and draws random weights for each rank's part.

In:   a checkpoint folder's configuration, or a cut model on the meta device.
Out:  the model; parameters and buffers of this rank, on its device.
Must hold: a seed gives the same weights on every layout of ranks; no rank ever holds the full model.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from transformers import AutoConfig, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from hf_helix.checkpoint.load import model_tensors
from hf_helix.checkpoint.reader import Checkpoint
from hf_helix.checkpoint.shard import UnshardedParameters, materialize
from hf_helix.models.causal_lm import build_causal_lm
from hf_helix.planning.text import shorten_list
from hf_helix.runtime.distributed.agreement import check_same_on_all_ranks
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.stage import Stage


def build_on_meta(folder: str | os.PathLike[str], dtype: Any = "auto", **options: Any) -> Any:
    """Returns the causal language model of a checkpoint folder, as `from_pretrained` makes the model, on the meta
    device.

    Args:
        options: for `AutoModelForCausalLM.from_config`, such as `attn_implementation`.

    Raises:
        ValueError: the folder has no `config.json`.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ValueError(
            f"model={str(folder)!r} is no folder with a config.json on this host; download a model first, `hf download "
            "NAME --local-dir FOLDER`, or give a model that is made already"
        )
    config = AutoConfig.from_pretrained(path)
    if dtype == "auto":
        dtype = config.dtype or Checkpoint(path).dtype
    with torch.device("meta"):
        model = build_causal_lm(config, dtype=dtype, **options)
    if (path / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


@torch.no_grad()
def initialize_parameters(model: Any, layers: Sequence[nn.Module], stage: Stage, mesh: Mesh, seed: int) -> None:
    """Draws random weights for a model on the meta device, layer by layer, with its own `_init_weights`. Collective.

    Every layer, and every module outside of the layers, has a seed of its own, made from `seed` and its name, so the
    weights do not depend on the layout. The weights differ from a model drawn at once with this seed, whose modules
    draw in sequence.

    Raises:
        ValueError: a module draws weights of another module.
    """
    check_same_on_all_ranks(f"seed={seed}", "seeds")
    on_meta = copy.deepcopy(model)  # takes no memory
    pieces = modules_drawn_apart(model, layers)
    check_pieces(on_meta, pieces)
    materialize(model, stage, mesh)
    tensors = model_tensors(model, stage, mesh)
    # One buffer for all pieces: a buffer for each piece would fragment the allocator.
    sizes = [sum(weight.numel() for weight in on_meta.get_submodule(piece).parameters()) for piece in pieces]
    buffer = torch.empty(max(sizes), dtype=model.dtype)
    with UnshardedParameters(stage, written=True) as unsharded:
        for piece in pieces:
            names = [name for name, _ in model.get_submodule(piece).named_parameters(piece)]
            names = [name for name in names if tensors[name].is_local and tensors[name].name == name]
            if not names:
                continue
            with torch.random.fork_rng(devices=[]):
                # `torch.manual_seed` would seed the generators of GPUs as well, which are not restored here.
                own = int.from_bytes(hashlib.sha256(f"{seed} {piece}".encode()).digest()[:7], "big")
                torch.default_generator.manual_seed(own)
                _move_into(on_meta.get_submodule(piece), buffer).apply(on_meta._init_weights)
            for name in names:
                out = model.get_parameter(name)
                unsharded.unshard(out)
                tensors[name].copy_slice(on_meta.get_parameter(name), out)


def modules_drawn_apart(model: nn.Module, layers: Sequence[nn.Module]) -> list[str]:
    """Returns the names of the modules with a seed of their own: layers, and other modules with parameters."""
    pieces: list[str] = []
    for name, module in model.named_modules():
        own = any(True for _ in module.parameters(recurse=False))
        if not _is_inside(name, pieces) and (own or any(module is layer for layer in layers)):
            pieces.append(name)
    return pieces


def _move_into(piece: nn.Module, buffer: Tensor) -> nn.Module:
    """Makes the parameters of a module consecutive views of a buffer."""
    start = 0
    for weight in piece.parameters():
        swap_tensors(weight, nn.Parameter(buffer[start : start + weight.numel()].view(weight.shape)))
        start += weight.numel()
    return piece


def _is_inside(name: str, pieces: Sequence[str]) -> bool:
    return any(not piece or name == piece or name.startswith(f"{piece}.") for piece in pieces)


def check_pieces(on_meta: Any, pieces: Sequence[str]) -> None:
    """Raises ValueError if a module around the pieces draws weights of a piece."""
    weights = dict(on_meta.named_parameters())
    before = {name: weight._version for name, weight in weights.items()}
    for name, module in on_meta.named_modules():
        if not _is_inside(name, pieces):
            on_meta._init_weights(module)
    drawn = [name for name, weight in weights.items() if weight._version != before[name]]
    if drawn:
        raise ValueError(
            f"{type(on_meta).__name__}._init_weights draws {shorten_list(drawn)} from a module around the layers, so "
            "the model cannot be drawn layer by layer; save one that is made whole, and start from its folder "
            "(weights=...)"
        )
