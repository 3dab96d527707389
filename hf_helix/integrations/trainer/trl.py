"""TRL's trainers under `HelixTrainerMixin`: their arguments, figures that `SFTTrainer` logs, and generated data.

In:   the arguments of a trainer's constructor; the outputs of the cut model.
Out:  the arguments as the class settles them; the figures of SFTTrainer's own `compute_loss`.
Must hold: if the loss of SFTTrainer is the built-in one, `SFTTrainer.compute_loss`, which computes the same loss and
figures for the logs, need not be called. The built-in loss, which is computed within the plan, is that of causal
language models, and nothing else. Classes with losses of their own gather figures over processes; those that generate
their data (GRPO, RLOO, distillation) also slice a generation batch by processes: the data-parallel ranks are these
processes. Ranks that share a batch have the same slice and draw alike; figures count every batch once. TRL is not
imported.
"""

import contextlib
import copy
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments, set_seed

from hf_helix.integrations.accelerate.accelerator import gather_batches
from hf_helix.integrations.trainer.stock import StockTrainer, TrainerCall
from hf_helix.models.derived.model_code import has_head_beside, has_stock_loss
from hf_helix.models.graph.balance import balance_of
from hf_helix.models.registry import REGISTERED
from hf_helix.models.stock.batch_inputs import count_targets
from hf_helix.models.stock.causal_lm import has_causal_head
from hf_helix.models.stock.peft import base_of
from hf_helix.runtime.distributed.mesh import Mesh, rank, world_size

_MODULE = "trl.trainer.sft_trainer"
SFT_TRAINER = f"{_MODULE}.SFTTrainer"

# Classes that read a model given by name as a causal language model, and change no weight of it.
_CAUSAL = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")


def is_sft(kind: type) -> bool:
    """Returns whether a class is TRL's SFTTrainer or a subclass."""
    return any(name_of(base) == SFT_TRAINER for base in kind.__mro__)


def name_of(kind: type) -> str:
    """Returns the name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_of_trl(kind: type) -> type | None:
    """Returns the class of TRL under a trainer's class, if any."""
    return next((base for base in kind.__mro__ if base.__module__.startswith("trl.")), None)


def settle_arguments(kind: type, call: TrainerCall) -> None:
    """Makes the training arguments that a class makes of none; SFTTrainer also makes its own of other arguments."""
    args, model, trl = call.get("args"), call.get("model"), _class_of_trl(kind)
    if trl is None:
        call.set("args", TrainingArguments(output_dir="tmp_trainer") if args is None else args)
        return
    name = trl.__name__.removesuffix("Trainer")
    config: Any = getattr(sys.modules[trl.__module__], f"{name}Config", None)
    if args is None and config is not None:
        of_model = Path(model if isinstance(model, (str, os.PathLike)) else model.config.name_or_path).name
        call.set("args", config(f"{of_model}-{name}"))
    elif name_of(trl) == SFT_TRAINER and not isinstance(args, config):
        call.set("args", config(**{each.name: getattr(args, each.name) for each in fields(args) if each.init}))
    elif args is None:
        raise ValueError(f"{trl.__name__}(args=None): give its training arguments, which name a folder, args=...")


def is_read_by_slices(kind: type, call: TrainerCall) -> bool:
    """Returns whether each rank can read its slices of a model given by name: the class does not read it by itself, or
    would read a causal language model from a folder, and leave its weights as they are."""
    trl, args, folder = _class_of_trl(kind), call.get("args"), Path(call.get("model"))
    if trl is None:
        return True
    changes = [call.get("peft_config"), call.get("quantization_config")]
    changes += [getattr(args, name, False) for name in ("trust_remote_code", "precompute_ref_log_probs")]
    template = str(getattr(args, "chat_template_path", None) or ".jinja")  # a model's template adds tokens
    is_kept = not any(changes) and template.endswith((".jinja", ".j2"))
    return trl.__name__ in _CAUSAL and is_kept and (folder / "config.json").is_file()


def model_options(kind: type, args: Any) -> dict[str, Any]:
    """Returns the options of `from_pretrained` for a model given as a folder. TRL's classes read it in fp32 unless the
    arguments have another dtype."""
    usual = {} if _class_of_trl(kind) is None else {"dtype": torch.float32}
    return {**usual, **(getattr(args, "model_init_kwargs", None) or {})}


def precompute_on_device(trainer: Any) -> None:
    """Makes a trainer without a reference model compute the log-probabilities of its reference beforehand by the model
    before the cut, on the device."""
    stock = getattr(trainer, "_precompute_ref_logps", None)
    if stock is None:
        return

    def precompute(*args: Any, **kwargs: Any) -> Any:
        model = trainer.model
        is_moved = not trainer._is_cut and trainer.ref_model is None
        home = model.device
        try:
            if is_moved:
                model.to(trainer.args.device)
            return stock(*args, **kwargs)
        finally:
            if is_moved:
                model.to(home)

    trainer._precompute_ref_logps = precompute


