"""References, teachers and reward models: frozen models of any class, which a loss calls besides the trained model.

In:   a model that a class or a script prepares for evaluation, by `Accelerator.prepare_model(model,
      evaluation_mode=True)`.
Out:  the model, cut in place over the same ranks. Calls without gradients return the full model's results.
Must hold: a model that cannot be cut stays full on every rank, and a line says why. TRL is not imported.

TRL's fused heads take hidden states, the parameters of the head, and labels; on a divided head they return what the
function returns for the full head, on every rank of a batch. Heads of models that are not cut run TRL's own function.
"""

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_helix.config import HelixConfig
from hf_helix.engine.cut.build import RunOptions
from hf_helix.engine.engine import Engine
from hf_helix.integrations.accelerate.checks import run_in_mixed_precision
from hf_helix.models.direct_use import Instead
from hf_helix.models.graph.context import LossTweaks
from hf_helix.models.stock.peft import base_of
from hf_helix.operators.vocabulary.log_probs import HeadOptions, vocab_log_probs
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.notices import say


def cut_references(
    accelerator: Any, num_layers: int | None, config: HelixConfig, mesh: Mesh, options: RunOptions, instead: Instead
) -> None:
    """Makes an `Accelerator` cut the models that it prepares for evaluation, and keep their engines.

    Args:
        accelerator: of the trainer.
        num_layers: of the trained model.
        config, mesh, options, instead: of the trained model's engine, see `Engine`.
    """
    stock, engines = accelerator.prepare_model, list[Engine]()
    copies = config.dp_replicate_size if config.shard_parameters else 1
    config = replace(
        config,
        plan="greedy",
        cuda_graphs=False,
        shard_optimizer=False,
        dp_replicate_size=copies,
        offload=None,
        verify_every=0,
        spread_vocabulary=False,
    )
    tweaks = LossTweaks(ends_at_decoder=True)
    options = RunOptions(seed=options.seed, autocast_dtype=options.autocast_dtype, loss_tweaks=tweaks)

    def prepare_model(given: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("evaluation_mode") or not isinstance(base_of(given), PreTrainedModel):
            return stock(given, *args, **kwargs)
        trained = [parameter for parameter in given.parameters() if parameter.requires_grad]
        given.requires_grad_(False)
        of_layers = config.layers_per_stage if num_layers_of(given) == num_layers else None
        try:
            engine = Engine(given, replace(config, layers_per_stage=of_layers), mesh, options, instead)
        except ValueError as error:  # on every rank alike, before anything is cut
            for parameter in trained:
                parameter.requires_grad_(True)
            size = sum(parameter.nbytes for parameter in given.parameters()) / 1e9
            say(f"{type(given).__name__} lies whole on every rank, {size:.2f} GB: {error}")
            return stock(given, *args, **kwargs)
        engines.append(engine)
        engine.weights.move_to(mesh.device)
        run_in_mixed_precision(given, accelerator)
        cut_fused_head()
        return given.eval()

    accelerator.prepare_model = prepare_model


def num_layers_of(model: Any) -> Any:
    """Returns the number of decoder layers of a model; None if its configuration says none."""
    return getattr(base_of(model).config.get_text_config(), "num_hidden_layers", None)


# -- TRL's fused heads -----------------------------------------------------------------------------------------------

_FIGURES = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def cut_fused_head() -> None:
    """Makes TRL's fused heads, if a script has imported them, compute with divided heads."""
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
    return value if division is None or not division.part.row.is_above else division.full(value)


class _FusedHead:
    """Stands for TRL's `ChunkedLogProbFunction`."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def apply(self, hidden: Tensor, weight: Any, bias: Any, targets: Tensor, *options: Any) -> tuple[Any, ...]:
        """Returns TRL's figures per token.

        Args:
            hidden: [tokens, hidden].
            weight: a parameter, perhaps divided.
            bias: the head's, or None.
            targets: [tokens].
            options: temperature, rows of a tile, bound of the logits, their scale, and names of the wanted figures.
        """
        division = getattr(weight, "_division", None)
        if division is None or not division.part.row.is_above:
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
        if not division.part.is_cut:
            return tuple(self._stock.apply(*tensors, *options))
        temperature, rows, softcap, scale, wanted = options
        head, (hidden, weight, bias, targets) = HeadOptions(temperature, softcap, scale, tuple(wanted), rows), tensors
        return vocab_log_probs(hidden, weight, bias, targets, division.mesh.tp, division.part.row.cut.length, head)


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
