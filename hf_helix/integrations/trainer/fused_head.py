"""TRL's fused heads on a head that ranks divide.

In:   what TRL's fused head passes to its function: hidden states, the parameters of the head, labels.
Out:  what the function returns for the full head, on every rank of a batch.
Must hold: TRL is not imported; heads of models that are not cut, such as a reference model's, run TRL's own function.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from hf_helix.operators.vocab_log_probs import HeadOptions, vocab_log_probs

_FIGURES = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def cut_fused_head() -> None:
    """Makes TRL's fused heads, where a script has imported them, compute with divided heads."""
    for (module, name), kind in _STANDING.items():
        stock = getattr(sys.modules.get(module), name, None)
        if stock is not None and not isinstance(stock, kind):
            setattr(sys.modules[module], name, kind(stock))


class _WholeHead:
    """Stands for TRL's `ChunkedDivergenceFunction`, of the logits of two heads: gathers a divided one."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def apply(self, *arguments: Any) -> Any:
        """Returns what TRL's function returns for full heads."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._stock.apply(*map(_whole, arguments))


def _whole(value: Any) -> Any:
    division = getattr(value, "_division", None)
    return value if division is None or not division.is_above else division.full(value)


class _FusedHead:
    """Stands for TRL's `ChunkedLogProbFunction`."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def apply(self, hidden: Tensor, weight: Any, bias: Any, targets: Tensor, *options: Any) -> tuple[Any, ...]:
        """Returns TRL's figures per token.

        Args:
            hidden: [tokens, hidden].
            weight: a parameter, perhaps divided.
            bias: likewise, or None.
            targets: [tokens].
            options: temperature, rows of a tile, bound of the logits, their scale, and names of the wanted figures.
        """
        division = getattr(weight, "_division", None)
        if division is None or not division.is_above:
            return tuple(self._stock.apply(hidden, weight, bias, targets, *options))
        wanted = ("log_probs", *(name for name in _FIGURES if name in options[4]))
        with torch._C.DisableTorchFunctionSubclass():
            if not division.is_here:
                return _unpacked(division.received(hidden, (len(wanted), len(hidden)), torch.float32), wanted)
            parameters = [None if each is None else division.recorded(each) for each in (weight, bias)]
            results = self._run(division, (hidden, *parameters, targets), options)
            if division.mesh.pipe.group is not None:
                division.share(torch.stack([each.detach().float() for each in results if each is not None]))
        return results

    def _run(self, division: Any, tensors: Any, options: tuple[Any, ...]) -> tuple[Any, ...]:
        if not division.is_cut:
            return tuple(self._stock.apply(*tensors, *options))
        temperature, rows, softcap, scale, wanted = options
        head, (hidden, weight, bias, targets) = HeadOptions(temperature, softcap, scale, tuple(wanted), rows), tensors
        return vocab_log_probs(hidden, weight, bias, targets, division.mesh.tp, division.placement.length, head)


def _unpacked(values: Tensor, wanted: tuple[str, ...]) -> tuple[Any, ...]:
    found: dict[str, Any] = dict(zip(wanted, values.unbind(), strict=True))
    for name in found.keys() - {"log_probs", "entropy"}:
        found[name] = found[name].detach().bool() if name == "is_top1" else found[name].detach()
    return tuple(found.get(name) for name in ("log_probs", *_FIGURES))


_STANDING: dict[tuple[str, str], Any] = {
    ("trl.trainer.utils", "_ChunkedLogProbFunction"): _FusedHead,
    ("trl.trainer.distillation_trainer", "ChunkedDivergenceFunction"): _WholeHead,
}
"""What stands for functions of TRL, by module and name."""