def count_tokens_once(trainer: Any) -> None:
    """Makes a trainer of TRL count tokens as gathered: `gather_for_metrics` has each batch once, and TRL would divide
    by the ranks that share it."""
    if hasattr(trainer, "_tp_size"):
        trainer._tp_size = 1


def settle_routers(args: Any, model: Any) -> bool:
    """Writes into a model whether SFTTrainer adds a loss of routers, and its factor, which it would do after the cut.

    Returns:
        Whether it does.
    """
    config, asked = model.config.get_text_config(), args.router_aux_loss_coef
    coefficient = getattr(config, "router_aux_loss_coef", 0.0) if asked is None else asked
    is_added = hasattr(config, "output_router_logits") and coefficient != 0.0
    if hasattr(config, "router_aux_loss_coef"):
        config.output_router_logits, config.router_aux_loss_coef = is_added, coefficient
    if hasattr(base_of(model), "router_aux_loss_coef"):
        base_of(model).router_aux_loss_coef = coefficient
    return is_added


def _is_built_in(args: Any, model: Any) -> bool:
    """Returns whether SFTTrainer's loss with a loss of routers is the one of the plan: the routers' is Mixtral's, and
    the labels are not smoothed, since SFTTrainer then leaves it out."""
    try:
        return not args.label_smoothing_factor and balance_of(base_of(model)) is not None
    except ValueError:
        return False


def _tokens_of(batch: Any) -> Tensor:
    """Returns the number of tokens of a micro-batch without padding, as a scalar; joined rows have no padding."""
    return batch["attention_mask"].sum() if "attention_mask" in batch else (batch["position_ids"][0] >= 0).sum()


class StockSFTTrainer(StockTrainer):
    """TRL's `SFTTrainer`, which logs entropy, accuracy and tokens with the loss."""

    figures = True

    def __init__(self) -> None:
        self._kept: dict[bool, list[Tensor]] = {True: [], False: []}
        self._tokens: Any = 0

    def take_losses(self, trainer: Any, batches: Sequence[Any], found: Sequence[Tensor]) -> Tensor:
        """Keeps entropy, right predictions, targets and tokens [micro-batches, 4], summed as SFTTrainer does, and the
        mean loss of routers, if any."""
        values = torch.stack([*found])
        counts = torch.stack([torch.stack((count_targets(batch), _tokens_of(batch))) for batch in batches])
        rows = torch.cat((values[:, 1:3], counts.to(values), values[:, 3:]), 1)[None]
        of_ranks = trainer.accelerator.gather_for_metrics(rows)
        rows = torch.cat((of_ranks[..., :4].sum(0), of_ranks[..., 4:].mean(0)), 1)
        self._kept[trainer.model.training].append(rows)
        self._tokens += rows[:, 3].sum(dtype=torch.float64) if trainer.model.training else 0
        return values[:, 0]

    def batch_factor(self, num_parts: int, dp_size: float) -> float:
        """Returns the factor of the loss of routers: SFTTrainer averages it over micro-batches and ranks."""
        return 1 / num_parts

    def log_entries(self, training: bool) -> dict[str, float]:
        """Returns the figures since the last log, with SFTTrainer's names and averages."""
        kept, self._kept[training] = self._kept[training], []
        if not kept:
            return {}
        entropy, right, targets, _, *routers = torch.cat(kept).unbind(1)
        means = {"entropy": entropy, "mean_token_accuracy": right}
        entries = {name: float((sums / targets.clamp(min=1)).mean()) for name, sums in means.items()}
        if routers:
            entries["aux_loss"] = float(routers[0].mean())
        entries["num_tokens"] = int(self._tokens)
        return entries if training else {f"eval_{name}": value for name, value in entries.items()}


# -- losses of the user's own ----------------------------------------------------------------------------------------


def has_own_loss(trainer: Any, model: Any, compute_loss_func: Any) -> bool:
    """Returns whether a trainer with its arguments, or its model before the cut, computes a loss other than the
    next-token loss of Transformers."""
    owner = next(base for base in type(trainer).__mro__ if "compute_loss" in vars(base))
    is_sft = name_of(owner) == SFT_TRAINER
    if (owner is not Trainer and not is_sft) or compute_loss_func is not None:
        return True
    if is_sft and settle_routers(trainer.args, model) and not _is_built_in(trainer.args, model):
        return True
    if is_sft and trainer.args.loss_type != "nll":
        return True
    base = base_of(model)
    is_declared = type(base).__name__ in REGISTERED
    return not has_causal_head(base) or not has_stock_loss(base) or (not is_declared and has_head_beside(base))


