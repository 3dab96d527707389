"""The `Accelerator` of a cut model: the methods that scripts call, under the Trainer and in a loop.

In:   an `Accelerator` made with `HelixPlugin`, and the engine once a model is cut.
Out:  the same object, of a class that counts every batch once.
Must hold: each method means the same as with stock DDP, is replaced by a correct one, or raises an error with an
alternative. docs/accelerate.md has a row for each. To Accelerate, a process is a process: `num_processes`,
`process_index`, `gather`, `reduce` and `split_between_processes` keep this meaning. Methods about samples, steps of a
scheduler and the model count the ranks that share a batch as one process.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hf_helix.engine.engine import Engine
from hf_helix.integrations.accelerate.checks import check_loader
from hf_helix.integrations.upstream import check_class, overrides
from hf_helix.runtime.distributed.mesh import Mesh, world_size
from hf_helix.runtime.divided import full_of
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.notices import say

_LIBRARIES = ("accelerate", "transformers", "trl", "hf_helix")
_ALWAYS_REFUSED = {"join_uneven_inputs": "every rank runs as many batches; leave it out"}
_COUNTED = "a script would count every rank that shares a batch"


@check_class
class CutAccelerator(Accelerator):
    """An `Accelerator` whose model is cut over ranks, see the module. `counting_once` makes one of a stock one.

    Attributes:
        engine: the engine of the cut model; None before the cut.
        is_trainers: whether a Trainer made the Accelerator, which checks data loaders itself.
    """

    engine: Engine | None = None
    is_trainers = False
    _has_said: frozenset[str] = frozenset()

    def attach(self, engine: Engine, refused: Mapping[str, str]) -> None:
        """Takes the engine of the cut model, and refuses further methods, each with an alternative."""
        self.engine = engine
        for name, instead in {**_ALWAYS_REFUSED, **refused}.items():
            setattr(self, name, _refuse(f"accelerator.{name}", instead))

    @property
    def mesh(self) -> Mesh:
        """The mesh of ranks."""
        plugin: Any = self.parallelism_config
        mesh: Mesh = plugin.build_mesh(self.device)
        return mesh

    @property
    def ranks_per_batch(self) -> int:
        """The number of ranks that share a batch."""
        return int(getattr(self.parallelism_config, "tp_size", 1))

    # -- samples -------------------------------------------------------------------------------------------------

    @overrides("Accelerator", otherwise="metrics would count every rank that shares a batch", caller=None)
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers values of samples, each sample once. Collective over the data-parallel ranks."""
        if self.ranks_per_batch == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        with watched():
            return gather_samples(input_data, self.mesh, self.gradient_state, use_gather_object)

    @overrides("Accelerator", otherwise=_COUNTED, caller=None)
    def gather(self, tensor: Any) -> Any:
        """Gathers over all processes as the stock method does; says once that ranks share batches."""
        self._explain("gather", "returns a row for each of {0} processes", "its rows of a batch have equal values")
        return super().gather(tensor)

    @overrides("Accelerator", otherwise=_COUNTED, caller=None)
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduces over all processes as the stock method does; says once that ranks share batches."""
        if reduction == "sum":
            self._explain("reduce", "adds up {0} processes", "its sum counts a batch {1} times; its mean is right")
        return super().reduce(tensor, reduction, scale)

    @property
    @overrides("Accelerator", otherwise=_COUNTED, caller=None)
    def num_processes(self) -> int:
        """The number of processes; says once that ranks share batches."""
        words = "batches, steps and learning rates go by num_processes // parallelism_config.tp_size, {2} here"
        self._explain("num_processes", "counts {0} processes", words)
        return int(super().num_processes)

    def _explain(self, name: str, meaning: str, consequence: str) -> None:
        """Says once, to a script that uses a name, its meaning for ranks that share a batch."""
        shared, caller = self.ranks_per_batch, sys._getframe(2).f_globals.get("__name__", "")
        if shared == 1 or name in self._has_said or caller.partition(".")[0] in _LIBRARIES:
            return
        self._has_said |= {name}
        total = world_size()
        about = f"accelerator.{name} {meaning}, and {shared} of them share each batch: {consequence}"
        instead = "" if name == "num_processes" else "; accelerator.gather_for_metrics takes every batch once"
        say(about.format(total, shared, total // shared) + instead)

    # -- objects -------------------------------------------------------------------------------------------------

    @overrides("Accelerator", otherwise="the model would be wrapped, and not cut, without a word")
    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Prepares a further model as the stock method does. Raises ValueError if no model was cut before."""
        is_first = self.engine is None and not self.is_trainers
        if is_first and not evaluation_mode and not getattr(model, "_is_accelerate_prepared", False):
            raise ValueError(
                f"accelerator.prepare({type(model).__name__}) does not cut a model; use plugin.prepare(accelerator, "
                "model, optimizer, ...) with the HelixPlugin of the Accelerator"
            )
        return super().prepare_model(model, device_placement, evaluation_mode)

    @overrides("Accelerator", otherwise="data-parallel ranks could get the same batches")
    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Prepares as the stock method does: ranks that share a batch get equal batches."""
        if not self.is_trainers:
            check_loader(data_loader, self, self.mesh.dp_size)
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    @overrides("Accelerator", otherwise="the learning rate would change too fast where ranks share a batch")
    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """Returns a scheduler that steps once for each data-parallel rank."""
        if getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        known = {id(each.optimizer): each for each in self._optimizers}
        optimizer = known.get(id(scheduler.optimizer), scheduler.optimizer)
        return SharedScheduler(scheduler, optimizer, self.mesh.dp_size, self)

    # -- the model -----------------------------------------------------------------------------------------------

    @overrides("Accelerator", otherwise="scripts would get the loop's model")
    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the Transformers model, which is cut in place."""
        if self.engine is not None and getattr(model, "engine", None) == self.engine:
            return self.engine.model
        return super().unwrap_model(model, *args, **kwargs)

    @overrides("Accelerator", otherwise="rank 0 would wait for the others, which write nothing")
    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Writes on the main process as the stock method does, with full tensors. Collective."""
        full = recursively_apply(full_of, obj)
        super().save(full, f, safe_serialization=safe_serialization)

    @overrides("Accelerator", otherwise="it would write this rank's part", caller=None)
    def save_model(
        self,
        model: Any,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes the checkpoint of the unsplit model's `save_pretrained`; other models as the stock method. Collective.

        Args:
            model: the cut model, or another one.
            save_directory: the folder of the checkpoint.
            max_shard_size: the size of a file.
            safe_serialization: True for a cut model.

        Raises:
            ValueError: the files would be pickles.
        """
        engine = self.engine
        if engine is None or self.unwrap_model(model) is not engine.model:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        if not safe_serialization:
            raise ValueError(
                "accelerator.save_model(safe_serialization=False) of a cut model: use safe_serialization=True; every "
                "rank writes its part of a safetensors file"
            )
        engine.save_pretrained(save_directory, max_shard_size)

    @overrides("Accelerator", otherwise="clipping all parameters would take a sum over ranks for each", caller=None)
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clips by the norm of the full gradient; all parameters of the model at once."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine = self.engine
        if engine is None or norm_type != 2 or {*map(id, given)} != {*map(id, engine.model.parameters())}:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        with watched():
            return engine.weights.clip_gradients(max_norm)

    # -- the place of this rank ----------------------------------------------------------------------------------

    @property
    @overrides("Accelerator", otherwise="every rank would be tensor-parallel rank 0", caller=None)
    def tensor_parallel_rank(self) -> int:
        """The tensor-parallel rank."""
        return self.mesh.tp.rank

    @property
    @overrides("Accelerator", otherwise="it would be an error", caller=None)
    def pipeline_parallel_rank(self) -> int:
        """The rank in the pipeline."""
        return self.mesh.pipe.rank

    @property
    @overrides("Accelerator", otherwise="it would be an error", caller=None)
    def context_parallel_rank(self) -> int:
        """The context-parallel rank."""
        return self.mesh.cp.rank

    @property
    @overrides("Accelerator", otherwise="every rank would be data-parallel rank 0", caller=None)
    def data_parallel_rank(self) -> int:
        """The data-parallel rank."""
        return int(self.process_index) // self.ranks_per_batch


