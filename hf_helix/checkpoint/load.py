"""Weights of a model that no rank ever holds in full: from a checkpoint folder, or at random.

In:   a model on the meta device, or a cut model; the rank's units and its mesh; a folder of safetensors, or a seed.
Out:  this rank's slices in its parameters, which stay the same objects for units and optimizers; a folder's model on
      the meta device.
Must hold: nothing is written before every rank has checked names, shapes and dtypes; the host holds this rank's share
and one more tensor; the weights do not depend on the layout of the ranks.
"""

import copy
import functools
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from transformers import AutoConfig, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from hf_helix.checkpoint.cut_parameters import materialize
from hf_helix.checkpoint.reader import FLOATS, Checkpoint, Source, match_tensors, persistent_tensors
from hf_helix.models.stock.causal_lm import build_causal_lm
from hf_helix.operators.parameters.parts import views_with_index
from hf_helix.planning.parameters import Parameter, Part
from hf_helix.planning.text import shorten_list
from hf_helix.runtime.distributed.agreement import check_same_on_all_ranks, decide_on_rank_0, on_all_ranks
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.rank_units import RankUnits


@torch.no_grad()
def load_parameters(model: Any, rank_units: RankUnits, mesh: Mesh, folder: str | Path) -> None:
    """Reads this rank's slices of its parameters from a Hugging Face checkpoint: `model.safetensors`, or several files
    and their index. Collective.

    Args:
        model: on the meta device, or cut. Values are cast to the dtypes of its parameters.
        rank_units, mesh, folder: the model's units on this rank, the layout of the ranks, the folder of the checkpoint.

    Raises:
        ValueError: on every rank, before anything is written: a file is missing, cut off or no safetensors; tensors are
            missing, unknown, or of another shape or dtype. Names the file and the tensors.
    """
    target = Target(model, rank_units, mesh)
    checkpoint = on_all_ranks(lambda: Checkpoint(Path(folder)))
    target.fill({name: (checkpoint, source) for name, source in target.sources(checkpoint).items()})


@torch.no_grad()
def load_adapters(model: Any, rank_units: RankUnits, mesh: Mesh, folder: str | Path) -> None:
    """Reads the adapters of a cut model from a folder of `save_full`, written on any layout. Collective. Raises
    ValueError, on every rank and before anything is written, if a file is missing or damaged, or holds other tensors.
    """
    target = Target(model, rank_units, mesh)
    sources: dict[str, tuple[Checkpoint, Source]] = {}
    for adapter, names in adapter_names(model).items():
        checkpoint = on_all_ranks(functools.partial(_open_adapter, adapter_file(folder, adapter)))
        sources |= {name: (checkpoint, source) for name, source in target.sources(checkpoint, names).items()}
    target.fill(sources)


def _open_adapter(path: Path) -> Checkpoint:
    if not path.is_file():
        raise ValueError(f"{path} is missing; {_OF_ADAPTERS}")
    return Checkpoint(path)


_OF_ADAPTERS = "give a folder to which the adapters of this model were saved"


