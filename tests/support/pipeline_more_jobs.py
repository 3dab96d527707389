"""What pipelines run and hold on real processes. Every function returns plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from support.pipeline_jobs import make, runner_of, window_of

from hf_helix import HelixTrainer
from hf_helix.planning.graph.operator import Part
from hf_helix.runtime.runner import Runner
from hf_helix.tuning.measure.memory import peak_bytes
from hf_helix.tuning.measure.overlap import trace_window

Step = tuple[str, int, int, str, str]
"""A computation that ran: part, micro-batch, virtual stage, unit, operator. The part is F, W, or I for any other."""


def build(folder: str, helix: dict[str, Any], model: dict[str, Any]) -> HelixTrainer:
    """A trainer whose model is in training."""
    trainer = make(folder, {"plan": "sequential", **helix}, model)
    trainer.model.train()
    return trainer


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
    trainer.helix.runner.executor.streams.close()
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
    trainer.helix.runner.executor.streams.close()
    return found
