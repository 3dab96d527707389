"""What saving, resuming and loading cost: seconds, and host memory beyond what each process had.

Times are of whole calls until the slowest rank is done, with files on the disk (fsync) where the call has that; medians
of the repeats. `resident` is the kernel's peak of all that was mapped (VmHWM, set back before the call), with pages of
files that the page cache holds anyway; `anonymous` is memory of the process's own (RssAnon), sampled every 2 ms. Memory
is counted from when everything is imported and the ranks are connected. The studies:

    trainer  a `checkpoint-N` of the Trainer on two ranks, saved and read again, beside the stock Trainer under DDP,
             whose rank 0 saves all and whose every rank reads all
    model    `save_pretrained` of a cut model, by ranks and layouts; `apart`: no two ranks share a folder, so that
             everything goes through rank 0
    load     ways to start, each in fresh processes: `whole` from_pretrained on every rank and then cut, `folder` every
             rank reads its slices, `random` a model on the meta device; then `save`, trainer.save_model()

    beside   a run that saves twice: how long training stands still for the first save and for the second, whose copies
             take the memory of the first, and its steps before and during the writing; with `--against`, in alternation
             with the hf_helix of another folder

    python -m benchmarks.checkpoint trainer --hidden 512
    python -m benchmarks.checkpoint beside --hidden 768 --layers 10 --against ../hf_helix_before
    python -m benchmarks.checkpoint model --folder /dev/shm      # without the disk
    python -m benchmarks.checkpoint load --layers 16 --hidden 1024 --vocabulary 32000 --tp 4
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import add_outputs, columns, llama, options_of, save
from benchmarks.ranks import Ranks

TRAINERS: Mapping[str, tuple[dict[str, Any] | None, int]] = {
    "stock, DDP": (None, 1),
    "tp_size=2": ({"tp_size": 2, "plan": "sequential"}, 2),
    "pp_size=2": ({"pp_size": 2, "plan": "sequential"}, 2),
    "dp 2, shard_optimizer": ({"shard_optimizer": True, "plan": "sequential"}, 1),
}
"""Options of `HelixConfig`, and micro-batches of a step."""

SAVED_BY = "tp_size=2"
LAYOUTS: Mapping[int, Sequence[dict[str, int]]] = {
    1: [{}],
    2: [{"tp_size": 2}, {"pp_size": 2}, {}],
    4: [{"tp_size": 4}, {"pp_size": 4}, {"tp_size": 2, "pp_size": 2}, {"tp_size": 2}, {}],
}
WAYS = ("whole", "folder", "random", "save")
SAVERS: Mapping[str, dict[str, Any]] = {
    "tp_size=2": {"tp_size": 2},
    "shard_parameters": {"shard_parameters": True},
    "tp_size=2, link=200mbit": {"tp_size": 2, "link": "200mbit"},
}
BETWEEN, SKIPPED = 20, 2
"""For `beside`: the steps up to the first save, between the saves and after them; those at the begin not counted."""

COSTS = "costs.jsonl"
Cost = dict[str, float]


class Costs:
    """Seconds, memory beyond that at the start, and bytes written or sent, of what runs inside; with all ranks."""

    def __enter__(self) -> Costs:
        _meet()
        self._stop = threading.Event()
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts anew
        self._before, self._written, self._anonymous = _status(), _written(), 0
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        self._start, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        cpu = time.process_time() - self._cpu
        _meet()
        self._stop.set()
        self._sampler.join()
        self.found: Cost = {
            "seconds": time.perf_counter() - self._start,
            "cpu": cpu,
            "resident": _status()["VmHWM"] - self._before["VmRSS"],
            "anonymous": self._anonymous,
            "written": _written() - self._written,
        }

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self._anonymous = max(self._anonymous, _status()["RssAnon"] - self._before["RssAnon"])


def _meet() -> None:
    import torch.distributed as dist

    dist.barrier()


def _status() -> dict[str, int]:
    """Returns what the kernel counts for this process, in bytes."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1] == "kB"}


