"""Proof on first use: a family that was derived from the model is proven before anything of the model is cut.

In:   the whole model of a run, its options and its mesh.
Out:  nothing, or an error on all ranks that names what differs.
Must hold: what is proven is a small model of the same class, patched as the model of the run is, on the run's own mesh,
all ranks together; a verdict is found again by what it is about only (the model's graphs, the source it is made of,
versions, layout). The random state of the run is as before, and nothing of the proof stays in memory.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_helix.config import AUTO, SCHEDULES, HelixConfig
from hf_helix.engine.proof.patches import carry_patches
from hf_helix.engine.proof.prove import describe, prove
from hf_helix.engine.proof.subject import Subject
from hf_helix.engine.proof.verdict import SHOWN, Proof
from hf_helix.models.registry import family_of
from hf_helix.planning.text import format_json
from hf_helix.runtime.distributed.agreement import decide_on_rank_0, on_all_ranks
from hf_helix.runtime.distributed.mesh import Mesh, mesh_of
from hf_helix.runtime.notices import about_time, say
from hf_helix.tuning.cache import result_folder, write_file
from hf_helix.version import __version__

FORMAT = "hf_helix.proof/2"


def prove_on_first_use(model: Any, config: HelixConfig, mesh: Mesh) -> None:
    """Proves the family of a model, unless it is declared or was proven on this machine before. Collective.

    The census proves classes as their defaults are. A checkpoint may switch on more, so it is no reason to skip this.

    Args:
        model: the whole Transformers model of the run; it is only looked at.
        config: the options of the run.
        mesh: the mesh of the run.

    Raises:
        ValueError: on every rank: the model, cut like this, does not compute what it computes unsplit.
    """
    family = on_all_ranks(lambda: family_of(model))
    if not family.needs_proof:
        return
    key = on_all_ranks(lambda: _key(family.digest(model), model, config, mesh))
    if config.cache and decide_on_rank_0(lambda: _was_proven(key)):
        return
    proof = _prove(model, config, mesh)
    if not proof.ok:
        raise ValueError(_advice(proof))
    if config.cache:
        decide_on_rank_0(lambda: _keep(key, proof))
    say(
        f"{proof.model}: derived from the model; equal to the unsplit model at {proof.layout} "
        f"({about_time(proof.seconds)})"
    )


def _prove(model: Any, config: HelixConfig, mesh: Mesh) -> Proof:
    """The proof of a small model of the same class. Collective."""
    options = replace(
        config,
        schedule=config.schedule if config.schedule in SCHEDULES else AUTO,
        profile=None,
        compile=False,
        cuda_graphs=False,
        shard_parameters=False,
        shard_optimizer=False,
    )
    if mesh.link is not None:  # an emulated link would only take time
        mesh = mesh_of(replace(config, link=None), mesh.device)
    small = on_all_ranks(lambda: _small(model, options))
    return prove(small, options, mesh)


def _small(model: Any, options: HelixConfig) -> Any:
    """A small model of the same class, with what was changed in this one."""
    small = Subject(model.config, type(model)).build(options)
    carry_patches(model, small)
    return small


def _advice(proof: Proof) -> str:
    """What is wrong and what to do, for the error that ends a run."""
    name, layout = proof.model, proof.layout
    if proof.refusal:
        return f"{name} is derived from the model, and a small one of its class cannot be cut: {proof.refusal}"
    wrong = ", ".join(f"{difference.name} (by {difference.error:.1e})" for difference in proof.wrong[:SHOWN])
    more = f" and {len(proof.wrong) - SHOWN} more" if len(proof.wrong) > SHOWN else ""
    return (
        f"{name} at {layout} is derived from the model and does not compute what the unsplit model computes: {wrong}"
        f"{more} differ. `hf-helix check {name}` shows which layouts are equal; use one of "
        "them, or the stock Trainer, or declare the family (docs/adding_a_model.md), and please report it"
    )


# -- verdicts on disk ----------------------------------------------------------------------------------------------


def _key(digest: str, model: Any, config: HelixConfig, mesh: Mesh) -> dict[str, str]:
    """What a verdict is about.

    Args:
        digest: the family's own digest of what the model computes, patched forwards included.
        model: the model of the run.
        config: the options of the run.
        mesh: the mesh of the run.
    """
    kind = type(model)
    return {
        "proof": f"{kind.__module__}.{kind.__qualname__}",
        "graphs": digest,
        "source": _source_digest(kind),
        "layout": describe({**mesh.sizes, "dp": 1}),
        "options": f"cp_method={config.cp_method} recompute={config.recompute} schedule={config.schedule}",
        "attention": str(model.config._attn_implementation),
        "device": mesh.device.type,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "hf_helix": __version__,
    }


def _source_digest(kind: type) -> str:
    """A digest of the file that a class is written in; empty where it is in none, as in a notebook."""
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()[:12]
    except (OSError, TypeError):
        return ""


def _was_proven(key: Mapping[str, str]) -> bool:
    """Whether the verdict of a key is on disk. Only equal ones are kept."""
    try:
        verdict = json.loads((result_folder(key) / "proof.json").read_text())
        return bool(verdict["format"] == FORMAT and verdict["case"] == dict(key))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _keep(key: Mapping[str, str], proof: Proof) -> None:
    """Writes a verdict."""
    folder = result_folder(key)
    folder.mkdir(parents=True, exist_ok=True)
    data = {"format": FORMAT, "case": dict(key), "verdict": str(proof)}
    write_file(folder / "proof.json", format_json(data) + "\n")
