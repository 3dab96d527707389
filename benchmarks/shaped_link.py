"""Two hosts on one machine, joined by a link of a given speed: what each plan, and what stock software, makes of it.

Builds two network namespaces joined by a veth pair with `tc tbf` (needs root; cleans up after itself), runs one rank
of a tensor-parallel Llama in each, and prints per rate the step time of every plan beside the computation alone, the
communication alone and the bound that follows; before them stock software with the same global batch: Transformers'
native tensor parallelism, and DDP, which holds the whole model on every rank. Losses and gradients of all are compared
first. The operators are measured on the link and plans are made with those times, as `plan="auto"` does; `auto` is the
plan that it would keep of those timed here. All times of a rate come from one run, everything in turn; medians, the
slower rank counts. A step here is forward, backward and gradient sums of a window, without the optimizer.

    sudo python benchmarks/shaped_link.py --rates 300 500 600 1000 --microbatches 16
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import fcntl
import functools
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

NAMESPACES = ("helix-a", "helix-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICES = ("helix-veth-a", "helix-veth-b")
MTU = "65535"  # large packets: a real network card does not take the cores' time, and a small packet would
BURST = "96kb"  # small, or single collectives look faster than the link is
LOCK = Path(tempfile.gettempdir()) / "hf_helix_shaped_link.lock"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[300, 500, 600, 1000], help="Mbit/s each way")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[16], help="of a window, two or more")
    parser.add_argument("--plans", nargs="+", help="besides sequential; all of hf_helix if not given")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout", type=int, default=3 * 3600, help="seconds after which everything is stopped")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--markdown", type=Path, help="also write the tables there, with hardware and versions")
    parser.add_argument("--profile", help="also save profiles, such as link-{rate}.json (or {rate}-{microbatches})")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.microbatches) < 2:
        parser.error("--microbatches: DDP needs a micro-batch for each rank, so two or more")
    if options.rank is None:
        launch(options)
    else:
        work(options)


def launch(options: argparse.Namespace) -> None:
    """Make the hosts and run a rank in each; leave nothing behind."""
    run_ranks("network namespaces", 2, start_rank, options.timeout, hosts())


def launch_here(count: int = 2) -> NoReturn:
    """Run ranks of this script on this host, without namespaces, and end with their exit code."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    sys.exit(subprocess.call([*launcher, *sys.argv], env={"OMP_NUM_THREADS": "1", **os.environ}))


def run_ranks(
    what: str,
    count: int,
    start: Callable[[int, str], subprocess.Popen[bytes]],
    seconds: float,
    *surroundings: contextlib.AbstractContextManager[object],
) -> None:
    """Run ranks to their end, and end with their exit code; leave nothing behind. Other benchmarks use it, too.

    Args:
        what: that only root may do.
        start: a rank, given its number and a folder that all ranks have in common.
        seconds: after which everything is stopped.
        surroundings: what must be there while ranks run.
    """
    if os.geteuid() != 0:
        sys.exit(f"this needs root, for {what}: sudo python {sys.argv[0]}")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    with only_run(), tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for surrounding in surroundings:
            stack.enter_context(surrounding)
        code = run_to_end(lambda rank: start(rank, folder), count, seconds)
    sys.exit(code)


def run_to_end(start: Callable[[int], subprocess.Popen[bytes]], count: int, seconds: float) -> int:
    """Start ranks, wait for them, and end all of them; the exit code.

    Args:
        start: starts a rank by its number.
        count: of ranks.
        seconds: after which everything is stopped.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            ranks.append(start(rank))
        return wait_for(ranks, seconds)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def stop(number: int, frame: object) -> None:
    """End by way of every `finally`, once."""
    for other in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def start_rank(
    rank: int, folder: str, count: int = 2, host: int | None = None, prepare: Callable[[], object] | None = None
) -> subprocess.Popen[bytes]:
    """This script once more, as a rank. It dies with this process.

    Args:
        folder: that all ranks have in common, for caches and what is temporary.
        count: of all ranks.
        host: that it is on; by default its own number, -1 for outside of both.
        prepare: what else the new process does first.
    """
    host = rank if host is None else host
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HELIX_CACHE": folder,
        "TMPDIR": folder,
        "MASTER_ADDR": "127.0.0.1" if host < 0 else ADDRESSES[0],
        "MASTER_PORT": "29555",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
    }
    command = [sys.executable, *sys.argv, "--rank", str(rank)]
    if host >= 0:
        environment["GLOO_SOCKET_IFNAME"] = DEVICES[host]
        command = ["ip", "netns", "exec", NAMESPACES[host], *command]
    die_with_parent = functools.partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def begin() -> None:
        die_with_parent()
        if prepare is not None:
            prepare()

    return subprocess.Popen(command, env=environment, preexec_fn=begin)


def llama(options: argparse.Namespace, vocabulary: int = 4096, heads: int = 16, **more: Any) -> Any:
    """The configuration of a Llama of `options.layers` layers and `options.hidden` features, all heads with keys."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        **more,
    )