def _written() -> int:
    """Returns the bytes that this process has given to the system, to write or to send."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def main() -> None:
    options = read_options()
    if options.out is not None:
        Ranks(int(os.environ["WORLD_SIZE"]), pins=False).run(STUDIES[options.study], options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        out = ["--out", folder]
        if options.study == "load":
            _write_checkpoint(options, folder)
            starts = [(options.tp * options.pp, [*out, "--way", way]) for way in options.ways]
        elif options.study == "beside":
            trees = [Path.cwd(), *([options.against] if options.against else [])]
            cases = [(name, tree) for _ in range(options.repeats) for name in options.savers for tree in trees]
            starts = [(2, [*out, "--way", name, "--tree", str(tree)]) for name, tree in cases]
        else:
            starts = [(count, out) for count in (options.ranks if options.study == "model" else [2])]
        for count, arguments in starts:
            if code := Ranks(count, pins=False, seconds=options.timeout).start(arguments):
                sys.exit(code)
        rows = [json.loads(line) for line in Path(folder, COSTS).read_text().splitlines()]
    text = describe_steps(rows) if options.study == "beside" else describe(rows)
    print(text)
    save(options, f"Saving and loading: {options.study}", __doc__, text, rows)


def read_options() -> argparse.Namespace:
    parser = options_of(__doc__, hidden=768, layers=8, vocabulary=8192, repeats=3, timeout=1200, tp=1, pp=1)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--ranks", type=int, nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="for `model`")
    parser.add_argument("--shards", default="200MB", help="the most bytes of a file that `load` reads")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="for `load`")
    parser.add_argument("--folder", help="where models are written; default: a temporary folder")
    parser.add_argument("--against", type=Path, help="for `beside`: a folder with another hf_helix")
    parser.add_argument("--savers", nargs="+", choices=SAVERS, default=list(SAVERS), help="for `beside`")
    parser.add_argument("--sequence", type=int, default=128, help="for `beside`: tokens of a sample")
    add_outputs(parser)
    for hidden in ("--way", "--out", "--tree"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args()


def config_of(options: argparse.Namespace) -> Any:
    """Returns the configuration of the Llama."""
    return llama(options.hidden, options.layers, options.vocabulary, max_position_embeddings=64)


def arguments_of(folder: str, **more: Any) -> Any:
    """Returns `TrainingArguments` of a run on the CPU that reports nothing."""
    from transformers import TrainingArguments

    return TrainingArguments(output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True, **more)


def tell(options: argparse.Namespace, name: str, size: int, runs: Sequence[Cost]) -> None:
    """Adds a row to the file of the command. Collective.

    Args:
        options: of the command.
        name: of the row.
        size: bytes that this rank holds, or that are on the disk.
        runs: what each repeat cost this rank.
    """
    from hf_helix.runtime.distributed.agreement import all_gather_object

    ranks = all_gather_object((size, runs))
    if options.rank == 0:
        row = {"name": name, "sizes": [size for size, _ in ranks], "ranks": [runs for _, runs in ranks]}
        with Path(options.out, COSTS).open("a") as file:
            file.write(json.dumps(row) + "\n")


# -- a checkpoint of the Trainer -----------------------------------------------------------------------------------


def trainer_study(options: argparse.Namespace) -> None:
    """One rank: every way of saving and of going on."""
    found: dict[str, list[Cost]] = {}
    sizes: dict[str, int] = {}
    for _ in range(options.repeats):
        for name, (helix, steps) in TRAINERS.items():
            trainer, costs = make_trainer(f"{options.out}/{name}", helix, steps, options)
            trainer.train()
            found.setdefault(f"save, {name}", []).append(costs["save"])
            saved = [path for path in Path(options.out, name, "checkpoint-1").rglob("*") if path.is_file()]
            sizes[f"save, {name}"] = sum(path.stat().st_size for path in saved)
            for source in {name, name if helix is None else SAVED_BY}:
                trainer, costs = make_trainer(f"{options.out}/{name}", helix, steps, options)
                trainer.args.max_steps, trainer.args.save_strategy = 2, "no"
                trainer.train(resume_from_checkpoint=f"{options.out}/{source}/checkpoint-1")
                found.setdefault(f"resume, {name}, saved by {source}", []).append(costs["resume"])
    for name in sorted(found, key=lambda name: name.startswith("resume")):
        tell(options, name, sizes.get(name, 0), found[name])


def make_trainer(
    folder: str, helix: dict[str, Any] | None, steps: int, options: argparse.Namespace
) -> tuple[Any, dict[str, Cost]]:
    """Returns a trainer, and the dictionary in which it notes what `save` and `resume` cost."""
    import torch
    from transformers import LlamaForCausalLM, PrinterCallback, Trainer

    from hf_helix import HelixConfig, HelixTrainer

    costs: dict[str, Cost] = {}

    def noted(name: str, call: Callable[[], Any]) -> Any:
        with Costs() as measured:
            result = call()
        before = costs.get(name, dict.fromkeys(measured.found, 0.0))
        added = {key: before[key] + measured.found[key] for key in ("seconds", "cpu", "written")}
        costs[name] = {**{key: max(before[key], value) for key, value in measured.found.items()}, **added}
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

    torch.manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, options.vocabulary, (32, 32))]
    batch = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": steps}
    args = arguments_of(folder, max_steps=1, save_strategy="steps", save_steps=1, logging_strategy="no", **batch)
    common: dict[str, Any] = {"model": LlamaForCausalLM(config_of(options)), "args": args, "train_dataset": rows}
    if helix is None:
        trainer = type("Stock", (Noted, Trainer), {})(**common)
    else:
        trainer = type("Ours", (Noted, HelixTrainer), {})(**common, helix_config=HelixConfig(**helix))
    trainer.remove_callback(PrinterCallback)
    return trainer, costs


# -- training beside a save ----------------------------------------------------------------------------------------


def beside_study(options: argparse.Namespace) -> None:
    """One rank: a run of one layout, with one hf_helix, that saves once."""
    sys.path.insert(0, options.tree)
    import torch
    from transformers import LlamaForCausalLM, PrinterCallback, TrainerCallback

    from hf_helix import HelixConfig, HelixTrainer

    begins: list[float] = []
    ends: list[tuple[float, bool]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *given: Any, **more: Any) -> None:
            begins.append(time.perf_counter())

        on_step_begin.__module__ = "hf_helix.benchmarks"  # else weights are copied at once, since it might change them

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            ends.append((time.perf_counter(), getattr(trainer, "is_writing", False)))
            control.should_save = state.global_step in (BETWEEN, 2 * BETWEEN)

    torch.manual_seed(0)
    sample = torch.randint(0, options.vocabulary, (64, options.sequence))
    rows = [{"input_ids": ids, "labels": ids} for ids in sample]
    batch = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    args = arguments_of(
        f"{options.out}/saved", max_steps=3 * BETWEEN, save_strategy="steps", save_steps=1000, save_total_limit=1,
        logging_strategy="no", **batch,
    )  # fmt: skip
    helix = HelixConfig(**SAVERS[options.way], plan="sequential")
    trainer = HelixTrainer(
        model=LlamaForCausalLM(config_of(options)), args=args, train_dataset=rows, helix_config=helix
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Clock())
    start = _status()["VmRSS"]
    trainer.train()
    steps = [end - begin for begin, (end, _) in zip(begins, ends, strict=True)]
    gaps = [begin - end for begin, (end, _) in zip(begins[1:], ends, strict=False)]
    later = [(step, writes) for step, (_, writes) in list(zip(steps, ends, strict=True))[BETWEEN:]]
    during, after = ([step for step, writes in later if writes is kind] for kind in (True, False))
    found: Cost = {
        "gap": statistics.median(gaps[SKIPPED : BETWEEN - 1]),
        "first": gaps[BETWEEN - 1],
        "second": gaps[2 * BETWEEN - 1],
        "step": statistics.median(steps[SKIPPED:BETWEEN]),
        "during": statistics.median(during or [0]),
        "after": statistics.median(after or [0]),
        "num_during": len(during) / 2,
        "grown": _status()["VmHWM"] - start,
    }
    files = [path for path in Path(options.out, "saved").glob("checkpoint-*/**/*") if path.is_file()]
    tell(options, f"{options.way}, {Path(options.tree).name}", sum(path.stat().st_size for path in files), [found])


def describe_steps(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of `beside`: medians over the repeats, of the slower rank."""
    cells = []
    for name in dict.fromkeys(row["name"] for row in rows):
        runs = [row["ranks"] for row in rows if row["name"] == name]

        def of(key: str, runs: Sequence[Any] = runs) -> list[float]:
            return [max(rank[0][key] for rank in ranks) for ranks in runs]

        still = {
            which: [still - gap for still, gap in zip(of(which), of("gap"), strict=True)]
            for which in ("first", "second")
        }
        ratios = [during / step for during, step in zip(of("during"), of("step"), strict=True) if during]
        size = next(row["sizes"][0] for row in rows if row["name"] == name)
        cells.append(
            [
                name,
                f"{size / 1e6:.0f}",
                *(f"{statistics.median(each):.3f}" for each in still.values()),
                " ".join(f"{value:.2f}" for value in still["second"]),
                f"{statistics.median(of('step')):.3f}",
                f"{statistics.median(of('after')):.3f}",
                f"{statistics.median(ratios):.2f}" if ratios else "",
                " ".join(f"{value:.2f}" for value in ratios),
                f"{statistics.median(of('num_during')):.0f}",
            ]
        )
    words = (
        "",
        "MB on disk",
        "first save s",
        "second",
        "of",
        "step s",
        "after",
        "during / before",
        "of",
        "steps during",
    )
    return columns(words, cells)