def counting_once(accelerator: Any) -> None:
    """Makes a stock `Accelerator` a `CutAccelerator`, and one of a script's own class likewise below its methods."""
    kind = type(accelerator)
    if issubclass(kind, CutAccelerator):
        return
    mixed = CutAccelerator if kind is Accelerator else type(kind.__name__, (kind, CutAccelerator), {})
    accelerator.__class__ = mixed


def _refuse(name: str, instead: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} does not go with a cut model: {instead}")

    return refuse


@check_class
class SharedScheduler(AcceleratedScheduler):
    """Accelerate's scheduler, which steps once for each process, with the ranks of a shared batch counted once."""

    def __init__(self, scheduler: LRScheduler, optimizer: Any, dp_size: int, accelerator: Any) -> None:
        linked = accelerator.step_scheduler_with_optimizer
        super().__init__(scheduler, optimizer, step_with_optimizer=linked, split_batches=True)
        self._steps = dp_size if linked and not accelerator.split_batches else 1
        accelerator._schedulers.append(self)

    @overrides(
        "AcceleratedScheduler",
        otherwise="the learning rate would change too fast where ranks share a batch",
        caller=None,
    )
    def step(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(self._steps):
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", math.inf):
                super().step(*args, **kwargs)


# -- metrics ---------------------------------------------------------------------------------------------------------


def gather_samples(
    data: Any, mesh: Mesh, state: Any, as_objects: bool = False, gather: Callable[[Tensor], Tensor] | None = None
) -> Any:
    """Gathers values of samples over the data-parallel ranks, each sample once. Collective over these ranks.

    Args:
        data: tensors, or lists, tuples and mappings of tensors, with samples along the first dimension; or a list of
            objects, one for each sample.
        mesh: the mesh of ranks.
        state: Accelerate's gradient state, with the end of the data loader and the size of the last batch.
        as_objects: whether tensors are objects, too: they may have several shapes.
        gather: gathers rows, see `RowsTogether`; None for a message of its own for each tensor.
    """
    rows = gather or functools.partial(_gather_rows, mesh=mesh)
    # The last batch is padded with samples from the start of the data set.
    count = _remainder(state) if state.end_of_dataloader else 0
    end = count if count > 0 else None
    if as_objects or not _holds_tensors_only(data):
        objects = _gather_objects(data, mesh)
        return objects[:end] if isinstance(objects, (list, tuple)) else objects
    return recursively_apply(lambda tensor: rows(tensor)[:end], data)


def gather_batches(data: Any, mesh: Mesh) -> Any:
    """Gathers tensors over the data-parallel ranks, so that every batch is there once. Collective over these ranks."""
    return recursively_apply(lambda tensor: _gather_rows(tensor, mesh), data)


def _gather_rows(rows: Tensor, mesh: Mesh) -> Tensor:
    """Returns the rows of every data-parallel rank; a scalar is a row."""
    rows = rows[None] if rows.dim() == 0 else rows
    if mesh.dp_group is None:
        return rows
    blocks = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(mesh.dp_size)]
    dist.all_gather(blocks, rows.contiguous(), group=mesh.dp_group)
    return torch.cat(blocks)


