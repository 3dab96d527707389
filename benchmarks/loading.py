"""Peak host memory and time of starting a cut model and of saving it, rank by rank.

In:   a layout and the size of a Llama; a checkpoint of it is written to a temporary folder first.
Out:  a table: for each way of starting, and for saving, what every rank took at its peak.
Must hold: every way runs in fresh processes on the same files; memory is counted from when everything is imported and
the ranks are connected.

`anonymous` is memory of the process's own (RssAnon), sampled every 2 ms. `resident` is the kernel's own peak of all
that was mapped (VmHWM), with pages of the checkpoint's files that the page cache holds anyway, one copy for all
processes, and gives up under pressure. `held` is what the rank's parameters take. `CPU` is the time that the slowest
rank computed, beside the time that passed: it says more where other work runs on the machine. The ways:

    whole    from_pretrained(folder) on every rank, then HelixTrainer cuts it
    folder   HelixTrainer(model=folder): every rank reads its slices
    random   a model on the meta device: every rank draws what it holds, layer by layer
    save     trainer.save_model() after `folder`

    OMP_NUM_THREADS=1 python benchmarks/loading.py --tp 4
    OMP_NUM_THREADS=1 python benchmarks/loading.py --pp 4
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipeline_memory

WAYS = ("whole", "folder", "random", "save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1, help="tp * pp processes are started")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--shards", default="200MB", help="the most bytes of a file of the checkpoint")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--timeout", type=int, default=300, help="seconds after which a way is ended")
    parser.add_argument("--markdown", type=Path, help="also write the table there")
    parser.add_argument("--json", type=Path, help="also write the bytes there")
    for hidden in ("--rank", "--way", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        sys.exit(run(options))
    work(options)


def run(options: argparse.Namespace) -> int:
    """Every way in processes of its own; the exit code."""
    given = list(sys.argv)
    with tempfile.TemporaryDirectory() as folder:
        largest = write_checkpoint(options, folder)
        costs = {}
        for way in options.ways:
            sys.argv = [*given, "--way", way, "--folder", folder]
            code = pipeline_memory.launch(argparse.Namespace(pp=options.tp * options.pp, timeout=options.timeout))
            if code:
                return code
            costs[way] = json.loads(Path(folder, f"{way}.json").read_text())
        stored = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    text = describe(costs, stored, largest, options)
    print(text)
    if options.markdown:
        options.markdown.write_text(markdown(text, given))
    if options.json:
        options.json.write_text(json.dumps({"stored": stored, "largest": largest, **costs}))
    return 0


def write_checkpoint(options: argparse.Namespace, folder: str) -> int:
    """Random weights; the bytes of the largest tensor."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(options), dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size=options.shards)
    return max(parameter.nbytes for parameter in model.parameters())


def config_of(options: argparse.Namespace, hidden: int = 0, vocabulary: int = 0) -> Any:
    """Of the model; or of one of other sizes."""
    from transformers import LlamaConfig

    hidden = hidden or options.hidden
    return LlamaConfig(
        vocab_size=vocabulary or options.vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
    )


# -- a rank ------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, TrainingArguments

    from hf_helix import HelixConfig, HelixTrainer

    torch.set_num_threads(1)
    args = TrainingArguments(output_dir=f"{options.folder}/out", use_cpu=True, report_to=[], save_strategy="no")
    helix = HelixConfig(tp_size=options.tp, pp_size=options.pp, plan="sequential")
    # Connections, the mesh and what is imported late are there before anything is counted.
    small = AutoModelForCausalLM.from_config(config_of(options, hidden=64, vocabulary=128))
    HelixTrainer(model=small, args=args, helix_config=helix)

    def whole() -> Any:
        return HelixTrainer(model=AutoModelForCausalLM.from_pretrained(options.folder), args=args, helix_config=helix)

    def folder() -> Any:
        return HelixTrainer(model=options.folder, args=args, helix_config=helix)

    def random() -> Any:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(options), dtype=torch.float32)
        return HelixTrainer(model=model, args=args, helix_config=helix)

    ways: dict[str, Callable[[], Any]] = {"whole": whole, "folder": folder, "random": random}
    if options.way == "save":
        trainer = folder()
        ways["save"] = trainer.save_model
    dist.barrier()
    with Peak() as peak:
        made = ways[options.way]()
    held = sum(parameter.nbytes for parameter in (trainer if made is None else made).model.parameters())
    times = {"seconds": peak.seconds, "cpu": peak.cpu}
    mine = {"held": held, "anonymous": peak.anonymous, "resident": peak.resident, **times}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        Path(options.folder, f"{options.way}.json").write_text(json.dumps(ranks))


class Peak:
    """Bytes beyond those at the start, and seconds, of what runs inside."""

    def __enter__(self) -> Peak:
        self._stop = threading.Event()
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts anew
        self._before = status()
        self.anonymous = self.resident = 0
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        self._start, self._start_cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds, self.cpu = time.perf_counter() - self._start, time.process_time() - self._start_cpu
        self._stop.set()
        self._sampler.join()
        self.resident = status()["VmHWM"] - self._before["VmRSS"]

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.anonymous = max(self.anonymous, status()["RssAnon"] - self._before["RssAnon"])


def status() -> dict[str, int]:
    """Of this process, in bytes."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1] == "kB"}


# -- the table ---------------------------------------------------------------------------------------------------


def describe(costs: dict[str, Any], stored: int, largest: int, options: argparse.Namespace) -> str:
    shape = f"{options.layers} layers, hidden {options.hidden}, vocabulary {options.vocabulary}"
    lines = [
        f"tp={options.tp} pp={options.pp}: a Llama of {megabytes(stored)} MB in fp32 ({shape}), "
        f"largest tensor {megabytes(largest)} MB",
        f"  {'':8}{'held':^24}{'anonymous, peak':^24}{'resident, peak':^24}{'seconds':>8}{'CPU':>8}",
    ]
    for way, ranks in costs.items():
        columns = (" ".join(megabytes(rank[name]) for rank in ranks) for name in ("held", "anonymous", "resident"))
        cells = "".join(f"{column:^24}" for column in columns)
        times = "".join(f"{max(rank[name] for rank in ranks):8.1f}" for name in ("seconds", "cpu"))
        lines.append(f"  {way:8}{cells}{times}")
    return "\n".join([*lines, "  MB by rank, beyond what a process takes with everything imported"])


def megabytes(size: int) -> str:
    return f"{size / 1e6:.0f}"


def markdown(text: str, command: list[str]) -> str:
    import torch
    import transformers

    kept = [word for index, word in enumerate(command) if "--markdown" not in command[max(0, index - 1) : index + 1]]
    about = {
        "command": f"`python {' '.join(kept)}`",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    head = "\n".join(f"- {name}: {value}" for name, value in about.items())
    return f"# Loading and saving, {datetime.date.today()}\n\n{head}\n\n```\n{text}\n```\n"


if __name__ == "__main__":
    main()
