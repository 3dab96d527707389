"""The steps of the paper's figure 15: kinds of overlap, added one by one.

In:   a row.
Out:  what each step gains over the baseline, in percent of it.
Must hold: every step keeps what the baseline overlaps by itself: steps of the ring beside blocks of attention, and the
weight gradient beside a reduce-scatter.

In the first step, communication between nodes takes no part in plans: what the baseline shows of it is put on the
compute stream, so that nothing of it is hidden by the other strand.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from benchmarks.paper.ablate import ablate_profile
from benchmarks.paper.published import DHELIX, MEGATRON, Row
from benchmarks.paper.runs import LAUNCH_SECONDS, Runs, barriers_of, case_of
from hf_helix.doctor.step import simulate_plan
from hf_helix.doctor.window import Fidelity
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.schedule.actions import Action, Slot
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.layout import Layout

STEPS = ("TP", "and CP", "and both at once", "and W's that move")
WITHOUT: Sequence[Collection[str]] = (("inter_node", "wgrad"), ("comm_beside_comm", "wgrad"), ("wgrad",), ())
"""What each step does without, see `benchmarks.paper.ablate`."""


def increments(runs: Runs, row: Row) -> list[float]:
    """Returns what each step adds, in percent of the baseline."""
    totals = [0.0, *(100 * (gain - 1) for gain in gains(runs, row))]
    return [after - before for before, after in pairwise(totals)]


def gains(runs: Runs, row: Row) -> list[float]:
    """Returns how many times as fast as Megatron every step is."""
    case, baseline = case_of(row, DHELIX), runs.run(row, MEGATRON).step.seconds
    result = []
    for without in WITHOUT:
        profile = runs.profile(row, DHELIX)
        if Kind.INTER_NODE.value in without:
            profile = exposed_only(profile, Kind.INTER_NODE)
        profile = ablate_profile(profile, without)
        plan = make_plan("dhelix", profile, model="", mesh={"tp_size": row.sizes.tp})
        step = simulate_plan(runs.amounts(row), case, runs.cluster(row), profile, plan, Fidelity.WHOLE)
        result.append(baseline / (step.seconds + LAUNCH_SECONDS * barriers_of(plan, profile, row)))
    return result


def layer_seconds(profile: Profile, layer: str) -> float:
    """Returns the seconds of a layer's forward and of its backward for one strand, in a long chain of such layers."""
    plan, graphs = make_plan("sequential", profile, model="", mesh={}), profile.layout.graphs
    slots = (Slot(forward=Action(0, "F", 1)), Slot(backward=Action(0, "B", 0)))
    short, long = (
        sum(predict(plan, replace(profile, layout=chain), [[slot]]).seconds for slot in slots)
        for chain in (Layout([layer] * count, {0: range(count)}, graphs) for count in (6, 10))
    )
    return (long - short) / 4


def exposed_only(profile: Profile, kind: Kind) -> Profile:
    """Returns the profile in which communication of a kind runs on the compute stream, and takes so long there that one
    strand is as fast as before: what it hides of it is gone."""
    names = {name for name in profile.times if profile.kind(name) is kind}
    layer = next(name for name, pair in profile.layout.graphs.items() if pair.forward.repeats)
    pairs = {key: pair for key, pair in profile.pairs.items() if not names & set(key)}
    moved = replace(ablate_profile(profile, (kind.value,)), pairs=pairs)

    def scaled(share: float) -> Profile:
        times = {name: each * share if name in names else each for name, each in profile.times.items()}
        return replace(moved, times=times)

    least = 1e-6
    without, whole, own = (layer_seconds(each, layer) for each in (scaled(least), moved, profile))
    return scaled(max(least, (own - without) / (whole - without))) if whole > without else profile
