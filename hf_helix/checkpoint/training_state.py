"""Saves and loads optimizer states with torch's distributed checkpoint (DCP), and the states of random generators.

In:   an optimizer over this rank's slices or shards of parameters, with the names and offsets of the parameters; the
      generators of the process. Operators have seeds of their own.
Out:  a folder with every rank's part; from the folder, the states for the slices of another layout; generators set to
      saved states.
Must hold: replicated states are written once. A state with the shape of its parameter is cut as the parameter and is
stored with its offset in the full tensor, so any layout finds its part; quantized states are stored as values and as
codes; other states fit one layout only and are refused elsewhere, by name. The optimizer is
unchanged until everything has been read, through the allow-lists of `plain_files`.

Quantized states (bitsandbytes and torchao, in 8 and 4 bits) are codes with a scale for each block of elements. A
checkpoint has their values in fp32 in the shape of the parameter, which any layout can cut, and the codes, which are
exact if the same elements form the blocks: a run resumed in the same layout has the same bits. In another layout
blocks begin anew with each slice, and values are quantized again.
"""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from hf_helix.checkpoint.background import Copies, Writes, write_now
from hf_helix.checkpoint.direct import DirectFileSystem
from hf_helix.checkpoint.files import ROOM, disk_errors
from hf_helix.checkpoint.plain_files import DamagedFile, PlainPlanner, PlainReader, fits, read_metadata
from hf_helix.operators.parameters.parts import views_of
from hf_helix.planning.parameters import Part, Shape
from hf_helix.runtime.distributed.agreement import exchange_on_rank_0, on_all_ranks
from hf_helix.runtime.distributed.groups import control_group
from hf_helix.runtime.distributed.mesh import rank

# -- quantized states ------------------------------------------------------------------------------------------------

CODES = "#"
"""Begins the name of an exact part of a quantized state in a checkpoint."""

BLOCK = 256  # elements of a block of bitsandbytes
States = dict[str, Any]


