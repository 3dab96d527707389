"""Weights of a model that no rank ever holds in full: from a checkpoint folder, or at random.

In:   a model on the meta device, or a cut model; its stage and its mesh; a folder of safetensors, or a seed.
Out:  this rank's slices in its parameters, which stay the same objects for units and optimizers; a folder's model on
      the meta device.
Must hold: nothing is written before every rank has checked names, shapes and dtypes; the host holds this rank's share
and one more tensor; the weights do not depend on the layout of the ranks.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from transformers import AutoConfig, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from hf_helix.checkpoint.cut_parameters import UnshardedParameters, materialize
from hf_helix.checkpoint.reader import FLOATS, Checkpoint, Reader, Source, match_tensors, persistent_tensors
from hf_helix.models.causal_lm import build_causal_lm
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.param_shard import COPIED, Placement
from hf_helix.planning.text import shorten_list
from hf_helix.runtime.distributed.agreement import check_same_on_all_ranks, on_all_ranks
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.stage import Stage


@torch.no_grad()
def load_parameters(model: Any, stage: Stage, mesh: Mesh, folder: str | Path) -> None:
    """Reads this rank's slices of its parameters from a Hugging Face checkpoint: `model.safetensors`, or several files
    and their index. Collective.

    Args:
        model: on the meta device, or cut. Values are cast to the dtypes of its parameters.
        stage, mesh, folder: the model's units on this rank, the layout of the ranks, the folder of the checkpoint.

    Raises:
        ValueError: on every rank, before anything is written: a file is missing, cut off or no safetensors; tensors are
            missing, unknown, or of another shape or dtype. Names the file and the tensors.
    """
    tensors = model_tensors(model, stage, mesh)
    checkpoint = on_all_ranks(lambda: Checkpoint(Path(folder)))
    sources = on_all_ranks(lambda: _sources(model, tensors, checkpoint))
    about = "\n".join(f"{key} {list(shape)} {dtype}" for key, (_, shape, dtype) in checkpoint.tensors.items())
    check_same_on_all_ranks(about, f"tensors in {folder}")
    materialize(model, stage, mesh)
    with UnshardedParameters(stage, written=True) as unsharded:
        for name, source in sources.items():
            if tensors[name].is_local:
                out = model.get_parameter_or_buffer(name)
                unsharded.unshard(out)
                with checkpoint.reader() as reader:
                    tensors[name].read(source, name, out, model, reader)


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the model, and this rank's slice."""

    name: str  # the first of its names in the model
    shape: tuple[int, ...] | None  # of the full tensor; None if unknown on this rank, which holds nothing of the tensor
    is_float: bool
    is_local: bool
    placement: Placement
    axis: Axis  # the ranks of the slices

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first and the last index, exclusive, of every block of this rank's slice."""
        return self.placement.bounds(self.axis.size, self.axis.rank)

    def read(self, source: Source, name: str, out: Tensor, model: Any, reader: Reader) -> None:
        """Reads this rank's slice of parameter `name` into `out`, and if possible no other part of the tensor."""
        placement = self.placement
        if source.converter is None:
            self.copy_slice(reader.slice(source.names[0]), out)
        elif source.is_cut_stack(placement):
            ((first, last),) = self.bounds
            out.copy_(source.part(first, last).convert(model, reader.tensor)[name])
        else:
            self.copy_slice(source.convert(model, reader.tensor)[name], out)

    def copy_slice(self, full: Any, out: Tensor) -> None:
        """Copies this rank's slice of a full tensor, or of any object that supports indexing."""
        dim = self.placement.dim
        if dim is None:
            out.copy_(full[...])
            return
        parts = out.detach().split([last - first for first, last in self.bounds], dim)
        for part, (first, last) in zip(parts, self.bounds, strict=True):
            part.copy_(full[(*[slice(None)] * dim, slice(first, last))])


def model_tensors(model: Any, stage: Stage, mesh: Mesh) -> dict[str, ModelTensor]:
    """Returns all tensors of a checkpoint of the model, by every name in the model."""
    owners, placements = stage.owners, stage.all_placements
    made: dict[int, ModelTensor] = {}
    by_name = {}
    for name, tensor in persistent_tensors(model).items():
        if id(tensor) not in made:
            placement, is_local = placements.get(tensor, COPIED), owners.get(tensor, stage.rank) == stage.rank
            has_shape = tensor.numel() > 0 or is_local
            shape = placement.full_shape(tensor.shape) if has_shape else None
            axis = mesh.axis_of(placement)
            made[id(tensor)] = ModelTensor(name, shape, tensor.is_floating_point(), is_local, placement, axis)
        by_name[name] = made[id(tensor)]
    return by_name


