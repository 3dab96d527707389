"""The stage for a plan: the rank's own stage, or that stage in tiles for the intra-batch baseline.

In:   the stage of a rank, and a plan.
Out:  a stage with the graphs of the plan.
Must hold: the parameters stay the same, and so does everything between the ranks.
"""

from __future__ import annotations

from dataclasses import replace

from hf_helix.operators.tiling import tile_unit
from hf_helix.planning.plan.baselines.intra_batch import IntraBatchPlan, tile_layout
from hf_helix.planning.plan.plan import Plan
from hf_helix.runtime.stage import Stage, shared_gradients


def stage_for(plan: Plan, stage: Stage) -> Stage:
    """Returns the stage with the graphs that a plan orders."""
    return tile_stage(stage, plan.tiles) if isinstance(plan, IntraBatchPlan) else stage


def tile_stage(stage: Stage, tiles: int) -> Stage:
    """Returns the stage with collectives and their linears cut into tiles."""
    model = {index: tile_unit(unit, tiles) for index, unit in stage.model.items()}
    return replace(stage, model=model, layout=replace(tile_layout(stage.layout, tiles), shared=shared_gradients(model)))
