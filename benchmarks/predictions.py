"""Predicted against measured, layout by layout: `python -m benchmarks.predictions`.

Two processes (or as many as `--ranks` says) measure for every speed of an emulated link (docs/results.md) what
they carry over it, and before and after each layout their device and how long ranks wait for each other, as `hf-helix
cluster` does: a machine that others share is not as fast in every minute. From these numbers alone every window is
predicted, as `hf-helix simulate` does: each layout, with and without recomputation, under each plan. The plans are made
from what was measured before, and the mean of two predictions counts: from the numbers before and from those after.
Between them the same windows run under the same plans, all speeds and plans in turn, and the median of the slowest rank
counts. A step here is forward, backward and gradient sums of a window, without the optimizer; every layout trains on
the same tokens, and how unevenly routers load the ranks is counted beforehand, but where experts have a capacity.
Memory is that of activations, counted storage by storage. Nothing else should run on the machine.

    python -m benchmarks.predictions --ranks 2 4 --markdown table.md
"""

import argparse
import datetime
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from transformers import LlamaConfig, MixtralConfig

from benchmarks.common import markdown, options_of
from hf_helix.config import HelixConfig, parse_link
from hf_helix.doctor.case import Case
from hf_helix.doctor.memory import peaks_of_window
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import profile_of, simulate_plan
from hf_helix.engine.synthetic import Workload
from hf_helix.measure.cluster_file import measure_cluster, measure_device, measure_links, measure_waiting, waiting_entry
from hf_helix.measure.machine import describe_device
from hf_helix.measure.memory import peak_bytes
from hf_helix.measure.overlap import time_steps, transports
from hf_helix.operators.communication.transport import Recorder
from hf_helix.planning.timing.cluster import Cluster, parse_cluster
from hf_helix.planning.timing.sizes import Sizes
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.distributed.mesh import mesh_of
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner, forget_gradients
from hf_helix.runtime.streams import make_streams
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


@dataclass(frozen=True)
class Row:
    """A window that was predicted and measured.

    Attributes:
        ranks: processes.
        model: `DENSE` or `EXPERTS`.
        layout: a name of `LAYOUTS`.
        recompute: as in `HelixConfig`.
        link: its speed.
        plan: the name of a rule.
        predicted: seconds.
        measured: seconds, the median.
        spread: the slowest repeat less the fastest, as part of the median.
        memory: predicted bytes of activations, of the rank that has most.
        counted: the same, as counted.
    """

    ranks: int
    model: str
    layout: str
    recompute: str
    link: str
    plan: str
    predicted: float
    measured: float
    spread: float
    memory: int
    counted: int

    @property
    def ratio(self) -> float:
        """Returns the predicted time as part of the measured one."""
        return self.predicted / self.measured


def main() -> None:
    options = read_options()
    started = time.perf_counter()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            output = Path(folder) / f"{ranks}.json"
            mp.spawn(work, (ranks, options, output), nprocs=ranks)
            rows += [Row(**each) for each in json.loads(output.read_text())]
    text = report(rows, options, time.perf_counter() - started)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def read_options() -> argparse.Namespace:
    sizes = {"hidden": 384, "layers": 4, "sequence": 256, "microbatches": 8, "repeats": 3}
    links = ["200mbit", "500mbit", "1gbit"]
    parser = options_of(__doc__, links=links, plans=["sequential", "greedy"], recompute=["none", "full"], **sizes)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], choices=(2, 4), help="processes")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--cluster", help="a cluster file of this machine; left out, it is measured")
    parser.add_argument("--markdown", type=Path, help="also write the tables there")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser.parse_args()


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


