"""A loop around Accelerate: with `HelixPlugin.prepare`, and the stock one around the unsplit model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from support.models import llama, sequences
from torch.utils.data import DataLoader
from transformers import default_data_collator

from hf_helix import HelixPlugin

Made = tuple[Accelerator, Any, Any, Any, Any, Any]


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
