"""Refuses arguments and overrides of a Trainer that cannot be honoured, by name and before any training.

In:   training arguments, a trainer.
Out:  nothing, or an error with the option, the reason and a value that works.
Must hold: no argument and no hook of the stock Trainer is silently ignored; docs/trainer.md lists the effect
of each argument.

Refusals here concern `TrainingArguments`, other arguments of a Trainer, and overrides of its methods and attributes.
The other places: `hf_helix.config` for options of `HelixConfig`, `hf_helix.engine.cut.checks` for models and batches,
`evaluation` for outputs other than logits, `../optimizers.py` for optimizers, `../accelerate/checks.py` for
an `Accelerator` and data loaders.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from hf_helix.config import HelixConfig
from hf_helix.engine.cut.recompute import problems_of
from hf_helix.integrations.accelerate.checks import launch_problems
from hf_helix.integrations.optimizers import FUSED_OPTIMIZERS, MODEL, NAMES, check_trainers_optimizer, cuts_of
from hf_helix.integrations.trainer.trackers import check_trackers
from hf_helix.integrations.trainer.trl import SFT_TRAINER, name_of
from hf_helix.integrations.upstream import hidden_methods, mentions
from hf_helix.runtime.distributed.mesh import check_joined

# Field, test for refused values, alternative.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("fp16", bool, "fp16=False: gradients would leave its range without a loss scaler over all ranks; use bf16=True"),
    ("fp16_full_eval", bool, "fp16_full_eval=False: it would cast the model that is trained"),
    ("bf16_full_eval", bool, "bf16_full_eval=False: it would cast the model that is trained"),
    ("deepspeed", bool, "deepspeed=None: hf_helix cuts the model itself"),
    ("fsdp", bool, "fsdp=None: hf_helix cuts the model itself"),
    (
        "torch_compile_backend",
        lambda name: name not in (None, "inductor"),
        "torch_compile_backend=None: what runs between collectives and matrix products is compiled by inductor",
    ),
    (
        "torch_compile_mode",
        bool,
        "torch_compile_mode=None: what is compiled is small; CUDA graphs are an option of HelixConfig, cuda_graphs",
    ),
    (
        "activation_offloading",
        bool,
        "activation_offloading=False: it expects the backward pass of a micro-batch right after its forward pass; "
        "HelixConfig(recompute='offload') keeps inputs of layers on the host",
    ),
    ("auto_find_batch_size", bool, "auto_find_batch_size=False: ranks would find different sizes"),
    ("use_liger_kernel", bool, "use_liger_kernel=False: it replaces the layers that hf_helix cuts"),
    ("torch_empty_cache_steps", bool, "torch_empty_cache_steps=None: memory is planned"),
    ("save_on_each_node", bool, "save_on_each_node=False: the ranks write one checkpoint together"),
    ("debug", bool, "debug=[]: modules are not called, so their hooks would never run"),
    ("label_names", lambda names: names not in (None, ["labels"]), "label_names=None: labels are named labels"),
    ("ddp_find_unused_parameters", bool, "ddp_find_unused_parameters=None: no DistributedDataParallel is made"),
    ("ddp_static_graph", bool, "ddp_static_graph=None: no DistributedDataParallel is made"),
    ("ddp_bucket_cap_mb", bool, "ddp_bucket_cap_mb=None: no DistributedDataParallel is made"),
)


def check_arguments(args: Any, config: HelixConfig) -> None:
    """Refuses training arguments that cannot be honoured.

    Raises:
        ValueError: names every such argument and a value that works.
    """
    check_joined(args.world_size)
    problems = [
        f"{name}={getattr(args, name)!r}: use {instead}"
        for name, is_refused, instead in _REFUSED
        if is_refused(getattr(args, name, None))
    ]
    if args.mixed_precision not in ("no", "bf16") and not args.fp16:
        problems.append(
            f"mixed_precision={args.mixed_precision!r} of the launcher: use `mixed_precision: bf16`, or 'no'; fp16 "
            "would need a loss scaler over all ranks"
        )
    problems += _problems_of_optim(str(getattr(args.optim, "value", args.optim)), config)
    problems += _problems_of_batches(args, config)
    problems += problems_of(args, config)
    problems += launch_problems(config.pp_size, args.device, args.full_determinism)
    if args.n_gpu > 1:
        problems.append(
            f"{args.n_gpu} GPUs in one process: use one process per GPU, "
            f"`accelerate launch --num_processes {args.n_gpu}`"
        )
    if problems:
        raise ValueError("HelixTrainer cannot honour " + "\n  ".join(problems))


def _problems_of_optim(name: str, config: HelixConfig) -> list[str]:
    use = "use optim='adamw_torch', or with states in 8 bits optim='adamw_bnb_8bit'"
    if config.offload:
        use = f"use optim='adamw_torch_fused', or leave out offload={config.offload!r}"
    if name in FUSED_OPTIMIZERS:
        return [f"optim={name!r}: {use}: it updates parameters in a backward pass of the whole model, which never runs"]
    cuts = cuts_of(config, next((each for each, names in NAMES.items() if name in names.split()), MODEL))
    return [f"optim={name!r}: {use}: {cuts}"] if cuts else []


def _problems_of_batches(args: Any, config: HelixConfig) -> list[str]:
    """Returns problems with the distribution of samples: only data-parallel ranks get different samples."""
    problems = []
    options, dp_size = args.accelerator_config, args.world_size // config.ranks_per_batch
    if (options.gradient_accumulation_kwargs or {}).get("sync_each_batch"):
        problems.append(
            "accelerator_config={'gradient_accumulation_kwargs': {'sync_each_batch': True}}: use 'sync_each_batch': "
            "False: gradients are summed over the ranks once, beside the backward of the last micro-batches"
        )
    if dp_size > 1 and not options.even_batches:
        problems.append(
            f"accelerator_config={{'even_batches': False}} with {dp_size} data-parallel ranks: use 'even_batches': "
            "True: ranks must run as many batches"
        )
    if dp_size > 1 and options.dispatch_batches:
        problems.append(
            f"accelerator_config={{'dispatch_batches': True}} with {dp_size} data-parallel ranks: use "
            "'dispatch_batches': False: every rank would get the same batches"
        )
    if config.ranks_per_batch > 1 and args.train_sampling_strategy == "batch_rebalance":
        problems.append(
            f"train_sampling_strategy='batch_rebalance' with {config.ranks_per_batch} ranks for a batch: use "
            "train_sampling_strategy='group_by_length': it would give each of them a batch of its own"
        )
    return problems


def check_evaluation(dataset: Any, dp_size: int) -> None:
    """Refuses an evaluation data set whose samples could not be counted once.

    Raises:
        ValueError: names suitable data sets.
    """
    if dp_size > 1 and isinstance(dataset, torch.utils.data.IterableDataset):
        raise ValueError(
            f"evaluation on an iterable dataset with {dp_size} data-parallel ranks: its last batch is filled up, and "
            "without a length nobody knows with how many samples; use a dataset with a length, such as list(dataset)"
        )


def check_trainer(trainer: Any, args: Any) -> None:
    """Refuses problems that only a complete trainer shows: overrides, optimizers and data sets.

    Raises:
        ValueError: names the problem and an alternative.
    """
    check_overrides(trainer)
    check_trackers(trainer)
    check_trainers_optimizer(trainer)
    accelerator = trainer.accelerator
    if accelerator.mixed_precision != args.mixed_precision:
        raise ValueError(
            f"an Accelerator was made before with mixed_precision={accelerator.mixed_precision!r}, and the training "
            f"arguments say {args.mixed_precision!r}; make it after, or give both the same"
        )
    repeats = args.accelerator_config.dispatch_batches is not False and trainer.helix.mesh.dp_size > 1
    if repeats and isinstance(trainer.train_dataset, torch.utils.data.IterableDataset):
        raise ValueError(
            "an iterable dataset with several data-parallel ranks needs "
            "accelerator_config={'dispatch_batches': False}; otherwise every rank would get the same batches"
        )
    evaluated = trainer.eval_dataset
    for dataset in evaluated.values() if isinstance(evaluated, dict) else [evaluated]:
        check_evaluation(dataset, trainer.helix.mesh.dp_size)


# -- overrides -----------------------------------------------------------------------------------------------------


# Methods of the stock Trainer that are never called, with alternatives.
_NEVER_CALLED = {
    "compute_loss_context_manager": "no model is called under it; use bf16=True for autocast",
    "autocast_smart_context_manager": "no model is called under it; use bf16=True for autocast",
    "_prepare_context_parallel_inputs": "sequences are cut by HelixConfig(cp_size=...)",
    "_wrap_model": "the cut model is not called; change the model before it is given to the trainer",
}


# Methods that the mixin replaces only for the built-in loss.
_CALLED_FOR_OWN_LOSSES = ("training_step", "prediction_step")


def check_overrides(trainer: Any) -> None:
    """Refuses overrides without effect. Called before every training and evaluation, since attributes may change.

    Raises:
        ValueError: names the override and an alternative.
    """
    name = type(trainer).__name__
    if trainer.model is not trainer.helix.model:
        raise ValueError(
            f"{name} has replaced the model after it was cut, by a {type(trainer.model).__name__}; "
            "change it before, such as with peft.get_peft_model(model, config)"
        )
    called = _CALLED_FOR_OWN_LOSSES if trainer._has_own_loss else ()
    for hook, hidden in hidden_methods(type(trainer)):
        if hidden is not Trainer and name_of(hidden) != SFT_TRAINER and hook not in called:
            if "super" in mentions(vars(hidden)[hook]):
                base = next(each for each in hidden.__mro__[1:] if hook in vars(each)).__name__
                classes = (
                    f"`class Cut{base}(HelixTrainerMixin, {base})` and `class {name}({hidden.__name__}, Cut{base})`"
                )
                remedy = f"write {classes}"
            else:
                other = "compute the loss in compute_loss" if hook == "training_step" else f"call super().{hook} in it"
                remedy = f"in front it would hide the mixin's, since it does not call super().{hook}: {other}"
            raise ValueError(
                f"{name} has {hidden.__name__} behind HelixTrainerMixin, so that {hidden.__name__}.{hook} is never "
                f"called; {remedy}"
            )
    if trainer._has_own_loss:
        return
    for hook, instead in _NEVER_CALLED.items():
        owner = next(kind for kind in type(trainer).__mro__ if hook in vars(kind))
        if hook in vars(trainer) or (owner is not Trainer and name_of(owner) != SFT_TRAINER):
            raise ValueError(f"{name} overrides {hook}, which is never called: {instead}")
    for hook in ("compute_loss", "compute_loss_func"):
        if vars(trainer).get(hook) is not None:
            raise ValueError(
                f"{name}.{hook} was assigned after the model was cut for the built-in loss; give compute_loss_func to "
                "the trainer, or override compute_loss in its class"
            )
    if getattr(trainer, "loss_is_scaled_for_ga", None) is False:
        raise ValueError(f"{name}.loss_is_scaled_for_ga is False, and the loss of a window is scaled: leave it None")
    smoother, factor = trainer.label_smoother, trainer.args.label_smoothing_factor
    usual = smoother is None if factor == 0 else type(smoother) is LabelSmoother and smoother.epsilon == factor
    if not usual:
        raise ValueError(f"{name}.label_smoother is set by hand; use TrainingArguments(label_smoothing_factor=...)")
