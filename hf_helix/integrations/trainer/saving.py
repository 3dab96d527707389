"""Saving checkpoints, while training goes on.

In:   a trainer with a cut model whose control asks for a save.
Out:  a `checkpoint-N` folder with an ordinary Hugging Face model, the optimizer's states and all other state of a run.
Must hold: a checkpoint is either complete or absent. The tensors in it are those of its step: they are copied to the
host before the next step of the optimizer, and a thread writes the copies. They are copied at once if a callback or a
class that we do not know may change weights before. Training waits instead if a callback or a class outside of
Transformers and TRL may read the folder, if the host has no room for the copies, and before the next save and the end
of a run. `on_save`, uploads and rotation see a complete folder. Counters, rotation, uploads and the choice of the best
model stay the stock Trainer's.
"""

import contextlib
import copy
import functools
import inspect
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import rotate_checkpoints

from hf_helix.checkpoint import files as atomic
from hf_helix.checkpoint.background import BackgroundSave, Copies, Writes, cores_are_busy, has_room
from hf_helix.checkpoint.claims import make_unfinished
from hf_helix.checkpoint.manifest import Manifest, describe_parameters
from hf_helix.checkpoint.training_state import Generators, begin_saving_states, generators, named_states, save_states
from hf_helix.checkpoint.whole import GENERATORS, OPTIMIZER, is_complete
from hf_helix.integrations.optimizers import unwrapped
from hf_helix.integrations.steps import before_steps
from hf_helix.integrations.trainer.preemption import PreemptionHooks
from hf_helix.integrations.upstream import overrides
from hf_helix.runtime.distributed.agreement import agree_on_action, agree_on_success, decide_on_rank_0
from hf_helix.runtime.distributed.groups import host_name
from hf_helix.runtime.distributed.mesh import rank, world_size
from hf_helix.runtime.divided import full_of, plain_parameters
from hf_helix.runtime.failures import activity
from hf_helix.runtime.failures.exchange import StoreExchange
from hf_helix.runtime.failures.heartbeat import RankFailure, watched
from hf_helix.runtime.notices import say

LAST_WAIT = 30.0
"""The most seconds for which a rank that fails waits for the checkpoint that is being written."""

_STEPS_OF_A_SAVE = (
    "_save_checkpoint",
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
)
_BEFORE_A_STEP = (
    "on_evaluate",
    "on_prediction_step",
    "on_log",
    "on_epoch_end",
    "on_epoch_begin",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
)
"""The events between a save and the next step of an optimizer."""

_KNOWN = ("hf_helix.", "transformers.", "trl.")
"""The packages whose classes do not read a checkpoint while it is saved, whose callbacks only read its folder, and
neither of which changes weights but by an optimizer."""


class PendingSave(NamedTuple):
    """A checkpoint that is being written.

    Attributes:
        files: the thread that writes.
        folder: of the checkpoint, once it is complete.
        state: of the trainer when it was saved.
        pushes: whether the checkpoint is uploaded.
        is_announced: whether `on_save` has been left out and follows.
    """

    files: BackgroundSave
    folder: str
    state: TrainerState
    pushes: bool
    is_announced: bool


