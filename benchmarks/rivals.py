"""Rivals: whole training steps of HelixTrainer next to the libraries that a user would pick instead, on the CPU.

Both contenders of a row train the same Llama with the same weights, batches and AdamW in processes of their own, with
one core and one thread each. They train one step each in turn, so that both meet the same speed of the machine; the
other one waits. A step is everything from one optimizer step to the next (batches, forward, backward, optimizer). The
slowest rank counts, and the first two steps do not. The table has medians of seconds, and median and quartiles of the
ratios of neighbouring steps. Memory is the peak of a process as the system counts it, of which every contender's
imports, Transformers' Trainer included, are a part, and the peak of live tensors in one further step, counted storage
by storage. Losses of all steps are compared: a contender that computes another thing is an error.

    python -m benchmarks.rivals
    python -m benchmarks.rivals --microbatches 8 16 --only pp_size=2
    python -m benchmarks.rivals --processes 4 --only pp_size=4 --microbatches 16
    python -m benchmarks.rivals --recompute --only pp_size=2
"""

import argparse
import contextlib
import datetime
import importlib.util
import itertools
import json
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import add_outputs, columns, facts, llama, options_of, save
from benchmarks.ranks import Ranks, wait_for

LEARNING_RATE = 1e-4
SKIPPED = 2  # steps of a run that do not count
TOLERANCE = 2e-5  # of losses, relative


class Pair(NamedTuple):
    """A row of the table."""

    ours: Mapping[str, Any]  # of `HelixConfig`
    rival: str  # a key of `RIVALS`
    processes: int  # 0 for the option's number

    @property
    def layout(self) -> str:
        """The layout in words, such as `pp_size=2`."""
        return ", ".join(f"{name}={value}" for name, value in self.ours.items()) or "dp"


def pairs_of(processes: int) -> list[Pair]:
    """The rows of the table for a number of processes; DeepSpeed's if it is installed."""
    pipeline, has_deepspeed = {"pp_size": processes}, importlib.util.find_spec("deepspeed") is not None
    return [
        Pair({"tp_size": 1}, "plain loop", 1),
        Pair({}, "DDP", processes),
        Pair({"shard_parameters": True}, "FSDP2", processes),
        *([Pair({"shard_parameters": True}, "DeepSpeed ZeRO-3", processes)] if has_deepspeed else []),
        Pair(pipeline, "torch 1F1B", processes),
        Pair(pipeline, "torch Interleaved1F1B", processes),
        Pair(pipeline, "torch ZBV", processes),
        Pair(pipeline, "torch DualPipeV", processes),
        Pair({"tp_size": processes}, "native TP", processes),
        *([Pair({"tp_size": processes}, "DeepSpeed AutoTP", processes)] if has_deepspeed else []),
    ]


def main() -> None:
    sizes = {"hidden": 768, "layers": 8, "sequence": 256, "batch": 2, "vocabulary": 4096}
    parser = options_of(__doc__, processes=2, **sizes, microbatches=[8], steps=10, timeout=900)
    parser.add_argument("--recompute", action="store_true", help="layers run again in backward")
    parser.add_argument("--only", nargs="+", help="parts of the names of the rows to run, such as pp_size=2")
    parser.add_argument("--contender", help=argparse.SUPPRESS)  # of a rank: its run as JSON
    add_outputs(parser)
    options = parser.parse_args()
    if options.contender:
        run = json.loads(options.contender)
        Ranks(run["processes"]).run(lambda given: work(given, run), options)
        return
    tables, results = [], []
    for microbatches in options.microbatches:
        rows = [each for each in pairs_of(options.processes) if is_asked(each, options.only)]
        found = measure(rows, microbatches, options)
        results.append({"microbatches": microbatches, "rows": found})
        tables.append(describe(found, microbatches, options))
        print("\n" + tables[-1], flush=True)
    print("\n".join(f"{name}: {value}" for name, value in facts().items()))
    save(options, "Rivals", __doc__, "\n\n".join(tables), results)


