"""A window small enough to check by hand, and what a figure of it shows."""

from support.arrays import arrays_of, window_instructions

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Kind, Operator
from hf_helix.planning.schedule.named import build_schedule
from hf_helix.planning.timing.operator_clock import Timeline, simulate
from hf_helix.planning.timing.profile import Pair, Profile
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Layout, Name
from hf_helix.report.timeline import Bar

MS = {"F.norm": 1.0, "F.gather": 4.0, "F.up": 6.0, "F.attention": 2.0, "F.send": 3.0}
MS |= {"B.send": 3.0, "B.attention": 5.0, "B.up.I": 6.0, "B.gather": 4.0, "B.up.W": 7.0, "B.norm": 2.0}


def operator(name: str, kind: Kind, reads: str, **options: bool) -> Operator:
    return Operator(name=name, kind=kind, reads=(reads,), writes=(name,), **options)


def layer() -> GraphPair:
    """Every kind of operator once."""
    operators = (
        operator("norm", Kind.COMPUTE, "x"),
        operator("gather", Kind.INTRA_NODE, "norm"),
        operator("up", Kind.COMPUTE, "gather", splits_dgrad_wgrad=True),
        operator("attention", Kind.COMPUTE, "up"),
        operator("send", Kind.INTER_NODE, "attention"),
    )
    return GraphPair.of(Graph("layer", operators, ("x",), ("send",), repeats=True))


def profile(**options: object) -> Profile:
    """Two chunks of one layer each, with round times."""
    layout = Layout(["layer", "layer"], {0: [0], 1: [1]}, {"layer": layer()})
    return Profile({}, layout, {("layer", entry): ms / 1e3 for entry, ms in MS.items()}, **options)


def window() -> tuple[Timeline, list[Instruction]]:
    """Two micro-batches on one rank."""
    known = profile()
    program = window_instructions(build_schedule("folded_1f1b", 1, 2), known.layout)
    return simulate(arrays_of(program, known.layout, known.times)), program


def bar(start: float, end: float, stream: str = "compute", strand: str = "F", operator: str = "up") -> Bar:
    return Bar(stream, f"{strand}0.layers.0.{operator}", start, end)


PAIRS: dict[tuple[Name, Name], Pair] = {
    (("layer", "F.up"), ("layer", "F.gather")): Pair(7e-3, 7e-3, 4e-3),
    (("layer", "B.up.W"), ("layer", "F.gather")): Pair(13e-3, 13e-3, 5e-3),
}
