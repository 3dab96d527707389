"""How near every rule comes to the bound, on the paper's dense rows: `python -m benchmarks.paper.bounds`.

In:   rows of figures 11 to 13, with the operators and times that their speeds are simulated with.
Out:  milliseconds of a layer, forward of one micro-batch beside backward of another, in parts of the bound.
Must hold: nothing that overlaps is slowed, so that no plan takes less than the bound: the busiest stream, and the way
of each strand through a layer.

A layer's time is the difference between two numbers of layers, so that the ends do not count.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.common import markdown, options_of
from benchmarks.paper.published import FIGURE_11, FIGURE_12, FIGURE_13A, Row
from benchmarks.paper.runs import SEARCH, SEARCHING, Runs
from hf_helix.planning.plan.bounds import bound
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.schedule.actions import Action, Schedule, Slot
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.window import Window

ROWS = (*FIGURE_11, *FIGURE_12, *FIGURE_13A)
RULES = ("sequential", "round_robin", "dhelix", "greedy", "search")
PLANNED, LAYERS = 16, (8, 24)


@dataclass(frozen=True)
class Shares:
    """Seconds of a layer of a row.

    Attributes:
        row: of the paper.
        bound: no plan takes less.
        rules: by rule, what its plan takes.
    """

    row: Row
    bound: float
    rules: dict[str, float]


def shares(runs: Runs, row: Row, rules: Sequence[str] = RULES) -> Shares:
    """Returns what a layer takes under the plan of each rule.

    Args:
        runs: which simulate the row.
        row: a dense one.
        rules: names of rules.
    """
    profile = replace(runs.profile(row, SEARCH), pairs={})
    chain, schedule = fused(profile, PLANNED)
    seconds = {}
    for rule in rules:
        plan = make_plan(rule, chain, model="layer", mesh={}, schedule=schedule, search_share=SEARCHING)
        short, long = (predict(plan, *fused(profile, count), timeline=True).seconds for count in LAYERS)
        seconds[rule] = (long - short) / (LAYERS[1] - LAYERS[0])
    first, schedule = fused(profile, LAYERS[0])
    arrays = Window(schedule, first.layout).arrays(first.times)
    return Shares(row, bound(arrays, first.layout) / LAYERS[0], seconds)


def fused(profile: Profile, layers: int) -> tuple[Profile, Schedule]:
    """Returns a chain of layers, and a window of one forward beside one backward."""
    name = next(name for name, pair in profile.layout.graphs.items() if pair.forward.repeats)
    layout = Layout([name] * layers, {0: range(layers)}, {name: profile.layout.graphs[name]})
    times = {key: seconds for key, seconds in profile.times.items() if key[0] == name}
    return replace(profile, layout=layout, times=times), [[Slot(Action(0, "F", 1), Action(0, "B", 0))]]


def main() -> None:
    options_of(__doc__).parse_args()
    runs, results, rows = Runs(), [], []
    for row in ROWS:
        results.append(each := shares(runs, row))
        parts = tuple(f"{each.bound / each.rules[rule]:.3f}" for rule in RULES)
        rows.append((row.name, f"{1e3 * each.bound:.2f}", *parts))
        print(" | ".join(rows[-1]), flush=True)
    means = [statistics.fmean(each.bound / each.rules[rule] for each in results) for rule in RULES]
    print(markdown(("row", "bound ms", *RULES), [*rows, ("mean", "", *(f"{mean:.3f}" for mean in means))]))


if __name__ == "__main__":
    main()
