"""Writes a cut model as an ordinary Hugging Face checkpoint, every rank its slices.

In:   a cut model, the rank's units and its mesh; a folder.
Out:  the files of the uncut model's `save_pretrained`: the same names, tensors and bytes.
Must hold: no tensor is gathered except ZeRO shards of tensors that lie otherwise on disk, a few layers at a time.
Offsets in files are known beforehand (`files`), so slices and shards go straight to their offsets, and of replicas one
is written. Ranks without access to rank 0's folder send their slices to rank 0. A failure on any rank is raised on all
ranks.
"""

import functools
import inspect
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hf_helix.checkpoint.background import Copies, Writes, write_now
from hf_helix.checkpoint.cut_parameters import join_slices
from hf_helix.checkpoint.files import (
    CheckpointLayout,
    PendingFiles,
    TensorPart,
    check_files,
    find_writers,
    staged,
    tensors_on_disk,
)
from hf_helix.checkpoint.load import adapter_file, adapter_names
from hf_helix.checkpoint.reader import Source, match_tensors, persistent_tensors
from hf_helix.models.stock.peft import is_peft
from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.parameters.parts import views_of
from hf_helix.planning.parameters import Cut, Parameter, Part
from hf_helix.runtime.distributed.agreement import decide_on_rank_0
from hf_helix.runtime.distributed.groups import control_group, receive_on_host, send_on_host
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.divided import full_of
from hf_helix.runtime.rank_units import RankUnits

_MAX_SHARD_SIZE = inspect.signature(PreTrainedModel.save_pretrained).parameters["max_shard_size"].default
CARD = "README.md"
MAX_GATHERED = 4
"""The largest number of flat parameters that are gathered at a time."""


def save_pretrained(
    model: Any, rank_units: RankUnits, mesh: Mesh, folder: str | Path, max_shard_size: int | str | None = None
) -> None:
    """Writes the model as an ordinary Hugging Face checkpoint, and deletes the files of an earlier save once complete.
    Collective. Raises OSError if this rank could not write, ValueError with the rank if another rank could not."""
    with staged(Path(folder)) as aside:
        write_now(begin_save(model, rank_units, mesh, aside, max_shard_size))


def begin_save(
    model: Any,
    rank_units: RankUnits,
    mesh: Mesh,
    folder: Path,
    max_shard_size: int | str | None = None,
    copies: Copies | None = None,
) -> Writes:
    """Makes the files of a checkpoint in an existing folder, and writes this rank's part, or copies it. Collective.

    Args:
        model: the cut model.
        rank_units: its units on this rank.
        mesh: the layout of the ranks.
        folder: of the files.
        max_shard_size: see `Engine.save_pretrained`.
        copies: for tensors that may change before they are written; None to write them at once. Without a folder that
            all ranks see, tensors are written at once all the same, since rank 0 would hold copies for the others.

    Returns:
        What is left to do.
    """
    layout = CheckpointLayout.of(model, rank_units, mesh, _MAX_SHARD_SIZE if max_shard_size is None else max_shard_size)
    for flat in rank_units.flat_parameters:
        flat.check_resharded()
    decide_on_rank_0(lambda: _create(model, layout, folder))
    writers = find_writers(folder)
    files = PendingFiles(folder, layout, copies if len(writers) == world_size() else None)
    _Writer(model, rank_units, mesh, files, layout, writers).write()
    paths = [folder / name for name in layout.files]
    return Writes(files.close, lambda _: check_files(paths, layout.tensors))


def _create(model: Any, layout: CheckpointLayout, folder: Path) -> None:
    """Makes the files of the tensors, and writes the other files of `save_pretrained`."""
    layout.create(folder)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


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

    def write(aside: Path) -> None:
        on_meta = {key: value.to("meta") for key, value in state.items()}
        if Path(folder, CARD).is_file():  # PEFT adds to an existing card
            shutil.copy2(Path(folder, CARD), aside)
        type(model).save_pretrained(model, str(aside), state_dict=state, **options)  # the instance may refuse
        for adapter, names in of_adapters.items():
            check_files([adapter_file(aside, adapter)], {key: on_meta[name] for key, name in names.items()})
        if not of_adapters:
            check_files(sorted(aside.glob("*.safetensors")), tensors_on_disk(model, on_meta))

    with staged(Path(folder)) as aside:
        decide_on_rank_0(lambda: write(aside))


class _Job(NamedTuple):
    """The parts that this rank writes of a source, and a function from the slices of its parameters to their values."""

    parts: list[TensorPart]
    values: Callable[[Mapping[str, Tensor]], Iterable[Tensor]]
    is_held: bool = False  # whether the values are a parameter's own memory


