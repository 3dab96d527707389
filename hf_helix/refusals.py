"""What cannot be honoured, refused by name before any training.

In:   training arguments, a model, a trainer.
Out:  nothing, or an error that names the option, the reason and a value that works.
Must hold: no argument of the stock Trainer is silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from hf_helix.operators.unit import Placement
from hf_helix.plugin import HelixPlugin
from hf_helix.runtime.mesh import check_joined

# Optimizers that treat every element by itself, so that a slice is updated as it would be in the whole.
ELEMENTWISE_OPTIMIZERS = (
    "adamw_torch",
    "adamw_torch_fused",
    "sgd",
    "adagrad",
    "rmsprop",
    "schedule_free_adamw",
    "schedule_free_sgd",
)

ELEMENTWISE_CLASSES = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop)

# Field, whether its value is refused, what to do instead.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("fp16", bool, "fp16=False: gradients would leave its range without a loss scaler over all ranks; use bf16=True"),
    ("fp16_full_eval", bool, "fp16_full_eval=False: it would cast the model that is trained"),
    ("bf16_full_eval", bool, "bf16_full_eval=False: it would cast the model that is trained"),
    ("activation_checkpointing", bool, "activation_checkpointing=False: recomputation is not built yet"),
    ("gradient_checkpointing", bool, "gradient_checkpointing=False: recomputation is not built yet"),
    ("deepspeed", bool, "deepspeed=None: hf_helix cuts the model itself"),
    ("fsdp", bool, "no fsdp: hf_helix cuts the model itself"),
    ("torch_compile", bool, "torch_compile=False: operators are issued one by one"),
    ("label_smoothing_factor", bool, "label_smoothing_factor=0.0: the loss over a cut vocabulary has no smoothing yet"),
    ("neftune_noise_alpha", lambda alpha: alpha is not None, "neftune_noise_alpha=None: not built yet"),
    ("auto_find_batch_size", bool, "auto_find_batch_size=False: ranks would find different sizes"),
    ("use_liger_kernel", bool, "use_liger_kernel=False: it replaces the layers that hf_helix cuts"),
    ("torch_empty_cache_steps", bool, "torch_empty_cache_steps=None: memory is planned"),
    ("save_on_each_node", bool, "save_on_each_node=False: one rank writes the model"),
    ("load_best_model_at_end", bool, "load_best_model_at_end=False: loading into a cut model is not built yet"),
)


def check_arguments(args: Any) -> None:
    """Refuse training arguments that cannot be honoured.

    Raises:
        ValueError: names every such argument and a value that works.
    """
    check_joined(args.world_size)
    problems = [
        f"{name}={getattr(args, name)!r}: use {instead}"
        for name, bad, instead in _REFUSED
        if bad(getattr(args, name, None))
    ]
    if args.mixed_precision not in ("no", "bf16") and not args.fp16:
        problems.append(
            f"mixed_precision={args.mixed_precision!r} of the launcher: use `mixed_precision: bf16`, or 'no'; fp16 "
            "would need a loss scaler over all ranks"
        )
    optimizer = getattr(args.optim, "value", args.optim)
    if optimizer not in ELEMENTWISE_OPTIMIZERS:
        problems.append(
            f"optim={optimizer!r}: not built yet for cut parameters; use one of {', '.join(ELEMENTWISE_OPTIMIZERS)}"
        )
    if args.save_strategy != SaveStrategy.NO and not args.save_only_model:
        problems.append(
            f"save_strategy={getattr(args.save_strategy, 'value', args.save_strategy)!r}: resuming is not built yet, "
            "so checkpoints hold the model only; use save_only_model=True, or save_strategy='no' and save_model()"
        )
    if args.n_gpu > 1:
        problems.append(
            f"{args.n_gpu} GPUs in one process: use one process per GPU, "
            f"`accelerate launch --num_processes {args.n_gpu}`"
        )
    plugin = args.parallelism_config
    if plugin is not None and not isinstance(plugin, HelixPlugin) and plugin.total_size > 1:
        problems.append(f"parallelism_config={plugin!r}: use HelixPlugin(...), or none")
    if problems:
        raise ValueError("HelixTrainer cannot honour these training arguments:\n  " + "\n  ".join(problems))


def check_model(model: Any) -> None:
    """Refuse models that are not whole, plain and in fp32 or bf16.

    Raises:
        ValueError: says what the model is and how to load it.
    """
    if getattr(model, "_is_cut_by_helix", False):
        raise ValueError(
            "the model was cut by an earlier HelixTrainer; save it with trainer.save_model(folder), and load it with "
            "from_pretrained(folder) for the next one"
        )
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise ValueError(
            "the model was loaded with a distributed_config, so Transformers has cut it already; "
            "load it without one, HelixTrainer cuts it"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"parameter {name} is on the meta device; load the weights first: from_pretrained(folder)")
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"parameter {name} is {parameter.dtype}, and torch.float32 and torch.bfloat16 are built; load the "
                "model with from_pretrained(..., dtype=torch.float32), or dtype=torch.bfloat16"
            )
        if parameter.dtype != model.dtype:
            raise ValueError(
                f"parameter {name} is {parameter.dtype}, others are {model.dtype}; load the model with one type for "
                "all: from_pretrained(..., dtype=torch.float32), or dtype=torch.bfloat16"
            )


def check_placements(model: Any, placements: Mapping[torch.nn.Parameter, Placement]) -> None:
    """Refuse a family's declaration that leaves parameters out: they would be neither trained nor saved.

    Raises:
        ValueError: names them.
    """
    stray = [name for name, parameter in model.named_parameters() if parameter not in placements]
    if stray:
        raise ValueError(
            f"the declaration of {type(model).__name__} has no operator for {', '.join(stray)}; declare the module "
            "that holds them with Builder.local, column_parallel or row_parallel"
        )


def check_batch(batch: Mapping[str, Any]) -> None:
    """Refuse batches that cannot be trained on.

    Raises:
        ValueError: says what the batch holds and what makes the missing part.
    """
    missing = [name for name in ("input_ids", "labels") if name not in batch]
    if "labels" in missing and "shift_labels" in batch:
        missing.remove("labels")
    if missing:
        raise ValueError(
            f"the batch has no {' and no '.join(missing)}, only {', '.join(batch)}; use a collator that makes them, "
            "such as DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )


def check_trainer(trainer: Any, args: Any) -> None:
    """Refuse what can only be seen once the Trainer is built.

    Raises:
        ValueError: as `check_arguments`.
    """
    if trainer.compute_loss_func is not None:
        raise ValueError("compute_loss_func is not built yet: the loss is the model's own; leave it out")
    if type(trainer).compute_loss is not Trainer.compute_loss:
        raise ValueError(
            f"{type(trainer).__name__} overrides compute_loss, which is never called: the loss is computed over a cut "
            "vocabulary; remove the override"
        )
    _check_optimizer(trainer)
    accelerator = trainer.accelerator
    if accelerator.mixed_precision != args.mixed_precision:
        raise ValueError(
            f"an Accelerator was made before with mixed_precision={accelerator.mixed_precision!r}, and the training "
            f"arguments say {args.mixed_precision!r}; make it after, or give both the same"
        )
    if accelerator.parallelism_config is not args.parallelism_config:
        raise ValueError(
            "an Accelerator was made before the Trainer, with another parallelism_config; make it after, or give it "
            "the same HelixPlugin"
        )
    datasets = (trainer.train_dataset, trainer.eval_dataset)
    repeats = args.accelerator_config.dispatch_batches is not False and trainer.mesh.dp_size > 1
    if repeats and any(isinstance(dataset, torch.utils.data.IterableDataset) for dataset in datasets):
        raise ValueError(
            "an iterable dataset with several data-parallel ranks needs "
            "accelerator_config={'dispatch_batches': False}; otherwise every rank would get the same batches"
        )


def _check_optimizer(trainer: Any) -> None:
    works = ", ".join(kind.__name__ for kind in ELEMENTWISE_CLASSES)
    makers = [kind for kind in type(trainer).__mro__ if "create_optimizer" in vars(kind)]
    overridden = any(kind.__module__ not in ("hf_helix.trainer", Trainer.__module__) for kind in makers)
    if trainer.optimizer_cls_and_kwargs is not None or overridden:
        raise ValueError(
            "optimizer_cls_and_kwargs and overrides of create_optimizer are not built yet for cut parameters; use "
            f"TrainingArguments(optim=...) or optimizers=(...), one of {works}"
        )
    if trainer.optimizer is not None and not isinstance(trainer.optimizer, ELEMENTWISE_CLASSES):
        raise ValueError(
            f"optimizers=({type(trainer.optimizer).__name__}, ...): it may not update a slice as it would the whole; "
            f"use one of {works}"
        )
    if trainer.optimizer is not None and trainer.helix_config.shard_optimizer:
        raise ValueError(
            f"optimizers=({type(trainer.optimizer).__name__}, ...) was given, and shard_optimizer=True makes its own; "
            "use TrainingArguments(optim=...), or shard_optimizer=False"
        )
