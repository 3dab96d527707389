"""Writes a cut model as an ordinary Hugging Face checkpoint, every rank what it holds.

In:   a cut model, its stage and its mesh; a folder.
Out:  the files that `save_pretrained` of the whole model would write: the same names, tensors and bytes.
Must hold: where every byte of every tensor lies is known before any is written, from names, types and shapes, so no
tensor is gathered: slices go straight to their places in the files, and of copies one is written. Ranks that do not
see rank 0's folder send it their slices one by one. A failure on any rank is raised on all of them.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_helix.checkpoint.reader import INDEX_NAME, Source, match, persistent_tensors
from hf_helix.checkpoint.safetensors_file import FileLayout, write_slice
from hf_helix.checkpoint.shard import join_slices
from hf_helix.operators.unit import COPIED, Placement
from hf_helix.runtime.distributed.agreement import agree_on_success, decide_on_rank_0, over_ranks
from hf_helix.runtime.distributed.groups import control_group, receive_on_host, send_on_host
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.stage import Stage

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_MAX_SHARD_SIZE = inspect.signature(PreTrainedModel.save_pretrained).parameters["max_shard_size"].default


def save_pretrained(
    model: Any, stage: Stage, mesh: Mesh, folder: str | Path, max_shard_size: int | str | None = None
) -> None:
    """Write the model as an ordinary Hugging Face checkpoint. Collective.

    Files of an earlier save in the same folder go once the new ones are complete.

    Args:
        stage: of the model, before tiling.
        max_shard_size: of a file, such as "5GB" or a number of bytes; None for the default of Transformers.

    Raises:
        OSError: this rank could not write.
        ValueError: another one could not; names it.
    """
    layout = _Layout.of(model, stage, mesh, _MAX_SHARD_SIZE if max_shard_size is None else max_shard_size)
    draft = _Draft(Path(folder), decide_on_rank_0(lambda: uuid.uuid4().hex), layout)
    try:
        decide_on_rank_0(draft.create)
        files = _Files(draft)
        _Writer(model, stage, mesh, files, layout, draft.writers()).write()
        files.close()
        agree_on_success(files.error)
        decide_on_rank_0(lambda: _publish(model, draft))
    except BaseException:
        if rank() == 0:
            draft.remove()
        raise


# -- what a checkpoint will be ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """What lies where in a checkpoint.

    Attributes:
        tensors: by their names on disk, on the meta device.
        file_of: the file of each.
        files: by name.
        index: what `model.safetensors.index.json` says; None for a single file.
    """

    tensors: dict[str, Tensor]
    file_of: dict[str, str]
    files: dict[str, FileLayout]
    index: dict[str, Any] | None

    @classmethod
    def of(cls, model: Any, stage: Stage, mesh: Mesh, max_shard_size: int | str) -> _Layout:
        """As `PreTrainedModel.save_pretrained` does it, step by step, without the tensors. Collective."""
        whole = _outlines(model, stage, mesh)
        weights = {id(model.get_parameter_or_buffer(name)): outline for name, outline in whole.items()}
        count = sum(weights[id(parameter)].numel() for parameter in model.parameters())
        tensors = {name: outline for name, outline in whole.items() if name not in model._keys_to_ignore_on_save}
        tensors = remove_tied_weights_from_state_dict(tensors, model)
        tensors = revert_weight_conversion(model, tensors)
        split = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda outline: outline.untyped_storage().nbytes(),
            get_storage_id=lambda outline: outline.untyped_storage()._cdata,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        files = {
            file: FileLayout.of({name: tensors[name] for name in names})
            for file, names in split.filename_to_tensors.items()
        }
        about = {"metadata": {"total_parameters": count, **split.metadata}, "weight_map": split.tensor_to_filename}
        return cls(tensors, split.tensor_to_filename, files, about if split.is_sharded else None)


def _outlines(model: Any, stage: Stage, mesh: Mesh) -> dict[str, Tensor]:
    """Everything that the whole model would save, on the meta device. Collective over the pipeline."""
    placements, owners = stage.all_placements, stage.owners
    tensors = persistent_tensors(model)
    shapes: dict[str, tuple[int, ...]] = {
        name: placements.get(tensor, COPIED).whole_shape(tensor.shape)
        for name, tensor in tensors.items()
        if owners.get(tensor, stage.rank) == stage.rank
    }
    if mesh.pipe.group is not None:
        shapes = {name: shape for part in over_ranks(shapes, mesh.pipe.ranks) for name, shape in part.items()}
    return {name: torch.empty(shapes[name], dtype=tensors[name].dtype, device="meta") for name in tensors}


# -- who writes what -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """What one rank writes of a tensor on disk: a slice, or all of it.

    Attributes:
        key: the name of the tensor.
        placement, size, rank: how it is cut, over how many, and which slice this is.
    """

    key: str
    placement: Placement = COPIED
    size: int = 1
    rank: int = 0


class _Writer:
    """Writes what this rank is to write of every tensor.

    Args:
        writers: the ranks that can write to rank 0's folder.
    """

    def __init__(self, model: Any, stage: Stage, mesh: Mesh, files: _Files, layout: _Layout, writers: set[int]) -> None:
        self.model = model
        self.mesh = mesh
        self.layout = layout
        self.files = files
        self.writers = writers
        self.tensors = persistent_tensors(model)
        self.placements, self.owners, self.rank = stage.all_placements, stage.owners, stage.rank
        self._given: dict[tuple[int, ...], dict[int, int]] = {}  # bytes by rank, of ranks that hold the same

    def write(self) -> None:
        """Everything, in an order that all ranks share. Collective."""
        sources, unknown = match(self.model, self.layout.tensors)
        assert not unknown, f"tensors that no parameter is made of: {unknown}"
        jobs = [self._parts(source) for source in sources]
        others = self._parts_of_others({number: parts for number, parts in enumerate(jobs) if parts})
        for number, (source, parts) in enumerate(zip(sources, jobs, strict=True)):
            if parts is not None:
                for part, value in zip(parts, self._values(source), strict=True):
                    self._put(part, value)
            for sender, theirs in others.items():
                for part in theirs.get(number, ()):
                    self.files.write(part, self._receive(part, sender))

    def _parts(self, source: Source) -> list[_Part] | None:
        """What this rank writes of a source; None where it has no part in it."""
        tensor = self.tensors[source.target]
        placement = self.placements.get(tensor, COPIED)
        axis = self.mesh.axis_of(placement)
        if self.owners.get(tensor, 0) != self.rank or not self._has_turn(source, placement):
            return None
        if source.converter is None:
            is_mine = placement.dim is not None or axis.rank == 0
            return [_Part(source.names[0], placement, axis.size, axis.rank)] if is_mine else []
        if _is_cut_stack(source, placement):
            ((first, last),) = placement.bounds(axis.size, axis.rank)
            return [_Part(key) for key in source.part(first, last).names]
        return [_Part(key) for key in source.names] if axis.rank == 0 else []

    def _has_turn(self, source: Source, placement: Placement) -> bool:
        """Whether this rank writes what it holds of a source, among those that hold the same: in turns, by bytes."""
        group = self.mesh.copies_of(placement)
        if group is None:
            return True
        ranks = dist.get_process_group_ranks(group)
        if source.converter is not None and not _is_cut_stack(source, placement):
            return rank() == ranks[0]  # slices are joined, so those of an axis must choose alike
        able = tuple(other for other in ranks if other in self.writers) or (ranks[0],)
        given = self._given.setdefault(able, dict.fromkeys(able, 0))
        chosen = min(able, key=given.__getitem__)
        given[chosen] += sum(self.layout.tensors[key].nbytes for key in source.names)
        return rank() == chosen

    def _values(self, source: Source) -> list[Tensor]:
        """The tensors of `_parts`. Collective over the axis that slices lie on, where they must be joined first."""
        tensor = self.tensors[source.target]
        placement = self.placements.get(tensor, COPIED)
        axis = self.mesh.axis_of(placement)
        if source.converter is None:
            return [tensor.detach()] if placement.dim is not None or axis.rank == 0 else []
        if _is_cut_stack(source, placement):
            # What is on disk has the numbers of all experts, and what is converted here those from 0 on.
            made = revert_weight_conversion(self.model, {source.target: tensor.detach()})
            return [made[key] for key in source.part(0, len(tensor)).names]
        joined = {}
        for name in source.convert(self.model, self.layout.tensors.__getitem__):
            held = self.tensors[name]
            joined[name] = join_slices(held.detach(), self.placements.get(held, COPIED), self.mesh)
        if axis.rank > 0:
            return []
        made = revert_weight_conversion(
            self.model, {name: value for name, value in joined.items() if value is not None}
        )
        return [made[key] for key in source.names]

    # -- where the folder is not shared

    def _parts_of_others(self, mine: dict[int, list[_Part]]) -> Mapping[int, dict[int, list[_Part]]]:
        """On rank 0: what it writes for ranks that cannot, by rank and by source. Collective."""
        if len(self.writers) == world_size():
            return {}
        found: list[Any] = [None] * world_size()
        dist.all_gather_object(found, None if rank() in self.writers else mine, group=control_group())
        return {other: parts for other, parts in enumerate(found) if parts} if rank() == 0 else {}

    def _put(self, part: _Part, value: Tensor) -> None:
        if rank() in self.writers:
            self.files.write(part, value)
        else:
            send_on_host(value, 0)

    def _receive(self, part: _Part, sender: int) -> Tensor:
        outline = self.layout.tensors[part.key]
        value = torch.empty(part.placement.shape(outline.shape, part.size, part.rank), dtype=outline.dtype)
        receive_on_host(value, sender)
        return value


def _is_cut_stack(source: Source, placement: Placement) -> bool:
    """Whether each rank can convert its own slice: experts that are stacked in the model and single on disk."""
    return source.is_stack and placement.dim == 0 and placement.num_fused == 1


# -- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draft:
    """The files of a checkpoint under names of their own, until they are complete.

    Attributes:
        token: in these names; the same on every rank.
    """

    folder: Path
    token: str
    layout: _Layout

    def path(self, name: str) -> Path:
        """Of the file that will have this name."""
        return self.folder / f".helix-{self.token}-{name}.tmp"

    def create(self) -> None:
        """Make every file in its size, and one to find out with who can write. Rank 0 alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, file in self.layout.files.items():
            file.create(self.path(name))
        self.path("probe").write_bytes(bytes(world_size()))

    def writers(self) -> set[int]:
        """The ranks whose writing arrives in rank 0's files. Collective."""
        with contextlib.suppress(OSError), self.path("probe").open("r+b") as file:
            os.pwrite(file.fileno(), b"x", rank())
        if world_size() > 1:
            dist.barrier(control_group())
        found = decide_on_rank_0(self.path("probe").read_bytes)
        return {number for number, byte in enumerate(found) if byte}

    def publish(self) -> None:
        """Give the files their names; those of an earlier save and what an unfinished one has left go. Rank 0 alone."""
        for name in self.layout.files:
            self.path(name).replace(self.folder / name)
        for file in self.folder.iterdir():
            is_left_over = file.name.startswith(".helix-") and file.name.endswith(".tmp")
            if is_left_over or (_WEIGHTS.fullmatch(file.name) and file.name not in self.layout.files):
                file.unlink()
        index = self.folder / INDEX_NAME
        if self.layout.index is None:
            index.unlink(missing_ok=True)
        else:
            index.write_text(json.dumps(self.layout.index, indent=2, sort_keys=True) + "\n")

    def remove(self) -> None:
        """What there is of the files."""
        with contextlib.suppress(OSError):
            for file in self.folder.glob(f".helix-{self.token}-*.tmp"):
                file.unlink()


class _Files:
    """What this rank has open of a draft.

    After an error nothing more is written, but nothing is raised, so that the ranks stay in step.

    Attributes:
        error: the first one.
    """

    def __init__(self, draft: _Draft) -> None:
        self.error: OSError | None = None
        self._draft = draft
        self._open: dict[str, int] = {}

    def write(self, part: _Part, value: Tensor) -> None:
        """Put a part of a tensor into its places."""
        if self.error is not None:
            return
        layout = self._draft.layout
        name = layout.file_of[part.key]
        with self._noted():
            if name not in self._open:
                self._open[name] = os.open(self._draft.path(name), os.O_WRONLY)
            start, whole = layout.files[name].starts[part.key], layout.tensors[part.key].shape
            write_slice(self._open[name], start, whole, value, part.placement, part.size, part.rank)

    def close(self) -> None:
        """Bring everything to the disk: rank 0 can only do that with what was written on its own host."""
        for number in self._open.values():
            with self._noted():
                os.fsync(number)
            os.close(number)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error


def _publish(model: Any, draft: _Draft) -> None:
    draft.publish()
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.save_pretrained(draft.folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(draft.folder)
