"""Refusals of models, declarations and batches, by name.

In:   a model, the placements of a family's declaration, a batch.
Out:  nothing, or an error with the given value and the values that work.
Must hold: nothing is changed before a refusal.

Here are refusals of a model, its weights or a batch, under the Trainer and in a loop. Other places:
`hf_helix.config` for the value of an option, `integrations/trainer/checks.py` for arguments of a Trainer,
`integrations/accelerate/checks.py` for an `Accelerator`, `models/derived/model_code.py` for changed methods, and a
family's `check` for its sizes.
"""

import logging
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from hf_helix.config import HelixConfig
from hf_helix.models.graph.context import LossTweaks
from hf_helix.models.registry import check_ranks, family_of
from hf_helix.models.stock.causal_lm import check_head, has_towers
from hf_helix.models.stock.four_bit import check_storage, four_bit_weights
from hf_helix.models.stock.peft import LORA, base_of, check_adapters, is_peft
from hf_helix.runtime.distributed.mesh import check_world, rank, world_size
from hf_helix.runtime.failures.values import Limits
from hf_helix.runtime.rank_units import RankUnits

logger = logging.getLogger(__name__)


def check_model(model: Any, loss_tweaks: LossTweaks, weights: str | Path | None = None) -> None:
    """Refuses models that are cut already, of other types than fp32 and bf16, or at odds with loss or weights.

    Raises:
        ValueError: with the kind of the model and the way to load it.
    """
    if getattr(model, "_is_cut_by_helix", False):
        raise ValueError(
            "the model was cut by an earlier HelixTrainer or HelixPlugin.prepare; save it with trainer.save_model(...) "
            "or model.save_pretrained(...), and load it with from_pretrained(folder) for the next one"
        )
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise ValueError(
            "the model was loaded with a distributed_config, so Transformers has cut it already; load it without one, "
            "and give the same to HelixTrainer(helix_config=...), which cuts it"
        )
    if loss_tweaks.label_smoothing and getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ValueError(
            f"label_smoothing_factor={loss_tweaks.label_smoothing} with a model whose loss has a part for the balance "
            "of its experts, which the stock Trainer then leaves out; use label_smoothing_factor=0.0, or "
            "model.config.output_router_logits = False"
        )
    if loss_tweaks.label_smoothing and has_towers(base_of(model)):
        raise ValueError(
            f"label_smoothing_factor={loss_tweaks.label_smoothing} with {type(base_of(model)).__name__}: the stock "
            "Trainer smooths the loss of a token's own label there, not of the next token's; use "
            "label_smoothing_factor=0.0"
        )
    if not loss_tweaks.ends_at_decoder:
        check_head(base_of(model))
    _check_device(model, weights)
    check_storage(base_of(model))
    check_adapters(model)
    family_of(base_of(model))
    packed = four_bit_weights(model)
    if packed and not is_peft(model):
        raise ValueError(
            f"the {type(model).__name__} has weights in 4 bits and no adapters, so that nothing of it is trained or "
            f"saved; hand over a PeftModel: {LORA}"
        )
    for name, parameter in model.named_parameters():
        if parameter in packed:
            continue
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"parameter {name} is {parameter.dtype}, and torch.float32 and torch.bfloat16 are built; load the "
                "model with from_pretrained(..., dtype=torch.float32), or dtype=torch.bfloat16"
            )


def check_sizes(model: Any, config: HelixConfig, world: int | None = None) -> None:
    """Refuses a `tp_size` that does not divide the processes or the heads of the model.

    Args:
        model: a model; of an unknown family, or None, it is refused later.
        config: the options.
        world: the number of processes; None for those of this run.

    Raises:
        ValueError: names the values that work.
    """
    base = base_of(model)
    try:
        family_of(base)
    except (ValueError, AttributeError):
        return

    def fits(size: int) -> bool:
        try:
            check_ranks(base, size)
        except ValueError:
            return False
        return True

    world = world or world_size()
    check_world(world, config.tp_size, config.pp_size, config.cp_size, config.ep_size, fits)
    try:
        check_ranks(base, config.tp_size)
    except ValueError as error:
        share = world // (config.pp_size * config.cp_size)
        works = [str(size) for size in range(1, share + 1) if share % size == 0 and fits(size)]
        raise ValueError(f"{error} (with {world} processes, tp_size={' or '.join(works)})") from error


def check_layouts(model: Any, given: HelixConfig) -> None:
    """Refuses sizes of `layouts` that the model cannot take, for a later start as well as for this one.

    Raises:
        ValueError: names the layout, and the values that work.
    """
    for world, config in given.by_world().items():
        try:
            check_sizes(model, config, world)
        except ValueError as error:
            raise ValueError(f"layouts: {world}: {error}") from None


