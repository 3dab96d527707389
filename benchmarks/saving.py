"""How the time and memory of saving a model grow with the ranks that hold it.

In:   the shape of a model, and numbers of ranks.
Out:  a table: for every layout the seconds that a save of the model takes, the peak of every rank's memory above what
      it had before, and the bytes that each rank has written or sent.
Must hold: times are of whole calls, the slowest rank's, medians of the repeats, with everything on the disk (fsync);
memory is the peak of the resident set (VmHWM), set back before each call. Every number of ranks is a start of its own.
`apart` is the same where no two ranks share a folder, so that everything goes through rank 0.

    python benchmarks/saving.py
    python benchmarks/saving.py --folder /dev/shm      # without the disk
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import checkpoint
import shaped_link

LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"tp_size": 2}, {"pp_size": 2}, {}],
    4: [{"tp_size": 4}, {"pp_size": 4}, {"tp_size": 2, "pp_size": 2}, {"tp_size": 2}, {}],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--timeout", type=int, default=600, help="seconds after which the run is ended")
    parser.add_argument("--folder", help="where models are written; default: a temporary folder")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sys.argv += ["--out", folder]
        for count in options.ranks:
            start = functools.partial(shaped_link.start_rank, folder=folder, count=count, host=-1)
            if code := shaped_link.run_to_end(start, count, options.timeout):
                sys.exit(code)


def work(options: argparse.Namespace) -> None:
    """A rank: every layout of this number of ranks."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM, TrainingArguments

    from hf_helix import HelixConfig, HelixTrainer

    torch.set_num_threads(1)
    rank, count = options.rank, int(os.environ["WORLD_SIZE"])
    for layout in LAYOUTS[count]:
        args = TrainingArguments(output_dir=options.out, use_cpu=True, report_to=[], disable_tqdm=True)
        torch.manual_seed(0)
        model = LlamaForCausalLM(shaped_link.llama(options, options.vocabulary, heads=8, max_position_embeddings=64))
        size = sum(parameter.nbytes for parameter in model.parameters())
        trainer = HelixTrainer(model=model, args=args, helix_config=HelixConfig(plan="sequential", **layout))
        name = " ".join(f"{key.removesuffix('_size')} {value}" for key, value in layout.items()) or f"dp {count}"
        for where in ("shared", "apart") if count == 2 and layout else ("shared",):
            row = describe(f"{count} ranks, {name}, {where}", size, measure(trainer, options, rank, where))
            if rank == 0:
                print(row, flush=True)
        trainer.helix.close()
        del trainer, model
    if dist.is_initialized():
        dist.barrier()


def measure(trainer: Any, options: argparse.Namespace, rank: int, where: str) -> list[list[tuple[float, int, int]]]:
    """Of every repeat, by rank: seconds, bytes of memory above, bytes handed over."""
    import torch.distributed as dist

    from hf_helix.checkpoint.folders import to_disk
    from hf_helix.runtime.distributed.agreement import all_gather_object

    folder = Path(options.out, f"of-rank-{rank}" if where == "apart" else "model")
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    costs_of_repeats = []
    for _ in range(options.repeats + 1):
        if dist.is_initialized():
            dist.barrier()
        before, written, start = checkpoint.resident(set_back=True), handed_over(), time.perf_counter()
        trainer.helix.save_pretrained(".")
        if rank == 0:
            to_disk(Path("."))
        if dist.is_initialized():
            dist.barrier()
        costs = time.perf_counter() - start, checkpoint.peak() - before, handed_over() - written
        costs_of_repeats.append(all_gather_object(costs))
    return costs_of_repeats[1:]


def handed_over() -> int:
    """Bytes that this process has given to the system, to write or to send."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def describe(name: str, size: int, costs: list[list[tuple[float, int, int]]]) -> str:
    seconds = [max(cost[0] for cost in ranks) for ranks in costs]
    peaks = " ".join(f"{max(run[rank][1] for run in costs) / 1e6:.0f}" for rank in range(len(costs[0])))
    written = " ".join(f"{costs[-1][rank][2] / 1e6:.0f}" for rank in range(len(costs[0])))
    every = " ".join(f"{value:.2f}" for value in seconds)
    return (
        f"  {size / 1e6:.0f} MB, {name:<32} {statistics.median(seconds):6.2f} s of {every:<18} "
        f"peak MB above: {peaks:<18} MB written or sent: {written}"
    )


if __name__ == "__main__":
    main()
