"""Predicted against measured, layout by layout.

Two processes (or four, by `--ranks`) measure for every speed of an emulated link (docs/results.md) what
they carry over it, and before and after each layout their device and how long ranks wait for each other, as `hf-helix
cluster` does: a machine that others share is not as fast in every minute. From these numbers alone every window is
predicted, as `hf-helix simulate` does: each layout, with and without recomputation, under each plan. The plans are made
from what was measured before, and the mean of two predictions counts: from the numbers before and from those after.
Between them the same windows run under the same plans, all speeds and plans in turn, and the median of the slowest rank
counts. A step here is forward, backward and gradient sums of a window, without the optimizer; every layout trains on
the same tokens, and how unevenly routers load the ranks is counted beforehand, but where experts have a capacity.
Memory is that of activations, counted storage by storage. Nothing else should run on the machine.

    python -m benchmarks.predictions
    python -m benchmarks.predictions --ranks 4 --markdown table.md
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, MixtralConfig

from benchmarks.common import add_outputs, columns, options_of, save
from benchmarks.ranks import Ranks
from hf_helix.config import HelixConfig, parse_link
from hf_helix.doctor.case import Case
from hf_helix.doctor.memory import peaks_of_window
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import profile_of, simulate_plan
from hf_helix.engine.synthetic import Workload
from hf_helix.measure.cluster_file import measure_cluster, measure_device, measure_links, measure_waiting, waiting_entry
from hf_helix.measure.memory import peak_bytes
from hf_helix.measure.overlap import time_steps, transports
from hf_helix.operators.communication.transport import Recorder
from hf_helix.planning.timing.cluster import Cluster, parse_cluster
from hf_helix.planning.timing.sizes import Sizes
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.distributed.mesh import mesh_of
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner, forget_gradients
from hf_helix.runtime.streams.streams import make_streams
from hf_helix.tuning.candidates import plan_runners

CPU = torch.device("cpu")
DENSE, EXPERTS = "llama", "mixtral"
SCHEDULE = "folded_1f1b"
TITLES = ("layout", "recompute", "link", "plan", "predicted s", "measured s", "ratio", "spread")
TITLES += ("predicted MB", "counted MB", "ratio")
APART = 0.1
"""Layouts whose steps differ by more than this part must be predicted in the right order."""


@dataclass(frozen=True)
class Layout:
    """A layout that is predicted and measured.

    Attributes:
        model: `DENSE` or `EXPERTS`.
        sizes: of the mesh.
        shard_parameters: whether weights are spread over data-parallel ranks.
        capacity: as `HelixConfig.expert_capacity_factor`.
    """

    model: str
    sizes: Sizes
    shard_parameters: bool = False
    capacity: float | None = None

    def config(self, recompute: str, link: str) -> HelixConfig:
        """Returns the options of a run of it."""
        sizes = self.sizes
        return HelixConfig(
            tp_size=sizes.tp,
            cp_size=sizes.cp,
            pp_size=sizes.pp,
            ep_size=sizes.ep,
            schedule=SCHEDULE,
            recompute=recompute,
            link=link,
            shard_parameters=self.shard_parameters,
            expert_capacity_factor=self.capacity,
        )


LAYOUTS = {
    "tp2": Layout(DENSE, Sizes(tp=2)),
    "pp2": Layout(DENSE, Sizes(pp=2)),
    "cp2": Layout(DENSE, Sizes(cp=2)),
    "dp2": Layout(DENSE, Sizes(dp=2)),
    "dp2 sharded": Layout(DENSE, Sizes(dp=2), shard_parameters=True),
    "ep2": Layout(EXPERTS, Sizes(dp=2, ep=2)),
    "ep2 capacity": Layout(EXPERTS, Sizes(dp=2, ep=2), capacity=1.25),
    "tp2 x dp2": Layout(DENSE, Sizes(tp=2, dp=2)),
    "tp2 x dp2 sharded": Layout(DENSE, Sizes(tp=2, dp=2), shard_parameters=True),
}


Row = Mapping[str, Any]
"""A window that was predicted and measured: its layout, recompute, link and plan; seconds predicted and measured (the
median), the spread of the repeats as part of that; bytes of activations on the rank that has most, predicted as
`memory`, and as counted."""


def main() -> None:
    sizes = {"hidden": 384, "layers": 4, "sequence": 256, "microbatches": 8, "repeats": 3}
    links = ["200mbit", "500mbit", "1gbit"]
    parser = options_of(__doc__, links=links, plans=["sequential", "greedy"], recompute=["none", "full"], **sizes)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4), help="processes")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    add_outputs(parser)
    options = parser.parse_args()
    if all(LAYOUTS[name].sizes.devices != options.ranks for name in options.layouts):
        parser.error(f"--layouts: none has {options.ranks} ranks; 2 ranks run tp2, 4 ranks 'tp2 x dp2'")
    Ranks(options.ranks, pins=False, seconds=6 * 3600).run(work, options)


def model_of(name: str, options: argparse.Namespace) -> Any:
    """Returns the configuration of a model."""
    heads = max(2, options.hidden // 64)
    sizes = {
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": options.sequence,
        "tie_word_embeddings": False,
    }
    if name == DENSE:
        return LlamaConfig(intermediate_size=11 * options.hidden // 4, **sizes)
    return MixtralConfig(intermediate_size=2 * options.hidden, num_local_experts=4, num_experts_per_tok=2, **sizes)


def work(options: argparse.Namespace) -> None:
    """One rank: the device and the links, then every layout."""
    names = [name for name in options.layouts if LAYOUTS[name].sizes.devices == options.ranks]
    files = measure(options)
    now, rows = clusters_now(files, options), []
    for name, recompute in itertools.product(names, options.recompute):
        made, now = compare(name, recompute, now, lambda: clusters_now(files, options), options)
        rows += made
        if options.rank == 0:
            text = columns(TITLES, list(map(line, rows))) + "\n\n" + "\n".join(summary(rows))
            print("\n".join(" | ".join(line(row)) for row in made), flush=True)
            save(options, "Predicted against measured", __doc__, text, rows)
    if options.rank == 0:
        print(text)


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns what a cluster file of this machine holds, by link; each link is measured over itself. Collective."""
    data, files = measure_cluster(CPU), {}
    for link in options.links:
        files[link] = dict(data)
        measure_links(files[link], mesh_of(HelixConfig(tp_size=options.ranks, link=link), CPU), quiet)
    return {link: all_gather_object(file)[0] for link, file in files.items()}


