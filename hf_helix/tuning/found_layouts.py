"""The findings of the doctor on disk: the speeds of layouts, for a run to compare itself with.

In:   the digest of a model, the speeds of its layouts, a cluster, and the question.
Out:  a file in the cache.
Must hold: a file is for one model and one number of devices, and names its question. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_helix.measure.cache_folder import cache_root, write_file
from hf_helix.planning.text import format_json
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.sizes import Sizes, size_text

FORMAT = "hf_helix.layouts/1"


@dataclass(frozen=True)
class Machine:
    """The machine of a file of layouts, and of a run.

    Attributes:
        device: the name of each device.
        devices: the number of devices.
        nodes: the number of nodes.
        dtype: of matrix products.
    """

    device: str
    devices: int
    nodes: int
    dtype: str


def remember(
    digest: str, speeds: Mapping[Sizes, float], cluster: Cluster, dtype: str, length: int, tokens: int
) -> Path:
    """Writes speeds to a file in the cache.

    Args:
        digest: of the model, see `file_of`.
        speeds: the predicted tokens per second of each layout.
        cluster: the machine.
        dtype: of matrix products, as clusters name it.
        length: of a sequence.
        tokens: of a step.
    """
    layouts = [{"layout": size_text(sizes), "tokens_per_second": round(speed)} for sizes, speed in speeds.items()]
    path = file_of(digest, cluster.devices)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "format": FORMAT,
        "cluster": cluster.name,
        "machine": vars(Machine(cluster.device.name, cluster.devices, cluster.nodes, dtype)),
        "length": length,
        "tokens": tokens,
        "layouts": layouts,
    }
    write_file(path, format_json(data) + "\n")
    return path


def file_of(digest: str, devices: int) -> Path:
    """Returns the file of a model, by the digest of its parameters (`hf_helix.tuning.cache.model_digest`) without
    types: the doctor sees a configuration only."""
    return cache_root() / "layouts" / f"{digest}-{devices}.json"
