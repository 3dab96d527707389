"""The weights of a cut model: norms and clipping, full tensors, the shards that an optimizer steps, checkpoints.

In:   the cut model, with complete gradients between a window and a step.
Out:  figures and tensors of the full model on every rank; files that Transformers reads.
Must hold: every method is collective, on all ranks; what users read and write is the full parameter.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_helix.checkpoint.background import Copies, Writes
from hf_helix.checkpoint.load import load_adapters, load_parameters
from hf_helix.checkpoint.save import begin_save, save_full, save_pretrained
from hf_helix.engine.cut_model import CutModel
from hf_helix.engine.matrix_steps import MatrixStep
from hf_helix.engine.optimizer_shards import (
    cut_states,
    full_weights,
    host_threads,
    join_states,
    keep_quantization,
    step_shards,
    steps_shards,
)
from hf_helix.models.stock.peft import is_peft
from hf_helix.operators.parameters.host_shard import arrived
from hf_helix.planning.parameters import Part
from hf_helix.runtime.distributed.agreement import check_same_on_all_ranks, decide_on_rank_0
from hf_helix.runtime.divided import full_of, plain_parameters
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.gradients.reduce import gradient_norm
from hf_helix.runtime.streams.streams import Streams


class Weights:
    """The weights of a cut model on this rank.

    Args:
        cut: the model.
        streams: of this rank.
    """

    def __init__(self, cut: CutModel, streams: Streams) -> None:
        self._cut = cut
        self._streams = streams

    @plain_parameters()
    def move_to(self, device: torch.device) -> None:
        """Moves this rank's parameters, also packed ones in 4 bits, which `model.to` does not move."""
        torch.nn.Module.to(self._cut.model, device)
        self.reshard_parameters()

    @plain_parameters()
    def gradient_norm(self) -> Tensor:
        """Returns the 2-norm of the full gradient of the model, on every rank. Collective."""
        return gradient_norm(self.parts(), self._cut.mesh.device)

    def parts(self) -> dict[torch.nn.Parameter, Part]:
        """Returns the parts of the parameters that this rank steps."""
        return self._cut.rank_units.parts(self._cut.mesh.place)

    @plain_parameters()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradient down to a norm of `max_norm`; returns the norm before. Collective."""
        norm = self.gradient_norm()
        rank_units = self._cut.rank_units
        parameters = [parameter for parameter in rank_units.stepped if parameter.grad is not None]
        if rank_units.host_shards and max_norm / (norm + 1e-6) >= 1:
            return norm  # to multiply by 1 would be a pass over the host's memory
        arrived(parameter.grad for parameter in parameters)
        with host_threads(rank_units):
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    @contextlib.contextmanager
    def full_weight(self, name: str) -> Iterator[Tensor]:
        """Yields a full weight by its name in the model; writes to the tensor are kept. Collective."""
        parameter = self._cut.model.get_parameter(name)
        full = full_of(parameter).detach()
        yield full
        parameter.data = full

    @contextlib.contextmanager
    def full_gradient(self, name: str) -> Iterator[Tensor]:
        """Yields a full gradient by its name in the model, between a window and the optimizer's step; writes to the
        tensor are kept. Collective.

        Raises:
            ValueError: there is no gradient.
        """
        parameter = self._cut.model.get_parameter(name)
        if parameter.grad is None:
            raise ValueError(f"{name} has no gradient; ask for it in a callback's on_pre_optimizer_step")
        full = full_of(parameter.grad)
        yield full
        parameter.grad = full

    def full_weights(self) -> AbstractContextManager[Any]:
        """Returns a context in which a model sharded over replicas (`shard_optimizer`, `shard_parameters`) has full
        weights on every rank: the model can be called and read, and generates.

        Every rank must enter the context; within the context nothing is collective, and to train, to evaluate with the
        engine, to save and to load are errors. Writes to sharded parameters are lost at the end.

        Raises:
            ValueError: this rank has slices of the model even then.
            RuntimeError: the context is entered already.
        """
        return full_weights(self._cut.model, self._cut.rank_units, self._cut.mesh, self._cut.config)

    @plain_parameters()
    def reshard_parameters(self) -> None:
        """Makes sharded parameters placeholders again, after a script has given them memory: `model.to("cpu:0")` copies
        tensors on `cpu`."""
        for flat in self._cut.rank_units.flat_parameters:
            flat.reshard()

    @plain_parameters()
    def step_shards(self, optimizer: Any, reads_matrices: bool = False) -> None:
        """Replaces full parameters by this rank's shards in an optimizer that has not stepped. Initial states of the
        optimizer stay (Adagrad). Collective.

        Args:
            optimizer: the optimizer itself, without Accelerate's wrapper.
            reads_matrices: whether the optimizer reads whole matrices, so that one rank steps each.
        """
        rank_units, streams = self._cut.rank_units, self._streams
        if steps_shards(optimizer):  # as at a second `train()`
            return
        parts = self.parts()
        if reads_matrices:
            join_states(optimizer)
            step_shards(optimizer, rank_units, streams, reads_matrices)
            MatrixStep.install(optimizer, parts, self._cut.mesh, streams)
        else:
            cut_states(optimizer, rank_units, self._cut.mesh)
            step_shards(optimizer, rank_units, streams)
            keep_quantization(optimizer, parts)

    @contextlib.contextmanager
    def stepped(self, optimizer: Any) -> Iterator[Mapping[Any, Part]]:
        """Yields the parameters that this rank steps in an optimizer, whose states in the context have the shapes of
        these parameters."""
        matrices = MatrixStep.of(optimizer)
        if matrices is None:
            yield self.parts()
        else:
            with matrices.whole_shapes() as parts:
                yield parts

    @watched()
    def save_pretrained(self, folder: str | Path, max_shard_size: int | str | None = None, model: Any = None) -> None:
        """Writes an ordinary Hugging Face checkpoint, each rank its part; of a PEFT model the adapters. Collective.

        Args:
            folder: the folder of the checkpoint.
            max_shard_size: the size of a file, such as "5GB"; None for the default of Transformers. Adapters are a
                single file.
            model: another model, made of the cut model by a script, such as by merging adapters; None for the cut
                model. Another model, and a cut model with changed modules, is assembled in the memory of rank 0's host.
        """
        model, is_as_cut = self._to_save(model)
        if is_as_cut:
            with plain_parameters():
                save_pretrained(model, self._cut.rank_units, self._cut.mesh, folder, max_shard_size)
        else:
            save_full(model, folder, max_shard_size)

    @watched()
    def begin_save(self, folder: str | Path, copies: Copies, model: Any = None) -> list[Writes]:
        """Begins `save_pretrained`; adapters and changed models are written at once. Collective.

        Args:
            folder: that nobody reads yet.
            copies: see `hf_helix.checkpoint.save.begin_save`.
            model: see `save_pretrained`.

        Returns:
            What is left to do.
        """
        model, is_as_cut = self._to_save(model)
        decide_on_rank_0(lambda: Path(folder).mkdir(parents=True, exist_ok=True))
        if is_as_cut:
            with plain_parameters():
                return [begin_save(model, self._cut.rank_units, self._cut.mesh, Path(folder), copies=copies)]
        save_full(model, folder)
        return []

    def _to_save(self, model: Any) -> tuple[Any, bool]:
        """Returns the model to save, and whether each rank writes its part. Collective."""
        self._cut.align_buffers("the model is saved")
        model = self._cut.model if model is None else model
        is_as_cut = model is self._cut.model and not self._cut.snapshot.change_of_structure()
        check_same_on_all_ranks(f"{type(model).__name__}, as it was cut: {is_as_cut}", "models to save")
        return model, is_as_cut and not is_peft(model)

    @plain_parameters()
    def load_weights(self, folder: str | Path) -> None:
        """Reads a checkpoint of `save_pretrained`, from any layout: each rank its slices. Collective.

        Raises:
            ValueError: on every rank, before any weight is written: the folder does not fit.
        """
        load = load_adapters if is_peft(self._cut.model) else load_parameters
        load(self._cut.model, self._cut.rank_units, self._cut.mesh, folder)