def limits_of(base: Any) -> Limits:
    """Returns the bounds of ids, labels and positions: the rows of the tables of a full model."""
    options = base.config.get_text_config()
    rope = getattr(options, "rope_parameters", None) or {}
    is_plain = rope.get("rope_type", "default") == "default"  # others are for longer sequences than those trained on
    return Limits(
        ids=base.get_input_embeddings().weight.shape[0],
        labels=table.weight.shape[0] if (table := base.get_output_embeddings()) is not None else sys.maxsize,
        positions=family_of(base).num_positions(base),
        trained_length=getattr(options, "max_position_embeddings", None) if is_plain else None,
    )


def warn_bf16_weights(model: Any) -> None:
    """Warns on rank 0 of weights trained in bf16, which may not be intended."""
    if rank() != 0:
        return
    if any(parameter.requires_grad and parameter.dtype is torch.bfloat16 for parameter in model.parameters()):
        logger.warning(
            "the trained weights are torch.bfloat16, and so are gradients and the optimizer's states, as in the stock "
            "Trainer; for fp32 weights load the model with dtype=torch.float32, and train with bf16=True"
        )


def warn_random_start(model: Any, weights: str | Path | None, seed: int) -> None:
    """Warns on rank 0 of a model on the meta device without a folder of weights, which starts at random.

    `seed` is the seed of its weights.
    """
    if rank() == 0 and weights is None and any(parameter.is_meta for parameter in model.parameters()):
        logger.warning(f"the model is on the meta device, without weights: it starts at random, seed={seed}")


def _check_device(model: Any, weights: str | Path | None) -> None:
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    make = 'with torch.device("meta"): model = AutoModelForCausalLM.from_config(config)'
    if empty and real:
        raise ValueError(
            f"parameter {empty[0]} is on the meta device, and {real[0]} is not; make all of them there ({make}), or "
            "none: from_pretrained(folder)"
        )
    if empty and hasattr(model, "peft_config"):
        raise ValueError(
            "a model with PEFT adapters is on the meta device, and no folder has both its weights and the adapters'; "
            "load the base model with from_pretrained(folder), and put the adapters on that"
        )
    if real and weights is not None:
        raise ValueError(
            f"weights={str(weights)!r} is for a model on the meta device, and this one has weights of its own; leave "
            f"it out, or use {make}"
        )


def check_placements(model: Any, placed: Collection[torch.nn.Parameter]) -> None:
    """Refuses a declaration without operators for some parameters, which would be neither trained nor saved.

    Raises:
        ValueError: names the parameters.
    """
    stray = [name for name, parameter in model.named_parameters() if parameter not in placed]
    if stray:
        raise ValueError(
            f"the declaration of {type(model).__name__} has no operator for {', '.join(stray)}; declare the module "
            "that holds them with Builder.autograd, column_parallel or row_parallel"
        )


def check_trained(model: Any, rank_units: RankUnits, was_trained: bool) -> None:
    """Refuses to train nothing, or weights that were frozen at the cut: their gradients are not in the plan.
    `was_trained`: whether any weight was trained at the cut, on any rank.

    Raises:
        ValueError: names the first weight, and the remedy.
    """
    if not was_trained:
        raise ValueError(
            "no weight of the model is trained; load adapters with PeftModel.from_pretrained(model, folder, "
            "is_trainable=True), or call requires_grad_(True) on weights before HelixTrainer is made"
        )
    stray = [name for name, parameter in model.named_parameters() if parameter not in rank_units.rows]
    if stray:
        raise ValueError(f"{stray[0]} was added after the model was cut; add adapters before HelixTrainer is made")
    frozen = {
        parameter
        for unit in rank_units.all_units.values()
        for op in unit.graphs.forward.operators
        if op.splits_dgrad_wgrad and not op.wgrad_fraction
        for parameter in unit.operators[op.forward_name].parameters
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter in frozen:
            raise ValueError(
                f"{name} is trained, and was frozen when the model was cut; call requires_grad_(True) before "
                "HelixTrainer is made"
            )


def check_batch(batch: Mapping[str, Any]) -> None:
    """Refuses batches without ids or labels.

    Raises:
        ValueError: names the content of the batch, and a collator that makes the missing part.
    """
    missing = [name for name in ("input_ids", "labels") if name not in batch]
    if "labels" in missing and "shift_labels" in batch:
        missing.remove("labels")
    if missing:
        raise ValueError(
            f"the batch has no {' and no '.join(missing)}, only {', '.join(batch)}; use a collator that makes them, "
            "such as DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
