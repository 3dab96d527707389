"""The training loop of a script around Accelerate: the work and the results of `HelixPlugin.prepare`.

In:   an `Accelerator` made with the plugin, and the loop's uncut model, optimizer, data loaders and scheduler.
Out:  a model that trains windows of micro-batches, and the other objects as Accelerate prepares them.
Must hold: weights change as in the same loop around the unsplit model; methods of the `Accelerator` that would be wrong
for a cut model are replaced, or raise an error with an alternative.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils.logging import get_logger

from hf_helix.config import HelixConfig
from hf_helix.engine.calls import together
from hf_helix.engine.cut.build import RunOptions
from hf_helix.engine.cut.checks import check_batch
from hf_helix.engine.cut.microbatches import LossScale
from hf_helix.engine.engine import Engine
from hf_helix.integrations.accelerate.checks import check_loader, run_in_mixed_precision
from hf_helix.integrations.optimizers import check_optimizer, hand_over, watch_steps
from hf_helix.models.direct_use import Instead
from hf_helix.models.graph.context import LossTweaks
from hf_helix.models.stock.batch_inputs import count_targets
from hf_helix.runtime.distributed.agreement import (
    agree_on_action,
    check_same_on_all_ranks,
)
from hf_helix.runtime.distributed.environment import check_environment
from hf_helix.runtime.distributed.groups import control_group
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.failures import activity
from hf_helix.runtime.failures.heartbeat import start_watch, watched
from hf_helix.runtime.notices import say
from hf_helix.tuning.cache import shared_options
from hf_helix.tuning.result_text import TuningResult

logger = get_logger(__name__)

Loss = Callable[[Any, Any], Tensor]
"""A loss of one's own: of a model and a batch, a scalar."""

USE_INSTEAD = Instead(
    "model.train_window(batches) or model.evaluate(batch) of what HelixPlugin.prepare returned",
    "save_pretrained(folder) of what HelixPlugin.prepare returned",
)


_WINDOWS = "model.train_window() is called, or the data has ended"

# Methods of the Accelerator that do not work in a loop around a cut model, with alternatives.
REFUSED = {
    "backward": "model.train_window(batches) has run backward already; leave it out",
    "accumulate": "a window is all micro-batches of an optimizer step; use `for window in model.windows(dataloader):`",
    "save_state": "resuming a loop is not built yet; use model.save_pretrained(folder)",
    "load_state": "resuming a loop is not built yet; use from_pretrained(folder) before prepare()",
}


def prepare(
    accelerator: Any,
    objects: Sequence[Any],
    config: HelixConfig,
    mesh: Mesh,
    seed: int | None,
    weights: str | Path | None,
    loss: Loss | None = None,
) -> list[Any]:
    """Prepares the objects of a script, see `HelixPlugin.prepare`. Collective."""
    models = [given for given in objects if isinstance(given, nn.Module)]
    if len(models) > 1:
        names = ", ".join(type(model).__name__ for model in models)
        raise ValueError(
            f"HelixPlugin.prepare takes one model, got {names}; give every model an Accelerator of its own"
        )
    for given in objects:
        if isinstance(given, torch.optim.Optimizer):
            check_optimizer(given, models[0] if models else None, config)
        if isinstance(given, DataLoader):
            check_loader(given, accelerator, mesh.dp_size)
    model = _cut(accelerator, models[0], config, mesh, seed, weights, loss) if models else None
    for given in objects:
        if model is not None and isinstance(given, torch.optim.Optimizer):
            hand_over(model.engine, given)
    others = [given for given in objects if not isinstance(given, nn.Module)]
    prepared = iter(accelerator.prepare(*others) if len(others) > 1 else map(accelerator.prepare, others))
    return [model if isinstance(given, nn.Module) else next(prepared) for given in objects]


def _cut(
    accelerator: Any,
    model: Any,
    config: HelixConfig,
    mesh: Mesh,
    seed: int | None,
    weights: str | Path | None,
    loss: Loss | None,
) -> HelixModel:
    for notice in check_environment(config.pp_size):
        logger.warning(notice)
    steps, mixed = accelerator.gradient_accumulation_steps, accelerator.mixed_precision
    about = f"gradient_accumulation_steps={steps}\nmixed_precision={mixed}\nseed given: {seed}"
    check_same_on_all_ranks(f"{shared_options(config)}\n{about}", "options")
    start_watch()
    chosen = [torch.initial_seed() if seed is None else seed]
    if dist.is_initialized():
        dist.broadcast_object_list(chosen, src=0, group=control_group())
    engine = Engine(
        model,
        config,
        mesh,
        RunOptions(
            seed=chosen[0],
            num_microbatches=steps,
            autocast_dtype=torch.bfloat16 if mixed == "bf16" else None,
            loss_tweaks=LossTweaks(ends_at_decoder=loss is not None),
            weights=weights,
        ),
        USE_INSTEAD,
    )
    engine.weights.move_to(accelerator.device)
    watch_steps(engine, meets=True)
    model._is_accelerate_prepared = True  # nothing is left to wrap
    if loss is not None:
        run_in_mixed_precision(model, accelerator)
    accelerator.attach(engine, REFUSED)
    return HelixModel(engine, accelerator, loss)


