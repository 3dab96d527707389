"""The manifest of a checkpoint, and the check of a run against the manifest before resuming.

In:   the model, the layout and the optimizer of a run; a checkpoint's folder.
Out:  `helix_state.json`, written last, so a folder with the file is complete; an error with the differences.
Must hold: a checkpoint is checked before any part is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from torch import nn
from torch.optim import Optimizer

from hf_helix.checkpoint.plain_files import DamagedFile, check_fields, read_json
from hf_helix.planning.parameters import Part
from hf_helix.planning.text import shorten_list
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.version import __version__

NAME = "helix_state.json"
FORMAT = 1
_DATA = (".safetensors", ".distcp", ".metadata", ".pt")  # files of a resumed run, never edited by hand

# Shape, dtype, training and optimizer group of every parameter.
Parameters = dict[str, dict[str, Any]]

_PARAMETER: dict[str, Any] = {"shape": list[int], "dtype": str, "trained": bool, "group": int | None}


@dataclass(frozen=True)
class Manifest:
    """The contents of `helix_state.json`."""

    model: str
    parameters: Parameters
    layout: dict[str, int]
    samples: dict[str, int]  # factors; their product is the number of samples of an optimizer step
    optimizer: str | None  # the name of the optimizer's class; None for a checkpoint of the model only
    # the sizes in bytes of the files that a resumed run reads
    files: dict[str, int] = dataclasses.field(default_factory=dict)
    # the pass over the data: its number, and the step before its first one
    epoch: dict[str, int] = dataclasses.field(default_factory=dict)
    group: int = 0  # the samples that are sorted by length together (group_by_length); 0 without
    hf_helix: str = __version__
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Writes the manifest into a folder, as the last file."""
        paths = (path for path in sorted(folder.rglob("*")) if path.name.endswith(_DATA))
        files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
        text = json.dumps(dataclasses.asdict(dataclasses.replace(self, files=files)), indent=1)
        (folder / NAME).write_text(text + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads and checks the manifest of a checkpoint. Raises ValueError for no checkpoint, another version;
        DamagedFile for damaged files."""
        if not folder.is_dir():
            raise ValueError(
                f"resume_from_checkpoint={str(folder)!r} is not a folder; give one that HelixTrainer has saved, such "
                "as 'output_dir/checkpoint-500', or True for the last one in output_dir"
            )
        path = folder / NAME
        if not path.is_file():
            raise ValueError(
                f"{folder} has no {NAME}: it was not saved by HelixTrainer, or not completely; resume from another "
                "checkpoint, or start from its weights with from_pretrained(folder)"
            )
        data = read_json(path, {"format": int, "hf_helix": str})
        if data["format"] != FORMAT:
            raise ValueError(
                f"{path} has format {data['format']}, written by hf_helix {data['hf_helix']}; this one reads format "
                f"{FORMAT}: resume with that version, or start from its weights with from_pretrained(folder)"
            )
        check_fields(path, data := {"epoch": {}, "group": 0, **data}, _FIELDS)
        if data["epoch"]:
            check_fields(path, data["epoch"], {"number": int, "first_step": int})
        check_fields(path, data["layout"], dict.fromkeys(("tp", "cp", "pp", "dp", "ep"), int))
        manifest = cls(**{name: data[name] for name in _FIELDS})
        manifest._check_files(folder)
        return manifest

    def _check_files(self, folder: Path) -> None:
        """Raises DamagedFile for entries without their fields, and for files that are missing or of another size."""
        for about in self.parameters.values():
            check_fields(folder / NAME, about, _PARAMETER)
        problems = []
        for name, size in self.files.items():
            path = folder / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != size:
                problems.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        if problems:
            raise DamagedFile(folder, f"is damaged: {shorten_list(problems, limit=3)}")

    def check_run(self, folder: Path, run: Manifest, skips_data: bool) -> None:
        """Compares a run with the checkpoint.

        Args:
            folder: of the checkpoint.
            run: the manifest of the run.
            skips_data: whether the run skips the data of earlier steps.

        Raises:
            ValueError: the run does not fit the checkpoint.
        """
        if self.optimizer is None:
            raise ValueError(
                f"{folder} holds the model only (save_only_model=True), and cannot be resumed; save with "
                "save_only_model=False, or start from its weights: from_pretrained(folder), and train() without it"
            )
        if problems := _differences(self.parameters, run.parameters, ("shape", "dtype", "trained")):
            raise ValueError(
                f"{folder} was saved from another model, a {self.model} (this one is a {run.model}): "
                f"{shorten_list(problems, limit=3)}; build the model as it was, or resume from another checkpoint"
            )
        if skips_data and math.prod(self.samples.values()) != math.prod(run.samples.values()):
            raise ValueError(
                f"{folder}: a step took {_factors(self.samples)} samples, and would take {_factors(run.samples)}, so "
                "the data would not go on where they were; change per_device_train_batch_size or "
                "gradient_accumulation_steps so that the products are equal, or use ignore_data_skip=True"
            )
        if skips_data and self.group and run.group and self.group != run.group:
            raise ValueError(
                f"{folder}: train_sampling_strategy='group_by_length' has ordered the data by groups of "
                f"{_groups(self)}, and would order them by groups of {_groups(run)}; change both so that the product "
                "is the same, give the ranks as `layouts`, or use ignore_data_skip=True"
            )

    def check_optimizer(self, folder: Path, run: Manifest) -> None:
        """Raises ValueError for another optimizer, or other parameter groups, with the differences."""
        if self.optimizer != run.optimizer:
            raise ValueError(
                f"{folder} has the states of the optimizer {self.optimizer}, and this run uses {run.optimizer}; use "
                "the same `optim`, or start from its weights: from_pretrained(folder), and train() without it"
            )
        if problems := _differences(self.parameters, run.parameters, ("group",)):
            raise ValueError(
                f"{folder} has the optimizer's states of another set of parameters: {shorten_list(problems, limit=3)}; "
                "freeze the same parameters and give the same groups, or start from its weights with "
                "from_pretrained(folder)"
            )


_FIELDS = get_type_hints(Manifest)  # the types of fields in the file


def describe_parameters(
    parts: Mapping[nn.Parameter, Part], mesh: Mesh, optimizer: Optimizer | None = None
) -> Parameters:
    """Returns the description of every parameter of the model, on all pipeline ranks. Collective."""
    groups = optimizer.param_groups if optimizer is not None else []
    group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
    mine: Parameters = {
        part.row.name: {
            "shape": list(part.row.shape),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "trained": part.row.trained,
            "group": group_of.get(parameter),
        }
        for parameter, part in parts.items()
    }
    if mesh.pipe.group is None:
        return mine
    return {name: about for part in all_gather_object(mine, mesh.pipe.ranks) for name, about in part.items()}


def _differences(saved: Parameters, present: Parameters, keys: tuple[str, ...]) -> list[str]:
    """Returns the differences between parameters, as sentences."""
    problems = [f"it has {name}" for name in saved if name not in present]
    problems += [f"it has no {name}" for name in present if name not in saved]
    for name in present:
        for key in keys if name in saved else ():
            if saved[name][key] != present[name][key]:
                problems.append(f"{name} has {key} {saved[name][key]}, here {present[name][key]}")
    return problems


def _groups(manifest: Manifest) -> str:
    return f"{manifest.group} samples (per_device_train_batch_size * gradient_accumulation_steps)"


def _factors(factors: Mapping[str, int]) -> str:
    return f"{math.prod(factors.values())} ({' x '.join(f'{name} {factor}' for name, factor in factors.items())})"
