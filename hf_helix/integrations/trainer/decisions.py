"""Decisions of callbacks: all ranks follow the decisions of any rank.

In:   the control of a trainer, after the events at which the stock loop reads the control.
Out:  equal flags on every rank; with `enable_jit_checkpoint`, a signal to any rank causes a single checkpoint of all.
      Ctrl-C ends a run with a sentence on the last checkpoint.
Must hold: flags set at another moment, such as by a signal handler, wait for the next of these events. The sentence
writes nothing and does not keep the trainer alive.
"""

import re
import weakref
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from hf_helix.checkpoint.manifest import NAME
from hf_helix.integrations.trainer.trackers import model_for_trackers
from hf_helix.runtime.distributed.agreement import agree_on_action
from hf_helix.runtime.distributed.endings import advise_on_interrupt
from hf_helix.runtime.failures import activity

FLAGS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")
_STOPS = FLAGS[-2:]
_EVENTS = {"on_epoch_begin", "on_step_end", "on_epoch_end", "on_evaluate", "on_save"}
# Shared if a callback of any rank overrides the event: it may call the model on one rank only.
_RARE = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
# Events at which JITCheckpointCallback of a single rank would save by itself.
_ALONE = ("on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_epoch_end")


class CallbackDecisions:
    """Replaces `call_event` of a trainer's callbacks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._handler = trainer, trainer.callback_handler
        self._stock, self._handler.call_event = self._handler.call_event, self._call
        self._agreed: set[str] = set()  # flags of all ranks
        self._late: set[str] = set()  # flags of this rank, not yet shared
        self._asked: set[str] = set()  # rare events that a callback of any rank overrides
        saving = [each for each in self._handler.callbacks if isinstance(each, JITCheckpointCallback)]
        for callback in saving:
            for event in _ALONE:
                setattr(callback, event, _nothing)

    def _call(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Calls the callbacks and shares their decisions. Collective at the events of the stock loop's decisions."""
        if event != "on_save" or not self._trainer.is_saving:  # else the event follows when the folder is complete
            with model_for_trackers(self._trainer, event), activity.doing(f"{activity.CALLBACKS}{event}"):
                control = self._stock(event, args, state, control, **kwargs)
        is_log_of_step = event == "on_log" and self._trainer.is_in_train and "loss" in kwargs["logs"]
        if event in _EVENTS or is_log_of_step or event in self._asked:
            self._share(event, control)
        elif event == "on_substep_end":
            self._late |= {name for name in _STOPS if getattr(control, name)} - self._agreed
            for name in _STOPS:
                setattr(control, name, name in self._agreed)
        if event == "on_substep_end" and self._trainer.is_preempted:
            self._trainer.restore_before_window()
            control.should_training_stop = True
        return control

    def _share(self, event: str, control: Any) -> None:
        asks = [any(_acts(callback, rare) for callback in self._handler.callbacks) for rare in _RARE]
        has_signal, is_writing = self._trainer.is_asked_to_end, self._trainer.is_writing
        mine = [*(getattr(control, name) or name in self._late for name in FLAGS), *asks, has_signal, is_writing]
        *shared, ends, writes = agree_on_action(f"training goes on after {event}", mine)
        flags, asked = shared[: len(FLAGS)], shared[len(FLAGS) :]
        self._asked = {rare for rare, is_asked in zip(_RARE, asked, strict=True) if is_asked}
        if ends and event == "on_step_end":  # no time is left for an evaluation
            flags = [flags[0], False, True, flags[3], True]
        elif self._trainer.is_preempted and event == "on_epoch_end":  # of the window that has ended inside
            flags = [flags[0], False, self._trainer.lacks_checkpoint(), flags[3], True]
        self._agreed, self._late = {name for name, flag in zip(FLAGS, flags, strict=True) if flag}, set()
        for name in FLAGS:
            setattr(control, name, name in self._agreed)
        if not writes:
            self._trainer.end_save()


def _acts(callback: Any, event: str) -> bool:
    """Returns whether a callback overrides an event."""
    call = getattr(callback, event)
    return call is not _nothing and getattr(call, "__func__", None) is not getattr(TrainerCallback, event)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of an event of a callback."""


# -- interrupts ----------------------------------------------------------------------------------------------------


def prepare_for_interrupts(trainer: Any) -> None:
    """Makes Ctrl-C end with the sentence of `describe_stop`."""
    reference = weakref.ref(trainer)
    advise_on_interrupt(
        lambda: describe_stop(alive.args.output_dir, alive.state.global_step) if (alive := reference()) else ""
    )


def describe_stop(output_dir: str | None, step: int) -> str:
    """Returns a sentence on the stop of a run after `step` optimizer steps, and on the way to resume."""
    folders = Path(output_dir or ".").glob("checkpoint-*")
    steps = {int(name[1]): path for path in folders if (name := re.search(r"checkpoint-(\d+)$", path.name))}
    complete = [number for number in steps if (steps[number] / NAME).is_file()]
    if not complete:
        hint = "TrainingArguments(save_strategy='steps', save_steps=...) saves checkpoints on the way"
        return f"stopped after step {step}, and nothing was saved; {hint}"
    last = steps[max(complete)]
    return f"stopped after step {step}; trainer.train(resume_from_checkpoint=True) goes on from {last}"
