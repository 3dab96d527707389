"""Writes a cut model as an ordinary Hugging Face checkpoint, every rank its slices.

In:   a cut model, its stage and its mesh; a folder.
Out:  the files of the uncut model's `save_pretrained`: the same names, tensors and bytes.
Must hold: no tensor is gathered except ZeRO shards, a few layers at a time. Offsets in files are known beforehand
(`files`), so slices go straight to their offsets (`folders`), and of replicas one is written. Ranks without access to
rank 0's folder send their slices to rank 0. A failure on any rank is raised on all ranks.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hf_helix.checkpoint.cut_parameters import UnshardedParameters, join_slices
from hf_helix.checkpoint.files import (
    CheckpointLayout,
    PendingCheckpoint,
    PendingFiles,
    TensorPart,
    check_files,
    staged,
    tensors_on_disk,
)
from hf_helix.checkpoint.peft import adapter_file, adapter_names
from hf_helix.checkpoint.reader import Source, match_tensors, persistent_tensors
from hf_helix.models.peft import is_peft
from hf_helix.operators.param_shard import COPIED, Placement
from hf_helix.runtime.distributed.agreement import agree_on_success, decide_on_rank_0
from hf_helix.runtime.distributed.groups import control_group, receive_on_host, send_on_host
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.divided import full_of
from hf_helix.runtime.stage import Stage

_MAX_SHARD_SIZE = inspect.signature(PreTrainedModel.save_pretrained).parameters["max_shard_size"].default


def save_pretrained(
    model: Any, stage: Stage, mesh: Mesh, folder: str | Path, max_shard_size: int | str | None = None
) -> None:
    """Writes the model as an ordinary Hugging Face checkpoint, and deletes the files of an earlier save once complete.
    Collective. Raises OSError if this rank could not write, ValueError with the rank if another rank could not."""
    layout = CheckpointLayout.of(model, stage, mesh, _MAX_SHARD_SIZE if max_shard_size is None else max_shard_size)
    pending = PendingCheckpoint(Path(folder), decide_on_rank_0(lambda: uuid.uuid4().hex), layout)
    try:
        decide_on_rank_0(pending.create)
        files = PendingFiles(pending)
        _Writer(model, stage, mesh, files, layout, pending.writers()).write()
        files.close()
        agree_on_success(files.error)
        decide_on_rank_0(lambda: _publish(model, pending))
    except BaseException:
        if rank() == 0:
            pending.remove()
        raise


def save_full(model: Any, folder: str | Path, max_shard_size: int | str | None = None) -> None:
    """Writes adapters, or a model changed since the cut, by its own `save_pretrained` on rank 0. Collective. Raises
    ValueError, on every rank, if the model has no `save_pretrained`, or the written files are not the model."""
    name = type(model).__name__
    if not hasattr(type(model), "save_pretrained"):
        raise ValueError(
            f"trainer.model is a {name}, which has no save_pretrained; assign the model inside it, such as "
            "trainer.model = averaged.module"
        )
    values = model.state_dict(keep_vars=True)
    of_adapters = adapter_names(model) if is_peft(model) else {}
    state: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}  # by id, since tied weights are one tensor
    for key in [key for names in of_adapters.values() for key in names.values()] or values:
        if id(values[key]) not in made:
            full = full_of(values[key])
            made[id(values[key])] = full.detach().cpu().clone() if rank() == 0 else full.new_empty(0)
        state[key] = made[id(values[key])]
    options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}

    def write() -> None:
        on_meta = {key: value.to("meta") for key, value in state.items()}
        with staged(Path(folder)) as aside:
            type(model).save_pretrained(model, str(aside), state_dict=state, **options)  # the instance may refuse
            for adapter, names in of_adapters.items():
                check_files([adapter_file(aside, adapter)], {key: on_meta[name] for key, name in names.items()})
            if not of_adapters:
                check_files(sorted(aside.glob("*.safetensors")), tensors_on_disk(model, on_meta))

    decide_on_rank_0(write)


class _Writer:
    """Writes this rank's part of every tensor; `writers` are the ranks with access to rank 0's folder."""

    def __init__(
        self, model: Any, stage: Stage, mesh: Mesh, files: PendingFiles, layout: CheckpointLayout, writers: set[int]
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.layout = layout
        self.files = files
        self.writers = writers
        self.tensors = persistent_tensors(model)
        self.unsharded = UnshardedParameters(stage)
        self.placements, self.owners, self.rank = stage.all_placements, stage.owners, stage.rank
        self._given: dict[tuple[int, ...], dict[int, int]] = {}  # bytes by rank, among the ranks with the same slice

    def write(self) -> None:
        """Writes every tensor, in an order equal on all ranks. Collective."""
        sources, unknown = match_tensors(self.model, self.layout.tensors)
        assert not unknown, f"tensors that no parameter is made of: {unknown}"
        jobs = [self._parts(source) for source in sources]
        others = self._parts_of_others({number: parts for number, parts in enumerate(jobs) if parts})
        with self.unsharded:
            for number, (source, parts) in enumerate(zip(sources, jobs, strict=True)):
                self._unshard(source)
                if parts is not None:
                    for part, value in zip(parts, self._values(source), strict=True):
                        self._put(part, value)
                for sender, theirs in others.items():
                    for part in theirs.get(number, ()):
                        self.files.write(part, self._receive(part, sender))

    def _unshard(self, source: Source) -> None:
        """Unshards the parameters of a source. Collective over the ranks of their shards."""
        if self.unsharded.is_needed:
            for name in source.convert(self.model, self.layout.tensors.__getitem__):
                self.unsharded.unshard(self.tensors[name])

    def _parts(self, source: Source) -> list[TensorPart] | None:
        """Returns the parts of a source that this rank writes; None if it holds nothing, or another replica writes."""
        tensor = self.tensors[source.target]
        placement = self.placements.get(tensor, COPIED)
        axis = self.mesh.axis_of(placement)
        if self.owners.get(tensor, 0) != self.rank or not self._has_turn(source, placement):
            return None
        if source.converter is None:
            is_mine = placement.dim is not None or axis.rank == 0
            return [TensorPart(source.names[0], placement, axis.size, axis.rank)] if is_mine else []
        if source.is_cut_stack(placement):
            ((first, last),) = placement.bounds(axis.size, axis.rank)
            return [TensorPart(key) for key in source.part(first, last).names]
        return [TensorPart(key) for key in source.names] if axis.rank == 0 else []

    def _has_turn(self, source: Source, placement: Placement) -> bool:
        """Returns whether this rank has written the fewest bytes so far, among the ranks with the same slice."""
        group = self.mesh.replica_group_of(placement)
        if group is None:
            return True
        ranks = dist.get_process_group_ranks(group)
        if source.converter is not None and not source.is_cut_stack(placement):
            return rank() == ranks[0]  # slices are joined, so the ranks of an axis must choose the same replica
        able = tuple(other for other in ranks if other in self.writers) or (ranks[0],)
        given = self._given.setdefault(able, dict.fromkeys(able, 0))
        chosen = min(able, key=given.__getitem__)
        given[chosen] += sum(self.layout.tensors[key].nbytes for key in source.names)
        return rank() == chosen

    def _values(self, source: Source) -> list[Tensor]:
        """Returns the values of `_parts`. Collective over the ranks of the slices, if slices must be joined first."""
        tensor = self.tensors[source.target]
        placement = self.placements.get(tensor, COPIED)
        axis = self.mesh.axis_of(placement)
        if source.converter is None:
            return [tensor.detach()] if placement.dim is not None or axis.rank == 0 else []
        if source.is_cut_stack(placement):
            # On disk, experts are numbered among all experts; the conversion numbers this rank's experts from 0.
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

    # -- ranks without access to the folder

    def _parts_of_others(self, mine: dict[int, list[TensorPart]]) -> Mapping[int, dict[int, list[TensorPart]]]:
        """Returns the parts that rank 0 writes for ranks without access, by rank and by source. Collective."""
        if len(self.writers) == world_size():
            return {}
        of_ranks: list[Any] = [None] * world_size()
        dist.all_gather_object(of_ranks, None if rank() in self.writers else mine, group=control_group())
        return {other: parts for other, parts in enumerate(of_ranks) if parts} if rank() == 0 else {}

    def _put(self, part: TensorPart, value: Tensor) -> None:
        if rank() in self.writers:
            self.files.write(part, value)
        else:
            send_on_host(value, 0)

    def _receive(self, part: TensorPart, sender: int) -> Tensor:
        tensor = self.layout.tensors[part.key]
        value = torch.empty(part.placement.shape(tensor.shape, part.size, part.rank), dtype=tensor.dtype)
        receive_on_host(value, sender)
        return value


def _publish(model: Any, pending: PendingCheckpoint) -> None:
    check_files([*map(pending.path, pending.layout.files)], pending.layout.tensors)
    pending.publish()
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.save_pretrained(pending.folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(pending.folder)
