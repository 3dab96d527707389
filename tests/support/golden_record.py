"""A golden record: what the package makes of every row of `invariant.classes`, of 24 doctor cases and of checkpoints.

    PYTHONPATH=tests python -m support.golden_record record /tmp/before.json     # on the old tree
    PYTHONPATH=tests python -m support.golden_record record /tmp/after.json      # on the new tree
    PYTHONPATH=tests python -m support.golden_record compare /tmp/before.json /tmp/after.json

A change of the package that is meant to change no behaviour leaves the record as it is. A difference is a decision with
a name, or a fault. `record` takes `--only classes|doctor|files`; `compare` prints the first differences of each kind.

In:   the table of equivalence classes; model configurations and clusters of the package; real ranks for checkpoints.
Out:  a JSON file: for a row the digests of operator graphs, plans, programs of all pipeline ranks, predicted seconds;
      for a doctor case seconds and memory by part; for a checkpoint the hash of every file.
Must hold: digests are made of plain values (names, numbers), so that a renamed class or a moved module changes none.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from invariant.classes import CASES, Case
from support.models import tiny
from support.programs import build_programs
from support.tuning_jobs import hasty
from support.units import StandInGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_helix.config import HelixConfig
from hf_helix.doctor.amounts.amounts import simulated_mesh
from hf_helix.doctor.case import Case as DoctorCase
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import simulate_step
from hf_helix.doctor.window import Fidelity
from hf_helix.engine.cut.build import cut_units
from hf_helix.engine.cut.recompute import modes_of
from hf_helix.models.registry import family_for
from hf_helix.models.stock.peft import base_of
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.choice.slot_clock import stage_costs
from hf_helix.planning.graph.operator import Graph
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.plan.program import build_program
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.cluster import load_cluster
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.planning.timing.sizes import Sizes, size_text
from hf_helix.planning.window.layout import Layout
from hf_helix.runtime.distributed.pipe import Pipe

PLANS = ("sequential", "round_robin", "greedy", "search", "dhelix")
REPLICAS = {"replica": "copies", "expert_replica": "expert_copies"}  # groups of a mesh by the axes of the simulator
NEAR = 1e-9  # predicted seconds that differ by a smaller part are equal
LONG = 70  # micro-batches of a window that repeats itself

Record = dict[str, Any]


def digest(value: object) -> str:
    """A short hash of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


# -- rows of the table ---------------------------------------------------------------------------------------------


