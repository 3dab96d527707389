"""Every method of an `Accelerator` that scripts call, around the stock model and around a cut one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import gather_object
from safetensors.torch import load_file
from support.jobs import build
from support.loop_jobs import reset
from support.models import llama, sequences
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback, default_data_collator

from hf_helix import HelixConfig, HelixPlugin


@dataclass
class Scene:
    """What a script has at hand after the backward pass of a step.

    Attributes:
        model: what the script calls; `parameters` are the model's.
        loss: of a batch, without gradients.
    """

    accelerator: Any
    model: Any
    loss: Callable[[Any], Tensor]
    folder: Path
    parameters: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = list(self.model.parameters())

    def batches(self) -> Iterator[Any]:
        """Seven rows, three in a batch."""
        yield from self.accelerator.prepare_data_loader(rows_of(7))


def rows_of(count: int, size: int = 3) -> DataLoader[Any]:
    return DataLoader(sequences(count, seed=9), size, collate_fn=default_data_collator)


# -- the methods -------------------------------------------------------------------------------------------------------

BATCHES, PROCESSES = "as the stock loop on the data-parallel ranks", "as the stock loop on all processes"
METHODS: dict[str, tuple[str, Callable[[Scene], Any]]] = {}


def row(*names: str, like: str = BATCHES) -> Callable[[Callable[[Scene], Any]], Callable[[Scene], Any]]:
    """Adds a row to `METHODS`: a name, the stock run to compare with, and the calls."""

    def add(calls: Callable[[Scene], Any]) -> Callable[[Scene], Any]:
        METHODS.update(dict.fromkeys(names, (like, calls)))
        return calls

    return add


@row("gather_for_metrics")
def _(scene: Scene) -> Any:
    gather, results = scene.accelerator.gather_for_metrics, []
    for batch in scene.batches():
        loss, ids = scene.loss(batch), batch["input_ids"]
        results.append(
            {
                "loss": gather(loss.repeat(len(ids))).tolist(),
                "scalar": gather(loss).reshape(-1).tolist(),
                "nested": {name: each.tolist() for name, each in gather({"ids": ids, "first": ids[:, 0]}).items()},
                "words": gather([str(each.tolist()) for each in ids[:, :3]]),
            }
        )
    return results


@row("gather_for_metrics(use_gather_object=True)")
def _(scene: Scene) -> Any:
    gather = partial(scene.accelerator.gather_for_metrics, use_gather_object=True)
    ids = [batch["input_ids"] for batch in scene.batches()]
    return [[each.tolist() for each in gather([row[: 2 + int(row[0]) % 3] for row in rows])] for rows in ids]


@row("gather", like=PROCESSES)
def _(scene: Scene) -> Any:
    mine = torch.tensor([float(scene.accelerator.process_index + 1)])
    return scene.accelerator.gather(mine).tolist(), scene.accelerator.gather({"a": mine.sum()})["a"].tolist()


@row("reduce", like=PROCESSES)
def _(scene: Scene) -> Any:
    mine = torch.tensor([float(scene.accelerator.process_index + 1)])
    return [scene.accelerator.reduce(mine, kind).tolist() for kind in ("sum", "mean")]


@row("pad_across_processes", like=PROCESSES)
def _(scene: Scene) -> Any:
    return scene.accelerator.pad_across_processes(torch.arange(scene.accelerator.process_index + 2)).tolist()


@row("gather_object", like=PROCESSES)
def _(scene: Scene) -> Any:
    return gather_object([f"of {scene.accelerator.process_index}"])


@row("split_between_processes", like=PROCESSES)
def _(scene: Scene) -> Any:
    prompts = ["a", "b", "c", "d", "e"]
    with (
        scene.accelerator.split_between_processes(prompts) as mine,
        PartialState().split_between_processes(torch.arange(5), apply_padding=True) as padded,
    ):
        return mine, padded.tolist(), gather_object(mine), scene.accelerator.gather(padded).tolist()


@row("num_processes", "process_index", like=PROCESSES)
def _(scene: Scene) -> Any:
    accelerator = scene.accelerator
    return accelerator.num_processes, accelerator.process_index, accelerator.local_process_index


@row("is_main_process", "is_local_main_process", "is_last_process", "on_main_process", like=PROCESSES)
def _(scene: Scene) -> Any:
    accelerator, calls = scene.accelerator, []
    for run_on in (accelerator.on_main_process, accelerator.on_local_main_process, accelerator.on_last_process):
        run_on(calls.append)(run_on.__name__)
    accelerator.on_process(calls.append, process_index=1)("on 1")
    return accelerator.is_main_process, accelerator.is_local_main_process, accelerator.is_last_process, calls


@row("wait_for_everyone", "main_process_first", like=PROCESSES)
def _(scene: Scene) -> Any:
    accelerator, path = scene.accelerator, scene.folder / "first"
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        if accelerator.is_main_process:
            path.write_text("done")
        found = path.read_text()
    return found, accelerator.wait_for_everyone()


@row("set_trigger", "check_trigger", like=PROCESSES)
def _(scene: Scene) -> Any:
    if scene.accelerator.is_last_process:
        scene.accelerator.set_trigger()
    return [bool(scene.accelerator.check_trigger()) for _ in range(2)]


@row("unwrap_model")
def _(scene: Scene) -> Any:
    whole = scene.accelerator.unwrap_model(scene.model)
    return type(whole).__name__, list(dict(whole.named_parameters())), whole.config.hidden_size


@row("get_state_dict")
def _(scene: Scene) -> Any:
    return values_of(scene.accelerator.get_state_dict(scene.model))


@row("save")
def _(scene: Scene) -> Any:
    accelerator, result = scene.accelerator, []
    for name, safe in (("weights.bin", False), ("weights.safetensors", True)):
        weights = accelerator.get_state_dict(scene.model)
        accelerator.save(weights if safe else {"model": weights}, scene.folder / name, safe_serialization=safe)
        accelerator.wait_for_everyone()
        path = scene.folder / name
        result.append(values_of(load_file(path) if safe else torch.load(path, weights_only=True)["model"]))
    return result


@row("save_model")
def _(scene: Scene) -> Any:
    scene.accelerator.save_model(scene.model, scene.folder / "model", max_shard_size="20KB")
    scene.accelerator.wait_for_everyone()
    files = [load_file(path) for path in sorted((scene.folder / "model").glob("*.safetensors"))]
    return len(files) > 1, values_of({name: value for each in files for name, value in each.items()})


@row("clip_grad_norm_", "clip_grad_value_")
def _(scene: Scene) -> Any:
    accelerator, parameters = scene.accelerator, scene.parameters
    norms = [float(accelerator.clip_grad_norm_(parameters, 0.1)) for _ in range(2)]
    norms.append(float(accelerator.clip_grad_norm_(parameters[:3], 0.01)))
    norms.append(float(accelerator.clip_grad_norm_(parameters, 0.05, norm_type=1)))
    accelerator.clip_grad_value_(parameters, 1e-4)
    return norms, [float(each.grad.norm()) for each in parameters]


@row("backward")
def _(scene: Scene) -> Any:
    weight = torch.ones(3, requires_grad=True)
    scene.accelerator.backward((weight * 2).sum())
    return (weight.grad * scene.accelerator.gradient_accumulation_steps).tolist()  # type: ignore[operator]


@row("no_sync", "sync_gradients", "trigger_sync_in_backward")
def _(scene: Scene) -> Any:
    with scene.accelerator.no_sync(scene.model):
        inside = scene.accelerator.sync_gradients
    with scene.accelerator.trigger_sync_in_backward(scene.model):
        return inside, scene.accelerator.sync_gradients


@row("accumulate")
def _(scene: Scene) -> Any:
    with scene.accelerator.accumulate(scene.model):
        return bool(scene.accelerator.sync_gradients)


@row("autocast")
def _(scene: Scene) -> Any:
    with scene.accelerator.autocast():
        return str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)


@row("prepare", "prepare_data_loader", "skip_first_batches")
def _(scene: Scene) -> Any:
    accelerator = scene.accelerator
    loader = accelerator.prepare(rows_of(13, 2))
    skipped = accelerator.skip_first_batches(loader, 1)
    rows = [[batch["input_ids"][:, :4].tolist() for batch in each] for each in (loader, skipped)]
    return rows, [accelerator.gather_for_metrics(batch["input_ids"][:, 0]).tolist() for batch in skipped]


@row("prepare_optimizer", "prepare_scheduler")
def _(scene: Scene) -> Any:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer, scheduler = scene.accelerator.prepare(optimizer, scheduler)
    rates = []
    for _ in range(2):
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
    return rates


class Notes(GeneralTracker):
    """A tracker that keeps what it is told."""

    name, requires_logging_directory = "notes", False

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    @property
    def tracker(self) -> Any:
        return self.notes

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.notes.append(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.notes.append((values, step))


@row("init_trackers", "get_tracker", "log", like=PROCESSES)
def _(scene: Scene) -> Any:
    accelerator, notes = scene.accelerator, Notes()
    accelerator.log_with = [notes]
    accelerator.init_trackers("project", {"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=3)
    found = accelerator.get_tracker("notes", unwrap=True)
    return notes.notes, type(found).__name__ if accelerator.is_main_process else ""


@row("register_for_checkpointing")
def _(scene: Scene) -> Any:
    return scene.accelerator.register_for_checkpointing(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0))


@row("free_memory", "clear")
def _(scene: Scene) -> Any:
    return [list(free(torch.ones(2), None)) for free in (scene.accelerator.free_memory, scene.accelerator.clear)]


def values_of(state: dict[str, Any]) -> dict[str, list[float]]:
    """The names, shapes and norms of weights."""
    with torch.no_grad():
        return {name: [*value.shape, float(value.double().norm())] for name, value in state.items()}


# -- the two doors -----------------------------------------------------------------------------------------------------


def call_all(scene: Scene, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    scene.folder.mkdir(exist_ok=True)
    result = {}
    for name, (_, calls) in METHODS.items():
        if name in left_out or calls in [METHODS[known][1] for known in result]:
            continue
        try:
            result[name] = calls(scene)
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
    return result


class Calls(TrainerCallback):
    """Calls every method once gradients are there."""

    trainer: Any
    result: dict[str, Any] | None = None

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        if self.result is None:
            wrapped, accelerator = self.trainer.model_wrapped, self.trainer.accelerator
            self.result = call_all(Scene(accelerator, wrapped, partial(loss_of, model), self.folder / "calls"))


def loss_of(model: Any, batch: Any) -> Tensor:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        loss: Tensor = model(**batch).loss
    model.train(was_training)
    return loss


def by_trainer(folder: str, helix: dict[str, Any] | None, accumulate: int = 2) -> dict[str, Any]:
    """The results of the methods of a trainer's Accelerator."""
    calls = Calls(folder)
    data = {"train_dataset": sequences(16)}
    training = {"max_steps": 1, "gradient_accumulation_steps": accumulate, "max_grad_norm": 0.0}
    trainer = calls.trainer = build(
        folder, helix, training, model=llama(num_hidden_layers=4), callbacks=[calls], **data
    )
    trainer.train()
    assert calls.result is not None
    return calls.result


def by_loop(folder: str, helix: dict[str, Any] | None, accumulate: int = 2) -> dict[str, Any]:
    """The results of the methods of the Accelerator of a loop."""
    reset()
    plugin = None if helix is None else HelixPlugin(HelixConfig(cache=False, plan="greedy", **helix))
    accelerator = Accelerator(cpu=True, parallelism_config=plugin, gradient_accumulation_steps=accumulate)
    model: Any = llama(num_hidden_layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    prepare = accelerator.prepare if plugin is None else partial(plugin.prepare, accelerator)
    model, optimizer, loader = prepare(model, optimizer, rows_of(16, 2))
    window = [batch for batch, _ in zip(loader, range(accumulate), strict=False)]
    if plugin is None:
        items = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
        items = accelerator.gather(items).sum() / accelerator.num_processes
        for batch in window:
            accelerator.backward(model(**batch, num_items_in_batch=items).loss * accumulate)
        loss = partial(loss_of, accelerator.unwrap_model(model))
    else:
        model.train_window(window)
        loss = lambda batch: model.evaluate(batch).loss  # noqa: E731
    result = call_all(Scene(accelerator, model, loss, Path(folder, "loop")), left_out=("backward", "accumulate"))
    if plugin:
        model.engine.close()
    return result
