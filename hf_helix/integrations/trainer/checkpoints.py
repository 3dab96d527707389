"""The Trainer's checkpoints: saving, and resuming a run.

In:   a trainer with a cut model, and the arguments of its stock methods.
Out:  `checkpoint-N` folders with an ordinary Hugging Face model, the optimizer's states and all other state of a run,
      for the same layout or another.
Must hold: a checkpoint is either complete or absent; an unusable checkpoint is refused before anything is loaded or
written; counters, rotation, uploads and the choice of the best model stay the stock Trainer's.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import SaveStrategy
from transformers.utils.logging import get_logger

from hf_helix.checkpoint import files as atomic
from hf_helix.checkpoint.claims import Claim, Held, take_claim
from hf_helix.checkpoint.manifest import NAME, Manifest
from hf_helix.checkpoint.plain_files import DamagedFile
from hf_helix.checkpoint.training_state import Generators, generators, load_states, set_generators
from hf_helix.checkpoint.whole import (
    GENERATORS,
    OPTIMIZER,
    check_whole,
    is_complete,
    numbered,
    read_generators,
    read_schedule,
    with_remedy,
)
from hf_helix.integrations.optimizers import unwrapped
from hf_helix.integrations.trainer.decisions import prepare_for_interrupts
from hf_helix.integrations.trainer.saving import SavingHooks
from hf_helix.integrations.upstream import overrides
from hf_helix.planning.timing.sizes import Sizes, size_text
from hf_helix.runtime.distributed.agreement import agree_on_action, decide_on_rank_0
from hf_helix.runtime.distributed.mesh import rank
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.failures.values import Health
from hf_helix.runtime.notices import say

logger = get_logger(__name__)

RUNNING = "_running"  # the mark of a run in `output_dir`; pushes to the Hub leave out `_*`
OLD_RANKS = 60.0  # seconds within which the ranks of an earlier start end


class CheckpointHooks(SavingHooks):
    """The part of `HelixTrainerMixin` that resumes from checkpoints."""

    _resumed: Manifest | None = None  # the manifest of the resumed checkpoint
    _first_epoch: Path | None = None  # the folder of the resumed checkpoint, until the resumed epoch has begun

    # -- resuming ------------------------------------------------------------------------------------------------

    @overrides(
        "Trainer",
        otherwise="a damaged checkpoint would be found half way, and a failing rank would leave the others waiting",
        caller=None,
    )
    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as the stock method does. The checkpoint may come from another layout (docs/checkpoints.md).

        With `layouts`, a call without `resume_from_checkpoint` goes on from the newest whole checkpoint in
        `output_dir`, and False starts anew.

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
            with self._claimed_output_dir(), self._last_save_kept(), self._preemptible():
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
            claim = _claim(Path(self.args.output_dir or "."), OLD_RANKS if self._plugin.given.layouts else 0.0)

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

    def _restarts(self, given: Any) -> bool:
        """Returns whether the run goes on from what it finds: with `layouts`, unless the script says where from."""
        restarts = given is None and self._plugin.given.layouts is not None and self.hp_search_backend is None
        if restarts and (not self._saves or self.args.save_only_model):
            say(
                "layouts without checkpoints to go on from: a restart begins anew; use save_strategy='steps' and "
                "save_only_model=False"
            )
        return restarts

    def _find_checkpoint(self, given: Any) -> str | None:
        """Returns the folder of the checkpoint to resume from, after a check of the checkpoint. Collective."""
        self._resumed = self._first_epoch = None
        restarts = self._restarts(given)
        if not given and not restarts:
            return None
        run = self._describe()

        def folder_of_run() -> Path | None:
            if restarts:
                return self._newest_whole()
            return self._last_checkpoint() if given is True else Path(given)

        def read() -> tuple[str, Manifest] | None:
            folder = folder_of_run()
            if folder is None:
                return None
            with with_remedy(folder):
                manifest = check_whole(folder)
            try:
                manifest.check_run(folder, run, skips_data=not self.args.ignore_data_skip)
            except ValueError as error:
                anew = "; with layouts, train(resume_from_checkpoint=False) starts anew" * restarts
                raise ValueError(f"{error}{anew}") from None
            return str(folder), manifest

        found = decide_on_rank_0(read)
        if found is None:
            return None
        folder, self._resumed = found
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
        atomic.recover(folder, is_complete)
        for path in numbered(folder):
            if (path / NAME).is_file():
                return path
            logger.warning(f"{path} has no {NAME}, so it is not complete or not by HelixTrainer; looking further")
        raise ValueError(
            f"No valid checkpoint found in output directory ({folder}): resume_from_checkpoint=True needs one that "
            "HelixTrainer has saved there; use resume_from_checkpoint=None to start anew"
        )

    def _newest_whole(self) -> Path | None:
        """Returns the newest whole checkpoint in `output_dir` that has the state of a run; None without one."""
        folder = Path(self.args.output_dir or ".")
        atomic.recover(folder, is_complete)
        for path in numbered(folder):
            try:
                if check_whole(path).optimizer is not None:
                    return path
                logger.warning(f"{path} holds the model only; looking further")
            except ValueError as error:
                logger.warning(f"{error}; looking further")
        return None

    @overrides("Trainer", otherwise="whole weights would be loaded into cut parameters, which is an error")
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Each rank reads its slices of the model. Collective."""
        self.helix.weights.load_weights(resume_from_checkpoint)

    @overrides("Trainer", otherwise="whole weights would be loaded into cut parameters, which is an error")
    def _load_best_model(self) -> None:
        """Loads the best model as the stock method does; each rank reads its slices. Collective."""
        best = self.state.best_model_checkpoint
        assert best is not None
        logger.info(f"Loading best model from {best} (score: {self.state.best_metric}).")
        self.helix.weights.load_weights(best)

    @overrides("Trainer", otherwise="a resumed run would start with empty optimizer states")
    @plain_parameters()
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self._resumed is not None
        optimizer, folder = unwrapped(self.optimizer), Path(checkpoint)
        self._resumed.check_optimizer(folder, self._describe(optimizer))
        with with_remedy(folder):
            with self.helix.weights.stepped(optimizer) as parts:
                load_states(optimizer, parts, folder / OPTIMIZER)
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

    @overrides("Trainer", otherwise="other ranks would see their data in another order")
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the stock sampler. Groups by length have as many samples on every number of ranks of `layouts`."""
        with patch.object(self.args, "gradient_accumulation_steps", self._stated_steps):
            return super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]

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


def _claim(folder: Path, patience: float) -> Claim:
    """Returns a claim on `output_dir` for this run; `patience` are the seconds to wait for the end of another run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim = _take(folder / RUNNING, time.monotonic() + patience)
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


def _take(mark: Path, until: float) -> Claim:
    while True:
        try:
            return take_claim(mark)
        except Held:
            if time.monotonic() >= until:
                raise
            time.sleep(0.5)