def layout_of(case: Case) -> Layout:
    """The layout that training makes, seen from the first rank, without process groups."""
    sizes, config = case.sizes, HelixConfig(**case.helix)
    copies = {"copies": sizes["dp"] * sizes["cp"], "expert_copies": sizes["dp"] * sizes["cp"] // sizes["ep"]}
    made = simulated_mesh(
        sizes, case.options.get("inter_node_axes") or (), False, copies if config.zero_stage else None
    )
    groups = {
        f"{name}_group": StandInGroup(copies[axis]) if copies[axis] > 1 else None for name, axis in REPLICAS.items()
    }
    group = StandInGroup(sizes["dp"]) if sizes["dp"] > 1 else None
    pipe = Pipe(list(range(sizes["pp"])), None, {0: object(), 1: object()})  # type: ignore[dict-item]
    mesh = replace(made, sizes=sizes, pipe=pipe, dp_group=group, **groups)  # type: ignore[arg-type]
    model = tiny(**case.model)
    base = base_of(model)
    modes = modes_of(list(family_for(base, config.tp_size).layers(base)), None, config)
    return cut_units(model, config, mesh, modes).rank_units.layout


def row_record(case: Case, windows: Sequence[tuple[str, int]]) -> Record:
    """The record of a model on a layout.

    Args:
        case: one of the rows of this model and layout.
        windows: the schedule and the number of micro-batches of all these rows.
    """
    layout = layout_of(case)
    record: Record = {
        "layout": digest(layout.describe()),
        "graphs": {
            name: [digest(graph_rows(graph)) for graph in (pair.forward, pair.backward)]
            for name, pair in layout.graphs.items()
        },
    }
    profile = rough_profile(layout)
    for rule in PLANS:
        with hasty():
            plan = make_plan(rule, profile, model="model", mesh=HelixConfig(**case.helix).option_sizes)
        record[f"plan {rule}"] = digest(json.loads(plan.to_json()))
        for name, count in windows:
            costs = stage_costs(profile) if name == "auto" else None
            schedule = Scheduler(name, case.sizes["pp"], costs)(count)
            programs = build_programs(schedule, layout, plan)
            record[f"programs {rule} {name} {count}"] = [digest(program_data(program)) for program in programs]
            record[f"seconds {rule} {name} {count}"] = predict(plan, profile, schedule).seconds
        if rule in ("greedy", "dhelix"):
            schedule = Scheduler(windows[0][0], case.sizes["pp"])(LONG)
            record[f"seconds {rule} {LONG}"] = predict(plan, profile, schedule).seconds
            record[f"programs {rule} {LONG}"] = [
                digest(program_data(build_program(schedule, layout, plan, rank))) for rank in range(case.sizes["pp"])
            ]
    return record


def graph_rows(graph: Graph) -> list[object]:
    """A graph as plain values."""
    rows = [
        [
            op.name,
            op.kind.value,
            op.part.value,
            op.reads,
            op.writes,
            op.accumulates,
            op.control_deps,
            op.weights,
            op.ahead,
        ]
        for op in graph.operators
    ]
    return [graph.inputs, graph.outputs, graph.saved_values, graph.repeats, rows]


def program_data(program: Sequence[Any]) -> list[object]:
    """The instructions of a rank as plain values."""
    return [
        [
            made.microbatch,
            -1 if made.is_traffic else made.unit,
            made.operator and [made.operator.name, made.operator.kind.value, made.operator.part.value],
            made.reads,
            made.accumulates,
            made.writes,
            sorted(made.frees),
            made.ends,
        ]
        for made in program
    ]


def class_records() -> Iterator[tuple[str, Record]]:
    """The record of every model on every layout of the table."""
    groups: dict[str, list[Case]] = {}
    for case in CASES.values():
        groups.setdefault(repr((case.model, case.helix, case.layout)), []).append(case)
    for cases in groups.values():
        first = cases[0]
        dist.init_process_group("fake", rank=0, world_size=max(1, first.ranks), store=FakeStore())
        try:
            windows = dict.fromkeys((name, case.count) for case in cases for name in case.schedules)
            yield (
                f"{first.name.rsplit('-', 1)[0]} {digest([first.model, first.helix])}",
                row_record(first, list(windows)),
            )
        finally:
            dist.destroy_process_group()


# -- the doctor ----------------------------------------------------------------------------------------------------

DOCTOR_MODELS = ("llama-8b", "gpt-6.7b", "phi-16b")
DOCTOR_CLUSTERS = ("h100x8", "rtx4090x8")
DOCTOR_CASES: tuple[dict[str, Any], ...] = (
    {"sizes": Sizes(dp=8), "shard_parameters": True},
    {"sizes": Sizes(tp=2, pp=2, dp=2), "shard_optimizer": True, "recompute": "selective"},
    {"sizes": Sizes(tp=8), "plan": "sequential"},
    {"sizes": Sizes(pp=4, dp=2), "microbatches": 32},
)


def doctor_records() -> Iterator[tuple[str, Record]]:
    """24 steps that are simulated quickly and whole."""
    for name in DOCTOR_MODELS:
        for cluster_name in DOCTOR_CLUSTERS:
            cluster = load_cluster(cluster_name)
            simulated = SimulatedModel(f"recipes/models/{name}", cluster)
            for options in DOCTOR_CASES:
                case = DoctorCase.of(**{"batch": 1, "length": 4096, "microbatches": 8, **options})
                amounts, record = simulated.amounts(case), {}
                for whole in (False, True):
                    step = simulate_step(amounts, case, cluster, Fidelity.DRAWN if whole else Fidelity.QUICK)
                    record["whole" if whole else "quick"] = {
                        "window": step.window,
                        "sums": step.sums,
                        "optimizer": step.optimizer,
                        "memory": step.memory.total,
                    }
                words = [str(value) for key, value in options.items() if key != "sizes"]
                yield " ".join([name, cluster_name, size_text(case.sizes), *words]), record


# -- files ---------------------------------------------------------------------------------------------------------

FILES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "llama tp2": (2, {}, {"tp_size": 2}),
    "llama pp2": (2, {"num_hidden_layers": 4}, {"pp_size": 2}),
    "llama cp2 shard_parameters": (2, {}, {"cp_size": 2, "shard_parameters": True}),
    "llama dp2 shard_optimizer": (2, {}, {"shard_optimizer": True}),
    "gpt2 tp2": (2, {"family": "gpt2"}, {"tp_size": 2}),
    "phimoe ep2": (2, {"family": "phimoe"}, {"ep_size": 2}),
}


