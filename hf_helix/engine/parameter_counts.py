"""How many parameters a model has, also once its parameters are cut.

In:   a whole model.
Out:  the counts that its own methods gave then, on every rank.
Must hold: a parameter that was frozen or trained after the cut counts as it is now, where this rank holds it.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class ParameterCounts:
    """The numbers of parameters of a whole model.

    Args:
        model: a whole model, before it is cut.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._whole = {name: (p.numel(), p.requires_grad) for name, p in model.named_parameters()}
        tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
        self._embeddings = {f"{name}.weight" for name in tables}

    def count(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Returns what `PreTrainedModel.num_parameters` returns for the whole model.

        Args:
            only_trainable: leave frozen parameters out.
            exclude_embeddings: leave the tables of embeddings out.
        """
        now = dict(self._model.named_parameters())

        def counts(name: str) -> bool:
            parameter, trained = now.get(name), self._whole[name][1]
            if parameter is not None and parameter.numel():  # other ranks' are empty, and never trained here
                trained = parameter.requires_grad
            return (trained or not only_trainable) and not (exclude_embeddings and name in self._embeddings)

        return sum(numel for name, (numel, _) in self._whole.items() if counts(name))

    def trainable_and_all(self) -> tuple[int, int]:
        """Returns what `PeftModel.get_nb_trainable_parameters` returns for the whole model."""
        return self.count(only_trainable=True), self.count()

    def put_on(self, model: Any) -> None:
        """Lets the methods of a cut model that count parameters count those of the whole model."""
        model.num_parameters = self.count
        if hasattr(model, "get_nb_trainable_parameters"):
            model.get_nb_trainable_parameters = self.trainable_and_all
