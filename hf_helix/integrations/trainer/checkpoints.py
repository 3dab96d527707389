"""The Trainer's checkpoints: saving, and resuming a run.

In:   a trainer with a cut model, and the arguments of its stock methods.
Out:  `checkpoint-N` folders with an ordinary Hugging Face model, the optimizer's states and all other state of a run,
      for the same layout or another.
Must hold: a checkpoint is either complete or absent; an unusable checkpoint is refused before anything is loaded or
written; counters, rotation, uploads and the choice of the best model stay the stock Trainer's.
"""

import contextlib
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import SaveStrategy, rotate_checkpoints
from transformers.utils.logging import get_logger

from hf_helix.checkpoint import files as atomic
from hf_helix.checkpoint.claims import Claim, Held, make_unfinished, take_claim
from hf_helix.checkpoint.manifest import NAME, Manifest, describe_parameters
from hf_helix.checkpoint.plain_files import DamagedFile
from hf_helix.checkpoint.training_state import Generators, generators, load_states, save_states, set_generators
from hf_helix.checkpoint.whole import (
    GENERATORS,
    OPTIMIZER,
    check_whole,
    numbered,
    read_generators,
    read_schedule,
    with_remedy,
)
from hf_helix.integrations.trainer.decisions import prepare_for_interrupts
from hf_helix.integrations.trainer.stock import TrainerAttributes
from hf_helix.integrations.upstream import overrides
from hf_helix.planning.timing.sizes import Sizes, size_text
from hf_helix.runtime.distributed.agreement import agree_on_action, agree_on_success, decide_on_rank_0
from hf_helix.runtime.distributed.groups import host_name
from hf_helix.runtime.distributed.mesh import rank
from hf_helix.runtime.divided import full_of, plain_parameters
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.failures.values import Health
from hf_helix.runtime.local_parameters import LocalParameter, local_parameters
from hf_helix.runtime.notices import say

logger = get_logger(__name__)

RUNNING = "_running"  # the mark of a run in `output_dir`; pushes to the Hub leave out `_*`


