"""Reduce-scatter or exchange and sum: which is faster on this backend, by size.

Runs both forms of the collective behind every row-parallel linear on two processes (gloo on CPU, NCCL on GPUs), in
alternation, medians, the fastest rank of each repeat (the others wait for the last to arrive), and prints what
`Transport.prefers_exchange` chooses. gloo's own reduce-scatter is an all-reduce.

    OMP_NUM_THREADS=1 python benchmarks/collectives.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.0625, 0.25, 1, 4, 16], help="of the whole sum")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    mp.spawn(work, (options,), nprocs=options.ranks)


def work(rank: int, options: argparse.Namespace) -> None:
    """One rank."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29577", RANK=str(rank), WORLD_SIZE=str(options.ranks))
    from hf_helix.runtime.distributed.mesh import build_mesh

    cuda = torch.cuda.device_count() >= options.ranks
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.set_num_threads(1)
    axis = build_mesh(options.ranks, device).tp
    if rank == 0:
        print(f"{dist.get_backend()}, {options.ranks} ranks, torch {torch.__version__}")
        print(f"{'MiB':>8} {'reduce-scatter ms':>18} {'exchange + sum ms':>18}  chosen")
    for size in options.megabytes:
        rows = options.ranks * max(1, round(size * 2**20 / 4 / 1024 / options.ranks))
        value = torch.randn(rows, 1024, device=device)
        out, arrived = value.new_empty(rows // options.ranks, 1024), torch.empty_like(value)

        def reduce(value: torch.Tensor = value, out: torch.Tensor = out) -> None:
            axis.transport.reduce_scatter(out, value)

        def exchange(value: torch.Tensor = value, out: torch.Tensor = out, arrived: torch.Tensor = arrived) -> None:
            axis.transport.exchange(arrived, value)
            torch.sum(arrived.view(options.ranks, *out.shape), 0, out=out)

        first, second = alternate(reduce, exchange, options.repeats, device)
        if rank == 0:
            chosen = "exchange + sum" if axis.transport.prefers_exchange(value) else "reduce-scatter"
            print(f"{value.nbytes / 2**20:8.2f} {first * 1e3:18.3f} {second * 1e3:18.3f}  {chosen}", flush=True)
    dist.destroy_process_group()


def alternate(a: Callable[[], None], b: Callable[[], None], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each, in turn; medians of the fastest rank."""
    times: list[list[float]] = [[], []]
    for _ in range(repeats + 2):
        for work, seconds in zip((a, b), times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            mine = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
            dist.all_reduce(mine, op=dist.ReduceOp.MIN)
            seconds.append(mine.item())
    return [statistics.median(seconds[2:]) for seconds in times]


if __name__ == "__main__":
    main()
