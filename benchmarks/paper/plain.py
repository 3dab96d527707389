"""The best layout that one strand has, beside the paper's own.

In:   a row of the paper.
Out:  the layout, its speed, and its memory.
Must hold: the model, the batch and the cluster are the row's; what does not fit is left out.
"""

from dataclasses import replace

from benchmarks.paper.published import MEGATRON, MODELS, Row
from benchmarks.paper.runs import SEARCH, Runs, case_of, speed_of
from hf_helix.config import RECOMPUTE
from hf_helix.doctor.layouts import check_sizes, layouts
from hf_helix.doctor.step import Step, memory_of_case, simulate_step
from hf_helix.doctor.window import Fidelity
from hf_helix.planning.timing.sizes import Sizes


def best_plain(runs: Runs, row: Row) -> tuple[str, float, float] | None:
    """Returns the fastest layout under `sequential` that fits: its name, its speed as the row counts it, and GB."""
    has_experts = MODELS[row.model].experts > 1
    fitting = [
        step
        for sizes in layouts(runs.cluster(row), has_experts)
        if (step := _fitting(runs, replace(row, sizes=sizes))) is not None
    ]
    if not fitting:
        return None
    best = max(fitting, key=lambda step: step.tokens_per_second)
    case = best.case
    name = layout_name(case.sizes) + ("" if case.recompute == "none" else f", recompute {case.recompute}")
    return name, speed_of(row, best), best.memory.total / 1e9


def layout_name(sizes: Sizes) -> str:
    """Returns the sizes above 1."""
    parts = {"dp": sizes.dp, "tp": sizes.tp, "cp": sizes.cp, "pp": sizes.pp, "ep": sizes.ep}
    return " ".join(f"{name}{size}" for name, size in parts.items() if size > 1)


def _fitting(runs: Runs, row: Row) -> Step | None:
    """Returns the step with the least recomputation that fits."""
    cluster, shape = runs.cluster(row), MODELS[row.model]
    for recompute in RECOMPUTE:
        case = case_of(row, MEGATRON).changed(recompute=recompute)
        try:
            check_sizes(row.sizes, row.length, row.layers or shape.layers, max(1, shape.experts))
            amounts = runs.amounts(row, SEARCH, recompute)
            if memory_of_case(amounts, case).total <= cluster.device.memory:
                return simulate_step(amounts, case, cluster, Fidelity.WHOLE)
        except ValueError:
            return None
    return None
