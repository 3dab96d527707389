"""Advice from the findings of the doctor: a run names, at its start, a layout that is clearly faster.

In:   the file of `hf_helix.tuning.found_layouts`; a model, and the machine and options of a run.
Out:  one line of output.
Must hold: a run gives advice only for the question of the doctor: the same model, the same number of devices of one
kind and of nodes, the same type of matrix products, sequences and steps of similar length. An unreadable file counts as
none; a run never simulates.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_helix.measure.machine import device_in_clusters
from hf_helix.planning.timing.sizes import Sizes, size_text
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.distributed.groups import host_name
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size
from hf_helix.runtime.notices import say
from hf_helix.tuning.cache import model_digest
from hf_helix.tuning.found_layouts import FORMAT, Machine, file_of

CLEARLY = 1.1
"""How many times as fast another layout must be predicted to be."""

NEAR = 1.25
"""The largest ratio between the lengths of sequences, or of steps, of the run and of the doctor's question."""


TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Types of matrix products, as clusters name them."""


class Advice:
    """The findings of the doctor for the model of a run. Collective.

    Args:
        base: the whole Transformers model, before it is cut.
        mesh: the ranks of the run.
        autocast_dtype: the type of matrix products under autocast; None for the type of the weights.
    """

    def __init__(self, base: Any, mesh: Mesh, autocast_dtype: torch.dtype | None) -> None:
        self._mesh = mesh
        self._data: Any = None
        if world_size() == 1:
            return
        nodes = len(set(all_gather_object(host_name())))
        if rank() == 0:
            dtype = autocast_dtype or next(base.parameters()).dtype
            machine = Machine(device_in_clusters(mesh.device), world_size(), nodes, TYPES.get(dtype, ""))
            self._data = known_layouts(base, machine)

    def say(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Prints on rank 0, once, a layout known to be clearly faster than the running layout."""
        data, self._data = self._data, None
        if data is None:
            return
        sizes = self._mesh.sizes
        tokens = sizes["dp"] * sum(batch["input_ids"].numel() for batch in batches)
        longest = max(batch["input_ids"].shape[-1] for batch in batches)
        line = better_layout(data, sizes, longest, tokens)
        if line is not None:
            say(line)


def known_layouts(base: Any, machine: Machine) -> Any:
    """Returns the doctor's speeds for a model on a machine; None without a file."""
    try:
        data = json.loads(file_of(model_digest(base, with_types=False), machine.devices).read_text())
        return data if data["format"] == FORMAT and data["machine"] == vars(machine) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def better_layout(data: Any, sizes: Mapping[str, int], length: int, tokens: int) -> str | None:
    """Returns the sentence about a layout; None if nothing better is known."""
    mine = Sizes.of(sizes)
    try:
        if not _near(length, data["length"]) or not _near(tokens, data["tokens"]):
            return None
        rates = {each["layout"]: float(each["tokens_per_second"]) for each in data["layouts"]}
        best = max(rates, key=lambda layout: rates[layout])
        gain = rates[best] / rates[size_text(mine)]
        asked = f"{data['length']:,} tokens a sequence and {data['tokens']:,} a step in {data['machine']['dtype']}"
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
    if gain < CLEARLY:
        return None
    return (
        f"hf-helix doctor predicts that {best} trains {gain:.2f} times as fast as this layout, {size_text(mine)} "
        f"({data['cluster']}, {asked})"
    )


def _near(one: float, other: float) -> bool:
    return max(one, other) <= NEAR * min(one, other)