class StateFormat(ABC):
    """The states of a library's optimizers."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @abstractmethod
    def exact(self, states: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the plain tensors of the quantized states, by name."""

    @abstractmethod
    def values(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> States:
        """Returns the states with tensors in fp32 in the shape of the parameter, in place of quantized ones."""

    @abstractmethod
    def made(self, parameter: nn.Parameter, values: States, exact: Mapping[str, Tensor]) -> States:
        """Returns the states of a parameter as the optimizer makes them, from `exact`, or else from `values`."""

    @abstractmethod
    def quantize_as_full(self, parts: Mapping[nn.Parameter, tuple[str, int]]) -> None:
        """Has the optimizer quantize the states of a part if it would quantize the full parameter's: small
        tensors are kept in fp32. `parts` are this rank's parameters, with the name and the elements of the full one.

        Raises:
            ValueError: names a part that cannot be quantized, and a remedy.
        """


class BitsandbytesFormat(StateFormat):
    """States `state1` and `state2`, with codes in uint8 if `absmax1` and `absmax2` are there. AdEMAMix stacks two
    averages in `state1`, which become `state1.0` and `state1.1`."""

    NAMES = ("state1", "state2")

    def exact(self, states: Mapping[str, Any]) -> dict[str, Tensor]:
        names = [name for each in "12" if f"absmax{each}" in states for name in (f"state{each}", f"absmax{each}")]
        return {name: states[name] for name in names}

    def values(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> States:
        found = {key: value for key, value in states.items() if key not in self.NAMES and not _is_of_codes(key)}
        for name in self.NAMES:
            for key, part, scale in _parts(name, states, parameter):
                found[key] = part if scale is None else _dequantized(part, scale, states[f"qmap{name[-1]}"])
        return found

    def made(self, parameter: nn.Parameter, values: States, exact: Mapping[str, Tensor]) -> States:
        self.optimizer.check_overrides()
        for number, group in enumerate(self.optimizer.param_groups):
            for place, each in enumerate(group["params"]):
                if each is parameter:
                    self.optimizer.init_state(group, parameter, number, place)
        states: States = self.optimizer.state[parameter]
        states.update({key: value for key, value in values.items() if key in states and key not in self.NAMES})
        if exact:
            for key, value in exact.items():
                states[key].copy_(value)
            return states
        for name in self.NAMES:
            for key, part, scale in _parts(name, states, parameter):
                if scale is None:
                    part.copy_(values[key])
                else:
                    _quantize(values[key], part, scale, states[f"qmap{name[-1]}"])
        return states

    def quantize_as_full(self, parts: Mapping[nn.Parameter, tuple[str, int]]) -> None:
        optimizer, config_of = self.optimizer, self.optimizer.get_config

        def get_config(group_number: int, number: int, group: Any) -> Any:
            config, parameter = config_of(group_number, number, group), group["params"][number]
            count = parameter.numel()
            _, elements = parts.get(parameter, ("", count))
            if count and (count < config["min_8bit_size"]) != (elements < config["min_8bit_size"]):
                config["min_8bit_size"] = 0 if elements >= config["min_8bit_size"] else math.inf
            return config

        optimizer.get_config = get_config


class TorchaoFormat(StateFormat):
    """States that are tensor subclasses, made of plain tensors."""

    LEAST = 4096  # elements, as written in torchao's `_new_buffer`

    def quantize_as_full(self, parts: Mapping[nn.Parameter, tuple[str, int]]) -> None:
        make, block = self.optimizer._new_buffer, self.optimizer.block_size
        for parameter, (name, elements) in parts.items():
            if self._quantizes(elements) and parameter.numel() % block:
                raise ValueError(
                    f"optimizer=({type(self.optimizer).__name__}, ...) quantizes the states of {name} in blocks of "
                    f"{block} elements, and a rank holds {parameter.numel()} of {elements} elements, so that blocks "
                    "would be of other elements than in one process; use optim='adamw_bnb_8bit', a tp_size that cuts "
                    "the parameter between blocks, or pp_size"
                )

        def new_buffer(parameter: Any, signed: bool) -> Tensor:
            count = parameter.numel()
            _, elements = parts.get(parameter, ("", count))
            quantizes = self._quantizes(elements)
            if not count or quantizes == self._quantizes(count):
                result: Tensor = make(parameter, signed)
            elif quantizes:
                result = self.optimizer._subclass_zeros(parameter, signed, block)
            else:
                result = torch.zeros_like(parameter)
            return result

        self.optimizer._new_buffer = new_buffer

    def _quantizes(self, elements: int) -> bool:
        return elements >= self.LEAST and elements % self.optimizer.block_size == 0

    def exact(self, states: Mapping[str, Any]) -> dict[str, Tensor]:
        return {
            f"{key}.{part}": getattr(value, part)
            for key, value in states.items()
            if _is_quantized(value)
            for part in value.tensor_attrs
        }

    def values(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> States:
        return {key: value.dequantize() if _is_quantized(value) else value for key, value in states.items()}

    def made(self, parameter: nn.Parameter, values: States, exact: Mapping[str, Tensor]) -> States:
        states = dict(values)
        for key in values.keys() & {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}:
            states[key] = state = self.optimizer._new_buffer(parameter, key == "exp_avg")
            if exact and _is_quantized(state):
                for part in state.tensor_attrs:
                    getattr(state, part).copy_(exact[f"{key}.{part}"])
            else:
                state.copy_(values[key])
        return states


FORMATS: dict[str, type[StateFormat] | None] = {
    "galore_torch": None,  # codes of projections, in the shape of no parameter
    "bitsandbytes": BitsandbytesFormat,
    "torchao": TorchaoFormat,
}


def format_of(optimizer: Any) -> StateFormat | None:
    """Returns the format of an optimizer's states; None for states as torch's optimizers have them."""
    libraries = (kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__)
    kind = next((FORMATS[library] for library in libraries if library in FORMATS), None)
    return kind(optimizer) if kind is not None else None


def _is_quantized(value: Any) -> bool:
    return hasattr(value, "dequantize") and hasattr(value, "tensor_attrs")


def _is_of_codes(key: str) -> bool:
    return key.startswith(("absmax", "qmap"))


def _parts(name: str, states: Mapping[str, Any], parameter: nn.Parameter) -> list[tuple[str, Tensor, Tensor | None]]:
    """Returns the parts of a state in the shape of the parameter: name, codes or values, and the scale of codes."""
    if name not in states:
        return []
    state, scale = states[name], states.get(f"absmax{name[-1]}")
    if state.dim() == parameter.dim():
        return [(name, state, scale)]
    scales = [None] * len(state) if scale is None else list(scale)
    return [(f"{name}.{row}", part, scales[row]) for row, part in enumerate(state)]


def _dequantized(codes: Tensor, scale: Tensor, qmap: Tensor) -> Tensor:
    from bitsandbytes.functional import dequantize_blockwise

    result: Tensor = dequantize_blockwise(codes.contiguous(), absmax=scale, code=qmap, blocksize=BLOCK)
    return result


def _quantize(values: Tensor, codes: Tensor, scale: Tensor, qmap: Tensor) -> None:
    from bitsandbytes.functional import quantize_blockwise

    values = values.to(codes.device, torch.float32).contiguous()
    made, about = quantize_blockwise(values, code=qmap, blocksize=BLOCK)
    codes.copy_(made.view_as(codes))
    scale.copy_(about.absmax.view_as(scale))


# -- states of optimizers --------------------------------------------------------------------------------------------

GROUPS, OTHERS = "param_groups", "state"
"""The names of the parameter groups' options, and of an optimizer's entries in `state` that belong to no parameter."""

_NOT_OPTIONS = ("params", "param_names")  # of a parameter group


def named_states(entry: Any) -> Mapping[str, Any]:
    """Returns the states of a parameter, an entry in an optimizer's `state`, by name; an entry that is no dictionary
    has the name ""."""
    return entry if isinstance(entry, Mapping) else {"": entry}


def entry_of(states: Mapping[str, Any]) -> Any:
    """Returns the entry that `named_states` has given."""
    return states[""] if states.keys() == {""} else dict(states)


class FullTensor(Tensor):
    """A full tensor for DCP, of which this rank writes or reads some chunks (`_Checkpointable`)."""

    local: Tensor
    _pieces: dict[Shape, Tensor]
    _is_written: bool

    @staticmethod
    def __new__(cls, part: Part, local: Tensor) -> FullTensor:
        made = Tensor._make_wrapper_subclass(cls, part.row.shape, dtype=local.dtype, device=local.device)
        made.local, made._pieces, made._is_written = local, views_of(part, local), part.writes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a slice: it only stands for a tensor in a checkpoint")

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), piece.shape) for offset, piece in self._pieces.items()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        items: list[WriteItem] = []
        if not self._is_written:
            return items
        for chunk, piece in zip(self._chunks(), self._pieces.values(), strict=True):
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(piece), self.size())
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._pieces[tuple(index.offset)]