class Target:
    """The tensors of a model, with the part of this rank.

    Attributes:
        tensors: the tensors of `state_dict`, by every name in the model; of a cut model, this rank's slices.
    """

    def __init__(self, model: Any, rank_units: RankUnits, mesh: Mesh) -> None:
        self.tensors = persistent_tensors(model)
        self._model, self._rank_units, self._mesh = model, rank_units, mesh
        self._first_names: dict[int, str] = {}  # of tied weights, by the id of their tensor
        for name, tensor in self.tensors.items():
            self._first_names.setdefault(id(tensor), name)
        elsewhere = rank_units.rows.keys() - rank_units.own_rows.keys()
        self._slices = {
            name: _slice(name, tensor, rank_units, mesh)
            for name, tensor in self.tensors.items()
            if tensor not in elsewhere
        }

    def _first_name(self, name: str) -> str:
        return self._first_names[id(self.tensors[name])]

    def sources(self, checkpoint: Checkpoint, names: Mapping[str, str] | None = None) -> dict[str, Source]:
        """Returns the source of every tensor, by one of the tensor's names. Collective.

        Args:
            checkpoint: with the sources.
            names: the names of the wanted tensors on disk, each with its name in the model; None for the full model.

        Raises:
            ValueError: on every rank, with all differences.
        """
        sources = on_all_ranks(lambda: self._checked(checkpoint, names))
        about = "\n".join(f"{key} {list(shape)} {dtype}" for key, (_, shape, dtype) in checkpoint.tensors.items())
        check_same_on_all_ranks(about, f"tensors in {checkpoint.folder}")
        return sources

    def _checked(self, checkpoint: Checkpoint, names: Mapping[str, str] | None) -> dict[str, Source]:
        keys = checkpoint.tensors.keys()
        if names is None:
            wanted: Iterable[str] = self.tensors
            sources, unknown = match_tensors(self._model, keys)
        else:
            wanted = names.values()
            sources = [Source(names[key], {key: [key]}) for key in keys if key in names]
            unknown = sorted(keys - names.keys())
        by_tensor: dict[str, dict[str, Source]] = {self._first_name(name): {} for name in wanted}
        problems: list[str] = []
        for source in sources:
            for name, shape in self._shapes(source, checkpoint, problems).items():
                if name not in self.tensors:
                    unknown.append(name)
                    continue
                by_tensor[self._first_name(name)][name] = source
                if shape is not None and name in self._slices:
                    problems += self._misfits(name, shape, source, checkpoint)
        missing = [name for name, candidates in by_tensor.items() if not candidates]
        if missing:
            problems.append(f"nothing for {shorten_list(missing)}")
        if unknown:
            problems.append(f"the model has no place for {shorten_list(unknown)}")
        if not problems:
            problems += self._unequal(by_tensor.values(), checkpoint)
        if problems:
            about = f"the weights in {checkpoint.folder} do not fit this {type(self._model).__name__}"
            instead = "give the folder that belongs to its config" if names is None else _OF_ADAPTERS
            raise ValueError(f"{about}: " + "\n  ".join([f"{problems[0]}; {instead}", *problems[1:]]))
        return dict(next(iter(candidates.items())) for candidates in by_tensor.values())

    def _shapes(self, source: Source, checkpoint: Checkpoint, problems: list[str]) -> dict[str, Any]:
        """Returns the shapes of the parameters of a source, tried on the meta device; None after a failure."""
        try:
            made = source.convert(self._model, checkpoint.meta_tensor)
        except Exception as error:
            problems.append(f"{source.target} cannot be made of {shorten_list(source.names)}: {error}")
            return {source.target: None}
        return {name: tuple(tensor.shape) for name, tensor in made.items()}

    def _misfits(self, name: str, shape: tuple[int, ...], source: Source, checkpoint: Checkpoint) -> list[str]:
        """Returns problems with the shape and the dtypes of a source."""
        tensor = self.tensors[name]
        full = self._slices[name].row.shape
        if full != shape:
            return [f"{name} is {list(shape)} there, and {list(full)} in the model"]
        types = {key: checkpoint.tensors[key].dtype for key in source.names}
        odd = [
            f"{key} is {dtype}" for key, dtype in types.items() if (dtype in FLOATS) is not tensor.is_floating_point()
        ]
        return [f"{shorten_list(odd)}; numbers must be one of {', '.join(FLOATS)}"] if odd else []

    def _unequal(self, by_tensor: Iterable[Mapping[str, Source]], checkpoint: Checkpoint) -> list[str]:
        """Returns problems with tied weights: a single tensor in the model, several unequal tensors in the folder."""
        problems = []
        for sources in (each for each in by_tensor if len(each) > 1 and not each.keys() - self._slices.keys()):
            values = []
            for name, source in sources.items():
                part = self._slices[name]
                values.append(torch.empty(part.shape, dtype=self.tensors[name].dtype))
                self._read(name, checkpoint, source, part, values[-1])
            if not all(torch.equal(values[0], value) for value in values[1:]):
                problems.append(
                    f"{' and '.join(sources)} differ, and are one in the model; use tie_word_embeddings=False"
                )
        return problems

    def fill(self, sources: Mapping[str, tuple[Checkpoint, Source]]) -> None:
        """Reads this rank's part of every tensor from its source, by one of the tensor's names."""
        parts = _materialized_parts(self._model, self._rank_units, self._mesh)
        for name, (checkpoint, source) in sources.items():
            if name in self._slices:
                self._read(name, checkpoint, source, *parts[self._first_name(name)])
        self._rank_units.mark_weights_stale()

    def _read(self, name: str, checkpoint: Checkpoint, source: Source, part: Part, out: Tensor) -> None:
        """Reads this rank's part of a tensor, and if possible no other part."""
        with checkpoint.reader() as reader:
            if source.converter is None:
                _copy_part(part, reader.slice(source.names[0]), out)
            elif source.is_cut_stack(part.row.cut):
                ((first, last),) = part.row.cut.bounds(*part.ranks)
                made = source.part(first, last).convert(self._model, reader.tensor)[name]
                _copy_part(part.in_slice, made, out)
            else:
                _copy_part(part, source.convert(self._model, reader.tensor)[name], out)