class HelixModel:
    """A cut model in a loop: trains windows, clips, evaluates and saves. Every method is collective.

    Attributes:
        module: the Transformers model; its parameters are cut in place and held by the optimizer.
        engine: the plan in use and measurements: `engine.plan`, `engine.measure_overlap()`, ...
    """

    def __init__(self, engine: Engine, accelerator: Any, loss: Loss | None = None) -> None:
        self.engine = engine
        self.module: Any = engine.model
        self._loss = loss
        self._accelerator = accelerator
        self._step = 0

    def windows(self, batches: Iterable[Any]) -> Iterator[list[Any]]:
        """Yields the batches of a data loader in lists of `gradient_accumulation_steps`; the last may be shorter."""
        batches = iter(batches)
        while window := self._fetched(batches):
            yield window
        with watched():
            self._agree([])  # another rank may have a window

    def _fetched(self, batches: Iterator[Any]) -> list[Any]:
        """Returns the next batches of a data loader; ranks that share them draw the same random numbers. Collective."""
        if self.engine.mesh.ranks_per_batch > 1:
            with watched():
                agree_on_action("a batch is fetched", mesh=self.engine.mesh)
        with activity.doing(activity.DATA):
            return list(itertools.islice(batches, self._accelerator.gradient_accumulation_steps))

    def _agree(self, batches: Sequence[Any]) -> None:
        """Compares the windows of the ranks. Collective."""
        agree_on_action(_WINDOWS, mesh=self.engine.mesh)
        self.engine.checks.agree(batches)

    def train_window(self, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Runs forward and backward of an optimizer step's micro-batches; gradients are added to `parameter.grad`.

        Returns:
            The mean loss of all tokens with a label, over all ranks; of a loss of one's own the mean over micro-batches
            and data-parallel ranks. The gradient is the gradient of this mean.

        Raises:
            ValueError: no batch, a batch without labels, or ranks with different windows.
        """
        mesh = self.engine.mesh
        with watched():
            self._agree(batches)
            if not batches:
                raise ValueError("train_window needs the batches of an optimizer step, such as [batch]; got none")
            loss = self._train(batches) if self._loss is None else self._train_own(self._loss, batches)
            if mesh.dp_group is not None:
                dist.all_reduce(loss, group=mesh.dp_group)
                loss = loss / mesh.dp_size
        self._step += 1
        return loss

    def _train(self, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Trains a window with the built-in loss."""
        mesh = self.engine.mesh
        batches = [self._checked(batch) for batch in batches]
        items = sum(count_targets(batch) for batch in batches)
        assert isinstance(items, Tensor)
        if mesh.dp_group is not None:
            dist.all_reduce(items, group=mesh.dp_group)
        scale = LossScale(mesh.dp_size / items, 1 / len(batches))
        self._say(self.engine.session.tune(batches, scale, self._step))
        return torch.stack(self.engine.session.train_window(batches, scale, self._step, is_compared=True)).sum()

    def _say(self, tuning: TuningResult | None) -> None:
        if tuning is not None:
            say(f"{tuning.summary} (details: print(model.engine.tuning))")

    def _train_own(self, loss_of: Loss, batches: Sequence[Any]) -> Tensor:
        """Trains a window with a loss of one's own: each backward pass runs with the next forward pass."""
        session = self.engine.session
        self._say(session.tune_calls())
        self.module.train()
        of_window = []
        for batch in batches:
            with session.calling(self._step) as losses:
                loss = loss_of(self.module, self._moved(batch)) / len(batches)
                loss.backward()
                losses.append(loss)
            of_window.append(loss.detach())
        session.finish_window()
        return torch.stack(of_window).sum()

    def evaluate(self, batch: Mapping[str, Any], logits: bool = False) -> CausalLMOutput:
        """Returns the mean loss of a batch and, on request, its logits, as `model(**batch)` of the unsplit model. A
        loss of one's own comes without logits.

        Data-parallel ranks have different batches and losses: `accelerator.gather_for_metrics` collects the losses.
        """
        with watched():
            if self._loss is not None:
                if logits:
                    raise ValueError(
                        "evaluate(logits=True) with a loss of one's own: call model(**batch).logits instead"
                    )
                agree_on_action("a batch is evaluated", mesh=self.engine.mesh, given=[batch])
                self.module.eval()
                with torch.no_grad(), together():
                    return CausalLMOutput(loss=self._loss(self.module, self._moved(batch)))
            batch = self._checked(batch)
            loss, whole = self.engine.session.evaluate(
                batch, LossScale(1 / count_targets(batch)), self._step, keep_logits=logits
            )
        return CausalLMOutput(loss=loss, logits=whole)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradient of the full model down to a norm of `max_norm`; returns the norm before."""
        with watched():
            return self.engine.weights.clip_gradients(max_norm)

    def save_pretrained(self, folder: str | Path, max_shard_size: int | str | None = None) -> None:
        """Writes the checkpoint of the unsplit model's `save_pretrained`."""
        agree_on_action("model.save_pretrained() is called")
        self.engine.save_pretrained(folder, max_shard_size)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the model, see `hf_helix.runtime.divided`."""
        return self.module.parameters()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._loss is not None:
            return self.module(*args, **kwargs)
        raise RuntimeError(
            f"a model that HelixPlugin.prepare has cut cannot be called directly; use {USE_INSTEAD.calling}"
        )

    def _checked(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        check_batch(batch)
        return self._moved(batch)

    def _moved(self, batch: Any) -> Any:
        return send_to_device(batch, self.engine.mesh.device)
