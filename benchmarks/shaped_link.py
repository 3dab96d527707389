"""Two hosts on one machine, joined by a link of a given speed: what each plan makes of it.

Builds two network namespaces joined by a veth pair with `tc tbf` (needs root; cleans up after itself), runs one rank
of a tensor-parallel Llama in each, and prints per rate the step time of every plan beside the computation alone, the
communication alone and the bound that follows. The operators are measured on the link first; `greedy` and `search` plan
with those times, as `plan="auto"` does, which keeps the fastest. All times of a rate come from one run, in turn;
medians, the slower rank counts. A step here is forward, backward and gradient sums of a window, without the optimizer.

    sudo python benchmarks/shaped_link.py --rates 300 600 1000 --microbatches 8 16
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_helix.planning.plan import Plan, Times

NAMESPACES = ("helix-a", "helix-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICES = ("helix-veth-a", "helix-veth-b")
GSO = "32768"  # the largest packet the shaper sees; larger ones it would cut up, which costs cores
BURST = "128kb"  # small, or single collectives look faster than the link is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[300, 600, 1000], help="Mbit/s each way")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--plans", nargs="+", default=["sequential", "round_robin", "greedy", "search"])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout", type=int, default=3600, help="seconds after which everything is stopped")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        launch(options)
    else:
        work(options)


def launch(options: argparse.Namespace) -> None:
    """Make the hosts and start a rank in each."""
    if os.geteuid() != 0:
        sys.exit("this needs root, for network namespaces: sudo python benchmarks/shaped_link.py")
    with hosts():
        ranks = []
        for rank, (namespace, device) in enumerate(zip(NAMESPACES, DEVICES, strict=True)):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": device,
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": "29555",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
            }
            command = ["ip", "netns", "exec", namespace, sys.executable, *sys.argv, "--rank", str(rank)]
            ranks.append(subprocess.Popen(command, env=environment))
        try:
            codes = [process.wait(timeout=options.timeout) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    sys.exit(max(codes))


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """Two namespaces and the link between them."""
    remove_hosts()
    try:
        ip("link", "add", DEVICES[0], "type", "veth", "peer", "name", DEVICES[1])
        for namespace, device, address in zip(NAMESPACES, DEVICES, ADDRESSES, strict=True):
            ip("netns", "add", namespace)
            ip("link", "set", device, "netns", namespace)
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", namespace, "link", "set", device, "gso_max_size", GSO)
            ip("-n", namespace, "link", "set", device, "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield
    finally:
        remove_hosts()


def remove_hosts() -> None:
    for namespace in NAMESPACES:
        subprocess.run(["ip", "netns", "del", namespace], stderr=subprocess.DEVNULL, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def shape(rank: int, rate: int) -> None:
    """Set the speed of this host's end."""
    shaper = ["tbf", "rate", f"{rate}mbit", "burst", BURST, "latency", "200ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", DEVICES[rank], "root", *shaper], check=True)


def work(options: argparse.Namespace) -> None:
    """One rank: every rate and window, every plan."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    bench = Bench(options)
    results = []
    for rate in options.rates:
        shape(options.rank, rate)
        for count in options.microbatches:
            results.append({"rate": rate, "microbatches": count, **bench.measure(count)})
            if options.rank == 0:
                print_result(results[-1])
    if options.rank == 0 and options.json:
        options.json.write_text(
            json.dumps({"versions": versions(), "flags": sys.argv[1:], "results": results}, indent=1)
        )
    dist.destroy_process_group()


class Bench:
    """A Llama cut over two ranks, with a runner for every plan."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from hf_helix.adapters import family_of
        from hf_helix.checkpoint import cut_parameters
        from hf_helix.runtime.mesh import build_mesh
        from hf_helix.runtime.runner import Runner
        from hf_helix.runtime.stage import fold_units
        from hf_helix.runtime.streams import make_streams

        torch.manual_seed(0)
        self.options = options
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=4096,
                hidden_size=options.hidden,
                intermediate_size=options.hidden * 11 // 4,
                num_hidden_layers=options.layers,
                num_attention_heads=16,
                num_key_value_heads=16,
            )
        ).train()
        self.mesh = build_mesh(2, "cpu")
        self.family = family_of(self.model)
        units = self.family.units(self.model, self.mesh.tp)
        cut_parameters(units, self.mesh)
        stage = fold_units(units)
        streams = make_streams(torch.device("cpu"))
        self.stage = stage
        self.runner = Runner(stage, self.plan("sequential", None), self.mesh, streams, "w", 0)

    def plan(self, rule: str, times: Times | None) -> Plan:
        from hf_helix.planning.plan import make_plan
        from hf_helix.planning.rules import RULES

        return make_plan(rule, RULES[rule], self.stage.graphs, model="bench", mesh={"tp_size": 2}, times=times)

    def window(self, count: int) -> list:
        import torch

        from hf_helix.runtime.strand import MicroBatch

        generator = torch.Generator().manual_seed(1)
        shape = (self.options.batch, self.options.sequence)
        scale = torch.tensor(1.0 / (count * shape[0] * (shape[1] - 1)))
        batches = []
        for place in range(count):
            ids = torch.randint(0, 4096, shape, generator=generator)
            batch = {"input_ids": ids, "labels": ids}
            prepare = functools.partial(self.family.side_inputs, self.model, batch, 2, scale)
            batches.append(MicroBatch(prepare, (0, place), ids.numel()))
        return batches

    def measure(self, count: int) -> dict:
        from hf_helix.runtime.tuning import tune

        tuning = tune(self.runner, self.window(count), self.plan, self.options.plans, self.options.repeats)
        return {"plans": {name: dataclasses.asdict(overlap) for name, overlap in tuning.overlaps.items()}}


def print_result(result: dict) -> None:
    plans = result["plans"]
    base = plans.get("sequential", next(iter(plans.values())))
    compute, moved = base["computation"], base["communication"]
    bound = max(compute, moved)
    print(
        f"\n{result['rate']} Mbit/s, M={result['microbatches']}: computation {compute:.2f} s, "
        f"communication {moved:.2f} s, one after the other {compute + moved:.2f} s, bound {bound:.2f} s"
    )
    print(f"  {'plan':<12} {'step s':>8} {'speed-up':>9} {'of bound':>9} {'hidden':>7} {'overlapped':>11}")
    for name, plan in plans.items():
        step = plan["step"]
        hidden = 1 - (step - compute) / moved
        print(
            f"  {name:<12} {step:8.2f} {base['step'] / step:8.2f}x {bound / step:9.2f} {hidden:7.0%} "
            f"{plan['overlapped_fraction']:11.0%}",
            flush=True,
        )


def versions() -> dict[str, str]:
    import torch
    import transformers

    return {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpus": str(os.cpu_count()),
    }


if __name__ == "__main__":
    main()
