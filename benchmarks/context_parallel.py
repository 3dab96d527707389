"""Two hosts that share long sequences: what each kind of overlap adds (the paper's figure 15).

Builds two hosts joined by a slow link (see shaped_link.py; needs root). Each holds one part of every sequence
(`cp_size=2`); with `--tp 2` each has two ranks, which share every layer over the host's own, faster link. From row to
row plans may use more: first nothing runs beside anything; then tensor-parallel communication beside computation, then
the ring of keys and values too, then both kinds at once, then weight gradients move. The operators are measured once,
on the links, and each row has the plan that `search` makes of them. All times of a length come from one run, in turn;
medians, the slowest rank counts. A step is forward, backward and gradient sums of a window, without the optimizer.
With `--rate even` the link is as fast as lets communication alone take as long as the computation that was measured
before, since the speed of a shared machine changes from hour to hour.

    sudo python benchmarks/context_parallel.py --lengths 1024 2048 --rate 200
    sudo python benchmarks/context_parallel.py --lengths 1024 2048 --rate 200 --tp 2 --local_rate 1500
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import shaped_link

CP = 2
EVEN = "even"
STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "nothing beside anything": ("sequential", ("intra_node", "inter_node", "comm_beside_comm", "wgrad")),
    "one strand": ("sequential", ()),
    "+ tp overlap": ("search", ("inter_node", "comm_beside_comm", "wgrad")),
    "+ cp overlap": ("search", ("comm_beside_comm", "wgrad")),
    "+ both at once": ("search", ("wgrad",)),
    "+ weight gradients": ("search", ()),
}
"""Each row: its rule, and what its plans must not use."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048], help="tokens of a sequence")
    parser.add_argument("--rate", type=rate_of, default=200, help="Mbit/s each way between the hosts, or `even`")
    parser.add_argument("--tp", type=int, default=1, help="ranks of a host")
    parser.add_argument("--local_rate", type=int, default=1500, help="Mbit/s inside a host")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ends", action="store_true", help="only one strand, and everything")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rate == EVEN and options.tp > 1:
        parser.error(f"--rate {EVEN}: needs --tp 1, where all communication is between the hosts")
    if options.rank is None:
        launch(options)
    else:
        work(options)


def rate_of(text: str) -> int | str:
    """What `--rate` takes."""
    return text if text == EVEN else int(text)