class CheckpointHooks(TrainerAttributes):
    """The part of `HelixTrainerMixin` that saves checkpoints and resumes from checkpoints."""

    _staging: str | None = None  # the folder of a checkpoint before publication
    _push_waits = False  # whether to upload the checkpoint after publication
    _resumed: Manifest | None = None  # the manifest of the resumed checkpoint
    _first_epoch: Path | None = None  # the folder of the resumed checkpoint, until the resumed epoch has begun
    _epoch_generators: Generators | None = None  # generator states at the start of the epoch
    _epoch: dict[str, int] | None = None  # the number of the epoch, and the step before its first one

    # -- resuming ------------------------------------------------------------------------------------------------

    @overrides(
        "Trainer",
        otherwise="a damaged checkpoint would be found half way, and a failing rank would leave the others waiting",
        caller=None,
    )
    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as the stock method does. The checkpoint may come from another layout (docs/checkpoints.md).

        Raises:
            ValueError: the checkpoint is damaged, or of another model, optimizer or batch; or `output_dir` is not
                writable.
                Nothing has been loaded or written then.
        """
        self._health = Health(self.args.device)
        prepare_for_interrupts(self)
        with watched():
            agree_on_action("trainer.train() is called")
            if resume_from_checkpoint or self._saves:
                self._settle_stream()
            with self._claimed_output_dir():
                folder = self._find_checkpoint(resume_from_checkpoint)
                if self._saves:
                    self._check_output_dir()
                output = super().train(folder, *args, **kwargs)  # type: ignore[misc]
                agree_on_action("trainer.train() has ended")  # a callback of one rank may still call the model
                self._health.check()
                return output

    @contextlib.contextmanager
    def _claimed_output_dir(self) -> Iterator[None]:
        """Returns a context in which `output_dir` is of this run, if checkpoints may be saved there. Trials of a search
        have folders of their own. Collective.

        Raises:
            ValueError: on every rank, names the process of another run with this `output_dir`.
        """
        claim: Claim | None = None

        def take() -> None:
            nonlocal claim
            claim = _claim(Path(self.args.output_dir or "."))

        if self._saves and self.hp_search_backend is None:
            decide_on_rank_0(take)
        try:
            yield
        finally:
            if claim is not None:
                claim.release()

    @property
    def _saves(self) -> bool:
        """Whether checkpoints may be saved."""
        return self.args.save_strategy != SaveStrategy.NO or bool(getattr(self.args, "enable_jit_checkpoint", False))

    def _find_checkpoint(self, given: Any) -> str | None:
        """Returns the folder of the checkpoint to resume from, after a check of the checkpoint. Collective."""
        self._resumed = self._first_epoch = None
        if given is None or given is False:
            return None
        run = self._describe()

        def read() -> tuple[str, Manifest]:
            folder = self._last_checkpoint() if given is True else Path(given)
            with with_remedy(folder):
                manifest = check_whole(folder)
            manifest.check_run(folder, run, skips_data=not self.args.ignore_data_skip)
            return str(folder), manifest

        folder, self._resumed = decide_on_rank_0(read)
        say(f"goes on from {folder}, saved on {size_text(Sizes.of(self._resumed.layout))}")
        self._first_epoch = Path(folder)
        return folder

    def _settle_stream(self) -> None:
        """Lets every rank read a stream that a run may resume: after a resume, Accelerate 1.15 does not know the ranks
        that share the batches of rank 0.
        """
        options = self.accelerator.dataloader_config
        is_stream = isinstance(self.train_dataset, torch.utils.data.IterableDataset)
        if not is_stream or self.helix.mesh.batch_group is None or self.args.ignore_data_skip:
            return
        if options.dispatch_batches:
            raise ValueError(
                "accelerator_config={'dispatch_batches': True} with an iterable dataset and ranks that share batches: "
                "use {'dispatch_batches': False}, so that every rank reads the stream, save_strategy='no', or "
                "ignore_data_skip=True: after a resume, ranks would get different batches"
            )
        options.dispatch_batches = False

    def _last_checkpoint(self) -> Path:
        """Returns the newest complete checkpoint in `output_dir`."""
        folder = Path(self.args.output_dir or ".")
        atomic.recover(folder, _is_complete)
        for path in numbered(folder):
            if (path / NAME).is_file():
                return path
            logger.warning(f"{path} has no {NAME}, so it is not complete or not by HelixTrainer; looking further")
        raise ValueError(
            f"No valid checkpoint found in output directory ({folder}): resume_from_checkpoint=True needs one that "
            "HelixTrainer has saved there; use resume_from_checkpoint=None to start anew"
        )

    @plain_parameters()
    def _describe(self, optimizer: Any = None) -> Manifest:
        """Returns the manifest of a checkpoint of this run. Collective."""
        args, mesh, options = self.args, self.helix.mesh, self.args.accelerator_config
        per_step = {
            "per_device_train_batch_size": args.train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "data-parallel ranks": 1 if getattr(options, "split_batches", False) else mesh.dp_size,
        }
        parameters = describe_parameters(self._local_parameters(), mesh, optimizer)
        name = type(optimizer).__name__ if optimizer is not None else None
        kind = type(self.helix.model).__name__
        return Manifest(kind, parameters, dict(mesh.sizes), per_step, name, epoch=self._epoch or {})

    def _local_parameters(self) -> dict[nn.Parameter, LocalParameter]:
        return local_parameters(self.helix.model, self.helix.runner.rank_units, self.helix.mesh)

    @overrides("Trainer", otherwise="whole weights would be loaded into cut parameters, which is an error")
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Each rank reads its slices of the model. Collective."""
        self.helix.load_weights(resume_from_checkpoint)

    @overrides("Trainer", otherwise="whole weights would be loaded into cut parameters, which is an error")
    def _load_best_model(self) -> None:
        """Loads the best model as the stock method does; each rank reads its slices. Collective."""
        best = self.state.best_model_checkpoint
        assert best is not None
        logger.info(f"Loading best model from {best} (score: {self.state.best_metric}).")
        self.helix.load_weights(best)

    @overrides("Trainer", otherwise="a resumed run would start with empty optimizer states")
    @plain_parameters()
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self._resumed is not None
        optimizer, folder = _unwrapped(self.optimizer), Path(checkpoint)
        self._resumed.check_optimizer(folder, self._describe(optimizer))
        with with_remedy(folder):
            load_states(optimizer, self._local_parameters(), folder / OPTIMIZER)
            self._load_schedule(folder)
        with patch.object(Trainer, "_load_optimizer_and_scheduler", lambda *_: None):  # of stock files
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]  # further state of a class

    def _load_schedule(self, folder: Path) -> None:
        state = read_schedule(folder)
        try:
            self.lr_scheduler.load_state_dict(state)
        except Exception as error:
            fault = f"does not fit the schedule of this run, {type(self.lr_scheduler).__name__} ({error!r})"
            raise DamagedFile(folder / SCHEDULER_NAME, fault) from error

    @overrides("Trainer", otherwise="a resumed run would read a stream from another place")
    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Returns the epoch and the batches of it that a resumed run skips, as the stock method does. That method does
        not know how often a stream without a length has ended and was read again.
        """
        place: tuple[int, int] = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        is_stream = isinstance(self.train_dataset, torch.utils.data.IterableDataset)
        if self._resumed is None or not is_stream or self.args.ignore_data_skip:
            return place
        epoch = self._resumed.epoch
        if not epoch:
            logger.warning("The checkpoint was saved by an older hf_helix: a stream that had ended goes on elsewhere.")
            return place
        steps = self.state.global_step - epoch["first_step"]
        return epoch["number"], steps * self.args.gradient_accumulation_steps

    @overrides("Trainer", otherwise="a resumed run would see its data in another order")
    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """Runs an epoch as the stock method does. The order of the data may depend on the random generators, so a
        resumed epoch starts with the generator states of its original start.
        """
        self._epoch = {"number": kwargs["epoch"], "first_step": self.state.global_step}
        if self._first_epoch is not None:
            set_generators(self._read_generators(self._first_epoch)["epoch"])
            self._first_epoch = None
            if self._resumed is not None and not self.args.ignore_data_skip:
                self._epoch = self._resumed.epoch or self._epoch
        self._epoch_generators = generators()
        return super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    @overrides("Trainer", otherwise="a resumed run would draw other random numbers")
    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            set_generators(self._read_generators(Path(checkpoint))["now"])

    def _read_generators(self, folder: Path) -> dict[str, Generators]:
        """Returns the states of this rank's generators. On another layout all ranks take rank 0's, since ranks that
        share a batch must draw the same numbers.
        """
        assert self._resumed is not None
        same_layout = self._resumed.layout == self.helix.mesh.sizes
        with with_remedy(folder):
            return read_generators(folder / GENERATORS.format(rank() if same_layout else 0))

    # -- saving --------------------------------------------------------------------------------------------------

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
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves as the stock method does, into a folder that is published when complete. Collective."""
        folder = super()._get_output_dir(trial)  # type: ignore[misc]
        name = f"{atomic.PREFIX}-{self.state.global_step}"
        with watched():
            agree_on_action(f"{name} is saved")
            self._health.check()
            staging = decide_on_rank_0(lambda: _stage(Path(folder)))
            self._staging, self._push_waits = str(staging), False
            try:
                with atomic.disk_errors(staging):
                    super()._save_checkpoint(model, trial)  # type: ignore[misc]
                    self._note_best(folder)
                    agree_on_success(None)  # every rank has written its part
                    manifest = self._describe(None if self.args.save_only_model else _unwrapped(self.optimizer))
                    decide_on_rank_0(lambda: self._publish(staging / name, Path(folder), manifest))
            except BaseException:
                if rank() == 0:
                    with contextlib.suppress(OSError):
                        atomic.abandon(staging, Path(folder), _is_complete)
                raise
            finally:
                self._staging = None
        if self._push_waits:
            super()._push_from_checkpoint(os.path.join(folder, name))  # type: ignore[misc]
        if self.args.should_save:
            rotate_checkpoints(folder, self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True)

    def _note_best(self, folder: str) -> None:
        """Corrects the path of the best checkpoint: the stock method looks in the staging folder."""
        best = self.state.best_global_step
        path = os.path.join(folder, f"{atomic.PREFIX}-{best}")
        if best and (best == self.state.global_step or os.path.exists(path)):
            self.state.best_model_checkpoint = path

    def _publish(self, aside: Path, folder: Path, manifest: Manifest) -> None:
        self.state.save_to_json(os.path.join(aside, TRAINER_STATE_NAME))
        atomic.publish(aside, folder, lambda: manifest.write(aside))

    @overrides("Trainer", otherwise="a run that is killed while it saves would leave a broken checkpoint")
    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or super()._get_output_dir(trial)  # type: ignore[misc]

    @overrides("Trainer", otherwise="an upload would read a folder that is being moved")
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads after the checkpoint is published: the upload reads the checkpoint while training continues."""
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]
        else:
            self._push_waits = True

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
        if state_dict is None:
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

    @overrides("Trainer", otherwise="the checkpoint would hold one rank's optimizer states")
    @plain_parameters()
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Writes the optimizer's states, each rank its part, and on rank 0 the scheduler's. Collective."""
        save_states(_unwrapped(self.optimizer), self._local_parameters(), Path(output_dir, OPTIMIZER))
        if self.args.should_save:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Please also save or load the state of the optimizer")
                atomic.save_torch(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    @overrides("Trainer", otherwise="a resumed run would draw other random numbers")
    def _save_rng_state(self, output_dir: str) -> None:
        now = generators()
        at_end = self.state.epoch is not None and self.state.epoch == int(self.state.epoch)
        states = {"now": now, "epoch": now if at_end else self._epoch_generators}
        atomic.save_torch(states, Path(output_dir, GENERATORS.format(rank())))


def make_output_dir(args: TrainingArguments) -> None:
    """Makes `output_dir` before the stock Trainer does, which would fail only on rank 0. Collective.

    Raises:
        ValueError: on every rank, if the folder cannot be made.
    """

    def make() -> None:
        if args.should_save:
            try:
                os.makedirs(args.output_dir or ".", exist_ok=True)
            except OSError as error:
                raise ValueError(f"output_dir={args.output_dir!r} cannot be made ({error}); give another") from error

    decide_on_rank_0(make)


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


def _claim(folder: Path) -> Claim:
    """Returns a claim on `output_dir` for this run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim = take_claim(folder / RUNNING)
    except Held as holder:
        raise ValueError(
            f"output_dir={str(folder)!r} is in use by another run, {holder}: give this run another output_dir, such as "
            f"{f'{folder}-2'!r}, or end the other run"
        ) from None
    except OSError as error:
        raise ValueError(f"output_dir={str(folder)!r} cannot be written ({error}); give another folder") from error
    if not claim.has_lock:
        logger.warning(f"{folder} is on a file system without locks: a second run with this output_dir is not noticed")
    return claim


def _stage(folder: Path) -> Path:
    """Makes the folder of an unfinished checkpoint."""
    atomic.recover(folder, _is_complete)
    folder.mkdir(parents=True, exist_ok=True)
    return make_unfinished(folder, atomic.STAGING)


def _is_complete(folder: Path) -> bool:
    try:
        Manifest.read(folder)
    except ValueError:
        return False
    return True


def _unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
