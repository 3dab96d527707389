"""Ablations: graphs that leave plans less freedom, to see what a freedom is worth (the paper's figure 15).

In:   the graphs of a unit, a profile or a runner, and the names of what plans must not use.
Out:  graphs, a profile or a runner with less freedom.
Must hold: results stay the same. Graphs and profiles are data, so nothing in the package knows of ablations.

By prediction, what every rule loses with a freedom:

    hf-helix profile --model FOLDER --tp_size 2 --output profile.json
    python -m benchmarks.paper.ablate profile.json --without wgrad
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from benchmarks.common import markdown, options_of
from hf_helix.cli.options import made_for, schedule_for
from hf_helix.config import RULES
from hf_helix.operators.units.rows import with_adders
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile import Profile, rough_profile
from hf_helix.planning.timing.profile_file import load_profile
from hf_helix.runtime.runner import Runner

ABLATIONS = ("intra_node", "inter_node", "comm_beside_comm", "wgrad")


def ablate(pair: GraphPair, names: Collection[str]) -> GraphPair:
    """The graphs of a unit with less freedom.

    Args:
        pair: the graphs.
        names: `intra_node`, `inter_node`: communication of that kind runs on the compute stream; `comm_beside_comm`:
            all communication shares one stream; `wgrad`: weight gradients stay at their canonical places.
    """
    kinds = {kind: Kind.COMPUTE for kind in (Kind.INTRA_NODE, Kind.INTER_NODE) if kind.value in names}
    if "comm_beside_comm" in names:
        kinds.setdefault(Kind.INTER_NODE, Kind.INTRA_NODE)
    forward, backward = (
        replace(graph, operators=tuple(replace(op, kind=kinds.get(op.kind, op.kind)) for op in graph.operators))
        for graph in (pair.forward, pair.backward)
    )
    return GraphPair(forward, _hold_weights(backward) if "wgrad" in names else backward)


def ablate_profile(profile: Profile, names: Collection[str]) -> Profile:
    """Returns the profile with graphs that have less freedom, see `ablate`; times stay."""
    graphs = {unit: ablate(pair, names) for unit, pair in profile.layout.graphs.items()}
    return replace(profile, layout=replace(profile.layout, graphs=graphs)) if names else profile


def _hold_weights(graph: Graph) -> Graph:
    """The graph with every weight gradient before the operators that stand behind it."""
    operators: list[Operator] = []
    held: str | None = None
    for op in graph.operators:
        operators.append(replace(op, ordered_after=(*op.ordered_after, held)) if held else op)
        held = op.name if op.part is Part.W else held
    return replace(graph, operators=tuple(operators))


def ablated(runner: Runner, names: Collection[str]) -> Runner:
    """Returns a runner of the same parameters under a plan of the same rule, made for ablated graphs by rough times."""
    model = {
        index: replace(unit, graphs=ablate(unit.graphs, names)) for index, unit in runner.rank_units.all_units.items()
    }
    layout = runner.rank_units.layout
    layout = replace(layout, graphs={name: ablate(pair, names) for name, pair in layout.graphs.items()})
    rows = with_adders(runner.rank_units.rows, model)
    rank_units = replace(runner.rank_units, all_units=model, rows=rows, layout=layout)
    plan = make_plan(runner.plan.rule, rough_profile(layout), model=runner.plan.model, mesh=runner.plan.mesh)
    return runner.of_units(rank_units, plan)


def predicted(rule: str, profile: Profile, microbatches: int) -> float:
    """Returns the predicted seconds of a window under the plan of a rule."""
    model, mesh = made_for(profile)
    schedule = schedule_for(profile, microbatches)
    plan = make_plan(rule, profile, model=model, mesh=mesh, schedule=schedule)
    return predict(plan, profile, schedule, timeline=True).seconds


def main() -> None:
    parser = options_of(__doc__, microbatches=8)
    parser.add_argument("profile", type=Path, help="a file made with `hf-helix profile`")
    parser.add_argument("--without", nargs="+", choices=ABLATIONS, required=True, help="what plans must not use")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    options = parser.parse_args()
    profile = load_profile(options.profile)
    profiles, count = (profile, ablate_profile(profile, options.without)), options.microbatches
    rows = [
        (f"`{rule}`", *(f"{1e3 * predicted(rule, each, count):,.1f} ms" for each in profiles)) for rule in options.rules
    ]
    print(markdown(("plan", "predicted", f"without {', '.join(options.without)}"), rows))


if __name__ == "__main__":
    main()
