"""A loop around Accelerate: with `HelixPlugin.prepare`, and the stock one around the unsplit model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from support.jobs import Stream
from support.models import llama, sequences
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader
from transformers import default_data_collator

from hf_helix import HelixConfig, HelixPlugin

Made = tuple[Accelerator, Any, Any, Any, Any, Any]


def follow(
    folder: str,
    helix: dict[str, Any] | None,
    count: int,
    accumulate: int,
    dp_size: int = 1,
    weights: str | None = None,
    kind: str = "AdamW",
    later: str = "",
    windows_of_step: int = 1,
) -> dict[str, Any]:
    """Two epochs: losses, norms and learning rates by step, evaluation of every sample, and the model saved.

    Args:
        helix: options of the plugin; None for the stock loop, in one process.
        accumulate: batches of a rank in a window.
        dp_size: ranks whose batches the stock loop trains on at once.
        weights: a folder that the model starts from, on the meta device before.
        kind: the class of the optimizer.
        later: a module whose parameters the optimizer is given once everything is prepared.
        windows_of_step: windows whose gradients add up before the optimizer steps.
    """
    plugin = None if helix is None else HelixPlugin(HelixConfig(cache=False, plan="greedy", **helix))
    all_made = made(plugin, accumulate * dp_size, count, weights, kind, later)
    accelerator, model, optimizer, loader, held_out, scheduler = all_made
    if later:
        whole = model.module if plugin else model
        optimizer.add_param_group({"params": whole.get_submodule(later).parameters(), "lr": 2e-2})
    train = model.train_window if plugin else stock_window(accelerator, model)
    evaluate = model.evaluate if plugin else lambda batch, logits: model.eval()(**batch)
    result: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    for _ in range(2):
        windows = model.windows(loader) if plugin else stock_windows(loader, accelerator.gradient_accumulation_steps)
        for place, window in enumerate(windows, 1):
            result["losses"].append(float(train(window)))
            if place % windows_of_step:
                continue
            result["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            for _ in range(1 if plugin else dp_size):
                scheduler.step()
            optimizer.zero_grad()
            result["rates"].append(scheduler.get_last_lr()[0])
    samples, guesses = [], []
    for batch in held_out:
        with torch.no_grad():
            output = evaluate(batch, logits=True)
        samples.append(accelerator.gather_for_metrics(output.loss.detach().repeat(len(batch["input_ids"]))))
        guesses.append(accelerator.gather_for_metrics(output.logits))
    result |= {"eval": torch.cat(samples).tolist(), "logits": torch.cat(guesses).numpy().copy()}
    model.save_pretrained(folder)
    if plugin:
        model.engine.close()
    return result


def made(
    plugin: HelixPlugin | None,
    accumulate: int,
    count: int,
    weights: str | None = None,
    kind: str = "AdamW",
    later: str = "",
    **options: Any,
) -> Made:
    reset()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, parallelism_config=plugin, **options)
    with torch.device("meta" if weights else "cpu"):
        model = llama(num_hidden_layers=4)
    first = [parameter for name, parameter in model.named_parameters() if not later or not name.startswith(later)]
    optimizer = getattr(torch.optim, kind)(first, lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = batches_of(count)
    held_out = DataLoader(sequences(5, seed=9), 2, collate_fn=default_data_collator)
    prepare = partial(plugin.prepare, accelerator, weights=weights) if plugin else accelerator.prepare
    return accelerator, *prepare(model, optimizer, loader, held_out, scheduler)


def reset() -> None:
    """Lets a process make another `Accelerator`."""
    AcceleratorState._reset_state()
    GradientState._reset_state()


def batches_of(count: int) -> DataLoader[Any]:
    """Of two rows each, the same everywhere."""
    dice = torch.Generator().manual_seed(5)
    return DataLoader(sequences(count), 2, shuffle=True, generator=dice, collate_fn=default_data_collator)


def stock_windows(loader: Any, size: int) -> Any:
    batches = list(loader)
    return (batches[start : start + size] for start in range(0, len(batches), size))


def stock_window(accelerator: Accelerator, model: Any) -> Callable[[Any], Any]:
    """As Accelerate's guide to gradient accumulation with sequences of several lengths."""

    def train(window: Any) -> Any:
        model.train()
        items = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
        total = torch.zeros(())
        for batch in window:
            loss = model(**batch, num_items_in_batch=items).loss
            accelerator.backward(loss * accelerator.gradient_accumulation_steps)  # which divides by it
            total += loss.detach()
        return total

    return train


# -- errors --------------------------------------------------------------------------------------------------------


