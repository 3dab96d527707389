"""Pages of simulated steps, and the memory of a window over time.

In:   a step or a ranking with the amounts of a rank; or a predicted window with its profile and its model.
Out:  parts of a page, see `hf_helix.report.page`; `WindowMemory`.
Must hold: the memory of a window equals the doctor's table, instruction by instruction; a window too long to be looked
    at is drawn with fewer micro-batches, with their number in its title.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from hf_helix.config import HelixConfig
from hf_helix.doctor.amounts.records import Amounts
from hf_helix.doctor.case import Case
from hf_helix.doctor.counting import amounts_of, kinds_of
from hf_helix.doctor.memory import Drawing, memory_of, memory_of_window
from hf_helix.doctor.step import Step, profile_of, simulate_step
from hf_helix.doctor.window import Fidelity
from hf_helix.engine.advice import TYPES
from hf_helix.engine.synthetic import model_on_meta
from hf_helix.operators.experts.moe import assuming
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.choice.slot_clock import stage_costs
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.predict import Prediction
from hf_helix.planning.schedule.placement import FRONT
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.timing.sizes import size_text
from hf_helix.planning.window.instructions import Instruction
from hf_helix.planning.window.layout import Layout
from hf_helix.report.page import Part, WindowMemory, schedule_parts, stacked, window_part
from hf_helix.report.timeline import bars_of_timeline
from hf_helix.tuning.cache import model_digest

MOST_BARS = 20_000  # of a timeline that a browser zooms at once


def step_parts(amounts: Amounts, case: Case, cluster: Cluster) -> list[Part]:
    """Returns the timeline of a step's window, its memory over time and its schedule."""
    profile = profile_of(amounts, case, cluster, whole=True)
    operators = sum(len(list(profile.layout.graphs[name].entries())) for name in profile.layout.units)
    count = min(case.microbatches, 3 * case.sizes.pp, MOST_BARS // operators)
    if not count:
        return [Part("The window", f"Its {operators:,} operators of one micro-batch are too many to be drawn.")]
    shown = replace(case, microbatches=count)
    step = simulate_step(amounts, shown, cluster, Fidelity.DRAWN)
    assert step.drawn is not None, "windows of so few operators are drawn"
    programs, timeline = step.drawn
    memory = window_memory(amounts, profile.layout, step.drawn, case, cluster.device.host_runs_ahead)
    schedule = Scheduler(
        case.config.schedule, case.sizes.pp, stage_costs(profile), spread=case.config.spread_vocabulary
    )(count)
    title = f"{size_text(case.sizes)}, plan {case.config.plan}, {count} of {case.microbatches} micro-batches"
    return [window_part({title: bars_of_timeline(timeline, programs)}, memory), *schedule_parts(profile, schedule)]


def layouts_part(steps: Mapping[str, Step], cluster: Cluster, table: str) -> Part:
    """Returns layouts next to each other, by name, with their table: seconds for a million tokens, and memory, both by
    part."""
    labels = {f"{name}, {step.tokens_per_second:,.0f} tokens/s": step for name, step in steps.items()}
    seconds = {label: _seconds(step) for label, step in labels.items()}
    memory = {label: {part: each / 1e9 for part, each in step.memory.parts().items()} for label, step in labels.items()}
    budget = cluster.device.memory / 1e9
    figures = [
        stacked(seconds, "Seconds for a million tokens, by part", "seconds"),
        stacked(memory, f"Memory of the fullest device, of {budget:,.1f} GB that a run may use", "GB"),
    ]
    note = "Predicted. Rest: what the busiest rank waits for besides, such as its host."
    return Part("The layouts", note, table, figures)


def _seconds(step: Step) -> dict[str, float]:
    """The seconds of a step for a million tokens, by part."""
    parts = {"computation": step.loads[Kind.COMPUTE]}
    parts |= {f"exposed {kind.value}": seconds for kind, seconds in step.exposed.items()}
    parts["bubble"] = step.bubble * step.window
    parts["rest"] = max(0.0, step.window - sum(parts.values()))
    parts |= {"sums of gradients": step.sums, "optimizer": step.optimizer}
    return {name: 1e6 * seconds / step.case.tokens for name, seconds in parts.items()}


# -- memory over time --------------------------------------------------------------------------------------------------


def window_memory(
    amounts: Amounts,
    layout: Layout,
    drawn: Drawing,
    case: Case,
    host_runs_ahead: bool,
) -> WindowMemory:
    """Returns the memory of the fullest rank during a window.

    Args:
        amounts: the amounts of a rank.
        layout: the units of all ranks.
        drawn: the programs of all ranks, and their timeline.
        case: places weights and states.
        host_runs_ahead: of the device, see `memory_of_window`.
    """
    programs, timeline = drawn
    found = []
    for rank, (places, memory) in enumerate(memory_of_window(amounts, layout, drawn, host_runs_ahead)):
        peaks = list(memory)
        parts = {peak: memory_of(amounts, layout, rank, peak, case) for peak in set(peaks)}
        found.append(
            (max(each.total for each in parts.values()), rank, places, [parts[peak].parts() for peak in peaks])
        )
    _, rank, places, steps = max(found, key=lambda each: each[0])
    starts = (timeline.starts[place] if _computes(programs[place]) else 0.0 for place in places)
    seconds = [*accumulate(starts, max), timeline.seconds]
    return WindowMemory(rank, seconds, {name: [step[name] for step in [*steps, steps[-1]]] for name in steps[0]})


def _computes(instruction: Instruction) -> bool:
    return instruction.operator is not None and not instruction.operator.kind.communicates


def memory_of_run(model: Any, profile: Profile, mesh: Mapping[str, Any], predicted: Prediction) -> WindowMemory:
    """Returns the memory of a predicted window of a run.

    Args:
        model: the configuration of the model, or its path.
        profile: the profile of the run, whose `about` has the shapes and the way in which replicas share weights.
        mesh: the sizes of the mesh, as options of `HelixConfig`.
        predicted: the window, with its timeline.

    Raises:
        ValueError: the profile is of another model, or of layers that are not all recomputed alike.
    """
    about, whole = profile.about, model_on_meta(model)
    kind, digest, *autocast = about["model"].split()
    if (kind, digest) != (type(whole).__name__, model_digest(whole)):
        raise ValueError(
            f"the profile is of another model than this {type(whole).__name__}, or of weights that are not all trained "
            "in fp32; memory is drawn for the model that was profiled"
        )
    shared = about.get("weights", "")
    ranks = int(next(iter(re.findall(r"\d+", shared)), 1))
    dp = max(1, ranks // mesh.get("cp_size", 1))
    on_host = re.search(r"(\w+) on the host", shared)
    options: dict[str, Any] = {
        "shard_optimizer": "stepped" in shared,
        "shard_parameters": "spread" in shared,
        "offload": on_host and on_host[1],
        "spread_vocabulary": profile.layout.is_spread,
    }
    batch, length = max(tuple(map(int, shape.split(" x ")[:2])) for shape in about["shapes"].split(", "))
    dtype = getattr(torch, autocast[0]) if autocast and autocast[0] != "float8" else None
    config = HelixConfig(**mesh, recompute=about.get("recompute"), **options)
    has_halves = any(name.startswith(FRONT) for name in profile.layout.units)
    kinds = kinds_of(whole) if has_halves else None
    with assuming(1.0):
        amounts = amounts_of(whole, config, batch, length, dtype, about["backend"], kinds, dp)
    unknown = {unit for unit in profile.layout.units if not profile.layout.graphs[unit].forward.transfers}
    if not unknown <= amounts.weights.keys():
        raise ValueError(f"the memory of {', '.join(sorted(unknown - amounts.weights.keys()))} is not counted")
    drawn = predicted.instructions, predicted.timeline
    case = Case(config, dp, batch, length, 1, dtype=TYPES[dtype or torch.float32])
    return window_memory(amounts, profile.layout, drawn, case, about["backend"] == "nccl")
