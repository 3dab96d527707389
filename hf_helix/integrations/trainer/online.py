"""TRL's trainers that generate their data (GRPO, RLOO, distillation), with several ranks to a batch.

In:   a trainer of TRL that slices a generation batch by processes, and gathers rewards and figures over processes.
Out:  the same trainer, to whose code the data-parallel ranks are the processes.
Must hold: ranks that share a batch have the same slice and draw alike; figures count every batch once. TRL is not
imported.
"""

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import set_seed

from hf_helix.integrations.trainer.stock import TrainerCall
from hf_helix.runtime.distributed.mesh import rank, world_size

_MODULES = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "trl.trainer.distillation_trainer")
_GATHERING = ("gather", "gather_object")
_SIZE = "generation_batch_size"


def is_online(kind: type) -> bool:
    """Returns whether a class of trainers generates its data."""
    return hasattr(kind, "_generate_and_score_completions")


def settle_generation(call: TrainerCall, ranks_per_batch: int) -> None:
    """Divides the generation batch, which TRL counts for every process, by the ranks that share a batch.

    The training arguments belong to the user, so the trainer gets a copy.

    Raises:
        ValueError: the rest does not hold whole groups of generations; or vLLM would generate.
    """
    args = copy.copy(call.get("args"))
    if getattr(args, "use_vllm", False):
        raise ValueError("use_vllm=True: use use_vllm=False; weights of a cut model are not copied to vLLM yet")
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


def count_batches_once(trainer: Any, ranks_per_batch: int) -> None:
    """Makes data-parallel ranks the processes that a trainer sees, and seeds each like one."""
    trainer.accelerator = _OnceEachBatch(trainer.accelerator, ranks_per_batch)
    set_seed(trainer.args.seed + rank() // ranks_per_batch)  # as `set_seed(seed, device_specific=True)` does


@contextlib.contextmanager
def gathering_once(ranks_per_batch: int) -> Iterator[None]:
    """Returns the context in which TRL's `gather` and `gather_object` return the values of every batch once."""
    modules: list[Any] = [sys.modules[name] for name in _MODULES if name in sys.modules]
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
    """An `Accelerator` whose processes are the data-parallel ranks; everything else is the Accelerator's own."""

    def __init__(self, accelerator: Any, ranks_per_batch: int) -> None:
        vars(self).update(stock=accelerator, ranks_per_batch=ranks_per_batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.stock, name, value)

    @property
    def num_processes(self) -> int:
        """The number of data-parallel ranks."""
        return int(self.stock.num_processes) // self.ranks_per_batch

    @property
    def process_index(self) -> int:
        """The data-parallel rank."""
        return int(self.stock.process_index) // self.ranks_per_batch

    def gather(self, value: Any) -> Any:
        """Returns the values of every batch once."""
        return _gather_once(self.stock.gather, self.ranks_per_batch, value)


def _gather_once(gather: Callable[[Any], Any], ranks_per_batch: int, value: Any) -> Any:
    """Returns the values of every batch, gathered over all ranks in order; as many of each rank."""
    return torch.cat(gather(value).chunk(world_size())[::ranks_per_batch])


def _gather_objects_once(gather: Callable[[Any], Any], ranks_per_batch: int, values: Any) -> list[Any]:
    return [value for mine in gather([values])[::ranks_per_batch] for value in mine]
