"""Layouts by the number of ranks: the options in force, and the micro-batches with which a step keeps its samples.

In:   a `HelixConfig`, with or without `layouts`; the ranks that the launcher has started.
Out:  the options of these ranks; their `gradient_accumulation_steps`.
Must hold: a step has the same samples on every number of ranks that `layouts` names. What a later start could not do is
an error of the first one.
"""

import math
import os

import torch.distributed as dist

from hf_helix.config import OWN_STORE, HelixConfig
from hf_helix.runtime.distributed.mesh import world_size


def launched_ranks() -> int:
    """Returns the number of ranks of this run, also before they have joined."""
    return world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def in_force(given: HelixConfig) -> HelixConfig:
    """Returns the options of this run's number of ranks. Raises ValueError if `layouts` has none for it."""
    return given.for_world(launched_ranks())


def notice_of_launcher() -> str:
    """Returns a sentence about a torchrun that would end when a node joins it; "" for others.

    An agent that stays the first publishes the address of rank 0 in the first round only, in torch 2.13 (see
    `next_rendezvous` in torch/distributed/elastic/rendezvous/dynamic_rendezvous.py), if ranks share its store. A node
    that joins waits for the address for a minute; then all agents end.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if not restarts or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return f"layouts: a node that joins this torchrun will end it; start torchrun with {OWN_STORE} in its environment"


def replicas_of(given: HelixConfig) -> dict[int, int]:
    """Returns the number of data-parallel ranks of each number of ranks in `layouts`."""
    return {world: world // config.ranks_per_batch for world, config in given.by_world().items()}


def steps_of(given: HelixConfig, steps: int) -> int:
    """Returns the micro-batches with which a step on this run's ranks has as many samples as on the most ranks.

    Args:
        given: the options, with `layouts` or without.
        steps: the micro-batches on the most ranks, `gradient_accumulation_steps`.

    Raises:
        ValueError: on some number of ranks, no number of micro-batches has as many samples.
    """
    if given.layouts is None:
        return steps
    replicas = replicas_of(given)
    most = max(replicas)
    taken = steps * replicas[most]
    unfit = {world: count for world, count in replicas.items() if taken % count}
    if unfit:
        needed = math.lcm(*(count // math.gcd(count, replicas[most]) for count in replicas.values()))
        cannot = " and ".join(f"the {count} data-parallel ranks of {world} ranks" for world, count in unfit.items())
        raise ValueError(
            f"gradient_accumulation_steps={steps} with layouts: a step has {taken} micro-batches, {steps} on each of "
            f"the {replicas[most]} data-parallel ranks of {most} ranks, and {cannot} cannot share them equally; use "
            f"gradient_accumulation_steps={math.ceil(steps / needed) * needed}, or another multiple of {needed}, or "
            f"sizes that leave a number of data-parallel ranks that divides {taken}"
        )
    return taken // replicas[launched_ranks()]
