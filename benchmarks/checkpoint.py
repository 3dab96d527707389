"""What a save and a resume cost: seconds, and memory beyond what the run has, beside the stock Trainer's.

In:   the shape of a model and the number of ranks.
Out:  a table: for every way of saving and of going on, the time, the peak of every rank's memory above what it had
      before, and the bytes on the disk.
Must hold: times are of whole calls, files on the disk (fsync) where the way has that; memory is the peak of the
process's resident set (VmHWM, set back before the call); the rows run one after the other in the same processes, and
the whole is repeated.

`save` is one `checkpoint-N`: model, optimizer states, everything else. `resume` is what is read: model and optimizer
states, up to the first step. The stock Trainer runs in DDP on the same ranks: rank 0 saves all, every rank reads all.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py
    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py --hidden 1024 --layers 8
"""

from __future__ import annotations

import argparse
import datetime
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shaped_link

LAYOUTS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "stock, DDP": (None, 1),
    "tp_size=2": ({"tp_size": 2, "plan": "sequential"}, 2),
    "pp_size=2": ({"pp_size": 2, "plan": "sequential"}, 2),
    "dp 2, shard_optimizer": ({"shard_optimizer": True, "plan": "sequential"}, 1),
}
SAVED_BY = "tp_size=2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=int, default=1200, help="seconds after which the run is ended")
    parser.add_argument("--markdown", type=Path, help="also write the table there")
    parser.add_argument("--folder", help="where checkpoints are written; default: a temporary folder")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sys.argv += ["--folder", folder]
        sys.exit(shaped_link.run_to_end(lambda rank: shaped_link.start_rank(rank, folder, 2, -1), 2, options.timeout))


def work(options: argparse.Namespace) -> None:
    """A rank: every row, so many times."""
    import torch
    import torch.distributed as dist

    from hf_helix.runtime.distributed.agreement import all_gather_object

    torch.set_num_threads(1)
    seconds_of_ranks: dict[str, list[Any]] = {}
    parameters = 0
    for _ in range(options.repeats):
        for name, (helix, steps) in LAYOUTS.items():
            trainer, costs = make(f"{options.folder}/{name}", helix, steps, options)
            parameters = parameters or sum(p.numel() for p in trainer.model.parameters())
            trainer.train()
            seconds_of_ranks.setdefault(f"save, {name}", []).append(all_gather_object(costs["save"]))
            for source in {name, name if helix is None else SAVED_BY}:
                trainer, costs = make(f"{options.folder}/{name}", helix, steps, options)
                trainer.args.max_steps = 2
                trainer.args.save_strategy = "no"
                trainer.train(resume_from_checkpoint=f"{options.folder}/{source}/checkpoint-1")
                seconds_of_ranks.setdefault(f"resume, {name}, saved by {source}", []).append(
                    all_gather_object(costs["resume"])
                )
    if dist.get_rank() == 0:
        sizes = {name: size_of(Path(options.folder, name, "checkpoint-1")) for name in LAYOUTS}
        text = describe(seconds_of_ranks, sizes, parameters)
        print(text, flush=True)
        if options.markdown:
            options.markdown.write_text(markdown(text))
    dist.barrier()
    shutil.rmtree(options.folder, ignore_errors=True)


def make(folder: str, helix: dict[str, Any] | None, steps: int, options: argparse.Namespace) -> tuple[Any, Any]:
    """A trainer that notes its costs in a dictionary: seconds, and bytes above what the process had."""
    import torch
    from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

    from hf_helix import HelixConfig, HelixTrainer

    costs: dict[str, tuple[float, int]] = {}

    def noted(name: str, call: Callable[[], Any]) -> Any:
        torch.distributed.barrier()
        before, start = resident(set_back=True), time.perf_counter()
        result = call()
        torch.distributed.barrier()
        seconds, more = time.perf_counter() - start, peak() - before
        sum_, most = costs.get(name, (0.0, 0))
        costs[name] = sum_ + seconds, max(most, more)
        return result

    class Noted:
        def _save_checkpoint(self, *args: Any, **given: Any) -> Any:
            return noted("save", lambda: super(Noted, self)._save_checkpoint(*args, **given))  # type: ignore[misc]

        def _load_from_checkpoint(self, *args: Any, **given: Any) -> Any:
            return noted("resume", lambda: super(Noted, self)._load_from_checkpoint(*args, **given))  # type: ignore[misc]

        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> Any:
            if checkpoint is None:
                return None
            load = super()._load_optimizer_and_scheduler  # type: ignore[misc]
            return noted("resume", lambda: load(checkpoint))

    config = shaped_link.llama(options, options.vocabulary, heads=8, max_position_embeddings=64)
    torch.manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, options.vocabulary, (32, 32))]
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=steps,
        save_strategy="steps",
        save_steps=1,
        logging_strategy="no",
    )
    common: dict[str, Any] = {"model": LlamaForCausalLM(config), "args": args, "train_dataset": rows}
    if helix is None:
        trainer = type("Stock", (Noted, Trainer), {})(**common)
    else:
        trainer = type("Ours", (Noted, HelixTrainer), {})(**common, helix_config=HelixConfig(**helix))
    trainer.remove_callback(PrinterCallback)
    return trainer, costs


def resident(set_back: bool = False) -> int:
    """Bytes of this process in memory now; its peak counts from here on."""
    if set_back:
        Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> int:
    """The most bytes since then."""
    return status("VmHWM")


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def describe(seconds_of_ranks: dict[str, list[Any]], sizes: dict[str, int], parameters: int) -> str:
    """The table: medians of the slowest rank's seconds, with all of them; the highest peak of each rank."""
    lines = [
        f"{parameters / 1e6:.1f} M parameters in fp32, {4 * parameters / 1e6:.0f} MB, with AdamW's states "
        f"{12 * parameters / 1e6:.0f} MB; on the disk {', '.join(f'{n}: {s / 1e6:.0f} MB' for n, s in sizes.items())}",
        f"  {'':<66}{'s':>7}   of                 peak MB above, by rank",
    ]
    for name, runs in sorted(seconds_of_ranks.items(), key=lambda item: item[0].startswith("resume")):
        seconds = [max(cost[0] for cost in ranks) for ranks in runs]
        peaks = [max(ranks[rank][1] for ranks in runs) for rank in range(2)]
        every = " ".join(f"{value:.2f}" for value in seconds)
        above = " ".join(f"{value / 1e6:.0f}" for value in peaks)
        lines.append(f"  {name:<66}{statistics.median(seconds):7.2f}   {every:<18} {above}")
    return "\n".join(lines)


def markdown(text: str) -> str:
    """The table with what is needed to repeat it."""
    import os

    import torch
    import transformers

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    command = " ".join(["python", *sys.argv[: sys.argv.index("--folder")]])
    return (
        f"# Saving and resuming, {datetime.date.today().isoformat()}\n\n- command: `{command}`\n"
        f"- commit: {commit.stdout.strip()}\n- torch {torch.__version__}, transformers {transformers.__version__}\n"
        f"- machine: {platform.machine()}, {os.cpu_count()} cores, two processes\n\n```\n{text}\n```\n"
    )


if __name__ == "__main__":
    main()
