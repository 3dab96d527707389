"""Random numbers of operators: every draw has a seed of its own.

In:   a device, and the seed of an operator's context.
Out:  a generator, or a context in which torch itself draws from the seed.
Must hold: equal seeds give equal numbers, and the generators of the run draw nothing. A window that is captured as a
CUDA graph has a source of its own, whose generators get new seeds before every replay. Values on the meta device, of
which the doctor counts the work, have no numbers: nothing is drawn for them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch

S = TypeVar("S", bound="Source")


class Source:
    """Hands out generators."""

    def generator(self, device: torch.device, seed: int) -> torch.Generator:
        """Returns a generator of a device at the begin of a seed."""
        return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)

    def seeded(self, device: torch.device, seed: int) -> AbstractContextManager[None]:
        """Returns a context in which torch's own functions draw from a seed."""
        return nullcontext() if device.type == "meta" else _seeded(device, seed)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    is_cpu = device.type == "cpu"  # where `torch.manual_seed` would seed generators of GPUs as well
    seed_generators = torch.default_generator.manual_seed if is_cpu else torch.manual_seed
    with torch.random.fork_rng(devices=[] if is_cpu else [device], device_type=device.type):
        seed_generators(seed)
        yield


_source = Source()


@contextmanager
def drawing_from(source: S) -> Iterator[S]:
    """Returns a context in which operators draw from another source, which is yielded."""
    global _source
    before, _source = _source, source
    try:
        yield source
    finally:
        _source = before


def generator(device: torch.device, seed: int) -> torch.Generator:
    """Returns a generator of the source in use, see `Source.generator`."""
    return _source.generator(device, seed)


def seeded(device: torch.device, seed: int) -> AbstractContextManager[None]:
    """Returns a context of the source in use, see `Source.seeded`."""
    return _source.seeded(device, seed)
