"""What pipelines run and hold on real processes. Every function returns plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from support.models import arguments, llama, sequences
from support.pipeline_jobs import whole_gradients, window_of

from hf_helix import HelixConfig, HelixPlugin, HelixTrainer
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.pipeline.scheduler import Scheduler, stage_costs
from hf_helix.planning.plans.registry import make_plan
from hf_helix.planning.profile import rough_profile
from hf_helix.runtime.runner import Runner
from hf_helix.tuning.measure.memory import peak_bytes
from hf_helix.tuning.measure.overlap import trace_window

Step = tuple[str, int, int, str, str]
"""A computation that ran: part, micro-batch, virtual stage, unit, operator. The part is F, W, or I for any other."""

_meshes: dict[tuple[int, int], Any] = {}


def build(folder: str, helix: dict[str, Any], model: dict[str, Any]) -> HelixTrainer:
    """A trainer on the process groups of earlier ones of its sizes: every group has threads, and none ever ends."""
    plugin = HelixPlugin(HelixConfig(cache=False, plan="sequential", **helix))
    sizes = plugin.config.tp_size, plugin.config.pp_size
    plugin.mesh = _meshes.get(sizes)
    args = arguments(folder, parallelism_config=plugin)
    trainer = HelixTrainer(model=llama(**model), args=args, train_dataset=sequences(4), helix_config=plugin.config)
    _meshes[sizes] = trainer.mesh
    trainer.model.train()
    return trainer


def runner_of(trainer: Any, rule: str, schedule: str) -> Runner:
    """The trainer's runner under another plan and schedule; `auto` is searched with rough times."""
    profile = rough_profile(trainer.runner.stage.layout)
    plan = make_plan(rule, profile, model=trainer.plan.model, mesh=trainer.plan.mesh)
    costs = stage_costs(profile) if schedule == "auto" else None
    return trainer.runner.with_plan(plan, Scheduler(schedule, trainer.mesh.pipe.size, costs))


def steps_of(runner: Runner, events: Iterable[tuple[str, str]]) -> list[Step]:
    """The computations of a trace in the order in which they ran."""
    layout = runner.layout
    stages = {unit: stage for stage, chunk in layout.chunks.items() for unit in chunk}
    units = {unit.label: index for index, unit in runner.stage.units.items()}
    found = []
    for verb, label in events:
        if verb != "run":
            continue
        strand, _, rest = label.partition(".")
        name = next(name for name in units if rest.startswith(f"{name}."))
        operator = rest.removeprefix(f"{name}.")
        pair = layout.graphs[layout.units[units[name]]]
        part = (pair.forward if strand[0] == "F" else pair.backward)[operator].part
        letter = part.value if part in (Part.F, Part.W) else "I"
        found.append((letter, int(strand[1:]), stages[units[name]], name, operator))
    return found


def traced(
    folder: str, helix: dict[str, Any], model: dict[str, Any], cases: Sequence[tuple[str, str, int]]
) -> list[list[Step]]:
    """What this rank computes in a window of each (plan, schedule, number of micro-batches)."""
    trainer = build(folder, helix, model)
    found = []
    for rule, schedule, count in cases:
        runner = runner_of(trainer, rule, schedule)
        trace = trace_window(runner, window_of(trainer, count, rows=1, lengths=(5,)))
        found.append(steps_of(runner, trace.events))
    trainer.runner.executor.streams.close()
    return found


def peaks(
    folder: str, helix: dict[str, Any], model: dict[str, Any], cases: Sequence[tuple[str, str, int]], length: int
) -> list[int]:
    """The most bytes of activations and buffers on this rank, likewise."""
    trainer = build(folder, helix, model)
    found = []
    for rule, schedule, count in cases:
        window = window_of(trainer, count, rows=1, lengths=(length,))
        found.append(peak_bytes(runner_of(trainer, rule, schedule), window))
    trainer.runner.executor.streams.close()
    return found


def window(
    folder: str,
    helix: dict[str, Any],
    model: dict[str, Any],
    case: tuple[str, str, int],
    rows: int,
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Losses and whole gradients (on rank 0) of a window under (plan, schedule, number of micro-batches)."""
    rule, schedule, count = case
    trainer = build(folder, helix, model)
    losses = runner_of(trainer, rule, schedule).train_window(window_of(trainer, count, rows, lengths))
    found = {"losses": [loss.item() for loss in losses], "gradients": whole_gradients(trainer)}
    trainer.runner.executor.streams.close()
    return found
