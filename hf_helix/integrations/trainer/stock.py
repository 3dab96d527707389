"""The Trainer class under `HelixTrainerMixin`, and the arguments of its constructor.

In:   the arguments of a trainer's constructor.
Out:  the same arguments, by name, without those that only the mixin takes; the figures that the class logs with the
    loss.
Must hold: `StockTrainer` describes `transformers.Trainer`; other classes have subclasses, as in `trl.py`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState, TrainingArguments

from hf_helix.config import HelixConfig
from hf_helix.engine.cut.microbatches import LossScale
from hf_helix.engine.engine import Engine
from hf_helix.integrations.accelerate.plugin import HelixPlugin
from hf_helix.models.graph.context import TokenLoss
from hf_helix.runtime.failures.values import Health

_BY_POSITION = ("model", "args")  # as in `Trainer(model, args)`


class TrainerAttributes:
    """The attributes that the parts of `HelixTrainerMixin` share: the stock Trainer's, then those of the mixin."""

    args: TrainingArguments
    state: TrainerState
    model: Any
    accelerator: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    lr_scheduler: Any
    processing_class: Any
    data_collator: Any
    train_dataset: Any
    compute_metrics: Callable[[Any], dict[str, Any]] | None
    hp_search_backend: Any
    compute_objective: Callable[[dict[str, float]], float]
    objective: Any
    _prepare_inputs: Callable[[Any], Any]
    _get_num_items_in_batch: Callable[[list[Any], torch.device], Any]
    is_world_process_zero: Callable[[], bool]
    push_to_hub: Callable[..., Any]
    place_model_on_device: bool
    model_accepts_loss_kwargs: bool

    helix: Engine
    """The cut model: its plan, its tuning, measurements, and `figures`, all figures of the last log."""

    helix_config: HelixConfig
    _plugin: HelixPlugin
    _stated_steps: int
    """The given `gradient_accumulation_steps`; with `layouts`, of the most ranks."""

    loss_scale: Callable[[Any], LossScale]
    _stock: StockTrainer
    _has_own_loss: bool
    _gathering: Callable[[], AbstractContextManager[None]]
    _health: Health


class TrainerCall:
    """The arguments of a trainer; `model` and `args` may be given by position or by name.

    Attributes:
        positional: positional arguments for the constructor.
        named: keyword arguments for the constructor.
    """

    def __init__(self, positional: Sequence[Any], named: dict[str, Any]) -> None:
        self.positional = list(positional)
        self.named = named

    def get(self, name: str) -> Any:
        """The value of an argument; None for an absent argument."""
        index = self._index(name)
        return self.named.get(name) if index is None else self.positional[index]

    def set(self, name: str, value: Any) -> None:
        """Replaces an argument, or adds a keyword argument."""
        index = self._index(name)
        if index is None:
            self.named[name] = value
        else:
            self.positional[index] = value

    def _index(self, name: str) -> int | None:
        given = _BY_POSITION[: len(self.positional)]
        return given.index(name) if name in given else None


def take_out(kind: type, mixin: type, names: Sequence[str]) -> None:
    """Makes a trainer's class take the mixin's arguments if a constructor in front of the mixin's does not.

    The class gets a constructor that puts them aside, see `put_aside`, and calls the one that it had. So the order
    `class Mine(Seq2SeqTrainer, HelixTrainer)` works, and a constructor `__init__(self, model, args)` as well. An
    argument that the class's own constructor names is left to it.

    Args:
        kind: the class, just made.
        mixin: the class whose constructor takes the arguments.
        names: the arguments.
    """
    bases = kind.__mro__[: kind.__mro__.index(mixin)]
    constructors = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)]
    before = list(itertools.takewhile(lambda each: not hasattr(each, _TAKES_OUT), constructors))
    closed = [name for name in names if not all(_takes(each, name) for each in before)]
    taken = [name for name in closed if name not in inspect.signature(before[0]).parameters]
    if not taken:
        return
    stock = before[0]

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        vars(self).setdefault(_TAKES_OUT, {}).update({name: kwargs.pop(name) for name in taken if name in kwargs})
        stock(self, *args, **kwargs)

    setattr(init, _TAKES_OUT, True)
    kind.__init__ = init  # type: ignore[misc]


_TAKES_OUT = "taken_out_by_helix"


def _takes(constructor: Any, name: str) -> bool:
    """Returns whether a constructor takes a keyword."""
    parameters = inspect.signature(constructor).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def put_aside(trainer: Any, name: str, given: Any) -> Any:
    """Returns an argument that a constructor in front of the mixin's has put aside, or else the given one.

    Args:
        trainer: the trainer under construction.
        name: the argument.
        given: its value in the call of the mixin's constructor; None if it is not given.

    Raises:
        TypeError: both are there.
    """
    aside = vars(trainer).get(_TAKES_OUT, {}).get(name)
    if aside is not None and given is not None:
        kind = type(trainer).__name__
        raise TypeError(
            f"{kind}({name}=...): a constructor of the class gives {name} as well; give {name} once, in the call or in "
            "the constructor"
        )
    return given if aside is None else aside


class StockTrainer:
    """`transformers.Trainer`, which takes a model without changes.

    Attributes:
        figures: whether the class logs figures with the loss, see `cross_entropy`.
    """

    figures = False

    def token_loss(self, trainer: Any) -> TokenLoss | None:
        """Returns a loss of log-probabilities in place of the model's own, if the class has one."""
        return None

    def settling(self, model: Any) -> AbstractContextManager[None]:
        """Returns the context in which a model is cut."""
        return nullcontext()

    def prepare(self, trainer: Any, inputs: Any) -> Any:
        """Returns a batch of a window on the device, for the cut model. Collective."""
        return trainer._prepare_inputs(inputs)

    def evaluated(self, trainer: Any) -> Any:
        """Returns the function for evaluations in place of the cut model; None for the model."""
        return None

    def take_losses(self, trainer: Any, batches: Sequence[Any], found: Sequence[Tensor]) -> Tensor:
        """Returns the losses of micro-batches, and keeps further figures for the log, if any.

        Args:
            trainer: the trainer, with its model in the mode (training or evaluation) of these losses.
            batches: from `prepare`.
            found: the outputs of the cut model for each micro-batch.
        """
        return torch.stack([*found])

    def batch_factor(self, num_parts: int, dp_size: float) -> float:
        """Returns the factor of a loss of a micro-batch as a whole, such as the loss of routers, before gradients are
        averaged over the data-parallel ranks.

        Args:
            num_parts: the number of micro-batches of the step.
            dp_size: the factor of losses of tokens for that average.
        """
        return dp_size

    def log_entries(self, training: bool) -> dict[str, float]:
        """Returns the class's additions to a log."""
        return {}