def _sources(model: Any, tensors: Mapping[str, ModelTensor], checkpoint: Checkpoint) -> dict[str, Source]:
    """Returns the source of every tensor, by one of the tensor's names. Raises ValueError with all differences."""
    sources, unknown = match_tensors(model, checkpoint.tensors)
    by_tensor: dict[str, dict[str, Source]] = {tensor.name: {} for tensor in tensors.values()}
    problems: list[str] = []
    for source in sources:
        for name, shape in _shapes(source, model, checkpoint, problems).items():
            if name not in tensors:
                unknown.append(name)
                continue
            by_tensor[tensors[name].name][name] = source
            if shape is not None:
                problems += _misfits(tensors[name], name, shape, source, checkpoint)
    missing = [name for name, candidates in by_tensor.items() if not candidates]
    if missing:
        problems.append(f"nothing for {shorten_list(missing)}")
    if unknown:
        problems.append(f"the model has no place for {shorten_list(unknown)}")
    if not problems:
        problems += _unequal(model, tensors, by_tensor, checkpoint)
    if problems:
        about = f"the weights in {checkpoint.folder} do not fit this {type(model).__name__}"
        raise ValueError(
            f"{about}: " + "\n  ".join([f"{problems[0]}; give the folder that belongs to its config", *problems[1:]])
        )
    return dict(next(iter(candidates.items())) for candidates in by_tensor.values())


def _shapes(source: Source, model: Any, checkpoint: Checkpoint, problems: list[str]) -> dict[str, Any]:
    """Returns the shapes of the parameters of a source, tried on the meta device; None after a failure."""
    try:
        made = source.convert(model, checkpoint.meta_tensor)
    except Exception as error:
        problems.append(f"{source.target} cannot be made of {shorten_list(source.names)}: {error}")
        return {source.target: None}
    return {name: tuple(tensor.shape) for name, tensor in made.items()}


def _misfits(tensor: ModelTensor, name: str, shape: Any, source: Source, checkpoint: Checkpoint) -> list[str]:
    """Returns problems with the shape and the dtypes of a source."""
    if tensor.shape not in (None, shape):
        return [f"{name} is {list(shape)} there, and {list(tensor.shape or ())} in the model"]
    types = {key: checkpoint.tensors[key].dtype for key in source.names}
    odd = [f"{key} is {dtype}" for key, dtype in types.items() if (dtype in FLOATS) is not tensor.is_float]
    return [f"{shorten_list(odd)}; numbers must be one of {', '.join(FLOATS)}"] if odd else []


def _unequal(
    model: Any,
    tensors: Mapping[str, ModelTensor],
    by_tensor: Mapping[str, Mapping[str, Source]],
    checkpoint: Checkpoint,
) -> list[str]:
    """Returns problems with tied weights: a single tensor in the model, several unequal tensors in the folder."""
    problems = []
    for name, sources in by_tensor.items():
        if len(sources) == 1 or not tensors[name].is_local:
            continue
        values = []
        for other, source in sources.items():
            with checkpoint.reader() as reader:
                held = tensors[name]
                assert held.shape is not None
                shape = held.placement.shape(held.shape, held.axis.size, held.axis.rank)
                values.append(torch.empty(shape, dtype=model.get_parameter_or_buffer(name).dtype))
                tensors[name].read(source, other, values[-1], model, reader)
        if not all(torch.equal(values[0], value) for value in values[1:]):
            problems.append(f"{' and '.join(sources)} differ, and are one in the model; use tie_word_embeddings=False")
    return problems


# -- models on the meta device, and random weights --------------------------------------------------------------------


def build_on_meta(folder: str | os.PathLike[str], dtype: Any = "auto", **options: Any) -> Any:
    """Returns the causal language model of a checkpoint folder, as `from_pretrained` makes the model, on the meta
    device; `options` are for `AutoModelForCausalLM.from_config`, such as `attn_implementation`.

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
