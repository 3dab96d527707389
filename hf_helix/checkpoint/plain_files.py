"""Files of a checkpoint, read as plain data: no file runs code.

In:   the path of a file with JSON, with `torch.save`'s bytes, or with the metadata of a DCP folder.
Out:  its content; an error that names the file and the fault.
Must hold: only classes on a list are made, and no function off the list is called: files with pickles are read through
an allow-list. An error never recommends a reader without a list.
"""

import io
import json
import pathlib
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.futures import Future
from torch.serialization import _get_layout, safe_globals

METADATA = ".metadata"  # the name of DCP's file


class DamagedFile(ValueError):
    """A file that is missing or damaged. The message names the file and the fault, and no remedy."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(path, fault)  # as errors are pickled
        self.fault = fault

    def __str__(self) -> str:
        return "{} {}".format(*self.args)


# -- JSON ------------------------------------------------------------------------------------------------------------


def read_json(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON object of a file.

    Args:
        path: of the file.
        fields: the types of fields by their names, such as `dict[str, int]` or `float | None`; further fields may have
            any type.

    Raises:
        DamagedFile: the file is missing or no such object.
    """
    if not path.exists():
        raise DamagedFile(path, "is missing")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile(path, f"is damaged or cut short ({error})") from None
    if not isinstance(data, dict):
        raise DamagedFile(path, f"is damaged: it holds a {type(data).__name__} instead of an object")
    check_fields(path, data, fields)
    return data


def check_fields(path: Path, data: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raises DamagedFile for a field that is missing or has another type, see `read_json`."""
    for name, hint in fields.items():
        if name not in data:
            raise DamagedFile(path, f"is damaged: it has no {name!r}")
        if not fits(data[name], hint):
            raise DamagedFile(path, f"is damaged: {name!r} should be {_name(hint)}, and is {_short(data[name])}")


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a value has a type such as `int`, `list[str]`, `dict[str, Any]` or a union of types. A bool is no
    number, a whole number is a float."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return True
    if kind in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if kind is dict and inner:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if kind is list and inner:
        return isinstance(value, list) and all(fits(each, inner[0]) for each in value)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, type(None) if kind is None else kind)


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# -- what `torch.save` writes ------------------------------------------------------------------------------------------

_PROJECTIONS = (
    ("galore_torch.galore_projector", "GaLoreProjector"),
    ("apollo_torch.svd_projector", "GaLoreProjector"),
    ("apollo_torch.random_projector", "GradientProjector"),
)
"""Classes of plain attributes that optimizers keep among their states. They are known if their library is in use."""


def read_torch(path: Path, source: io.BytesIO | None = None) -> Any:
    """Returns the content of a file of `torch.save`, or of the part `source` of the file.

    Raises:
        DamagedFile: the file is missing or damaged, or has a class off the list.
    """
    if source is None and not path.is_file():
        raise DamagedFile(path, "is missing")
    libraries = [(sys.modules[module], name) for module, name in _PROJECTIONS if module in sys.modules]
    try:
        with safe_globals([getattr(module, name) for module, name in libraries]):
            return torch.load(path if source is None else source, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's text recommends to read without a list
        raise DamagedFile(path, _fault(error)) from None


def _fault(error: Exception) -> str:
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named:
        return f"is not read: it asks for {named[1]}, which no file of HelixTrainer has"
    if isinstance(error, pickle.UnpicklingError):
        return "is damaged: its content is not of torch.save"
    return f"is damaged ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no content'})"


# -- folders of DCP ----------------------------------------------------------------------------------------------------

_CLASSES = (
    Metadata,
    MetadataIndex,
    StorageMeta,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
)
_TYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in _CLASSES},
    **{("torch", name): value for name, value in _TYPES.items()},
    (_get_layout.__module__, _get_layout.__name__): _get_layout,
    **{(module, kind.__name__): kind for module in ("pathlib", "pathlib._local") for kind in [pathlib.PosixPath]},
}
"""The classes of DCP's metadata, and the types of tensors: all that a good file asks for."""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata; anything off the list is an error before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return _ALLOWED[module, name]


def read_metadata(folder: Path) -> Metadata:
    """Returns the metadata of a DCP folder.

    Raises:
        DamagedFile: the file is missing or damaged, or has a class off the list.
    """
    path = folder / METADATA
    if not path.is_file():
        raise DamagedFile(path, "is missing")
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:
        named = isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error)
        raise DamagedFile(path, _fault(error) if named else f"is no metadata of DCP ({error!r})") from None
    fault = next(_faults(metadata), None)
    if fault is not None:
        raise DamagedFile(path, f"is no metadata of DCP: {fault}")
    return metadata


def _faults(metadata: Any) -> Iterator[str]:
    """Yields the faults of metadata; a pickle may leave out any attribute."""
    if not isinstance(metadata, Metadata):
        yield f"it holds a {type(metadata).__name__}"
        return
    states, places = (getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data"))
    if not isinstance(states, dict) or not isinstance(places, dict):
        yield "its tables are missing"
        return
    for name, about in states.items():
        of_tensor = isinstance(about, TensorStorageMetadata) and _is_tensor(about)
        if not isinstance(name, str) or not (of_tensor or isinstance(about, BytesStorageMetadata)):
            yield f"the entry {name!r} is no state"
    for index, place in places.items():
        if not isinstance(index, MetadataIndex) or not isinstance(place, _StorageInfo) or not _is_place(place):
            yield f"the place of {index} is no part of a file of this folder"


def _is_tensor(about: Any) -> bool:
    size, properties = getattr(about, "size", None), getattr(about, "properties", None)
    chunks = getattr(about, "chunks", None)
    is_cut = isinstance(chunks, list) and all(isinstance(chunk, ChunkStorageMetadata) for chunk in chunks)
    return isinstance(size, torch.Size) and isinstance(getattr(properties, "dtype", None), torch.dtype) and is_cut


def _is_place(place: Any) -> bool:
    name, numbers = getattr(place, "relative_path", None), (getattr(place, "offset", -1), getattr(place, "length", -1))
    inside = isinstance(name, str) and Path(name).name == name
    return inside and all(isinstance(number, int) and number >= 0 for number in numbers)


class PlainReader(FileSystemReader):
    """Reads a folder of DCP whose metadata `read_metadata` has read; its errors name the damaged file."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._folder, self._metadata = folder, metadata

    def read_metadata(self) -> Metadata:  # with arguments, DCP would try other files as well
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Reads the parts of a plan, file by file."""
        done: Future[None] = Future()
        done.set_result(None)
        items: dict[str, list[Any]] = {}
        for item in plan.items:
            items.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, parts in items.items():
            try:
                super().read_data(replace(plan, items=parts), planner)
            except DamagedFile as error:
                raise DamagedFile(self._folder / name, error.fault) from None
            except Exception as error:
                raise DamagedFile(self._folder / name, _fault(error)) from None
        return done


class PlainPlanner(DefaultLoadPlanner):
    """Loads states that are no tensors as `read_torch` does."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = read_torch(Path("."), value)