# -- save_pretrained of a cut model --------------------------------------------------------------------------------


def model_study(options: argparse.Namespace) -> None:
    """One rank: every layout of this number of ranks."""
    import torch
    from transformers import LlamaForCausalLM

    from hf_helix import HelixConfig, HelixTrainer
    from hf_helix.checkpoint.files import to_disk

    count = int(os.environ["WORLD_SIZE"])
    for layout in LAYOUTS[count]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config_of(options))
        helix = HelixConfig(plan="sequential", **layout)
        trainer = HelixTrainer(model=model, args=arguments_of(options.out), helix_config=helix)
        name = " ".join(f"{key.removesuffix('_size')} {value}" for key, value in layout.items()) or f"dp {count}"
        for where in ("shared", "apart") if count == 2 and layout else ("shared",):
            folder = Path(options.out, f"of-rank-{options.rank}" if where == "apart" else "model")
            folder.mkdir(exist_ok=True)
            runs = []
            for _ in range(options.repeats + 1):
                with Costs() as costs:
                    trainer.helix.save_pretrained(str(folder))
                    if options.rank == 0:
                        to_disk(folder)
                runs.append(costs.found)
            tell(options, f"{name} on {count} ranks, {where}", _held(model), runs[1:])
        trainer.helix.close()
        del trainer, model


