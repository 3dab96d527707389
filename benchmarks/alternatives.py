"""What a user would pick instead of hf_helix for the same global batch: native tensor parallelism, and plain DDP.

Both are stock: the model's own forward, autograd's backward, gradients accumulated over the micro-batches. They are
timed by `measure_overlap` in turn with our plans, so they look like a runner to it.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.tuning.measure.overlap import forget_gradients

NATIVE_TP = "native TP"
DDP = "DDP"
TOLERANCE = 1e-4  # of losses and gradients, relative: the alternatives must do the same work

Batch = Mapping[str, Tensor]


def build_models(model: PreTrainedModel, size: int, folder: Path) -> dict[str, nn.Module]:
    """The alternatives, with the weights of a model that is still whole, through a folder that all see. Collective."""
    replica = DistributedDataParallel(copy.deepcopy(model))
    logging.disable_progress_bar()
    model.save_pretrained(folder)  # rank 0 writes
    all_gather_object(None)
    cut = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=size))
    return {NATIVE_TP: cut.train(), DDP: replica}


class Alternative:
    """A stock model that takes the same window; it looks like a runner to `measure_overlap`.

    Args:
        batches: the micro-batches of the window; DDP takes this rank's share of them.
        runner: ours, whose streams, parameters and schedule the measurement looks after.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], runner: Runner, rank: int, size: int) -> None:
        self.model = model
        self.batches = batches[rank::size] if isinstance(model, DistributedDataParallel) else batches
        shares = size if isinstance(model, DistributedDataParallel) else 1  # DDP averages over them
        self.scale = shares / len(batches)
        self.executor = runner.executor
        self.stage = runner.stage
        self.scheduler = runner.scheduler

    def train_window(self, window: object, complete: bool = True) -> list[Tensor]:
        """Forward and backward; this rank's scaled losses. Gradients are complete, in `parameter.grad`."""
        if not complete:  # asked for a trace: there is none of stock models
            return []
        for parameter in self.model.parameters():
            parameter.grad = None
        losses = []
        for place, batch in enumerate(self.batches):
            with self._accumulating(last=place == len(self.batches) - 1):
                loss = self.model(**batch, use_cache=False).loss * self.scale
                loss.backward()
            losses.append(loss.detach())
        return losses

    def _accumulating(self, last: bool) -> contextlib.AbstractContextManager[None]:
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()


def try_windows(
    runner: Runner, model: nn.Module, others: Mapping[str, Alternative], window: Sequence[MicroBatch], device: str
) -> dict[str, dict[str, float]]:
    """One window of each: its mean loss, the norm of a gradient, the MiB that a rank sends. Collective.

    Args:
        model: what the runner trains.
        device: the network device that everything goes through.

    Raises:
        RuntimeError: a loss or a gradient differs, so they do not do the same work.
    """
    ours = _try_window(runner, model, window, device)
    every = {"hf_helix": ours}
    forget_gradients(runner)
    for name, other in others.items():
        every[name] = found = _try_window(other, getattr(other.model, "module", other.model), window, device)
        for what in ("loss", "gradient"):
            if not abs(found[what] - ours[what]) <= TOLERANCE * abs(ours[what]):
                raise RuntimeError(f"{name}: {what} is {found[what]:.7g}, but ours {ours[what]:.7g}")
    return every


def _try_window(
    contender: Runner | Alternative, model: Any, window: Sequence[MicroBatch], device: str
) -> dict[str, float]:
    all_gather_object(None)  # nobody is still sending
    before = _sent(device)
    loss = float(torch.stack(contender.train_window(window)).sum())
    all_gather_object(None)
    sent = (_sent(device) - before) / 2**20
    gradient = model.model.layers[0].input_layernorm.weight.grad  # no rank has only a part of it
    losses, norms, mebibytes = zip(*all_gather_object((loss, float(gradient.norm()), sent)), strict=True)
    return {"loss": statistics.fmean(losses), "gradient": statistics.fmean(norms), "sent": max(mebibytes)}


def _sent(device: str) -> int:
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())