def is_asked(pair: Pair, only: Sequence[str] | None) -> bool:
    return not only or any(text in f"{pair.layout} {pair.rival}" for text in only)


def measure(rows: Sequence[Pair], microbatches: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs both contenders of each row; returns the figures of each row."""
    found = []
    for row in rows:
        ours = {"helix": {**row.ours, **({"recompute": "full"} if options.recompute else {})}}
        more = {"processes": row.processes, "microbatches": microbatches}
        found.append(figures(row, *run_in_turn([{**ours, **more}, {"rival": row.rival, **more}], options)))
        told = (
            f"{row.layout} / {row.rival}: {found[-1]['seconds']:.3f} of the time, {found[-1]['process']:.3f} of memory"
        )
        print(told, file=sys.stderr, flush=True)
    return found


def run_in_turn(runs: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs contenders in processes of their own, one step each in turn; returns the figures of each."""
    limit = datetime.timedelta(seconds=options.timeout)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        paths = [Path(folder, f"{place}.json") for place in range(len(runs))]
        processes = []
        for place, (run, path) in enumerate(zip(runs, paths, strict=True)):
            given = {**run, "place": place, "store": store.port, "output": str(path)}
            ranks = Ranks(int(run["processes"]), seconds=options.timeout)
            processes += stack.enter_context(ranks.running(["--contender", json.dumps(given)]))
        for step, place in itertools.product(range(options.steps + SKIPPED), range(len(runs))):
            store.set(key_of(place, step), "")
            ends = [end_of(place, step, rank) for rank in range(int(runs[place]["processes"]))]
            while not store.check(ends):
                if any(process.poll() for process in processes):
                    sys.exit(f"{runs} have failed")
                time.sleep(0.02)
        if wait_for(processes, options.timeout):
            sys.exit(f"{runs} have failed")
        return [json.loads(path.read_text()) for path in paths]


def key_of(place: int, step: int) -> str:
    """Returns the key of the store that starts a step of a contender."""
    return f"{place}/{step}"


def end_of(place: int, step: int, rank: int) -> str:
    """Returns the key of the store that a rank sets after a step."""
    return f"{place}/{step}/{rank}"


def figures(row: Pair, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a row: medians over steps, ratios, and the largest difference of losses."""
    losses = zip(ours["losses"], theirs["losses"], strict=True)
    apart = max(abs(one - other) / abs(other) for one, other in losses)
    if apart > TOLERANCE:
        sys.exit(f"{row.layout} and {row.rival} have other losses: {ours['losses']}, {theirs['losses']}")
    medians = {
        f"{who}_{name}": statistics.median(run[name]) if name == "seconds" else run[name]
        for who, run in (("ours", ours), ("rival", theirs))
        for name in ("seconds", "process", "tensors")
    }
    low, middle, high = statistics.quantiles(
        [one / other for one, other in zip(ours["seconds"], theirs["seconds"], strict=True)], n=4
    )
    ratios = {name: ours[name] / theirs[name] for name in ("process", "tensors")}
    about = {"ours": row.layout, "rival": row.rival, "apart": apart}
    return {**about, **medians, **ratios, "seconds": middle, "quartiles": (low, high), "runs": [ours, theirs]}


def describe(rows: Sequence[Mapping[str, Any]], microbatches: int, options: argparse.Namespace) -> str:
    """The table of one number of micro-batches."""
    title = (
        f"Llama: hidden {options.hidden}, {options.layers} layers, vocabulary {options.vocabulary}, rows of "
        f"{options.sequence}; {microbatches} micro-batches of {options.batch} rows a process; "
        f"{'recomputation; ' if options.recompute else ''}{options.steps} steps"
    )
    header = (
        "ours",
        "rival",
        "ours s",
        "rival s",
        "time",
        "quartiles",
        "ours MB",
        "rival MB",
        "memory",
        "tensors",
        "losses apart",
    )
    cells = [
        (
            row["ours"],
            row["rival"],
            f"{row['ours_seconds']:.3f}",
            f"{row['rival_seconds']:.3f}",
            f"{row['seconds']:.2f}",
            "{:.2f} to {:.2f}".format(*row["quartiles"]),
            f"{row['ours_process'] / 1e6:.0f}",
            f"{row['rival_process'] / 1e6:.0f}",
            f"{row['process']:.2f}",
            f"{row['tensors']:.2f}",
            f"{row['apart']:.0e}",
        )
        for row in rows
    ]
    return f"{title}\n{columns(header, cells)}"


# -- one contender, on a rank ----------------------------------------------------------------------------------------

Step = Callable[[Sequence[Tensor]], float]
"""Runs forward, backward and optimizer of a window, from the rows of its micro-batches; returns the mean loss."""


class Turns:
    """The turns of this rank: each step waits for its own, and its end gives the turn to the other contender.

    Args:
        run: the contender.
        rank: of its ranks.
        limit: seconds to wait for a turn.

    Attributes:
        seconds: of the steps so far.
    """

    def __init__(self, run: Mapping[str, Any], rank: int, limit: float) -> None:
        self._store = dist.TCPStore("127.0.0.1", run["store"], timeout=datetime.timedelta(seconds=limit))
        self._place, self._rank = run["place"], rank
        self.seconds: list[float] = []

    def begin(self) -> None:
        """Waits for the turn."""
        self._store.wait([key_of(self._place, len(self.seconds))])
        self._start = time.perf_counter()

    def end(self) -> None:
        """Notes that the step has ended."""
        self.seconds.append(time.perf_counter() - self._start)
        self._store.set(end_of(self._place, len(self.seconds) - 1, self._rank), "")


def work(options: argparse.Namespace, run: Mapping[str, Any]) -> None:
    """Trains as one rank, and writes the figures of all ranks."""
    torch.manual_seed(0)
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401

    model = LlamaForCausalLM(
        llama(options.hidden, options.layers, options.vocabulary, max_position_embeddings=options.sequence)
    )
    turns = Turns(run, options.rank, options.timeout)
    losses, tensors = (train_ours if "helix" in run else train_rival)(model, run, options, turns)
    mine = turns.seconds[SKIPPED:], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, tensors
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    seconds, process, live = zip(*gathered, strict=True)
    if options.rank == 0:
        slowest = [max(step) for step in zip(*seconds, strict=True)]
        result = {"seconds": slowest, "process": max(process), "tensors": max(live), "losses": losses}
        Path(run["output"]).write_text(json.dumps(result))


def train_rival(
    model: Any, run: Mapping[str, Any], options: argparse.Namespace, turns: Turns
) -> tuple[list[float], float]:
    """Trains with another library; returns as `train_ours`."""
    batches = batches_of(options, run)
    checkpoint_layers(model, options)
    step = RIVALS[run["rival"]](model, run, options)
    losses = []
    for _ in range(options.steps + SKIPPED):
        turns.begin()
        losses.append(mean_over_ranks(step(next(batches)), run))
        turns.end()
    # A tally of storages cannot see into DTensors, nor into the memory that ZeRO-3 gives parameters in turn.
    is_hidden = run["rival"] in ("native TP", "DeepSpeed ZeRO-3")
    return losses, math.nan if is_hidden else peak_of(lambda: step(next(batches)))


def checkpoint_layers(model: Any, options: argparse.Namespace) -> None:
    """Makes layers of a rival's model run again in backward, if asked for."""
    if options.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()


def rows_of(options: argparse.Namespace, count: int) -> Tensor:
    """Random rows [count, sequence], the same on every rank."""
    size = (count, options.sequence)
    return torch.randint(options.vocabulary, size, generator=torch.Generator().manual_seed(1))


def replicas_of(run: Mapping[str, Any]) -> int:
    """The number of data-parallel ranks of a contender."""
    return int(run["processes"]) if run.get("rival") in ("DDP", "FSDP2", "DeepSpeed ZeRO-3") else 1


def batches_of(options: argparse.Namespace, run: Mapping[str, Any]) -> Iterator[list[Tensor]]:
    """Yields the micro-batches of this rank, window by window, as the Trainer divides them over replicas."""
    replicas, count = replicas_of(run), run["microbatches"]
    rank = options.rank if replicas > 1 else 0
    rows = rows_of(options, options.batch * replicas * count * (options.steps + SKIPPED + 1))
    micro = rows.split(options.batch)
    for begin in itertools.count(0, count * replicas):
        yield [micro[place] for place in range(begin + rank, begin + count * replicas, replicas)]


def mean_over_ranks(loss: float, run: Mapping[str, Any]) -> float:
    if replicas_of(run) == 1:
        return loss
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def peak_of(step: Callable[[], object]) -> int:
    """The peak of live tensors in a step, without the ones of before; gradients are made anew in it."""
    from hf_helix.measure.memory import LiveBytes

    with LiveBytes() as tally:
        step()
    return tally.peak


def train_ours(
    model: Any, run: Mapping[str, Any], options: argparse.Namespace, turns: Turns
) -> tuple[list[float], float]:
    """Trains with HelixTrainer; returns all losses, and the peak of live tensors in one step."""
    import transformers
    from transformers import TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from hf_helix import HelixConfig, HelixTrainer

    transformers.logging.set_verbosity_error()
    losses: list[float] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.end()
            if state.global_step < steps:
                turns.begin()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in (logs or {}):
                losses.append(float(logs["loss"]))

    steps = options.steps + SKIPPED
    replicas = run["processes"] // HelixConfig(**run["helix"]).ranks_per_batch
    rows = rows_of(options, options.batch * replicas * run["microbatches"] * (steps + 1))
    args = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=run["microbatches"],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = HelixTrainer(model=model, args=args, train_dataset=data, helix_config=HelixConfig(**run["helix"]))
    trainer.remove_callback(PrinterCallback)
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    trainer.remove_callback(watch)
    trainer.args.max_steps = 1
    return losses, peak_of(trainer.train)


# -- rivals ----------------------------------------------------------------------------------------------------------


def optimizer_of(parameters: Any, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=fused)


def accumulating(model: Any, optimizer: torch.optim.Optimizer, sync: Callable[[bool], object]) -> Step:
    """A plain loop over micro-batches; `sync` is called with whether the next backward pass is the last."""

    def step(window: Sequence[Tensor]) -> float:
        losses = []
        for place, ids in enumerate(window, 1):
            sync(place == len(window))
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / len(window)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).sum())

    return step