def file_records() -> Iterator[tuple[str, Record]]:
    """Checkpoints after two steps of training, on real ranks."""
    from support.cluster import Cluster

    for name, (ranks, model, helix) in FILES.items():
        cluster = Cluster(ranks)
        with TemporaryDirectory() as folder:
            cluster.run("support.golden_record:train_two_steps", folder=folder, helix=helix, model=model)
            paths = sorted(path for path in Path(folder).rglob("*") if path.suffix in (".safetensors", ".json"))
            record = {str(path.relative_to(folder)): file_digest(path) for path in paths}
        cluster.close()
        yield f"files {name}", record


def file_digest(path: Path) -> str:
    """The hash of a file; of JSON without what changes from run to run."""
    if path.suffix == ".safetensors":
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    data = json.loads(path.read_text())
    return digest(sorted(data)) if isinstance(data, dict) else digest(len(data))


def train_two_steps(folder: str, helix: dict[str, Any], model: dict[str, Any]) -> None:
    """On every rank: two steps, a checkpoint after each."""
    from support.pipeline_jobs import make

    training = {"max_steps": 2, "save_steps": 1, "save_strategy": "steps", "gradient_accumulation_steps": 2}
    trainer = make(folder, {"plan": "greedy", **helix}, model, training)
    trainer.train()
    trainer.save_model(f"{folder}/final")
    trainer.helix.runner.executor.streams.close()


# -- the command ---------------------------------------------------------------------------------------------------

KINDS = {"classes": class_records, "doctor": doctor_records, "files": file_records}


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Where two records differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from differences(before.get(key), after.get(key), f"{where}/{key}")
    elif isinstance(before, float) and isinstance(after, float | int):
        if abs(before - after) > NEAR * abs(before):
            yield f"{where}: {before:.9g} -> {after:.9g} ({after / before - 1:+.2%})" if before else f"{where}: {after}"
    elif before != after:
        yield f"{where}: {before} -> {after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record")
    record.add_argument("file", type=Path)
    record.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    compare = commands.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
        found = [each for kind in before.keys() & after.keys() for each in differences(before[kind], after[kind], kind)]
        print("\n".join(found[:200]))
        print(f"{len(found)} differences in {sum(len(rows) for rows in before.values())} records")
        raise SystemExit(bool(found))
    made: dict[str, Record] = {}
    for kind in options.only:
        begin = time.monotonic()
        made[kind] = {}
        for name, row in KINDS[kind]():
            made[kind][name] = row
            print(f"\r{kind}: {len(made[kind])} records, {time.monotonic() - begin:.0f} s", end="", flush=True)
        print()
        options.file.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