class SavingHooks(PreemptionHooks):
    """The part of `HelixTrainerMixin` that saves checkpoints."""

    control: Any
    _staging: str | None = None  # the folder of a checkpoint before publication
    _writes: list[Writes] | None = None  # the rest of a save that goes on while training does; None if training waits
    _pushes: bool = False  # whether to upload the checkpoint after publication
    _pending: PendingSave | None = None
    _exchange: StoreExchange | None = None
    _copies: Copies
    _has_said_why: bool = False  # whether the run has said why training waits for its saves
    _epoch_generators: Generators | None = None  # generator states at the start of the epoch
    _epoch: dict[str, int] | None = None  # the number of the epoch, and the step before its first one

    @plain_parameters()
    def _describe(self, optimizer: Any = None) -> Manifest:
        """Returns the manifest of a checkpoint of this run. Collective."""
        args, mesh, options = self.args, self.helix.mesh, self.args.accelerator_config
        per_step = {
            "per_device_train_batch_size": args.train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "data-parallel ranks": 1 if getattr(options, "split_batches", False) else mesh.dp_size,
        }
        parameters = describe_parameters(self.helix.weights.parts(), mesh, optimizer)
        name = type(optimizer).__name__ if optimizer is not None else None
        kind = type(self.helix.model).__name__
        group = args.train_batch_size * self._stated_steps if args.train_sampling_strategy == "group_by_length" else 0
        return Manifest(kind, parameters, dict(mesh.sizes), per_step, name, epoch=self._epoch or {}, group=group)

    def _check_output_dir(self) -> None:
        """Refuses an `output_dir` without room for checkpoints. Collective."""
        folder = Path(self.args.output_dir or ".")
        needed = self._least_bytes(self._describe())
        probe = decide_on_rank_0(lambda: _probe(folder, needed))
        # The model can go through rank 0, but optimizer states come from all ranks, and all ranks read.
        is_shared = not self.args.save_only_model or self.args.load_best_model_at_end
        host = host_name().split()[0]
        lost = ValueError(
            f"output_dir={str(folder)!r} on {host} is not the folder that rank 0 has written to: give a folder that "
            "all hosts share; or save_only_model=True with load_best_model_at_end=False (rank 0 writes the model, and "
            "no run resumes from it); or save_strategy='no' with load_best_model_at_end=False, and "
            "trainer.save_model(folder) at the end"
        )
        try:
            agree_on_success(lost if is_shared and not probe.exists() else None)
        finally:
            if rank() == 0:
                probe.unlink(missing_ok=True)  # an error of its own would hide the refusal

    def _least_bytes(self, run: Manifest) -> int:
        """Returns a lower bound for the bytes of a checkpoint: the trained weights and, with AdamW, two averages
        of each."""
        with_averages = str(getattr(self.args.optim, "value", self.args.optim)).startswith("adamw_torch")
        factor = 3 if with_averages and not self.args.save_only_model else 1
        trained = [about for about in run.parameters.values() if about["trained"]]
        return factor * sum(math.prod(p["shape"]) * getattr(torch, p["dtype"]).itemsize for p in trained)

    @overrides("Trainer", otherwise="a run that is killed while it saves would leave a broken checkpoint")
    @activity.doing(activity.CHECKPOINT)
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves as the stock method does, into a folder that is published when complete, by a thread that writes copies
        while training goes on. Collective."""
        self.end_save()
        folder = super()._get_output_dir(trial)  # type: ignore[misc]
        name = f"{atomic.PREFIX}-{self.state.global_step}"
        with watched():
            waits = self._waits_for_saves(name)
            self._health.check()
            staging = decide_on_rank_0(lambda: _stage(Path(folder)))
            if self._exchange is None:
                self._exchange, self._copies = StoreExchange(), _filled_before_steps()
            self._copies.begin()
            self._staging, self._pushes, self._writes = str(staging), False, None if waits else []
            try:
                with atomic.disk_errors(staging):
                    super()._save_checkpoint(model, trial)  # type: ignore[misc]
                    self._note_best(folder)
                    publish = self._publishing(staging / name, folder)
                    agree_on_success(None)  # every rank has made its files
            except BaseException:
                if rank() == 0:
                    _abandon(staging, folder)
                raise
            finally:
                writes, self._writes, self._staging = self._writes or [], None, None
            abandon = functools.partial(_abandon, staging, folder)
            rests = cores_are_busy(self.helix.mesh.device)
            files = BackgroundSave(writes, self._copies, publish, abandon, self._exchange, not waits, rests)
            if self._may_change_weights():
                self._copies.fill()
        self._pending = PendingSave(files, os.path.join(folder, name), _copied(self.state), self._pushes, not waits)
        if waits:
            self.end_save()

    def _publishing(self, staged: Path, folder: str) -> Callable[[], None]:
        """Returns the function that rank 0's thread completes a checkpoint with, by the state of now. Collective."""
        manifest = self._describe(None if self.args.save_only_model else unwrapped(self.optimizer))
        best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
        if rank() == 0:
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))

        def publish() -> None:
            with atomic.disk_errors(staged):
                atomic.publish(staged, Path(folder), lambda: manifest.write(staged))
                rotate_checkpoints(folder, limit, best, use_mtime=True)

        return publish

    def _waits_for_saves(self, name: str) -> bool:
        """Returns whether training waits until a checkpoint is complete. Collective."""
        needed = self._bytes_held()
        is_read, is_full = agree_on_action(f"{name} is saved", [self._is_read_at_once(), not has_room(needed)])
        if is_full and not is_read and not self._has_said_why:
            self._has_said_why = True
            say(f"training waits for its saves: a host has no room for a copy of its ranks' {needed / 1e9:.1f} GB each")
        return is_read or is_full

    def _is_read_at_once(self) -> bool:
        """Whether code that we do not know may read the folder right after a save, or within it; or the run ends."""
        bases = [base for base in type(self).__mro__ if any(step in vars(base) for step in _STEPS_OF_A_SAVE)]
        is_replaced = any(step in vars(self) for step in _STEPS_OF_A_SAVE)
        is_known = not is_replaced and all(map(_is_known, bases)) and self._knows_callbacks("on_save")
        is_asked_for = bool(self.control.should_save)  # else a script calls `_save_checkpoint` itself
        return self.is_asked_to_end or not is_known or not is_asked_for

    def _may_change_weights(self) -> bool:
        """Whether code that we do not know may change weights before the next step of an optimizer."""
        bases = [base for base in type(self).__mro__ if any(map(inspect.isroutine, vars(base).values()))]
        return not (all(map(_is_known, bases)) and self._knows_callbacks(*_BEFORE_A_STEP))

    def _knows_callbacks(self, *events: str) -> bool:
        callbacks = self.callback_handler.callbacks
        calls = [getattr(callback, event) for callback in callbacks for event in events]
        return all(_is_known(getattr(call, "__func__", call)) for call in calls)

    @plain_parameters()
    def _bytes_held(self) -> int:
        """Returns the largest number of bytes that this rank may have to copy for a save."""
        held = [parameter.detach() for parameter in self.helix.weights.parts()]
        optimizer = None if self.args.save_only_model else unwrapped(self.optimizer)
        for entry in optimizer.state.values() if optimizer is not None else ():
            held += [value for value in named_states(entry).values() if isinstance(value, Tensor)]
        # Quantized states are saved as codes and as values in fp32.
        return sum(value.nbytes + (0 if value.is_floating_point() else 4 * value.numel()) for value in held)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint has begun that nothing has waited for."""
        return self._pending is not None

    @property
    def is_writing(self) -> bool:
        """Whether the files of a checkpoint are being written."""
        return self._pending is not None and self._pending.files.is_busy

    def end_save(self) -> None:
        """Waits until the last checkpoint is complete, and then uploads it and calls `on_save`, both with the state of
        its step. Collective. Raises the error of a rank that could not write, on every rank, see `BackgroundSave`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with watched():
            pending.files.wait_for_mine()
            agree_on_action(f"{Path(pending.folder).name} is written")  # an error if a rank has died meanwhile
            pending.files.wait()
            pending.files.check()
        now, self.state = self.state, pending.state
        try:
            if pending.pushes:
                super()._push_from_checkpoint(pending.folder)  # type: ignore[misc]
            if pending.is_announced:
                self.control = self.callback_handler.call_event("on_save", self.args, pending.state, self.control)
        finally:
            self.state = now

    @contextlib.contextmanager
    def _last_save_kept(self) -> Iterator[None]:
        """Returns a context whose errors leave time for the checkpoint that is being written."""
        if self._pending is not None:  # of a run that has failed
            self._pending.files.wait()
        self._pending = self._exchange = None
        try:
            yield
        except BaseException as error:
            if self._pending is not None:
                limit = 0.0 if isinstance(error, RankFailure) else LAST_WAIT
                self._pending.files.wait(limit if world_size() > 1 else None)
            raise

    @overrides("Trainer", otherwise="the end of a run would miss the checkpoint that is being written")
    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.end_save()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _note_best(self, folder: str) -> None:
        """Corrects the path of the best checkpoint: the stock method looks in the staging folder."""
        best = self.state.best_global_step
        path = os.path.join(folder, f"{atomic.PREFIX}-{best}")
        if best and (best == self.state.global_step or os.path.exists(path)):
            self.state.best_model_checkpoint = path

    @overrides("Trainer", otherwise="a run that is killed while it saves would leave a broken checkpoint")
    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or super()._get_output_dir(trial)  # type: ignore[misc]

    @overrides("Trainer", otherwise="an upload would read a folder that is being moved")
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads after the checkpoint is published: the upload reads the checkpoint while training continues."""
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]
        else:
            self._pushes = True

    @overrides("Trainer", otherwise="ranks would wait for rank 0, which waits for them")
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model on every rank; the stock method of Transformers 5.17 writes only on rank 0. Collective."""
        agree_on_action("trainer.save_model() is called")
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    @overrides("Trainer", otherwise="the checkpoint would hold one rank's slices")
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes an ordinary Hugging Face checkpoint; every rank writes its slices, or rank 0 the tensors that a script
        gives. Collective."""
        folder = output_dir if output_dir is not None else self.args.output_dir
        assert folder is not None
        if state_dict is None and self._writes is not None and self._is_staged(folder):
            self._writes += self.helix.weights.begin_save(folder, self._copies, model=self.model)
        elif state_dict is None:
            self.helix.save_pretrained(folder, model=self.model)
        else:
            state_dict = {name: full_of(value) for name, value in state_dict.items()}
            if self.args.should_save:  # by the method of the class: a cut model's refuses
                type(self.model).save_pretrained(self.model, folder, state_dict=state_dict)
        if self.args.should_save:
            processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            atomic.save_torch(self.args, Path(folder, TRAINING_ARGS_NAME))

    def _is_staged(self, folder: str) -> bool:
        """Returns whether a folder lies in the one that is published at the end of the save."""
        return self._staging is not None and Path(folder).is_relative_to(self._staging)

    @overrides("Trainer", otherwise="the checkpoint would hold one rank's optimizer states")
    @plain_parameters()
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Writes the optimizer's states, each rank its part, and on rank 0 the scheduler's. Collective."""
        optimizer, target = unwrapped(self.optimizer), Path(output_dir, OPTIMIZER)
        with self.helix.weights.stepped(optimizer) as parts:
            if self._writes is not None and self._is_staged(output_dir):
                self._writes.append(begin_saving_states(optimizer, parts, target, self._copies))
            else:
                save_states(optimizer, parts, target)
        if self.args.should_save:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Please also save or load the state of the optimizer")
                atomic.save_torch(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    @overrides("Trainer", otherwise="a resumed run would draw other random numbers")
    def _save_rng_state(self, output_dir: str) -> None:
        if self.is_preempted and self._before is not None:
            states = {"now": self._before.generators, "epoch": self._epoch_generators}
        else:
            states = self._generators_at_step()
        atomic.save_torch(states, Path(output_dir, GENERATORS.format(rank())))

    def _generators_at_step(self) -> dict[str, Any]:
        now = generators()
        at_end = self.state.epoch is not None and self.state.epoch == int(self.state.epoch)
        return {"now": now, "epoch": now if at_end else self._epoch_generators}


def _probe(folder: Path, needed: int) -> Path:
    """Writes a small file to the folder and checks the free space; returns the path of the file."""
    probe = folder / f"_probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(4096))
    except OSError as error:
        raise ValueError(f"output_dir={str(folder)!r} cannot be written ({error}); give another folder") from error
    free = shutil.disk_usage(folder).free
    if needed > free:
        probe.unlink()
        raise ValueError(
            f"output_dir={str(folder)!r} has {free / 1e9:.3f} GB of room, and a checkpoint needs {needed / 1e9:.3f} GB "
            "or more; make room, give another folder, or use save_strategy='no'"
        )
    return probe


def _stage(folder: Path) -> Path:
    """Makes the folder of an unfinished checkpoint."""
    atomic.recover(folder, is_complete)
    folder.mkdir(parents=True, exist_ok=True)
    return make_unfinished(folder, atomic.STAGING)


def _abandon(staging: Path, folder: str) -> None:
    with contextlib.suppress(OSError):
        atomic.abandon(staging, Path(folder), is_complete)


def _is_known(code: Any) -> bool:
    """Whether a class or function comes from packages that we know."""
    return f"{getattr(code, '__module__', '')}.".startswith((*_KNOWN, "builtins."))


def _filled_before_steps() -> Copies:
    """Returns copies that are made at the latest when an optimizer is about to step."""
    copies = Copies()

    def fill(owner: Copies, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        owner.fill()
        return args, kwargs

    before_steps(copies, fill)
    return copies


def _copied(state: TrainerState) -> TrainerState:
    """Returns a copy that the steps after it do not change."""
    copied = copy.copy(state)
    copied.log_history = list(state.log_history)
    return copied
