"""The state of the generators that data and user code draw from. Operators have seeds of their own.

In:   the process's generators.
Out:  a file for each rank, and the generators as they were.
Must hold: torch reads the file without unpickling anything but plain values.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

Generators = dict[str, Any]


def generators() -> Generators:
    """The state of Python's, numpy's and torch's generators, of this rank's device, too."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    found = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_generators(found: Generators) -> None:
    """Put them back."""
    kind, keys, *rest = found["numpy"]
    random.setstate(found["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(found["torch"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
