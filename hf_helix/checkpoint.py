"""Hugging Face checkpoint <-> shards.

In:   a whole model on every rank; later, the cut one.
Out:  parameters cut in place under their own names, those of other pipeline ranks emptied; ordinary safetensors in a
      folder.
Must hold: names (those on disk, where Transformers has others in memory), types and configuration never change;
`from_pretrained` loads what is saved, from any layout. The writing rank holds its own share and one file's tensors, and
a file is no larger than the largest single unit (a layer, the embedding or the head).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from hf_helix.operators.unit import Placement, Unit
from hf_helix.runtime.mesh import Mesh, rank, world_size
from hf_helix.runtime.stage import Stage

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


def cut_parameters(stage: Stage, mesh: Mesh) -> None:
    """Keep this rank's slice of every parameter that it holds, in place, and nothing of the others.

    Rank 0's values count, as with DDP: where another rank starts from other weights (a model initialised at random
    without a common seed), it gets rank 0's. Parameters of other pipeline ranks stay in the model under their names,
    empty and not trained.
    """
    placements = stage.all_placements
    if world_size() > 1:
        _align_with_rank_0(list(placements), mesh.device)
    owners = stage.owners
    for parameter, placement in placements.items():
        if owners[parameter] != stage.rank:
            parameter.data = parameter.data.new_empty(0)
            parameter.requires_grad_(False)
        else:
            axis = mesh.axis_of(placement)
            parameter.data = placement.cut(parameter.data, axis.size, axis.rank)


def whole_parameter(value: Tensor | None, placement: Placement, mesh: Mesh, owner: int = 0) -> Tensor | None:
    """The uncut tensor on the first of the ranks that hold a copy together, None on the others. Collective over these.

    The writing rank allocates the whole once, and one slice where slices do not lie in one piece.

    Args:
        value: this rank's slice of a parameter, or of its gradient; on ranks that do not hold it, anything.
        owner: the pipeline rank that holds it.
    """
    pipe = mesh.pipe
    whole = _join_slices(value.detach(), placement, mesh) if pipe.rank == owner and value is not None else None
    if owner == 0 or mesh.axis_of(placement).rank > 0:
        return whole if pipe.rank == 0 else None
    if pipe.rank == owner:
        assert whole is not None
        about: list[Any] = [tuple(whole.shape), whole.dtype]
        dist.send_object_list(about, pipe.ranks[0], group=pipe.group)
        dist.send(whole.contiguous(), pipe.ranks[0], group=pipe.group)
    if pipe.rank > 0:
        return None
    about = [None, None]
    dist.recv_object_list(about, pipe.ranks[owner], group=pipe.group)
    arrived = torch.empty(about[0], dtype=about[1], device=mesh.device)
    dist.recv(arrived, pipe.ranks[owner], group=pipe.group)
    return arrived


def _join_slices(value: Tensor, placement: Placement, mesh: Mesh) -> Tensor | None:
    """The uncut tensor on the first rank of the axis it is cut over, None on the others. Collective over it."""
    axis = mesh.axis_of(placement)
    if axis.group is None or placement.dim is None:
        return value if axis.rank == 0 else None
    ranks = dist.get_process_group_ranks(axis.group)
    if axis.rank > 0:
        dist.send(value.contiguous(), ranks[0], group=axis.group)
        return None
    shape = list(value.shape)
    shape[placement.dim] = placement.length
    whole = value.new_empty(shape)
    placement.paste(whole, value, axis.size, 0)
    for number, source in enumerate(ranks[1:], 1):
        places = placement.slices(whole, axis.size, number)
        if len(places) == 1 and places[0].is_contiguous():
            dist.recv(places[0], source, group=axis.group)
            continue
        shape[placement.dim] = sum(place.shape[placement.dim] for place in places)
        arrived = whole.new_empty(shape)
        dist.recv(arrived, source, group=axis.group)
        placement.paste(whole, arrived, axis.size, number)
    return whole


def save_pretrained(model: Any, stage: Stage, mesh: Mesh, folder: str | Path) -> None:
    """Write the model as an ordinary Hugging Face checkpoint. Collective; rank 0 writes.

    Files of an earlier save in the same folder go once the new ones are complete.
    """
    folder = Path(folder)
    names = {parameter: name for name, parameter in model.named_parameters()}
    writer = _Writer(folder, model) if rank() == 0 else None
    units, owners = list(stage.model.values()), stage.owners
    sizes = _whole_bytes(stage, mesh)
    limit = max(sum(sizes[parameter] for parameter in unit.placements) for unit in units)
    for group in _file_groups(units, sizes, limit):
        tensors = {}
        for parameter, placement in group.items():
            if mesh.holds_first_copy(placement):
                whole = whole_parameter(parameter, placement, mesh, owners[parameter])
                if whole is not None:
                    tensors[names[parameter]] = whole.cpu()
        if writer is not None:
            writer.write(tensors)
    if writer is not None:
        writer.finish()
    if world_size() > 1:
        dist.barrier()


class _Writer:
    """Writes shards under temporary names and puts them in place at the end."""

    def __init__(self, folder: Path, model: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.model = model
        self._files: list[Path] = []
        self._keys: list[list[str]] = []
        self._bytes = 0

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        path = self.folder / f".helix-{os.getpid()}-{len(self._files)}.tmp"
        tensors = {name: _alone(value) for name, value in revert_weight_conversion(self.model, dict(tensors)).items()}
        save_file(tensors, path, metadata={"format": "pt"})
        self._files.append(path)
        self._keys.append(list(tensors))
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self) -> None:
        count = len(self._files)
        width = max(5, len(str(count)))
        names = [f"model-{i + 1:0{width}d}-of-{count:0{width}d}.safetensors" for i in range(count)]
        names = [SINGLE_NAME] if count == 1 else names
        for path, name in zip(self._files, names, strict=True):
            path.replace(self.folder / name)
        for file in self.folder.iterdir():
            is_left_over = file.name.startswith(".helix-") and file.name.endswith(".tmp")
            if is_left_over or (_WEIGHTS.fullmatch(file.name) and file.name not in names):
                file.unlink()
        index = self.folder / INDEX_NAME
        if count == 1:
            index.unlink(missing_ok=True)
        else:
            weight_map = {key: name for keys, name in zip(self._keys, names, strict=True) for key in keys}
            data = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
            index.write_text(json.dumps(data, indent=2) + "\n")
        self.model.config.architectures = [type(self.model).__name__]
        self.model.config.dtype = str(self.model.dtype).removeprefix("torch.")
        self.model.config.save_pretrained(self.folder)
        if getattr(self.model, "generation_config", None) is not None:
            self.model.generation_config.save_pretrained(self.folder)


def _alone(value: Tensor) -> Tensor:
    """A tensor that shares its memory with no other."""
    return value.contiguous() if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _file_groups(
    units: list[Unit], sizes: Mapping[nn.Parameter, int], limit: int
) -> Iterator[dict[nn.Parameter, Placement]]:
    """Units in order, packed into files of at most `limit` bytes; a tied parameter goes where it comes first."""
    group: dict[nn.Parameter, Placement] = {}
    seen: set[nn.Parameter] = set()
    for unit in units:
        new = {p: placement for p, placement in unit.placements.items() if p not in seen}
        seen.update(new)
        if group and sum(sizes[parameter] for parameter in (*group, *new)) > limit:
            yield group
            group = {}
        group.update(new)
    if group:
        yield group


def _whole_bytes(stage: Stage, mesh: Mesh) -> dict[nn.Parameter, int]:
    """Bytes of every parameter when it is not cut, also of those that other pipeline ranks hold. Collective."""
    placements = stage.all_placements
    found = []
    for parameter, placement in placements.items():
        size = parameter.nbytes
        if size and placement.dim is not None:
            size = size // parameter.shape[placement.dim] * placement.length
        found.append(size)
    if mesh.pipe.group is not None:
        sizes = torch.tensor(found, device=mesh.device)
        dist.all_reduce(sizes, group=mesh.pipe.group)
        found = sizes.tolist()
    return dict(zip(placements, found, strict=True))


def _align_with_rank_0(parameters: list[nn.Parameter], device: torch.device) -> None:
    """Broadcast the parameters if any rank's differ from rank 0's."""
    mine = torch.stack([_fingerprint(parameter) for parameter in parameters]).to(device)
    theirs = mine.clone()
    dist.broadcast(theirs, src=0)
    differs = (mine != theirs).any().float()
    dist.all_reduce(differs)
    if differs.item():
        for parameter in parameters:
            value = parameter.data.to(device)
            dist.broadcast(value, src=0)
            parameter.data.copy_(value)


def _fingerprint(parameter: nn.Parameter) -> Tensor:
    """Two numbers that other values would hardly share: the sum, and a sum weighted by place."""
    flat = parameter.detach().reshape(-1).double()
    weights = torch.linspace(0.5, 1.5, flat.numel(), dtype=flat.dtype, device=flat.device)
    return torch.stack((flat.sum(), flat @ weights))