def launch(options: argparse.Namespace) -> None:
    """Make the hosts and run their ranks; leave nothing behind."""
    count = CP * options.tp

    def start(rank: int, folder: str) -> subprocess.Popen[bytes]:
        return shaped_link.start_rank(rank, folder, count, rank // options.tp)  # tensor-parallel ranks are neighbours

    shaped_link.run_ranks("network namespaces", count, start, 3600, shaped_link.hosts())


def work(options: argparse.Namespace) -> None:
    """One rank: every length, every row."""
    import torch.distributed as dist

    host = options.rank // options.tp
    shaped_link.join(host)
    bench = Bench(options)
    first = options.rank % options.tp == 0  # of its host
    if first and options.tp > 1:
        shaped_link.shape(host, options.local_rate, "lo")
    dist.barrier()
    results = []
    for length in options.lengths:
        rate = bench.even_rate(length) if options.rate == EVEN else options.rate
        if first:
            shaped_link.shape(host, rate)
        dist.barrier()
        results.append(bench.measure(length, rate))
        if options.rank == 0:
            print("\n" + describe(results[-1]), flush=True)
            if options.json:
                about = {**shaped_link.versions(), "flags": shlex.join(sys.argv[1:-2])}  # without --rank
                options.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    dist.destroy_process_group()


class Bench:
    """A Llama cut over the ranks, with a stage for everything that plans must not use."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from benchmarks.paper.ablate import ablate
        from hf_helix.checkpoint.shard import cut_parameters
        from hf_helix.models.graph.context import ParallelContext
        from hf_helix.models.registry import family_of
        from hf_helix.planning.pipeline.scheduler import Scheduler
        from hf_helix.planning.plans.registry import make_plan
        from hf_helix.planning.profile import rough_profile
        from hf_helix.runtime.distributed.mesh import build_mesh
        from hf_helix.runtime.runner import Runner
        from hf_helix.runtime.stage import place_units
        from hf_helix.runtime.streams import make_streams

        torch.manual_seed(0)
        self.options = options
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=2048,
                hidden_size=options.hidden,
                intermediate_size=options.hidden * 11 // 4,
                num_hidden_layers=options.layers,
                num_attention_heads=options.heads,
                num_key_value_heads=options.kv_heads,
                max_position_embeddings=max(options.lengths),
            )
        ).train()
        self.mesh = build_mesh(options.tp, "cpu", cp_size=CP, inter_node_axes=["cp"])
        self.family = family_of(self.model)
        units = self.family.units(self.model, ParallelContext(self.mesh.tp, self.mesh.cp))
        streams = make_streams(torch.device("cpu"))
        self.runners: dict[tuple[str, ...], Any] = {}
        for _, without in STEPS.values():
            if without in self.runners:
                continue
            stage = place_units([dataclasses.replace(unit, graphs=ablate(unit.graphs, without)) for unit in units])
            if not self.runners:
                cut_parameters(stage, self.mesh)
            plan = make_plan("sequential", rough_profile(stage.layout), model="bench", mesh=self.mesh.option_sizes)
            self.runners[without] = Runner(stage, plan, self.mesh, streams, Scheduler("folded_1f1b", 1), 0)

    def window(self, length: int) -> list[Any]:
        import torch

        from hf_helix.models.batch_inputs import SequenceCut
        from hf_helix.runtime.microbatch import MicroBatch

        count = self.options.microbatches
        generator = torch.Generator().manual_seed(1)
        ids = [torch.randint(0, 2048, (1, length), generator=generator) for _ in range(count)]
        scale = torch.tensor(1.0 / (count * (length - 1)))
        cut = SequenceCut.of(self.mesh.tp, self.mesh.cp)
        prepare = functools.partial(self.family.side_inputs, self.model)
        return [
            MicroBatch(functools.partial(prepare, {"input_ids": one, "labels": one}, cut, scale), (0, place), length)
            for place, one in enumerate(ids)
        ]

    def even_rate(self, length: int) -> int:
        """Mbit/s at which communication takes as long as computation."""
        from hf_helix.measure.overlap import measure_overlap

        overlap = measure_overlap({"": self.runners[()]}, self.window(length), 1)[""]
        sums = sum(parameter.nbytes for parameter in self.runners[()].stage.placements)  # all-reduce of two ranks
        return round(8 * (overlap.bytes_moved + sums) / overlap.computation / 1e6)

    def measure(self, length: int, rate: int) -> dict[str, Any]:
        """Measure the operators, make the plans, time everything in turn."""
        from benchmarks.paper.ablate import ablate_profile
        from hf_helix.measure.operators import measure_profile
        from hf_helix.measure.overlap import measure_overlap
        from hf_helix.tuning.candidates import plan_runners, predict_window

        window = self.window(length)
        profile = measure_profile(self.runners[()], window)
        runners, predicted = {}, {}
        for name, (rule, without) in STEPS.items():
            if self.options.tp == 1 and name in ("+ tp overlap", "+ both at once"):
                continue
            if self.options.ends and name not in ("one strand", "+ weight gradients"):
                continue
            known = ablate_profile(profile, without)
            runners[name] = plan_runners(self.runners[without], [rule], known, len(window))[rule]
            predicted[name] = predict_window(runners[name], known, len(window))
        overlaps = measure_overlap(runners, window, self.options.repeats)
        rows = {name: dataclasses.asdict(overlap) for name, overlap in overlaps.items()}
        return {"length": length, "rate": rate, "rows": rows, "predicted": predicted}


def describe(result: dict[str, Any]) -> str:
    """The table of a length."""
    rows, predicted = result["rows"], result["predicted"]
    base = rows["one strand"]
    compute, moved = base["computation"], base["communication"]
    bound = max(compute, base["busiest"])
    lines = [
        f"{result['length']} tokens, {result['rate']} Mbit/s: computation {compute:.2f} s, communication {moved:.2f} s "
        f"({base['busiest']:.2f} s on the busier link), bound {bound:.2f} s",
        f"  {'':<24} {'step s':>8} {'predicted':>9} {'speed-up':>9} {'of bound':>9} {'hidden':>7} {'overlapped':>11}",
    ]
    for name, row in rows.items():
        lines.append(
            f"  {name:<24} {row['step']:8.2f} {predicted[name]:9.2f} {base['step'] / row['step']:8.2f}x "
            f"{bound / row['step']:9.2f} {1 - (row['step'] - compute) / moved:7.0%} {row['overlapped_fraction']:11.0%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