class _Planner(DefaultSavePlanner):
    """Knows the data of this rank's items before DCP's writer asks for them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._data: dict[MetadataIndex, Any] = {}

    def take(self, plan: SavePlan, copies: Copies | None) -> None:
        """Takes the data of a plan as they are now, without copies if tensors do not change before they are written."""
        for item in plan.items:
            data = super().resolve_data(item)
            self._data[item.index] = copies.of(data, is_held=True) if copies and isinstance(data, Tensor) else data
        self.state_dict = {}  # else values made for this save would stay until its end

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._data.pop(write_item.index)


def save_states(optimizer: Optimizer, parts: Mapping[nn.Parameter, Part], folder: Path) -> None:
    """Writes the states of an optimizer and the options of its parameter groups. Collective. Raises on every rank if
    any could not write, see `on_all_ranks`."""
    write_now(begin_saving_states(optimizer, parts, folder, copies=None))


def begin_saving_states(
    optimizer: Optimizer, parts: Mapping[nn.Parameter, Part], folder: Path, copies: Copies | None
) -> Writes:
    """Decides which rank writes which states of an optimizer, and the options of its parameter groups. Collective.

    Args:
        optimizer: the optimizer.
        parts: of its parameters on this rank.
        folder: of the files.
        copies: for states that may change before they are written.

    Returns:
        What is left to do.
    """
    # No copies ahead by DCP itself: on a GPU they would need a stream, and the thread that writes has no device.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.fs = DirectFileSystem()
    planner = _Planner()
    planner.set_up_planner(_states(optimizer, parts), writer.storage_meta(), rank() == 0)
    writer.set_up_storage_writer(rank() == 0)
    mine = on_all_ranks(lambda: writer.prepare_local_plan(planner.create_local_plan()))
    metadata: list[Metadata] = []  # on rank 0

    def share_out(plans: list[SavePlan]) -> list[SavePlan]:
        plans, about = planner.create_global_plan(plans)
        metadata.append(about)
        return writer.prepare_global_plan(plans)

    plan = planner.finish_plan(exchange_on_rank_0(mine, share_out))
    planner.take(plan, copies)

    def write() -> list[WriteResult]:
        with disk_errors(folder):
            results: list[WriteResult] = writer.write_data(plan, planner).wait()
        return results

    return Writes(write, lambda of_ranks: writer.finish(metadata[0], list(of_ranks)))


def _states(optimizer: Optimizer, parts: Mapping[nn.Parameter, Part]) -> dict[str, Any]:
    """Returns this rank's states by their names in a checkpoint, and the options of the parameter groups."""
    saved: dict[str, Any] = {
        GROUPS: [
            {key: _plain(value) for key, value in group.items() if key not in _NOT_OPTIONS}
            for group in optimizer.param_groups
        ]
    }
    if others := {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}:
        saved[OTHERS] = others
    form = format_of(optimizer)
    for parameter in _parameters(optimizer):
        part, states = parts.get(parameter), named_states(optimizer.state.get(parameter, {}))
        if part is None or not states:
            continue
        if form is not None:
            for key, value in form.exact(states).items():
                saved[f"{part.row.name}/{CODES}{key}@{_elements(parameter, part)}"] = value
            states = form.values(parameter, states)
        for key, value in states.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                saved[f"{part.row.name}/{key}"] = value
            elif value.shape == parameter.shape:
                saved[f"{part.row.name}/{key}"] = FullTensor(part, value)
            else:
                saved[f"{part.row.name}/{key}{part.mark}"] = value
    return saved