def work(rank: int, ranks: int, options: argparse.Namespace, output: Path) -> None:
    """One rank: the device and the links, then every layout."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29581", RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    files = measure(options, ranks)
    rows: list[Row] = []
    names = [name for name in options.layouts if LAYOUTS[name].sizes.devices == ranks]

    def measured() -> dict[str, Cluster]:
        return clusters_now(files, options, ranks)

    now = measured() if names else {}
    for name, recompute in itertools.product(names, options.recompute):
        made, now = compare(name, recompute, now, measured, options)
        rows += made
        if rank == 0:
            print("\n".join(" | ".join(line(row)) for row in made), flush=True)
    if rank == 0:
        output.write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace, ranks: int) -> dict[str, dict[str, Any]]:
    """Returns what a cluster file of this machine holds, by link; each link is measured over itself. Collective."""
    if options.cluster:
        data = yaml.safe_load(Path(options.cluster).read_text())
        if data.get("devices_per_node") != ranks:
            sys.exit(f"--cluster {options.cluster}: must be measured with {ranks} processes on one node")
    else:
        data = measure_cluster(CPU)
    files = {}
    for link in options.links:
        files[link] = dict(data)
        measure_links(files[link], mesh_of(HelixConfig(tp_size=ranks, link=link), CPU), quiet)
    return {link: all_gather_object(file)[0] for link, file in files.items()}


def clusters_now(files: dict[str, dict[str, Any]], options: argparse.Namespace, ranks: int) -> dict[str, Cluster]:
    """Returns this machine by link, as fast as its device is now, and as ranks wait for each other now. Collective."""
    now: dict[str, Any] = {}
    if not options.cluster:
        axis, streams = mesh_of(HelixConfig(tp_size=ranks, link=options.links[-1]), CPU).tp, make_streams(CPU)
        device, waiting = measure_device(CPU, ranks, quiet), waiting_entry(measure_waiting(axis, streams, CPU))
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
    case = Case(
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
    rows = []
    for (speed, plan), planned in runners.items():
        way, steps = replace(case, plan=plan), []
        for cluster in (before[speed], after[speed]):
            profile = profile_of(amounts, way, cluster, whole=True)
            steps.append(simulate_plan(amounts, way, cluster, profile, planned.plan))
        drawn = steps[0].drawn
        assert drawn is not None
        memory = max(peak.total for peak in peaks_of_window(amounts, runner.layout, drawn, host_runs_ahead=False))
        predicted = statistics.fmean(step.window + step.sums for step in steps)
        every, median = times[speed, plan], statistics.median(times[speed, plan])
        spread = (max(every) - min(every)) / median
        about = layout.sizes.devices, layout.model, name, recompute, speed, plan
        rows.append(Row(*about, predicted, median, spread, memory, counted[speed, plan]))
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
        alike = all(getattr(first, key) == getattr(second, key) for key in ("ranks", "model", "link", "plan"))
        if alike and max(first.measured, second.measured) > (1 + APART) * min(first.measured, second.measured):
            yield first, second


def line(row: Row) -> tuple[str, ...]:
    """Returns a row as cells of the table."""
    times = f"{row.predicted:.3f}", f"{row.measured:.3f}", f"{row.ratio:.2f}", f"{row.spread:.0%}"
    memory = f"{row.memory / 1e6:.2f}", f"{row.counted / 1e6:.2f}", f"{row.memory / row.counted:.3f}"
    return row.layout, row.recompute, row.link, row.plan, *times, *memory


def report(rows: Sequence[Row], options: argparse.Namespace, seconds: float) -> str:
    """Returns the tables and what they say, as Markdown."""
    flags = " ".join(sys.argv[1:])
    lines = [
        f"# Predicted against measured, {datetime.date.today()}",
        "",
        *(__doc__ or "").strip().splitlines()[2:-2],
        "",
        f"{describe_device(CPU)}, torch {torch.__version__}, one thread a rank; `python -m benchmarks.predictions "
        f"{flags}` in {seconds / 60:.0f} minutes; load {os.getloadavg()[2]:.1f}.",
    ]
    for ranks in dict.fromkeys(row.ranks for row in rows):
        part = [row for row in rows if row.ranks == ranks]
        lines += ["", f"## {ranks} ranks", "", markdown(TITLES, [line(row) for row in part]), "", *summary(part)]
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> list[str]:
    """Returns what a table says: the errors, and whether the order of layouts is right."""
    errors = [abs(row.ratio - 1) for row in rows]
    worst = max(rows, key=lambda row: abs(row.ratio - 1))
    memory: dict[str, float] = {}
    for row in rows:
        memory[row.layout] = max(memory.get(row.layout, 0.0), abs(row.memory / row.counted - 1))
    apart = list(pairs(rows))
    wrong = [(a, b) for a, b in apart if (a.measured < b.measured) != (a.predicted < b.predicted)]
    lines = [
        f"- Step times: mean absolute error {statistics.fmean(errors):.1%}, {sum(e <= APART for e in errors)} of "
        f"{len(rows)} within {APART:.0%}, the worst {worst.ratio - 1:+.1%} ({worst.layout}, "
        f"recompute={worst.recompute}, {worst.link}, {worst.plan}).",
        "- Memory: largest error "
        + ", ".join(f"{error:.1%} ({layout})" for layout, error in memory.items())
        + "; without a capacity of experts, routers load every layer differently.",
        f"- Order: {len(apart) - len(wrong)} of {len(apart)} pairs of layouts that differ by more than {APART:.0%} are "
        "predicted in the right order.",
    ]
    for first, second in wrong:
        names = [f"{row.layout} (recompute={row.recompute})" for row in (first, second)]
        lines.append(f"  - wrong: {names[0]} and {names[1]} at {first.link}, {first.plan}")
    return lines


if __name__ == "__main__":
    main()
