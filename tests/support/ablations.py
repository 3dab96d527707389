"""Runners whose plans have less freedom."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from benchmarks.paper.ablate import ablate
from hf_helix.planning.plans.registry import make_plan
from hf_helix.planning.profile import rough_profile
from hf_helix.runtime.runner import Runner


def ablated(runner: Runner, names: Collection[str]) -> Runner:
    """A runner of the same parameters with a plan of the same rule, made for the ablated graphs by rough efforts."""
    model = {index: replace(unit, graphs=ablate(unit.graphs, names)) for index, unit in runner.stage.model.items()}
    layout = runner.stage.layout
    layout = replace(layout, graphs={name: ablate(pair, names) for name, pair in layout.graphs.items()})
    stage = replace(runner.stage, model=model, layout=layout)
    plan = make_plan(runner.plan.rule, rough_profile(layout), model=runner.plan.model, mesh=runner.plan.mesh)
    streams, autocast_dtype = runner.executor.streams, runner.precision.autocast_dtype
    return Runner(stage, plan, runner.mesh, streams, runner.scheduler, runner.seed, autocast_dtype)
