"""The schedule `auto`: the fastest on the fold for given costs.

In:   the number of ranks P and micro-batches M, what the virtual stages cost, and how many activations a rank may hold.
Out:  the fastest schedule found: a named one, or one that list scheduling has made and local search has improved.
Must hold: it is on the fold, so it never moves layers between ranks; it is never slower than `folded_1f1b` and
`dualpipe_v` where their activations fit; the same input gives the same schedule, so all ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from hf_helix.planning.pipeline.actions import Schedule
from hf_helix.planning.pipeline.clock import SlotClock
from hf_helix.planning.pipeline.costs import Costs
from hf_helix.planning.pipeline.list_schedule import Policy, list_schedule
from hf_helix.planning.pipeline.local_search import improve_schedule
from hf_helix.planning.pipeline.named import FOLDED, build_schedule
from hf_helix.planning.pipeline.placement import FOLD, stage_ranks
from hf_helix.planning.pipeline.simulate import Simulated, simulate_schedule
from hf_helix.planning.pipeline.validate import validate

SEARCHED = "searched"
"""The label of a schedule that is none of the named ones."""
FINALISTS, STARTS = 4, 2


def choose_schedule(
    num_ranks: int, num_microbatches: int, costs: Costs, max_live: int | None = None, search: bool = True
) -> tuple[str, Schedule]:
    """Returns the fastest schedule found on the fold, and its label: a name, or `SEARCHED`.

    Args:
        num_ranks: pipeline ranks.
        num_microbatches: of the window.
        costs: of each of the 2P virtual stages.
        max_live: activations, each of one stage and micro-batch, that may live at once on a rank; None for as many as
            the hungrier of `folded_1f1b` and `dualpipe_v` holds.
        search: also try many policies and improve the best schedules, which takes seconds in long windows. Off, the
            choice is among the named schedules and two that list scheduling makes.

    Raises:
        ValueError: `max_live` is less than 2.
    """
    if max_live is not None and max_live < 2:
        raise ValueError(f"max_live={max_live} is too few: a micro-batch leaves 2 activations on a rank; use 2 or more")
    ranks = stage_ranks(FOLD, num_ranks)
    clock = SlotClock(ranks, costs, num_microbatches)

    def run(label: str, schedule: Schedule) -> tuple[str, Simulated]:
        return label, simulate_schedule(schedule, ranks, costs)

    candidates = [run(name, build_schedule(name, num_ranks, num_microbatches)) for name in FOLDED]
    if max_live is None:
        max_live = max(max(simulated.live) for _, simulated in candidates)
    candidates = [(label, simulated) for label, simulated in candidates if max(simulated.live) <= max_live]
    policies = (_policies if search else _usual_policies)(num_ranks, num_microbatches, costs, max_live)
    candidates.append(run(SEARCHED, _listed(clock, policies)))
    for _, start in sorted(candidates, key=_merit)[: STARTS if search else 0]:
        candidates.append(run(SEARCHED, improve_schedule(start.schedule, clock, max_live)))
    label, best = min(candidates, key=_merit)
    validate(best.schedule, num_microbatches, ranks)
    return label, best.schedule


def listed_schedules(num_ranks: int, num_microbatches: int, costs: Costs) -> list[Schedule]:
    """Returns the schedules that list scheduling makes where nothing is searched. They put weight gradients off until a
    rank would wait, as searched ones do.

    Args:
        num_ranks: pipeline ranks.
        num_microbatches: of the window.
        costs: of each of the 2P virtual stages.
    """
    ranks = stage_ranks(FOLD, num_ranks)
    clock = SlotClock(ranks, costs, num_microbatches)
    named = [simulate_schedule(build_schedule(name, num_ranks, num_microbatches), ranks, costs) for name in FOLDED]
    max_live = max(max(simulated.live) for simulated in named)
    policies = _usual_policies(num_ranks, num_microbatches, costs, max_live)
    return [list_schedule(clock, policy)[0] for policy in policies]


def _merit(candidate: tuple[str, Simulated]) -> tuple[float, int]:
    """Returns time, then memory."""
    return candidate[1].seconds, max(candidate[1].live)


def _listed(clock: SlotClock, policies: Iterable[Policy]) -> Schedule:
    """Returns the best schedule of list scheduling: the best policies of a short window compete on the whole one."""
    rounds, short = [(clock, 1)], 2 * (max(clock.ranks) + 1)
    if short < clock.num_microbatches:
        rounds.insert(0, (SlotClock(clock.ranks, clock.costs, short), FINALISTS))
    for each, keep in rounds:
        made = [(list_schedule(each, policy), policy) for policy in policies]
        made.sort(key=lambda one: one[0][1])
        policies = [policy for _, policy in made[:keep]]
    return made[0][0][0]


def _policies(num_ranks: int, num_microbatches: int, costs: Costs, max_live: int) -> Iterator[Policy]:
    """Yields the policies of a search."""
    pairs = (True, False) if costs.gain > 1 else (False,)
    most = 2 * num_microbatches  # backwards that a rank has
    aparts = dict.fromkeys(min(apart, most) for apart in (num_ranks, 2 * num_ranks, most))
    for pair, early, apart, forward, backward, delay in product(
        pairs, (False, True), aparts, (1, 2), (0, 1, 2), (0.5, 1.0)
    ):
        yield Policy(max_live, pair, early, apart, forward, backward, delay)


def _usual_policies(num_ranks: int, num_microbatches: int, costs: Costs, max_live: int) -> Iterator[Policy]:
    """Yields two policies, one of which is as good as the best where stages cost the same and windows are short."""
    for early in (True, False):
        yield Policy(max_live, costs.gain > 1, early, 2 * num_microbatches, backward=int(early), delay=0.5)
