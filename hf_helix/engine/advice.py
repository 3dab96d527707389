"""What the doctor found, kept on disk, so that a run can say at its start that another layout is clearly faster.

In:   a ranking of layouts for a model on a cluster; later, a model and the mesh that it is to be trained on.
Out:  a file in the cache; one line of output.
Must hold: it is said only for the same model, the same number of devices and the same kind of device; a file that
cannot be read is as good as none; a run never simulates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_helix.planning.text import format_json
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.notices import say
from hf_helix.simulation.sizes import Sizes, size_text
from hf_helix.tuning.cache import cache_root, write_file
from hf_helix.tuning.fingerprint import model_digest
from hf_helix.tuning.measure.machine import describe_device

if TYPE_CHECKING:
    from hf_helix.simulation.cluster import Cluster
    from hf_helix.simulation.layouts import Ranking

CLEARLY = 1.1
"""How many times as fast another layout must be predicted to be."""

FORMAT = "hf_helix.layouts/1"


def remember(model: Any, ranking: Ranking, cluster: Cluster) -> Path:
    """Writes what the doctor found.

    Args:
        model: the whole model.
        ranking: its layouts.
        cluster: what they were simulated for.
    """
    found = [
        {"layout": size_text(step.case.sizes), "tokens_per_second": round(step.tokens_per_second)}
        for step in ranking.steps
    ]
    path = _file(model, cluster.devices)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"format": FORMAT, "cluster": cluster.name, "device": cluster.device.name, "layouts": found}
    write_file(path, format_json(data) + "\n")
    return path


def say_better_layout(base: Any, mesh: Mesh) -> None:
    """Says on rank 0 if the doctor found a layout that is clearly faster than the one that is about to run.

    Args:
        base: the whole Transformers model.
        mesh: what it is to be trained on.
    """
    if rank() == 0 and world_size() > 1:
        line = better_layout(base, mesh.sizes, describe_device(mesh.device))
        if line is not None:
            say(line)


def better_layout(base: Any, sizes: dict[str, int], device: str) -> str | None:
    """Returns what to say of a layout; None where nothing better is known.

    Args:
        base: the whole Transformers model.
        sizes: of the mesh, by the names of its dimensions.
        device: the name of the device.
    """
    mine = Sizes(sizes["tp"], sizes["cp"], sizes["pp"], sizes["dp"], sizes["ep"])
    try:
        data = json.loads(_file(base, mine.devices).read_text())
        if data["format"] != FORMAT or data["device"] != device:
            return None
        rates = {each["layout"]: float(each["tokens_per_second"]) for each in data["layouts"]}
        best = max(rates, key=lambda layout: rates[layout])
        gain = rates[best] / rates[size_text(mine)]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
    if gain < CLEARLY:
        return None
    return (
        f"hf-helix doctor predicts that {best} trains {gain:.2f} times as fast as this layout, {size_text(mine)} "
        f"({data['cluster']})"
    )


def _file(model: Any, devices: int) -> Path:
    """The file of a model, whatever type its weights were loaded in: the doctor sees a configuration alone."""
    return cache_root() / "layouts" / f"{model_digest(model, with_types=False)}-{devices}.json"