class _Writer:
    """Writes this rank's part of every tensor; `writers` are the ranks with access to rank 0's folder."""

    def __init__(
        self,
        model: Any,
        rank_units: RankUnits,
        mesh: Mesh,
        files: PendingFiles,
        layout: CheckpointLayout,
        writers: set[int],
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.layout = layout
        self.files = files
        self.writers = writers
        self.tensors = persistent_tensors(model)
        self._flats: dict[Tensor, FlatParameter] = {
            p: flat for flat in rank_units.flat_parameters for p in flat.placements
        }
        self._gathered = functools.lru_cache(MAX_GATHERED)(lambda flat: flat.views(flat.gather()))
        self._rows: Mapping[Any, Parameter] = rank_units.rows
        parts = rank_units.parts(mesh.place).items()
        self._stepped = {self.tensors[part.row.name]: (part, stepped) for stepped, part in parts}
        self._given: dict[tuple[int, ...], dict[int, int]] = {}  # bytes by rank, among the ranks with the same part

    def write(self) -> None:
        """Writes every tensor, in an order equal on all ranks. Collective."""
        sources, unknown = match_tensors(self.model, self.layout.tensors)
        assert not unknown, f"tensors that no parameter is made of: {unknown}"
        jobs = [self._job(source) for source in sources]
        others = self._parts_of_others({number: job.parts for number, job in enumerate(jobs) if job and job.parts})
        for number, (source, job) in enumerate(zip(sources, jobs, strict=True)):
            slices = self._slices(source)
            if job is not None:
                for part, value in zip(job.parts, job.values(slices), strict=True):
                    self._put(part, value, job.is_held)
            for sender, theirs in others.items():
                for part in theirs.get(number, ()):
                    self.files.write(part, self._receive(part, sender))

    def _slices(self, source: Source) -> dict[str, Tensor]:
        """Returns this rank's slices of the parameters of a source that is converted. Collective over the ranks of
        their shards; nobody converts shards."""
        if source.converter is None:
            return {}
        names = source.convert(self.model, self.layout.tensors.__getitem__)
        held = {name: self.tensors[name] for name in names}
        return {
            name: self._gathered(self._flats[tensor])[tensor] if tensor in self._flats else tensor.detach()
            for name, tensor in held.items()
        }

    def _job(self, source: Source) -> _Job | None:
        """Returns this rank's part of a source to write; None if it holds nothing, or another replica writes."""
        tensor = self.tensors[source.target]
        row = self._row(source.target)
        part, stepped = self._stepped.get(tensor, (Part(row, self.mesh.place), tensor))
        if not part.is_here or not self._has_turn(source, tensor, row.cut):
            return None
        if source.is_cut_stack(row.cut):
            # On disk, experts are numbered among all experts; the conversion numbers this rank's experts from 0.
            ((first, last),) = row.cut.bounds(*part.ranks)
            names = source.part(0, last - first).names
            return _Job(
                self._full(source.part(first, last).names),
                lambda slices: self._reverted({source.target: slices[source.target]}, names),
            )
        is_first = part.ranks.rank == 0
        if source.converter is not None:
            return _Job(self._full(source.names if is_first else []), lambda slices: self._joined(slices, source.names))
        pieces = views_of(part, stepped.detach()) if row.cut.dim is not None or is_first else {}
        parts = [TensorPart(source.names[0], offset, tuple(piece.shape)) for offset, piece in pieces.items()]
        return _Job(parts, lambda _: pieces.values(), isinstance(tensor, nn.Parameter))

    def _row(self, name: str) -> Parameter:
        """Returns the row of a parameter, or of a buffer, which the first pipeline rank writes."""
        tensor = self.tensors[name]
        return self._rows.get(tensor) or Parameter(name, tuple(tensor.shape))

    def _full(self, names: Sequence[str]) -> list[TensorPart]:
        shapes = {name: tuple(self.layout.tensors[name].shape) for name in names}
        return [TensorPart(name, (0,) * len(shape), shape) for name, shape in shapes.items()]

    def _has_turn(self, source: Source, tensor: Tensor, cut: Cut) -> bool:
        """Returns whether this rank has written the fewest bytes so far, among the ranks with the same part."""
        group = self.mesh.replica_group_of(cut)
        if source.converter is None and tensor in self._flats:  # replicas have other shards, but for copies
            copies = self._flats[tensor].copies
            group = None if copies is None else copies.group
        if group is None:
            return True
        ranks = dist.get_process_group_ranks(group)
        if source.converter is not None and not source.is_cut_stack(cut):
            return rank() == ranks[0]  # slices are joined, so the ranks of an axis must choose the same replica
        able = tuple(other for other in ranks if other in self.writers) or (ranks[0],)
        given = self._given.setdefault(able, dict.fromkeys(able, 0))
        chosen = min(able, key=given.__getitem__)
        given[chosen] += sum(self.layout.tensors[key].nbytes for key in source.names)
        return rank() == chosen

    def _joined(self, slices: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
        """Returns the tensors on disk of parameters that are joined first, on the first rank of the axis. Collective
        over the ranks of the slices."""
        joined = {name: join_slices(held, self._row(name).cut, self.mesh) for name, held in slices.items()}
        full = {name: value for name, value in joined.items() if value is not None}
        return self._reverted(full, names) if full else []

    def _reverted(self, values: dict[str, Tensor], names: Sequence[str]) -> list[Tensor]:
        """Returns tensors on disk, made of values of parameters."""
        made = revert_weight_conversion(self.model, values)
        return [made[name] for name in names]

    # -- ranks without access to the folder

    def _parts_of_others(self, mine: dict[int, list[TensorPart]]) -> Mapping[int, dict[int, list[TensorPart]]]:
        """Returns the parts that rank 0 writes for ranks without access, by rank and by source. Collective."""
        if len(self.writers) == world_size():
            return {}
        of_ranks: list[Any] = [None] * world_size()
        dist.all_gather_object(of_ranks, None if rank() in self.writers else mine, group=control_group())
        return {other: parts for other, parts in enumerate(of_ranks) if parts} if rank() == 0 else {}

    def _put(self, part: TensorPart, value: Tensor, is_held: bool) -> None:
        if rank() in self.writers:
            self.files.write(part, value, is_held)
        else:
            send_on_host(value, 0)

    def _receive(self, part: TensorPart, sender: int) -> Tensor:
        value = torch.empty(part.shape, dtype=self.layout.tensors[part.key].dtype)
        receive_on_host(value, sender)
        return value
