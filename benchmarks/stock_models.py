"""Stock software that does the same work: a model under DDP, under FSDP2, or under Transformers' tensor parallelism.

In:   a model that is still whole, a folder that all ranks see, and the micro-batches of a window.
Out:  what `measure_overlap` and `time_steps` time in turn with our plans.
Must hold: everything is the stock's own, the model's forward, autograd's backward, and gradients that are accumulated
over the micro-batches as Accelerate does it: DDP and FSDP2 sum them over the ranks once, in the last one's backward.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner, forget_gradients

DDP, FSDP2, NATIVE_TP = "DDP", "FSDP2", "native TP"
TOLERANCE = {None: 1e-4, torch.bfloat16: 2e-3}
"""By how much losses and gradients may differ from ours, relatively, by the type of matrix products."""

Batch = Mapping[str, Tensor]


def build_models(
    model: PreTrainedModel, names: Sequence[str], size: int, folder: Path, bf16: bool = False
) -> dict[str, nn.Module]:
    """Returns stock models with the weights of a model. Collective.

    Args:
        model: still whole, with the same weights on every rank.
        names: of `DDP`, `FSDP2` and `NATIVE_TP`.
        size: the number of ranks.
        folder: that all ranks see; the weights go through it.
        bf16: whether FSDP2 gathers and computes in bf16, over weights in fp32.
    """
    logging.disable_progress_bar()
    model.save_pretrained(folder)  # rank 0 writes
    all_gather_object(None)
    options = {FSDP2: {"fsdp_size": size, "fsdp_mixed_precision": bf16}, NATIVE_TP: {"tp_size": size}}
    models: dict[str, nn.Module] = {}
    for name in names:
        spread = {"distributed_config": DistributedConfig(**options[name])} if name in options else {}
        loaded = AutoModelForCausalLM.from_pretrained(folder, **spread).train()
        models[name] = DistributedDataParallel(loaded) if name == DDP else loaded
    return models


class StockModel:
    """A stock model that trains a window; it looks like a runner to what times windows.

    Args:
        model: one of `build_models`.
        batches: the micro-batches of this rank: under tensor parallelism, all ranks have the same ones.
        scale: of the mean loss of each; DDP and FSDP2 average gradients over the ranks, tensor parallelism does not.
        runner: ours, whose streams, parameters and schedule the measurement looks after, and whose types of matrix
            products are taken, as Accelerate does it under `bf16=True`.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], scale: float, runner: Runner) -> None:
        self.model, self.batches, self.scale = model, batches, scale
        self.precision = runner.precision
        self.executor, self.rank_units, self.scheduler = runner.executor, runner.rank_units, runner.scheduler

    def train_window(self, window: object, complete: bool = True) -> list[Tensor]:
        """Forward and backward; returns this rank's losses, scaled. Gradients are complete, in `parameter.grad`.

        Args:
            window: ours, which is not looked at.
            complete: False asks for a trace; there is none of stock models, and nothing is run.
        """
        if not complete:
            return []
        for parameter in self.model.parameters():
            parameter.grad = None
        losses = []
        for place, batch in enumerate(self.batches, start=1):
            self._sum_gradients(place == len(self.batches))
            with self.precision.autocast():
                loss = self.model(**batch, use_cache=False).loss * self.scale
            loss.backward()
            losses.append(loss.detach())
        return losses

    def _sum_gradients(self, now: bool) -> None:
        """Says whether the next forward and backward sum gradients over the ranks."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(now)
        elif isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = now  # as its `no_sync` does


def try_windows(
    runner: Runner, model: nn.Module, others: Mapping[str, StockModel], window: Sequence[MicroBatch], device: str
) -> dict[str, dict[str, float]]:
    """One window of each: its mean loss, the norm of a gradient, the MiB that a rank sends. Collective.

    Args:
        runner: ours.
        model: what the runner trains.
        others: by name, whose parameters lie whole on every rank or are cut as the runner's are.
        window: what the runner trains on; the others have their micro-batches.
        device: the network device that everything goes through.

    Raises:
        RuntimeError: a loss or a gradient differs, so they do not do the same work.
    """
    ours = _try_window(runner, model, window, device)
    every = {"hf_helix": ours}
    forget_gradients(runner)
    for name, other in others.items():
        every[name] = theirs = _try_window(other, getattr(other.model, "module", other.model), window, device)
        for what in ("loss", "gradient"):
            if not abs(theirs[what] - ours[what]) <= TOLERANCE[runner.precision.autocast_dtype] * abs(ours[what]):
                raise RuntimeError(f"{name}: {what} is {theirs[what]:.7g}, but ours {ours[what]:.7g}")
    return every


def _try_window(
    contender: Runner | StockModel, model: Any, window: Sequence[MicroBatch], device: str
) -> dict[str, float]:
    all_gather_object(None)  # nobody is still sending
    before = _sent(device)
    loss = float(torch.stack(contender.train_window(window)).sum())
    all_gather_object(None)
    sent = (_sent(device) - before) / 2**20
    gradient = model.model.layers[0].input_layernorm.weight.grad  # only FSDP2 has a part of it on each rank
    gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    losses, norms, mebibytes = zip(*all_gather_object((loss, float(gradient.norm()), sent)), strict=True)
    return {"loss": statistics.fmean(losses), "gradient": statistics.fmean(norms), "sent": max(mebibytes)}


def _sent(device: str) -> int:
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())