# -- starting ------------------------------------------------------------------------------------------------------


def _write_checkpoint(options: argparse.Namespace, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(options), dtype=torch.float32)
    model.save_pretrained(f"{folder}/model", max_shard_size=options.shards)
    largest = max(parameter.nbytes for parameter in model.parameters())
    print(f"a Llama of {_held(model) / 1e6:.0f} MB in fp32, its largest tensor {largest / 1e6:.0f} MB", flush=True)


def load_study(options: argparse.Namespace) -> None:
    """One rank, one way."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_helix import HelixConfig, HelixTrainer

    args, folder = arguments_of(f"{options.out}/trained", save_strategy="no"), f"{options.out}/model"
    helix = HelixConfig(tp_size=options.tp, pp_size=options.pp, plan="sequential")
    # Connections, the mesh and what is imported late are there before anything is counted.
    small = AutoModelForCausalLM.from_config(llama(64, options.layers, 128))
    HelixTrainer(model=small, args=args, helix_config=helix)

    def start(model: Any) -> Any:
        return HelixTrainer(model=model, args=args, helix_config=helix)

    def random() -> Any:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(options), dtype=torch.float32)
        return start(model)

    ways: dict[str, Callable[[], Any]] = {
        "whole": lambda: start(AutoModelForCausalLM.from_pretrained(folder)),
        "folder": lambda: start(folder),
        "random": random,
    }
    if options.way == "save":
        trainer = start(folder)
        ways["save"] = trainer.save_model
    with Costs() as costs:
        made = ways[options.way]()
    tell(options, options.way, _held((trainer if made is None else made).model), [costs.found])


def _held(model: Any) -> int:
    """Returns the bytes of this rank's own elements: to other readers, parameters are whole."""
    from hf_helix.runtime.divided import plain_parameters

    with plain_parameters():
        return sum(parameter.nbytes for parameter in model.parameters())


# -- the table -----------------------------------------------------------------------------------------------------


def describe(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table: the slowest rank's seconds, peaks of all ranks in MB."""
    cells = []
    for row in rows:
        repeats = [[runs[place] for runs in row["ranks"]] for place in range(len(row["ranks"][0]))]
        seconds = [max(cost["seconds"] for cost in ranks) for ranks in repeats]
        cpu = statistics.median(max(cost["cpu"] for cost in ranks) for ranks in repeats)
        by_rank = [
            " ".join(f"{max(cost[name] for cost in runs) / 1e6:.0f}" for runs in row["ranks"])
            for name in ("anonymous", "resident", "written")
        ]
        spread = " ".join(f"{value:.2f}" for value in seconds)
        size = " ".join(f"{size / 1e6:.0f}" for size in dict.fromkeys(row["sizes"]) if size)
        cells.append([row["name"], f"{statistics.median(seconds):.2f}", f"{cpu:.2f}", spread, size, *by_rank])
    return columns(("", "s", "CPU s", "s of", "held or on disk", "anonymous", "resident", "written or sent"), cells)


STUDIES: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "trainer": trainer_study,
    "model": model_study,
    "load": load_study,
    "beside": beside_study,
}

if __name__ == "__main__":
    main()
