"""Fingerprints: texts by which a model, its options and its files are recognised.

In:   a whole model and its mesh; a `HelixConfig`; a file.
Out:  names and values as text: what a measurement is for, what ranks must have in common, what a file holds.
Must hold: what changes the graphs or the times of operators changes a value.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hf_helix.config import SCHEDULES, HelixConfig
from hf_helix.planning.graph.recompute import NONE
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.version import __version__


def fingerprint(
    model: Any, mesh: Mesh, autocast_dtype: torch.dtype | None = None, recompute: Sequence[str] = ()
) -> dict[str, str]:
    """Returns what measurements of a model are for. Call it before the model is cut.

    Args:
        model: a whole Transformers model.
        mesh: which ranks share what.
        autocast_dtype: the type of matrix products under autocast; None for no autocast.
        recompute: the recompute mode of every layer, see `hf_helix.engine.recompute`.
    """
    shared = [(name, mesh.sizes[name]) for name in ("tp", "pp", "cp", "ep")]
    runs = [f"{mode} x {len(list(layers))}" for mode, layers in itertools.groupby(recompute)]
    again = {} if set(recompute) <= {NONE} else {"recompute": recompute[0] if len(runs) == 1 else ", ".join(runs)}
    return {
        "model": f"{type(model).__name__} {model_digest(model)}"
        + (f" {autocast_dtype}".replace("torch.", "") if autocast_dtype else ""),
        "mesh": " ".join(f"{name}={size}" for name, size in shared if size > 1 or name == "tp"),
        **_spread(mesh),
        "attention": str(model.config._attn_implementation),
        **again,
        "transformers": version("transformers"),
        "hf_helix": __version__,
    }


def _spread(mesh: Mesh) -> dict[str, str]:
    """What ranks with copies spread over each other; nothing where every rank keeps and steps all of it."""
    if mesh.copies is None:
        return {}
    once = mesh.copies.weights is mesh.copies.sums
    return {"weights": f"{'stepped by' if once else 'spread over'} {mesh.copies.weights.size}"}


def model_digest(model: Any, with_types: bool = True) -> str:
    """Returns a digest of a whole model's parameters: their names and shapes, and which of them are frozen.

    Args:
        model: a whole Transformers model.
        with_types: whether the types that the parameters are kept in count, too.
    """
    weights = [
        (
            name,
            tuple(weight.shape),
            *((str(weight.dtype),) if with_types else ()),
            *(() if weight.requires_grad else ("frozen",)),
        )
        for name, weight in model.named_parameters()
    ]
    return hashlib.sha256(json.dumps(weights).encode()).hexdigest()[:12]


def file_digest(path: str | None) -> str:
    """Returns a digest of what a file holds; an empty text without a path."""
    return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def shared_options(config: HelixConfig) -> str:
    """Returns the options that all ranks must have in common, one on each line.

    The plan is left out: it is compared once it is made. Files may have other paths on another host, so that
    their contents are compared.
    """
    values = dataclasses.asdict(config)
    del values["plan"]
    values["profile"] = file_digest(config.profile)
    if config.schedule not in SCHEDULES:
        values["schedule"] = Path(config.schedule).read_text().strip()
    return "\n".join(f"{name}={value}" for name, value in values.items())