def join(host: int) -> None:
    """What a rank does first: one thread, the core of its host, the group of all."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[host % len(cores)]})
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))


def wait_for(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> int:
    """Until all are done, one has failed, or time is up; the exit code."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        codes = [process.poll() for process in ranks]
        if any(codes):
            return 1
        if None not in codes:
            return 0
        time.sleep(0.2)
    print(f"stopped after {seconds} s", file=sys.stderr)
    return 1


@contextlib.contextmanager
def only_run() -> Iterator[None]:
    """Names and cores are those of one run."""
    with LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit("another run of this benchmark is under way")
        yield


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
            ip("-n", namespace, "link", "set", device, "mtu", MTU)
            ip("-n", namespace, "link", "set", device, "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield
    finally:
        remove_hosts()


def remove_hosts() -> None:
    """A device goes with its namespace; where it never got there, by itself."""
    for namespace in NAMESPACES:
        subprocess.run(["ip", "netns", "del", namespace], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["ip", "link", "del", DEVICES[0]], stderr=subprocess.DEVNULL, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def shape(rank: int, rate: int, device: str | None = None) -> None:
    """Set the speed of this host's end, or of another of its devices."""
    shaper = ["tbf", "rate", f"{rate}mbit", "burst", BURST, "latency", "200ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", device or DEVICES[rank], "root", *shaper], check=True)


def work(options: argparse.Namespace) -> None:
    """One rank: every rate and window, every plan."""
    import torch.distributed as dist

    join(options.rank)
    bench = Bench(options)
    tried = {count: bench.compare(count) for count in options.microbatches}  # while the link is fast
    results = []
    for rate in options.rates:
        shape(options.rank, rate)
        for count in options.microbatches:
            figures = bench.measure(rate, count)
            results.append({"rate": rate, "microbatches": count, "tried": tried[count], **figures})
            if options.rank == 0:
                print("\n" + describe(results[-1]), flush=True)
                save(options, results, "A shaped link", __doc__ or "", describe, sys.argv[1:-2])  # without --rank
    dist.destroy_process_group()


class Bench:
    """A Llama cut over two ranks, with a runner for every plan and with what one would use instead."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from stock_models import DDP, NATIVE_TP, build_models
        from transformers import LlamaForCausalLM

        from hf_helix.config import HelixConfig
        from hf_helix.engine.build import build_runner
        from hf_helix.engine.microbatches import WindowMaker
        from hf_helix.planning.graph.recompute import NONE
        from hf_helix.runtime.distributed.mesh import build_mesh

        torch.manual_seed(0)
        self.options = options
        self.model = LlamaForCausalLM(llama(options)).train()
        folder = Path(tempfile.gettempdir()) / "model"  # see start_rank
        self.stock = build_models(self.model, (NATIVE_TP, DDP), 2, folder)
        mesh = build_mesh(2, "cpu")
        self.maker = WindowMaker(self.model, mesh)
        self.runner = build_runner(self.model, HelixConfig(tp_size=2), mesh, [NONE] * options.layers).runner

    def batches(self, count: int) -> list[dict[str, Any]]:
        """The micro-batches of a window."""
        import torch

        generator = torch.Generator().manual_seed(1)
        shape = (self.options.batch, self.options.sequence)
        ids = [torch.randint(0, 4096, shape, generator=generator) for _ in range(count)]
        return [{"input_ids": tokens, "labels": tokens} for tokens in ids]

    def window(self, count: int) -> list[Any]:
        """The same, as our runners take them."""
        import torch

        from hf_helix.engine.microbatches import LossScale

        scale = LossScale(torch.tensor(1.0 / (count * self.options.batch * (self.options.sequence - 1))))
        return [self.maker.microbatch(batch, scale, (0, place)) for place, batch in enumerate(self.batches(count))]

    def others(self, count: int) -> dict[str, Any]:
        """What one would use instead, for a window."""
        from stock_models import DDP, NATIVE_TP, StockModel

        batches = self.batches(count)
        return {
            NATIVE_TP: StockModel(self.stock[NATIVE_TP], batches, 1 / count, self.runner),
            DDP: StockModel(self.stock[DDP], batches[self.options.rank :: 2], 2 / count, self.runner),
        }

    def compare(self, count: int) -> dict[str, dict[str, float]]:
        """A window of each: they must do the same work."""
        from stock_models import try_windows

        return try_windows(self.runner, self.model, self.others(count), self.window(count), DEVICES[self.options.rank])

    def measure(self, rate: int, count: int) -> dict[str, Any]:
        """Measure the operators, make the plans, time everything in turn."""
        from hf_helix.config import RULES
        from hf_helix.measure.operators import measure_profile
        from hf_helix.measure.overlap import measure_overlap
        from hf_helix.tuning.candidates import plan_runners, predict_window
        from hf_helix.tuning.effort import BASELINE, CANDIDATES, FULL

        window, others = self.window(count), self.others(count)
        profile = measure_profile(self.runner, window, {"link": f"{rate} Mbit/s"})
        if self.options.profile and self.options.rank == 0:
            from hf_helix.planning.profile_file import save_profile

            save_profile(profile, self.options.profile.format(rate=rate, microbatches=count))
        rules = self.options.plans or RULES
        runners = plan_runners(self.runner, list(dict.fromkeys([BASELINE, *rules])), profile, count)
        predicted = {rule: predict_window(runner, profile, count) for rule, runner in runners.items()}
        overlaps = measure_overlap({**runners, **others}, window, self.options.repeats)
        # As `tune` does: the best of those that are predicted to be fastest.
        automatic = sorted((rule for rule in runners if rule in CANDIDATES), key=lambda rule: predicted[rule])
        timed = {BASELINE, *[rule for rule in automatic if rule != BASELINE][: FULL.timed]}
        return {
            "plans": {rule: dataclasses.asdict(overlaps[rule]) for rule in runners},
            "predicted": predicted,
            "auto": min(timed, key=lambda rule: overlaps[rule].step),
            "alternatives": {name: {"step": overlaps[name].step} for name in others},
        }


def describe(result: dict[str, Any]) -> str:
    """The table of a rate and a window."""
    plans, predicted, others, tried = (result[key] for key in ("plans", "predicted", "alternatives", "tried"))
    base, best = plans["sequential"], plans[result["auto"]]
    compute, moved = base["computation"], base["communication"]
    bound = max(compute, moved)
    losses = ", ".join(f"{name} {row['loss']:.4f}" for name, row in tried.items())
    sent = ", ".join(f"{name} {row['sent']:.0f}" for name, row in tried.items())
    lines = [
        f"{result['rate']} Mbit/s, M={result['microbatches']}: computation {compute:.2f} s, "
        f"communication {moved:.2f} s, one after the other {compute + moved:.2f} s, bound {bound:.2f} s",
        f"mean loss: {losses}; MiB that a rank sends in a step: {sent}",
        f"  {'':<20} {'step s':>8} {'predicted':>9} {'speed-up':>9} {'of bound':>9} {'hidden':>7} {'overlapped':>11}",
    ]
    for name, row in others.items():
        step = row["step"]
        lines.append(f"  {name:<20} {step:8.2f} {'-':>9} {base['step'] / step:8.2f}x {'-':>9} {'-':>7} {'-':>11}")
    rows = {**{rule: rule for rule in plans}, f"auto ({result['auto']})": result["auto"]}
    for name, rule in rows.items():
        step = plans[rule]["step"]
        lines.append(
            f"  {name:<20} {step:8.2f} {predicted[rule]:9.2f} {base['step'] / step:8.2f}x {bound / step:9.2f} "
            f"{1 - (step - compute) / moved:7.0%} {plans[rule]['overlapped_fraction']:11.0%}"
        )
    errors = [abs(predicted[rule] / plans[rule]["step"] - 1) for rule in plans]
    lines.append(f"Predicted times are off by {sum(errors) / len(errors):.1%} of the measured ones on average.")
    lines += [verdict(name, row["step"], best["step"]) for name, row in others.items()]
    fastest = min(others, key=lambda name: others[name]["step"])
    lines.append(f"The fastest alternative at this rate is {fastest}.")
    return "\n".join(lines)


def verdict(name: str, other: float, ours: float) -> str:
    """How an alternative compares with our automatic plan."""
    if other < ours:
        return f"{name} WINS: {other:.2f} s; ours takes {ours / other:.2f} times as long ({ours:.2f} s)."
    return f"Ours is {other / ours:.2f} times as fast as {name} ({ours:.2f} s instead of {other:.2f} s)."


def save(
    options: argparse.Namespace,
    results: Sequence[dict[str, Any]],
    title: str,
    script: str,
    table: Callable[[dict[str, Any]], str],
    flags: Sequence[str],
) -> None:
    """Write the files that were asked for, with what there is so far. Other benchmarks use it, too.

    Args:
        options: with the paths `json` and `markdown`.
        results: in the order of their tables.
        title: of the page.
        script: the docstring of a benchmark, whose second paragraph says how it measures.
        table: returns the table of a result.
        flags: of the command.
    """
    about = {**versions(), "flags": shlex.join(flags)}
    if options.json:
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=1))
    if options.markdown:
        facts = "\n".join(f"- {key}: {value}" for key, value in about.items())
        tables = "\n\n".join(map(table, results))
        how = script.split("\n\n")[1]
        options.markdown.write_text(f"# {title}, {about['date']}\n\n{how}\n\n{facts}\n\n```\n{tables}\n```\n")


def versions() -> dict[str, str]:
    import torch
    import transformers

    cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpus": f'{os.cpu_count()} {platform.machine()}, "{cpu}"; a core and a thread for each rank',
        "kernel": platform.release(),
    }


if __name__ == "__main__":
    main()
