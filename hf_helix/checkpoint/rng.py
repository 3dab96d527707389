"""The states of the random generators that data and user code draw from. Operators have seeds of their own.

In:   the process's generators.
Out:  their states, as values that a checkpoint can hold; the generators set back to them.
Must hold: `torch.load` reads the states with `weights_only=True`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

Generators = dict[str, Any]


def generators() -> Generators:
    """The states of Python's, numpy's and torch's generators, with that of this rank's device."""
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
    """Sets the generators back to states that `generators` has returned."""
    kind, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