def _plain(value: Any) -> Any:
    """Returns an option as numbers of Python, which a checkpoint is read as, in place of numpy's."""
    if isinstance(value, np.generic):
        return value.item()
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def load_states(optimizer: Optimizer, parts: Mapping[nn.Parameter, Part], folder: Path) -> None:
    """Loads the states of `save_states`, written on any layout. Collective. Raises ValueError for a state that fits
    only the layout of the checkpoint; DamagedFile, or RuntimeError with the rank, for a file that could not be read.
    """
    parameters = _parameters(optimizer)
    metadata = on_all_ranks(lambda: read_metadata(folder))
    wanted: dict[str, Any] = {GROUPS: None}  # by the names of states in the folder; DCP fills the values
    names_of: dict[nn.Parameter, dict[str, Any]] = {}  # these names, by parameter and state
    states = on_all_ranks(lambda: list(_saved_states(parameters, parts, metadata)))
    counters = {key for parameter, key, _, saved in states if parts[parameter].row.shape and _is_scalar(saved)}
    for parameter, key, name, saved in states:
        if isinstance(saved, BytesStorageMetadata):
            wanted[name] = None
        else:
            wanted[name] = _empty_state(parameter, parts[parameter], name, saved, key in counters)
        names_of.setdefault(parameter, {})[key] = name
    if OTHERS in metadata.state_dict_metadata:
        wanted[OTHERS] = None
    form = format_of(optimizer)
    with _failures_named(f"reading the optimizer's states from {folder}"):
        planner = PlainPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        load(wanted, storage_reader=PlainReader(folder, metadata), planner=planner, process_group=control_group())
    if not fits(wanted[GROUPS], list[dict[str, Any]]):
        raise DamagedFile(folder, f"is damaged: its {GROUPS} are {type(wanted[GROUPS]).__name__}")
    values = {
        parameter: {key: _local(wanted[name]) for key, name in names.items()} for parameter, names in names_of.items()
    }
    _put(optimizer, parameters, values if form is None else {}, wanted[GROUPS], wanted.get(OTHERS) or {})
    if form is not None:
        for parameter, read in values.items():
            exact = {key.removeprefix(CODES): value for key, value in read.items() if key.startswith(CODES)}
            others = {key: value for key, value in read.items() if not key.startswith(CODES)}
            optimizer.state[parameter] = form.made(parameter, others, exact)
    for group, options in zip(optimizer.param_groups, wanted[GROUPS], strict=True):
        group.update(options)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns the parameters in the order of their numbers in `state_dict`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _saved_states(
    parameters: list[nn.Parameter], parts: Mapping[nn.Parameter, Part], metadata: Metadata
) -> Iterator[tuple[nn.Parameter, str, str, Any]]:
    """Yields the saved states of this rank's parameters: parameter, state, name in the folder, description. Raises
    ValueError for a state with neither the shape of its parameter nor the mark of this slice."""
    by_name = {parts[parameter].row.name: parameter for parameter in parameters if parameter in parts}
    for name, saved in metadata.state_dict_metadata.items():
        owner, _, key = name.rpartition("/")
        parameter = by_name.get(owner)
        if parameter is None:
            continue
        key, _, mark = key.partition("@")
        part = parts[parameter]
        if key.startswith(CODES):
            if mark == _elements(parameter, part):
                yield parameter, key, name, saved
        elif isinstance(saved, BytesStorageMetadata) or not saved.size or saved.size == part.row.shape:
            yield parameter, key, name, saved
        elif mark.partition("of")[2] != part.mark.partition("of")[2]:
            raise ValueError(
                f"the optimizer's state {key!r} of {owner} has the shape {list(saved.size)}, and the parameter "
                f"{list(part.row.shape)}, so it cannot be cut for another tp_size or ep_size, or for "
                "another number of ranks with shard_optimizer=True or shard_parameters=True; resume with those of the "
                "checkpoint"
            )
        elif mark == part.mark.removeprefix("@"):
            yield parameter, key, name, saved