def clusters_now(files: dict[str, dict[str, Any]], options: argparse.Namespace) -> dict[str, Cluster]:
    """Returns this machine by link, as fast as its device is now, and as ranks wait for each other now. Collective."""
    axis, streams = mesh_of(HelixConfig(tp_size=options.ranks, link=options.links[-1]), CPU).tp, make_streams(CPU)
    device, waiting = measure_device(CPU, options.ranks, quiet), waiting_entry(measure_waiting(axis, streams, CPU))
    streams.close()
    now = all_gather_object({"device": device, "waiting_us": waiting})[0]
    return {link: parse_cluster({**file, **now}, f"this machine, {link}") for link, file in files.items()}


def quiet(stage: str, share: float) -> None:
    """Shows no progress."""


def compare(
    name: str,
    recompute: str,
    before: dict[str, Cluster],
    measured: Callable[[], dict[str, Cluster]],
    options: argparse.Namespace,
) -> tuple[list[Row], dict[str, Cluster]]:
    """Predicts and measures a layout on every link; returns what is known of the machine then, too. Collective.

    Args:
        name: of the layout.
        recompute: as in `HelixConfig`.
        before: this machine by link, as it is now.
        measured: measures the same.
        options: of the command.
    """
    layout = LAYOUTS[name]
    shape = model_of(layout.model, options)
    workload = Workload(shape, layout.config(recompute, options.links[0]), CPU)
    window = workload.window(options.microbatches // layout.sizes.dp, 1, options.sequence)
    runner, link = workload.runner, workload.mesh.link
    case = Case.of(
        sizes=layout.sizes,
        batch=1,
        length=options.sequence,
        microbatches=len(window),
        schedule=SCHEDULE,
        recompute=recompute,
        shard_parameters=layout.shard_parameters,
        dtype="fp32",
        imbalance=1.0 if layout.capacity else imbalance_of(runner, window),
        expert_capacity_factor=layout.capacity,
    )
    assert link is not None
    amounts = SimulatedModel(shape, next(iter(before.values()))).amounts(case)
    runners = {}
    for speed, cluster in before.items():
        profile = profile_of(amounts, case, cluster, whole=True)
        for plan, planned in plan_runners(runner, options.plans, profile, case.microbatches).items():
            runners[speed, plan] = planned
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runners}
    for _, speed in itertools.product(range(options.repeats), before):
        link.rate = parse_link(speed).rate
        mine = {plan: runners[speed, plan] for plan in options.plans}
        for plan, seconds in time_steps(mine, window, 1).items():
            times[speed, plan] += seconds
    counted = {}
    for (speed, plan), planned in runners.items():
        link.rate = parse_link(speed).rate
        counted[speed, plan] = max(all_gather_object(peak_bytes(planned, window)))
    after = measured()
    rows: list[Row] = []
    for (speed, plan), planned in runners.items():
        way, steps = case.changed(plan=plan), []
        for cluster in (before[speed], after[speed]):
            profile = profile_of(amounts, way, cluster, whole=True)
            steps.append(simulate_plan(amounts, way, cluster, profile, planned.plan))
        drawn = steps[0].drawn
        assert drawn is not None
        memory = max(peak.total for peak in peaks_of_window(amounts, runner.layout, drawn, host_runs_ahead=False))
        predicted = statistics.fmean(step.window + step.sums for step in steps)
        every, median = times[speed, plan], statistics.median(times[speed, plan])
        rows.append(
            {
                "model": layout.model,
                "layout": name,
                "recompute": recompute,
                "link": speed,
                "plan": plan,
                "predicted": predicted,
                "measured": median,
                "spread": (max(every) - min(every)) / median,
                "memory": memory,
                "counted": counted[speed, plan],
            }
        )
    return rows, after