def plain_loop(model: Any, run: Mapping[str, Any], options: argparse.Namespace) -> Step:
    return accumulating(model, optimizer_of(model.parameters()), lambda is_last: None)


def ddp(model: Any, run: Mapping[str, Any], options: argparse.Namespace) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model)

    def sync(is_last: bool) -> None:
        wrapped.require_backward_grad_sync = is_last  # as `no_sync` does

    return accumulating(wrapped, optimizer_of(model.parameters()), sync)


def fsdp2(model: Any, run: Mapping[str, Any], options: argparse.Namespace) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return accumulating(model, optimizer_of(model.parameters()), model.set_requires_gradient_sync)


def native_tp(model: Any, run: Mapping[str, Any], options: argparse.Namespace) -> Step:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    folder = [tempfile.mkdtemp() if options.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    if options.rank == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    config = DistributedConfig(tp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=config).train()
    checkpoint_layers(model, options)
    # The fused step refuses the mixture of tensors and DTensors that native tensor parallelism makes.
    return accumulating(model, optimizer_of(model.parameters(), fused=False), lambda is_last: None)


def with_deepspeed(stage: int, is_cut: bool) -> Callable[[Any, Mapping[str, Any], argparse.Namespace], Step]:
    """A stage of DeepSpeed's ZeRO, of its AutoTP if the model is cut."""

    def make(model: Any, run: Mapping[str, Any], options: argparse.Namespace) -> Step:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile
        deepspeed.init_distributed("gloo")
        config = {
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_accumulation_steps": run["microbatches"],
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            **({"tensor_parallel": {"autotp_size": dist.get_world_size()}} if is_cut else {}),
        }
        optimizer = optimizer_of(model.parameters(), fused=False)
        engine, *_ = deepspeed.initialize(model=model.train(), optimizer=optimizer, config=config)

        def step(window: Sequence[Tensor]) -> float:
            losses = []
            for ids in window:
                loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            return float(torch.stack(losses).mean())

        return step

    return make


class Stage(nn.Module):
    """Layers of a Llama as a stage of torch's pipelining; the first has the embedding, the last the head."""

    def __init__(self, model: Any, layers: range, is_first: bool, is_last: bool) -> None:
        super().__init__()
        decoder = model.model
        self.embedding = decoder.embed_tokens if is_first else None
        self.layers = nn.ModuleList(decoder.layers[place] for place in layers)
        self.norm, self.head = (decoder.norm, model.lm_head) if is_last else (None, None)
        self.rope = decoder.rotary_emb

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        rope = self.rope(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rope, position_ids=positions)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


def pipeline(kind: str, chunks: int, is_folded: bool) -> Callable[[Any, Mapping[str, Any], argparse.Namespace], Step]:
    """A schedule of `torch.distributed.pipelining`, with `chunks` stages a rank."""

    def make(model: Any, run: Mapping[str, Any], options: argparse.Namespace) -> Step:
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules

        ranks, rank = dist.get_world_size(), options.rank
        count = ranks * chunks
        own = [rank, count - 1 - rank] if is_folded else list(range(rank, count, ranks))
        bounds = [options.layers * place // count for place in range(count + 1)]
        stages = []
        for number in own:
            part = Stage(model, range(bounds[number], bounds[number + 1]), number == 0, number == count - 1)
            stages.append(pipelining.PipelineStage(part, number, count, torch.device("cpu")))

        def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

        schedule = getattr(schedules, f"Schedule{kind}")(
            stages if chunks > 1 else stages[0], run["microbatches"], loss_fn=loss_of
        )
        optimizer = optimizer_of([each for stage in stages for each in stage.submod.parameters()])
        has_last, home = count - 1 in own, 0 if is_folded else ranks - 1
        model.model.layers = None  # the stages hold the layers of this rank; the others are freed

        def step(window: Sequence[Tensor]) -> float:
            ids, losses = torch.cat(list(window)), list[Tensor]()
            given = (ids,) if 0 in own else ()
            schedule.step(*given, **({"target": ids, "losses": losses} if has_last else {}))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss = torch.stack(losses).mean().detach() if has_last else torch.zeros(())
            dist.broadcast(loss, home)
            return float(loss)

        return step

    return make


RIVALS: Mapping[str, Callable[[Any, Mapping[str, Any], argparse.Namespace], Step]] = {
    "plain loop": plain_loop,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "torch 1F1B": pipeline("1F1B", 1, is_folded=False),
    "torch Interleaved1F1B": pipeline("Interleaved1F1B", 2, is_folded=False),
    "torch ZBV": pipeline("ZBVZeroBubble", 2, is_folded=True),
    "torch DualPipeV": pipeline("DualPipeV", 2, is_folded=True),
    "native TP": native_tp,
    "DeepSpeed ZeRO-3": with_deepspeed(3, is_cut=False),
    "DeepSpeed AutoTP": with_deepspeed(0, is_cut=True),
}

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
