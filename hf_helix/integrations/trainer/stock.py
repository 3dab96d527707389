"""Stands for the class under `HelixTrainerMixin`, and for the arguments that it is made with.

In:   the arguments of a trainer's constructor.
Out:  the same arguments, by name; what the class under the mixin would do to the model, done before the model is cut.
Must hold: `StockTrainer` stands for `transformers.Trainer`; a class that needs more is a subclass, as in `trl.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import TrainingArguments

_BY_POSITION = ("model", "args")  # what scripts write as `Trainer(model, args)`


class TrainerCall:
    """The arguments that a trainer is made with; `model` and `args` may be given by position or by name.

    Attributes:
        positional: for the constructor of the class under the mixin.
        named: the same, by name.
    """

    def __init__(self, positional: Sequence[Any], named: dict[str, Any]) -> None:
        self.positional = list(positional)
        self.named = named

    def get(self, name: str) -> Any:
        """The value of an argument; None where it is not given."""
        place = self._place(name)
        return self.named.get(name) if place is None else self.positional[place]

    def set(self, name: str, value: Any) -> None:
        """Replaces an argument, or gives it by name."""
        place = self._place(name)
        if place is None:
            self.named[name] = value
        else:
            self.positional[place] = value

    def _place(self, name: str) -> int | None:
        given = _BY_POSITION[: len(self.positional)]
        return given.index(name) if name in given else None


class StockTrainer:
    """`transformers.Trainer`, which takes a model as it is.

    Attributes:
        figures: whether it logs figures beside the loss, see `cross_entropy`.
    """

    figures = False

    def take_losses(self, trainer: Any, batches: Sequence[Any], found: Tensor) -> Tensor:
        """Returns the losses of micro-batches, and keeps the figures that stand behind them, if any.

        Args:
            trainer: the trainer, whose model is in the mode that counts.
            batches: the micro-batches.
            found: what the cut model gives for each.
        """
        return found

    def log_entries(self, training: bool) -> dict[str, float]:
        """Returns what the class adds to a log."""
        return {}

    def settle(self, call: TrainerCall) -> None:
        """Gives the call the arguments, and the model, that the class itself would make of what is given."""
        if call.get("args") is None:
            call.set("args", TrainingArguments(output_dir="tmp_trainer"))

    def model_options(self, args: Any) -> dict[str, Any]:
        """The options of `from_pretrained` for a model that is given as the path of its folder."""
        return dict(getattr(args, "model_init_kwargs", None) or {})

    def check_call(self, kind: type, call: TrainerCall) -> None:
        """Refuses what the class would do and hf_helix cannot honour.

        Args:
            kind: the class of the trainer, for the error.
            call: what it is made with.

        Raises:
            ValueError: names every such option and a value that works.
        """

    def add_adapters(self, model: Any, call: TrainerCall) -> Any:
        """The model with the adapters that the class would add to it after it is cut."""
        return model

    def check_model(self, model: Any, args: Any) -> None:
        """Refuses a model whose loss the class would change.

        Args:
            model: before it is cut.
            args: the training arguments.

        Raises:
            ValueError: says what to change.
        """