# -- trainers that generate their data -------------------------------------------------------------------------------

_MODULES = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "trl.trainer.distillation_trainer")
_GATHERING = ("gather", "gather_object")
_SIZE = "generation_batch_size"


def is_of_trl(kind: type) -> bool:
    """Returns whether a class of trainers is TRL's, or a subclass."""
    return _class_of_trl(kind) is not None


def is_online(kind: type) -> bool:
    """Returns whether a class of trainers generates its data."""
    return hasattr(kind, "_generate_and_score_completions")


def settle_generation(call: TrainerCall, ranks_per_batch: int) -> None:
    """Divides the generation batch, which TRL counts for every process, by the ranks that share a batch.

    The training arguments belong to the user, so the trainer gets a copy.

    Raises:
        ValueError: the rest does not hold whole groups of generations.
    """
    args = copy.copy(call.get("args"))
    if not hasattr(args, _SIZE):
        return
    size = getattr(args, _SIZE) // ranks_per_batch
    if size % args.num_generations:
        raise ValueError(
            f"num_generations={args.num_generations} does not divide a generation batch of {size} (per_device_train_"
            f"batch_size * steps_per_generation * data-parallel ranks, with {ranks_per_batch} ranks to a batch); use "
            f"per_device_train_batch_size={args.num_generations}, or a multiple"
        )
    setattr(args, _SIZE, size)
    call.set("args", args)


def count_batches_once(trainer: Any, mesh: Mesh) -> None:
    """Makes a class of TRL gather every batch once. To one that generates its data, the data-parallel ranks are the
    processes, each with a seed of its own."""
    if not is_online(type(trainer)):
        trainer.accelerator = _OnceEachBatch(trainer.accelerator, mesh)
        return
    trainer.accelerator = _DataParallelRanks(trainer.accelerator, mesh)
    set_seed(trainer.args.seed + rank() // mesh.ranks_per_batch)  # as `set_seed(seed, device_specific=True)` does


def gathering_from_all(trainer: Any) -> AbstractContextManager[None]:
    """Returns the context in which a trainer gathers from every process: its code divides by the ranks that share a
    batch."""
    given = trainer.accelerator
    return attributes(trainer, accelerator=given.stock if isinstance(given, _OnceEachBatch) else given)


@contextlib.contextmanager
def attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Returns a context in which attributes of an object have other values."""
    before = {name: value for name, value in vars(owner).items() if name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(before)


@contextlib.contextmanager
def gathering_once(ranks_per_batch: int, names: Sequence[str] = _MODULES) -> Iterator[None]:
    """Returns the context in which `gather` and `gather_object` of TRL's modules return the values of every batch
    once."""
    modules: list[Any] = [sys.modules[name] for name in names if name in sys.modules]
    before = [
        (module, name, getattr(module, name)) for module in modules for name in _GATHERING if hasattr(module, name)
    ]
    for module, name, stock in before:
        once: Callable[..., Any] = _gather_once if name == "gather" else _gather_objects_once
        setattr(module, name, functools.partial(once, stock, ranks_per_batch))
    try:
        yield
    finally:
        for module, name, stock in before:
            setattr(module, name, stock)


class _OnceEachBatch:
    """An `Accelerator` that gathers every batch once; everything else is the Accelerator's own."""

    def __init__(self, accelerator: Any, mesh: Mesh) -> None:
        vars(self).update(stock=accelerator, mesh=mesh)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.stock, name, value)

    def gather(self, value: Any) -> Any:
        """Returns the values of every batch once, which takes no message if all ranks share one."""
        return gather_batches(value, self.mesh)


class _DataParallelRanks(_OnceEachBatch):
    """An `Accelerator` whose processes are the data-parallel ranks."""

    @property
    def num_processes(self) -> int:
        """The number of data-parallel ranks."""
        return int(self.stock.num_processes) // self.mesh.ranks_per_batch

    @property
    def process_index(self) -> int:
        """The data-parallel rank."""
        return int(self.stock.process_index) // self.mesh.ranks_per_batch


def _gather_once(gather: Callable[[Any], Any], ranks_per_batch: int, value: Any) -> Any:
    """Returns the values of every batch, gathered over all ranks in order; as many of each rank."""
    return torch.cat(gather(value).chunk(world_size())[::ranks_per_batch])


def _gather_objects_once(gather: Callable[[Any], Any], ranks_per_batch: int, values: Any) -> list[Any]:
    return [value for mine in gather([values])[::ranks_per_batch] for value in mine]