def _elements(parameter: nn.Parameter, part: Part) -> str:
    """Returns the elements of a parameter that this rank steps, as text."""
    start, _ = part.elements or (0, 0)
    return f"{part.mark}:{start}:{parameter.numel()}"


def _is_scalar(saved: Any) -> bool:
    return not isinstance(saved, BytesStorageMetadata) and not saved.size


def _empty_state(parameter: nn.Parameter, part: Part, name: str, saved: Any, counts: bool) -> Tensor:
    """Returns an empty tensor into which DCP reads a state; `counts` for a number, such as the number of steps."""
    dtype = saved.properties.dtype
    if "@" in name or counts or saved.size != part.row.shape:
        return torch.zeros(saved.size, dtype=dtype)
    return FullTensor(part, torch.zeros_like(parameter, dtype=dtype, requires_grad=False))


def _local(value: Any) -> Any:
    return value.local if isinstance(value, FullTensor) else value


def _put(
    optimizer: Optimizer,
    parameters: list[nn.Parameter],
    values: Mapping[nn.Parameter, dict[str, Any]],
    groups: list[dict[str, Any]],
    others: Mapping[Any, Any],
) -> None:
    """Loads states as `load_state_dict` does, without rounding to the dtype of the parameter."""
    mine = optimizer.state_dict()["param_groups"]
    numbers = dict(zip(parameters, (number for group in mine for number in group["params"]), strict=True))
    # The parameters' states come first: Adagrad reads the first of all.
    state = {**{numbers[parameter]: entry_of(states) for parameter, states in values.items()}, **others}
    filled = [{**group, **options} for group, options in zip(mine, groups, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": filled})
    for parameter, states in values.items():
        kept = dict(named_states(optimizer.state[parameter]))
        for key, value in states.items():
            if isinstance(value, Tensor) and kept[key].dtype != value.dtype:
                kept[key] = value.to(kept[key].device)
        optimizer.state[parameter] = entry_of(kept)


@contextlib.contextmanager
def _failures_named(what: str) -> Iterator[None]:
    """Replaces DCP's error, which is no `Exception` and shows tracebacks of every rank, by a short error."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, DamagedFile):
            raise cause from None
        remedy = f"; {ROOM}" if isinstance(cause, OSError) else ""
        raise RuntimeError(f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}{remedy}") from cause


# -- random generators ---------------------------------------------------------------------------------------------


Generators = dict[str, Any]


def generators() -> Generators:
    """Returns the states of Python's, numpy's and torch's generators, with the generator of this rank's device."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(states: Generators) -> None:
    """Sets the generators to states returned by `generators`."""
    random.setstate(states["python"])
    np.random.set_state(_numpy_state(states))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def check_generators(states: Generators) -> None:
    """Sets generators of its own to the states; any exception means that they are none."""
    random.Random().setstate(states["python"])
    np.random.RandomState().set_state(_numpy_state(states))
    torch.Generator().set_state(states["torch"])


def _numpy_state(states: Generators) -> tuple[Any, ...]:
    kind, keys, *rest = states["numpy"]
    return kind, keys.numpy().astype(np.uint32), *rest