class RowsTogether:
    """Gathers all rows of some code over the data-parallel ranks in one message. The code runs twice, without other
    effects the first time: `gather` first notes the rows, and after `exchange` returns the rows of all ranks.

    Args:
        mesh: the mesh of ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._noted: list[Tensor] = []
        self._found: Iterator[Tensor] | None = None

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the rows of every rank; before `exchange`, this rank's in their place."""
        if self._found is not None:
            return next(self._found)
        rows = tensor[None] if tensor.dim() == 0 else tensor
        self._noted.append(rows)
        return torch.cat([rows] * self._mesh.dp_size)

    def exchange(self) -> None:
        """Exchanges the noted rows. Collective over the data-parallel ranks, which have noted equally many rows."""
        flat = torch.cat([each.detach().reshape(-1).double() for each in self._noted])
        with watched():
            pieces = _gather_rows(flat[None], self._mesh).split([each.numel() for each in self._noted], 1)
        named = zip(pieces, self._noted, strict=True)
        self._found = iter([piece.to(rows.dtype).view(-1, *rows.shape[1:]) for piece, rows in named])


def _gather_objects(objects: Any, mesh: Mesh) -> Any:
    """Returns the objects of every data-parallel rank; a single rank's as they are."""
    if mesh.dp_group is None:
        return objects
    lists: list[Any] = [None] * mesh.dp_size
    dist.all_gather_object(lists, objects, group=mesh.dp_group)
    return [each for objects_of_rank in lists for each in objects_of_rank]


def _holds_tensors_only(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _remainder(state: Any) -> int:
    """Returns the number of samples in the last batch of all ranks. Accelerate 1.15 counts the batch of rank 0 once for
    every rank that shares the batch.
    """
    is_copied = getattr(state.active_dataloader, "submesh_tp", None) is not None
    return state.remainder // world_size() if is_copied else state.remainder
