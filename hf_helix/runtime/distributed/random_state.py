"""The random state of a process: the generators of Python, numpy and torch, and the generator of torch's device.

In:   the device of the run.
Out:  the state as data, a number that identifies a state, and the state of a rank on several others.
Must hold: to read a state draws nothing. The first of the ranks that share a state draws the same numbers as without
    sharing.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_helix.runtime.distributed.groups import broadcast_object

State = tuple[Any, ...]
"""Of Python, of numpy, of torch, and of torch's device, which is None on the CPU."""


def read_random(device: torch.device) -> State:
    """Returns the random state of this process."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device


def write_random(state: State, device: torch.device) -> None:
    """Gives this process a random state."""
    of_python, of_numpy, of_torch, on_device = state
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if on_device is not None:
        torch.cuda.set_rng_state(on_device, device)


def random_number(device: torch.device) -> int:
    """Returns a number that identifies a random state, with 64 bits."""
    (version, words, gauss), (_, keys, *rest), of_torch, on_device = read_random(device)
    digest = hashlib.blake2b(of_torch.numpy(), digest_size=8)
    others = repr((version, hash(words), gauss, rest))  # hash(None) is another in every process
    for part in (keys, others.encode(), *([] if on_device is None else [on_device.numpy()])):
        digest.update(part)
    return int.from_bytes(digest.digest(), "little", signed=True)


def share_random(device: torch.device, ranks: Sequence[int]) -> None:
    """Gives several ranks the random state of the first of them. Collective over these ranks."""
    mine = read_random(device)
    write_random(broadcast_object(mine, ranks[0], ranks), device)
