"""How many parameters a model has, also once its parameters are cut.

In:   a whole model.
Out:  the counts that its own methods gave then, on every rank.
Must hold: a parameter that was frozen or trained after the cut counts as it is now, where this rank holds it.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Sizes:
    """The sizes of the parameters of a whole model, by name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._whole = {name: (p.numel(), p.requires_grad) for name, p in model.named_parameters()}
        tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
        self._embeddings = {f"{name}.weight" for name in tables}

    def count(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As `PreTrainedModel.num_parameters` of the whole model."""
        now = dict(self._model.named_parameters())

        def counts(name: str) -> bool:
            parameter, trained = now.get(name), self._whole[name][1]
            if parameter is not None and parameter.numel():  # other ranks' are empty, and never trained here
                trained = parameter.requires_grad
            return (trained or not only_trainable) and not (exclude_embeddings and name in self._embeddings)

        return sum(numel for name, (numel, _) in self._whole.items() if counts(name))

    def trainable_and_all(self) -> tuple[int, int]:
        """As `PeftModel.get_nb_trainable_parameters` of the whole model."""
        return self.count(only_trainable=True), self.count()

    def put_on(self, model: Any) -> None:
        """Let the methods of a cut model that count parameters count the whole ones."""
        model.num_parameters = self.count
        if hasattr(model, "get_nb_trainable_parameters"):
            model.get_nb_trainable_parameters = self.trainable_and_all
