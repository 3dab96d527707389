"""Weights for a model that no rank ever has whole: from a checkpoint folder, or drawn at random.

In:   a model on the meta device, or one that is cut already; its stage and its mesh; a folder of safetensors, or a
      seed.
Out:  this rank's slices in its parameters, which stay the same objects, so that units and optimizers keep them.
Must hold: nothing is written before every rank has found that names, shapes and types fit; the host holds this rank's
share and, beside it, one tensor (drawn at random: one layer); whatever the layout, the weights are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_helix.checkpoint.materialize import materialize
from hf_helix.checkpoint.reader import FLOATS, Checkpoint, Reader, Source, match, persistent_tensors, some
from hf_helix.operators.unit import COPIED, Placement
from hf_helix.runtime.distributed.agreement import agree_on_success, agree_on_text
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.stage import Stage


@torch.no_grad()
def load_parameters(model: Any, stage: Stage, mesh: Mesh, folder: str | Path) -> None:
    """Read this rank's slices of every parameter that it holds from a Hugging Face checkpoint. Collective.

    Args:
        model: on the meta device, or cut and real. Values are cast to the types of its parameters.
        stage: of the units made from this model, before tiling.
        folder: with `model.safetensors`, or with several files and their index.

    Raises:
        ValueError: on every rank, before anything is written: a file is missing, cut off or no safetensors; tensors
            are missing, unknown, or of another shape or type. Names the file and the tensors.
    """
    places = places_of(model, stage, mesh)
    checkpoint = found = None
    error: Exception | None = None
    try:
        checkpoint = Checkpoint(Path(folder))
        found = _sources(model, places, checkpoint)
    except Exception as problem:
        error = problem
    agree_on_success(error)
    assert checkpoint is not None
    assert found is not None
    about = "\n".join(f"{key} {list(shape)} {dtype}" for key, (_, shape, dtype) in checkpoint.tensors.items())
    agree_on_text(about, f"tensors in {folder}")
    materialize(model, stage, mesh)
    for name, source in found.items():
        if places[name].mine:
            with checkpoint.reader() as reader:
                places[name].read(source, name, model.get_parameter_or_buffer(name), model, reader)


# -- from a folder -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A tensor of the model, and what of it this rank holds.

    Attributes:
        name: the first of its names in the model.
        shape: of the whole; None where this rank holds nothing and cannot know.
        size, rank: of the axis that it is cut over.
    """

    name: str
    shape: tuple[int, ...] | None
    is_float: bool
    mine: bool
    placement: Placement = COPIED
    size: int = 1
    rank: int = 0

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return self.placement.bounds(self.size, self.rank)

    def room(self, dtype: torch.dtype) -> Tensor:
        """For this rank's slice."""
        assert self.shape is not None
        return torch.empty(self.placement.shape(self.shape, self.size, self.rank), dtype=dtype)

    def read(self, source: Source, name: str, out: Tensor, model: Any, reader: Reader) -> None:
        """This rank's slice from the folder, and no more of it where that can be."""
        placement = self.placement
        if source.converter is None:
            self.copy(reader.slice(source.names[0]), out)
        elif source.is_stack and placement.dim == 0 and placement.num_fused == 1:
            ((first, last),) = self.bounds
            out.copy_(source.part(first, last).convert(model, reader.tensor)[name])
        else:
            self.copy(source.convert(model, reader.tensor)[name], out)

    def copy(self, whole: Any, out: Tensor) -> None:
        """This rank's slice of a tensor, or of anything that reads when it is indexed like one."""
        dim = self.placement.dim
        if dim is None:
            out.copy_(whole[...])
            return
        parts = out.detach().split([last - first for first, last in self.bounds], dim)
        for part, (first, last) in zip(parts, self.bounds, strict=True):
            part.copy_(whole[(*[slice(None)] * dim, slice(first, last))])


def places_of(model: Any, stage: Stage, mesh: Mesh) -> dict[str, _Place]:
    """Everything that a checkpoint has, by every name it goes by in the model."""
    owners, placements = stage.owners, stage.all_placements
    found: dict[int, _Place] = {}
    places = {}
    for name, tensor in persistent_tensors(model).items():
        if id(tensor) not in found:
            placement, mine = placements.get(tensor, COPIED), owners.get(tensor, stage.rank) == stage.rank
            known = tensor.numel() > 0 or mine
            shape = placement.whole_shape(tensor.shape) if known else None
            axis = mesh.axis_of(placement)
            found[id(tensor)] = _Place(name, shape, tensor.is_floating_point(), mine, placement, axis.size, axis.rank)
        places[name] = found[id(tensor)]
    return places


def _sources(model: Any, places: Mapping[str, _Place], checkpoint: Checkpoint) -> dict[str, Source]:
    """What each tensor of the model is read from, by one of its names.

    Raises:
        ValueError: whatever does not fit, all at once.
    """
    sources, unknown = match(model, checkpoint.tensors)
    found: dict[str, dict[str, Source]] = {place.name: {} for place in places.values()}
    problems: list[str] = []
    for source in sources:
        for name, shape in _shapes(source, model, checkpoint, problems).items():
            if name not in places:
                unknown.append(name)
                continue
            found[places[name].name][name] = source
            if shape is not None:
                problems += _misfits(places[name], name, shape, source, checkpoint)
    missing = [name for name, by in found.items() if not by]
    if missing:
        problems.append(f"nothing for {some(missing)}")
    if unknown:
        problems.append(f"the model has no place for {some(unknown)}")
    if not problems:
        problems += _differing(model, places, found, checkpoint)
    if problems:
        about = f"the weights in {checkpoint.folder} do not fit this {type(model).__name__}"
        raise ValueError(f"{about}; give the folder that belongs to its config:\n  " + "\n  ".join(problems))
    return dict(next(iter(by.items())) for by in found.values())


def _shapes(source: Source, model: Any, checkpoint: Checkpoint, problems: list[str]) -> dict[str, Any]:
    """The shapes of what a source makes, tried on the meta device; None where that fails."""
    try:
        made = source.convert(model, checkpoint.outline)
    except Exception as error:
        problems.append(f"{source.target} cannot be made of {some(source.names)}: {error}")
        return {source.target: None}
    return {name: tuple(outline.shape) for name, outline in made.items()}


def _misfits(place: _Place, name: str, shape: Any, source: Source, checkpoint: Checkpoint) -> list[str]:
    if place.shape not in (None, shape):
        return [f"{name} is {list(shape)} there, and {list(place.shape or ())} in the model"]
    types = {key: checkpoint.tensors[key].dtype for key in source.names}
    odd = [f"{key} is {dtype}" for key, dtype in types.items() if (dtype in FLOATS) is not place.is_float]
    return [f"{some(odd)}; numbers must be one of {', '.join(FLOATS)}"] if odd else []


def _differing(
    model: Any, places: Mapping[str, _Place], found: Mapping[str, Mapping[str, Source]], checkpoint: Checkpoint
) -> list[str]:
    """Of tensors that are one in the model and several in the folder, those that are not equal there."""
    problems = []
    for name, by in found.items():
        if len(by) == 1 or not places[name].mine:
            continue
        values = []
        for other, source in by.items():
            with checkpoint.reader() as reader:
                values.append(places[name].room(model.get_parameter_or_buffer(name).dtype))
                places[name].read(source, other, values[-1], model, reader)
        if not all(torch.equal(values[0], value) for value in values[1:]):
            problems.append(f"{' and '.join(by)} differ, and are one in the model; use tie_word_embeddings=False")
    return problems


# -- at random ---------------------------------------------------------------------------------------------------