def imbalance_of(runner: Runner, window: Sequence[MicroBatch]) -> float:
    """Returns how many times as many rows as an even share the busiest rank's experts get. Collective."""
    recorder = Recorder(runner.mesh.experts.transport)
    with transports([runner.mesh.experts], [recorder]):
        runner.train_window(window, complete=False)
        runner.executor.streams.synchronize()
    forget_gradients(runner)
    mine = [tuple(map(sum, move.rows)) for move in recorder.moved if move.rows]  # what goes out, and what comes in
    exchanges = list(zip(*all_gather_object(mine), strict=True))
    most = sum(max(max(each) for each in ranks) for ranks in exchanges)
    return most / sum(statistics.fmean(out for out, _ in ranks) for ranks in exchanges) if exchanges else 1.0


def pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yields two layouts of the same model on the same link, under the same plan, whose measured steps are apart."""
    for first, second in itertools.combinations(rows, 2):
        alike = all(first[key] == second[key] for key in ("model", "link", "plan"))
        steps = first["measured"], second["measured"]
        if alike and max(steps) > (1 + APART) * min(steps):
            yield first, second


def line(row: Row) -> tuple[str, ...]:
    """Returns a row as cells of the table."""
    case = (row["layout"], row["recompute"], row["link"], row["plan"])
    times = f"{row['predicted']:.3f}", f"{row['measured']:.3f}", f"{row['predicted'] / row['measured']:.2f}"
    memory = f"{row['memory'] / 1e6:.2f}", f"{row['counted'] / 1e6:.2f}", f"{row['memory'] / row['counted']:.3f}"
    return *case, *times, f"{row['spread']:.0%}", *memory


def summary(rows: Sequence[Row]) -> list[str]:
    """Returns what a table says: the errors, and whether the order of layouts is right."""
    errors = [row["predicted"] / row["measured"] - 1 for row in rows]
    worst, where = max(zip(errors, rows, strict=True), key=lambda pair: abs(pair[0]))
    memory: dict[str, float] = {}
    for row in rows:
        memory[row["layout"]] = max(memory.get(row["layout"], 0.0), abs(row["memory"] / row["counted"] - 1))
    apart = list(pairs(rows))
    wrong = [(a, b) for a, b in apart if (a["measured"] < b["measured"]) != (a["predicted"] < b["predicted"])]
    lines = [
        f"- Step times: mean absolute error {statistics.fmean(map(abs, errors)):.1%}, "
        f"{sum(abs(error) <= APART for error in errors)} of {len(rows)} within {APART:.0%}, the worst {worst:+.1%} "
        f"({', '.join(line(where)[:4])}).",
        "- Memory: largest error "
        + ", ".join(f"{error:.1%} ({layout})" for layout, error in memory.items())
        + "; without a capacity of experts, routers load every layer differently.",
        f"- Order: {len(apart) - len(wrong)} of {len(apart)} pairs of layouts that differ by more than {APART:.0%} are "
        "predicted in the right order.",
    ]
    return lines + [f"  - wrong: {', '.join(line(a)[:4])} and {', '.join(line(b)[:4])}" for a, b in wrong]


if __name__ == "__main__":
    main()
