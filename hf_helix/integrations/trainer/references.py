"""Reference models: frozen models of the trained model's class, which TRL's classes call beside it.

In:   a model that a class prepares for evaluation, by `Accelerator.prepare_model(model, evaluation_mode=True)`.
Out:  the model, cut in place over the same ranks. Calls without gradients return what the full model returns.
Must hold: models of other classes or sizes, such as reward models, stay full on every rank.
"""

from dataclasses import replace
from typing import Any

from hf_helix.config import HelixConfig
from hf_helix.engine.build import RunOptions
from hf_helix.engine.engine import Engine
from hf_helix.integrations.accelerate.mixed_precision import run_in_mixed_precision
from hf_helix.integrations.trainer.fused_head import cut_fused_head
from hf_helix.models.direct_use import Instead
from hf_helix.models.graph.context import LossTweaks
from hf_helix.models.peft import base_of
from hf_helix.runtime.distributed.mesh import Mesh


def cut_references(
    accelerator: Any, model: Any, config: HelixConfig, mesh: Mesh, options: RunOptions, instead: Instead
) -> None:
    """Makes an `Accelerator` cut the reference models of a trained model, and keep their engines.

    Args:
        model: the trained model, before it is cut.
        config, mesh, options, instead: of the trained model's engine, see `Engine`.
    """
    stock, kind, engines = accelerator.prepare_model, _kind_of(model), list[Engine]()
    config = replace(config, plan="greedy", cuda_graphs=False, shard_optimizer=False, offload=None)
    tweaks = LossTweaks(ends_at_decoder=True)
    options = RunOptions(seed=options.seed, autocast_dtype=options.autocast_dtype, loss_tweaks=tweaks)

    def prepare_model(given: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("evaluation_mode") or _kind_of(given) != kind:
            return stock(given, *args, **kwargs)
        given.requires_grad_(False)
        engines.append(Engine(given, config, mesh, options, instead))
        engines[-1].move_to(mesh.device)
        run_in_mixed_precision(given, accelerator)
        cut_fused_head()
        return given.eval()

    accelerator.prepare_model = prepare_model


def _kind_of(model: Any) -> Any:
    """Returns the class of a model, and the names and shapes of its parameters."""
    base = base_of(model)
    return type(base), [(name, parameter.shape) for name, parameter in base.named_parameters()]