def said(action: Callable[[], Any]) -> str:
    """The words of an error; empty without one."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def misuse(helix: dict[str, Any]) -> dict[str, str]:
    """What is said to those who go on as if the model were whole."""
    accelerator, model, _, loader, *_ = made(HelixPlugin(HelixConfig(cache=False, **helix)), 2, 8)
    batch = next(iter(loader))
    parameters = list(model.parameters())
    result = {
        "backward": said(lambda: accelerator.backward(torch.zeros(()))),
        "accumulate": said(lambda: accelerator.accumulate(model)),
        "unwrap_model": said(lambda: accelerator.unwrap_model(model)),
        "save_model": said(lambda: accelerator.save_model(model, "anywhere")),
        "get_state_dict": said(lambda: accelerator.get_state_dict(model)),
        "save_state": said(lambda: accelerator.save_state("anywhere")),
        "load_state": said(lambda: accelerator.load_state("anywhere")),
        "call": said(lambda: model(**batch)),
        "module": said(lambda: model.module(**batch)),
        "some parameters": said(lambda: accelerator.clip_grad_norm_(parameters[:2], 1.0)),
        "another norm": said(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)),
        "no batch": said(lambda: model.train_window([])),
        "no labels": said(lambda: model.train_window([{"input_ids": batch["input_ids"]}])),
        "cut twice": said(lambda: accelerator.parallelism_config.prepare(accelerator, model.module)),
    }
    model.engine.close()
    return result


def clip_values(helix: dict[str, Any], limit: float) -> tuple[str, float, float]:
    """What is said where the model's own parameters are given; the largest gradient before its values are clipped, and
    after."""
    accelerator, model, _, loader, *_ = made(HelixPlugin(HelixConfig(cache=False, plan="sequential", **helix)), 1, 8)
    model.train_window([next(iter(loader))])
    result = [max(float(p.grad.abs().max()) for p in model.parameters())]
    words = said(lambda: accelerator.clip_grad_value_(model.module.parameters(), limit))
    result.append(max(float(p.grad.abs().max()) for p in model.parameters()))
    model.engine.close()
    return words, *result


def stray(option: str) -> dict[str, str]:
    """What is said, where ranks share parameters or the optimizer, when optimizers step that were not prepared with the
    model. Nothing watches them once the model is gone."""
    plugin = HelixPlugin(HelixConfig(cache=False, plan="sequential", **{option: True}))
    gc.collect()
    before = len(_global_optimizer_pre_hooks)
    made(plugin, 1, 8)[1].engine.close()
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before
    reset()
    accelerator, whole = Accelerator(cpu=True, parallelism_config=plugin), llama()
    first = torch.optim.AdamW(whole.parameters())
    model, prepared, loader = plugin.prepare(accelerator, whole, torch.optim.SGD(whole.parameters()), batches_of(8))
    model.train_window([next(iter(loader))])
    found = {
        "made before": said(first.step),
        "made afterwards": said(torch.optim.AdamW(whole.lm_head.parameters()).step),
        "of Accelerate": said(accelerator.prepare_optimizer(torch.optim.SGD(whole.parameters())).step),
        "of matrices": said(torch.optim.Adafactor(model.parameters()).step),
        "another model's": said(torch.optim.SGD(llama().parameters()).step),
        "prepared": said(prepared.step),
    }
    prepared.param_groups[0]["params"].append(whole.lm_head.weight)
    found["changed by hand"] = said(prepared.step)
    model.engine.close()
    return found


def stepped(option: str, prepared: bool) -> list[float]:
    """Losses of windows and evaluations with an optimizer that does not count the versions of what it steps, prepared
    with the model, or made of what that has returned."""
    reset()
    plugin = HelixPlugin(HelixConfig(cache=False, plan="greedy", **{option: True}))
    accelerator, model, loader = Accelerator(cpu=True, parallelism_config=plugin), llama(), batches_of(16)
    options: dict[str, Any] = {"lr": 1e-2, "fused": True}
    if prepared:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        model, optimizer, loader = plugin.prepare(accelerator, model, optimizer, loader)
    else:
        model, loader = plugin.prepare(accelerator, model, loader)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    losses = []
    for batch in loader:
        losses += [float(model.train_window([batch])), float(model.evaluate(batch).loss)]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(model.evaluate(batch).loss))
    model.engine.close()
    return losses


def refused(helix: dict[str, Any], kind: str) -> None:
    """Only prepare."""
    reset()
    plugin = HelixPlugin(HelixConfig(cache=False, **helix))
    options: dict[str, Any] = {"parallelism_config": plugin, "cpu": True}
    if kind == "another plugin":
        options["parallelism_config"] = HelixPlugin(plugin.config)
    if kind == "uneven":
        options["dataloader_config"] = DataLoaderConfiguration(even_batches=False)
    if kind == "compiled":
        options["dynamo_backend"] = "eager"
    accelerator = Accelerator(**options)
    with torch.device("meta" if kind == "states on the meta device" else "cpu"):
        model = llama(num_hidden_layers=4)
    optimizer = (torch.optim.Adagrad if "state" in kind else torch.optim.AdamW)(model.parameters())
    given: list[Any] = [model, optimizer]
    if kind == "LBFGS":
        given[1] = torch.optim.LBFGS(model.parameters())
    if kind.startswith("a step"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
        optimizer.step()
    if kind == "another model":
        given[1] = torch.optim.AdamW(llama().parameters())
    if kind == "two models":
        given.append(llama())
    if kind in ("uneven", "streamed"):
        rows = sequences(8)
        given.append(DataLoader(Stream(rows) if kind == "streamed" else rows, 2, collate_fn=default_data_collator))
    plugin.prepare(accelerator, *given)


def other_options_of_rank(seeds: tuple[int, ...]) -> None:
    """Every rank gives another seed."""
    reset()
    plugin = HelixPlugin(tp_size=2)
    accelerator = Accelerator(parallelism_config=plugin, cpu=True)
    plugin.prepare(accelerator, llama(), seed=seeds[torch.distributed.get_rank()])
