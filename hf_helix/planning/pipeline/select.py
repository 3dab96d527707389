"""Pipelines: the schedule to take for given costs.

In:   the number of ranks P and micro-batches M, what the parts of every virtual stage take, and room for activations.
Out:  the best schedule found on the fold.
Must hold: never slower than `w` and `dualpipe_v` where they have room; the same input gives the same schedule, so that
all ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

from hf_helix.planning.pipeline.actions import Schedule
from hf_helix.planning.pipeline.list_schedule import Policy, list_schedule
from hf_helix.planning.pipeline.local_search import refine_schedule
from hf_helix.planning.pipeline.placement import FOLD, split_layers, stage_ranks
from hf_helix.planning.pipeline.schedule_file import PLACEMENT_OF, build_schedule, load_schedule, placement_of
from hf_helix.planning.pipeline.simulate import Costs, Simulated, simulate_schedule
from hf_helix.planning.pipeline.validate import validate

__all__ = [
    "AUTO",
    "SEARCHED",
    "Costs",
    "Simulated",
    "choose_schedule",
    "find_schedule",
    "simulate_layers",
    "simulate_schedule",
]

AUTO = "auto"
SEARCHED = "searched"
"""The label of a schedule that is none of the named ones."""
FINALISTS, STARTS = 4, 2
FOLDED = [name for name, placement in PLACEMENT_OF.items() if placement == FOLD]


def find_schedule(
    name: str, num_ranks: int, num_microbatches: int | None, costs: Callable[[Sequence[int]], Costs]
) -> tuple[str, Schedule]:
    """The schedule that a user asks for, and its label.

    Args:
        name: of a schedule, `auto` for the best found, or the path of an action file.
        num_ranks: pipeline ranks.
        num_microbatches: of the window; None for all of an action file, or else three for each rank.
        costs: of the virtual stages, given the rank of each.

    Raises:
        ValueError: as `choose_schedule`, `build_schedule` and `load_schedule`; or it is none of these.
        OSError: as `load_schedule`.
    """
    count = 3 * num_ranks if num_microbatches is None else num_microbatches
    if name in PLACEMENT_OF:
        return name, build_schedule(name, num_ranks, count)
    if name == AUTO:
        return choose_schedule(num_ranks, count, costs(stage_ranks(FOLD, num_ranks)))
    if not Path(name).is_file():
        raise ValueError(
            f"schedule={name!r} is neither the name of a schedule nor an existing file; "
            f"use one of {', '.join([*PLACEMENT_OF, AUTO])}, or the path of an action file"
        )
    return name, load_schedule(name, num_ranks, num_microbatches)


def simulate_layers(
    name: str, num_ranks: int, num_microbatches: int | None, num_layers: int | None = None, **times: float
) -> tuple[str, Simulated]:
    """A schedule as `find_schedule` finds it, run with equal layers: its label, and what comes out.

    Args:
        name: as of `find_schedule`.
        num_ranks: as of `find_schedule`.
        num_microbatches: as of `find_schedule`.
        num_layers: of the model; None for two for each rank.
        times: of a layer, as of `Costs.of_layers`.
    """

    def costs(ranks: Sequence[int]) -> Costs:
        layers = split_layers(2 * num_ranks if num_layers is None else num_layers, ranks)
        return Costs.of_layers([len(stage) for stage in layers], **times)

    label, schedule = find_schedule(name, num_ranks, num_microbatches, costs)
    ranks = stage_ranks(placement_of(schedule), num_ranks)
    return label, simulate_schedule(schedule, ranks, costs(ranks))


def choose_schedule(
    num_ranks: int, num_microbatches: int, costs: Costs, most_live: int | None = None
) -> tuple[str, Schedule]:
    """The fastest schedule found on the fold, and its label: a name, or `SEARCHED`.

    Args:
        num_ranks: pipeline ranks.
        num_microbatches: of the window.
        costs: of each of the 2P virtual stages.
        most_live: activations, each of one stage and micro-batch, that may live at once on a rank; None for as many as
            the hungrier of `w` and `dualpipe_v` holds.

    Raises:
        ValueError: `most_live` is less than 2.
    """
    if most_live is not None and most_live < 2:
        raise ValueError(
            f"most_live={most_live} is too few: a micro-batch leaves 2 activations on a rank; use 2 or more"
        )
    ranks = stage_ranks(FOLD, num_ranks)

    def run(label: str, schedule: Schedule) -> tuple[str, Simulated]:
        return label, simulate_schedule(schedule, ranks, costs)

    found = [run(name, build_schedule(name, num_ranks, num_microbatches)) for name in FOLDED]
    if most_live is None:
        most_live = max(max(simulated.live) for _, simulated in found)
    found = [(label, simulated) for label, simulated in found if max(simulated.live) <= most_live]
    found.append(run(SEARCHED, _listed(num_ranks, num_microbatches, costs, most_live)))
    for _, start in sorted(found, key=_merit)[:STARTS]:
        found.append(run(SEARCHED, refine_schedule(start.schedule, ranks, costs, most_live)))
    label, best = min(found, key=_merit)
    validate(best.schedule, num_microbatches, ranks)
    return label, best.schedule


def _merit(found: tuple[str, Simulated]) -> tuple[float, int]:
    """Time, then memory."""
    return found[1].seconds, max(found[1].live)


def _listed(num_ranks: int, num_microbatches: int, costs: Costs, most_live: int) -> Schedule:
    """The best that list scheduling finds: of all policies the best few of a short window, on the whole one."""
    policies = list(_policies(num_ranks, num_microbatches, costs, most_live))
    for count, keep in ((min(num_microbatches, 2 * num_ranks), FINALISTS), (num_microbatches, 1)):
        made = [(list_schedule(num_ranks, count, costs, policy), policy) for policy in policies]
        made.sort(key=lambda one: one[0][1])
        policies = [policy for _, policy in made[:keep]]
    return made[0][0][0]


def _policies(num_ranks: int, num_microbatches: int, costs: Costs, most_live: int) -> Iterator[Policy]:
    """The policies that are tried."""
    pairs = (True, False) if costs.gain > 1 else (False,)
    aparts = (num_ranks, 2 * num_ranks, 2 * num_microbatches)
    for pair, early, apart, forward, backward, delay in product(
        pairs, (False, True), aparts, (1, 2), (0, 1, 2), (0.5, 1.0)
    ):
        yield Policy(most_live, pair, early, apart, forward, backward, delay)
