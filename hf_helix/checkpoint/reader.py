"""Reads a Hugging Face checkpoint, and matches the tensors on disk with the parameters of a model.

In:   a folder with `model.safetensors`, or with several files and their index; a Transformers model on any device.
Out:  names, shapes and dtypes of the tensors, read from the files' headers; for every parameter its source tensors;
      slices of tensors.
Must hold: names and conversions equal `from_pretrained`'s; only the requested part of a tensor is read, and no
file stays mapped into memory.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from hf_helix.planning.parameters import Cut
from hf_helix.planning.text import shorten_list

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Floating-point dtypes: the name in safetensors, and the name in torch."""


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: Path  # the path of the file
    shape: tuple[int, ...]  # of the full tensor
    dtype: str  # by its name in safetensors, such as "BF16"


class Checkpoint:
    """The safetensors files of a folder, or a single file.

    Attributes:
        folder: of the checkpoint, or the path of the file.
        tensors: every tensor, by its name on disk.

    Raises:
        ValueError: no files; or a file is missing, cut off, or lacks tensors of the index. Names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        for path, promised in _files(folder):
            with open_safetensors(path) as file:
                present = set(file.keys())
                absent = sorted(promised - present)
                if absent:
                    raise ValueError(f"{path} has no {shorten_list(absent)}, which {folder / INDEX_NAME} says it has")
                for key in sorted(present):
                    about = file.get_slice(key)
                    self.tensors[key] = StoredTensor(path, tuple(about.get_shape()), about.get_dtype())

    @property
    def dtype(self) -> str:
        """The dtype of the first floating-point tensor by its name in torch, for configurations without a dtype."""
        first = min(key for key, stored in self.tensors.items() if stored.dtype in FLOATS)
        return FLOATS[self.tensors[first].dtype]

    def meta_tensor(self, key: str) -> Tensor:
        """Returns a tensor of the same shape on the meta device, to try a conversion."""
        return torch.empty(self.tensors[key].shape, device="meta")

    def reader(self) -> Reader:
        """Returns a reader for a few tensors."""
        return Reader(self.tensors)


class Reader(contextlib.ExitStack):
    """Reads tensors of a checkpoint, within a context: at its end files are closed, and their pages leave this
    process."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._open: dict[Path, Any] = {}

    def slice(self, key: str) -> Any:
        """Returns a tensor that reads only indexed elements."""
        return self._file(key).get_slice(key)

    def tensor(self, key: str) -> Tensor:
        """Returns the full tensor."""
        return self._file(key).get_tensor(key)

    def _file(self, key: str) -> Any:
        path = self._tensors[key].file
        if path not in self._open:
            self._open[path] = self.enter_context(open_safetensors(path))
        return self._open[path]


@dataclass(frozen=True)
class Source:
    """The tensors on disk that become a parameter; with some conversions, several parameters."""

    target: str  # the name of the (first) parameter
    # names on disk: a single tensor's under its own name, else by the patterns of the converter
    keys: dict[str, list[str]] = field(default_factory=dict)
    # Transformers' conversion of the tensors to the parameter; None for a tensor without conversion
    converter: WeightConverter | None = None

    @property
    def names(self) -> list[str]:
        """The names of the tensors on disk."""
        return [key for keys in self.keys.values() for key in keys]

    @property
    def is_stack(self) -> bool:
        """Whether tensors are stacked along dimension 0, as experts are, so that a slice needs only some tensors."""
        if self.converter is None:
            return False
        first, *others = self.converter.operations
        joined = all(isinstance(other, Concatenate) and other.dim > 0 for other in others)
        return isinstance(first, MergeModulelist) and first.dim == 0 and joined

    def is_cut_stack(self, cut: Cut) -> bool:
        """Returns whether each rank can convert its own slice, such as experts stacked in the model and separate on
        disk."""
        return self.is_stack and cut.dim == 0 and not cut.is_fused

    def part(self, first: int, last: int) -> Source:
        """Returns the source of the entries `first` to `last`, exclusive, of a stack."""
        return replace(self, keys={pattern: keys[first:last] for pattern, keys in self.keys.items()})

    def convert(self, model: Any, tensor_of: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Returns the parameters of the source, by name."""
        if self.converter is None:
            return {self.target: tensor_of(self.names[0])}
        converter = copy.deepcopy(self.converter)  # the converter collects its tensors
        for pattern, keys in self.keys.items():
            for key in keys:
                converter.add_tensor(self.target, key, pattern, tensor_of(key))  # as when saving
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def match_tensors(model: Any, keys: Iterable[str]) -> tuple[list[Source], list[str]]:
    """Matches tensors on disk with the parameters of a model, as `from_pretrained` does. Returns the source of every
    parameter, and the names of tensors without a parameter. Raises ValueError for two tensors of one parameter."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names = dict.fromkeys(persistent_tensors(model), True)
    prefix = model.base_model_prefix
    sources: dict[str, Source] = {}
    unknown = []
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = rename_source_key(key, [], [], prefix, names)
        if name not in names:
            unknown.append(key)
            continue
        source = sources.setdefault(name, Source(name, {}, by_pattern[pattern] if pattern else None))
        if source.keys and (pattern is None or source.converter is None):
            raise ValueError(f"{source.names[0]} and {key} would both be {name}; leave one of them out of the folder")
        source.keys.setdefault(pattern or key, []).append(key)
    # Transformers lists tensors of older versions that no model needs.
    info = SimpleNamespace(missing_keys=set(), unexpected_keys=set(unknown))
    model._adjust_missing_and_unexpected_keys(info)
    return list(sources.values()), sorted(info.unexpected_keys)


def persistent_tensors(model: nn.Module) -> dict[str, Any]:
    """Returns the tensors of `model.state_dict()` by name and in its order; for a cut model, this rank's slices."""
    tensors = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = tensor
    return tensors


def _files(folder: Path) -> list[tuple[Path, set[str]]]:
    """Returns the files of a checkpoint, each with the names of its tensors in the index."""
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    for path in (folder, single):
        if path.is_file():
            return [(path, set())]
    if index.is_file():
        try:
            file_of = json.loads(index.read_text())["weight_map"]
            files = sorted(set(file_of.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of safetensors: {error!r}; save the model again") from error
        missing = [str(folder / file) for file in files if not (folder / file).is_file()]
        if missing:
            raise ValueError(f"{shorten_list(missing)} is missing, which {index} names; copy the whole folder")
        return [(folder / file, {key for key, of in file_of.items() if of == file}) for file in files]
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder on this host; download a model first, `hf download NAME --local-dir {folder}`"
        )
    others = sorted(path.name for pattern in ("pytorch_model*.bin", "*.pth") for path in folder.glob(pattern))
    also = f", only {shorten_list(others)}, which cannot be read in slices" if others else ""
    raise ValueError(
        f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}{also}; make them with "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)"
    )


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Opens a file for the duration of the context. Raises ValueError with the file if it cannot be read."""
    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read, it may be cut off: {error}; copy or save it again") from error
    with file:
        yield file