def _materialized_parts(model: Any, rank_units: RankUnits, mesh: Mesh) -> dict[str, tuple[Part, Tensor]]:
    """Gives this rank's part of a model memory, and returns every tensor of a checkpoint by its first name: the part
    of this rank, or its shard of the part, and the position of the part."""
    for flat in rank_units.flat_parameters:
        flat.check_resharded()
    materialize(model, rank_units, mesh)
    held = rank_units.parts(mesh.place).items()
    parts: dict[str, tuple[Part, Tensor]] = {part.row.name: (part, stepped) for stepped, part in held}
    for name, tensor in persistent_tensors(model).items():
        if not isinstance(tensor, nn.Parameter):
            parts[name] = _slice(name, tensor, rank_units, mesh), tensor
    return parts


def _slice(name: str, tensor: Any, rank_units: RankUnits, mesh: Mesh) -> Part:
    """Returns this rank's slice of a parameter, or of a buffer, which every rank has in full."""
    row = rank_units.own_rows.get(tensor) or Parameter(name, tuple(tensor.shape), owner=mesh.pipe.rank)
    return Part(replace(row, shape=row.cut.full_shape(tensor.shape), flat=None), mesh.place)


def _copy_part(part: Part, full: Any, out: Tensor) -> None:
    """Copies this rank's part of a full tensor, or of any object that supports indexing."""
    for view, index in views_with_index(part, out.detach()):
        view.copy_(full[index or ...])


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
def initialize_parameters(
    model: Any, layers: Sequence[nn.Module], rank_units: RankUnits, mesh: Mesh, seed: int
) -> None:
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
    parts = _materialized_parts(model, rank_units, mesh)
    # One buffer for all pieces: a buffer for each piece would fragment the allocator.
    sizes = [sum(weight.numel() for weight in on_meta.get_submodule(piece).parameters()) for piece in pieces]
    buffer = torch.empty(max(sizes), dtype=model.dtype)
    for piece in pieces:
        names = [name for name, _ in model.get_submodule(piece).named_parameters(piece) if name in parts]
        if not names:
            continue
        with torch.random.fork_rng(devices=[]):
            # `torch.manual_seed` would seed the generators of GPUs as well, which are not restored here.
            own = int.from_bytes(hashlib.sha256(f"{seed} {piece}".encode()).digest()[:7], "big")
            torch.default_generator.manual_seed(own)
            _move_into(on_meta.get_submodule(piece), buffer).apply(on_meta._init_weights)
        for name in names:
            part, out = parts[name]
            _copy_part(part, on_meta.get_parameter(name), out)
    rank_units.mark_weights_stale()


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


# -- adapters --------------------------------------------------------------------------------------------------------

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
