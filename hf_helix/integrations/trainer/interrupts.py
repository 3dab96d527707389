"""Interrupts: what a run that was stopped by Ctrl-C goes on from.

In:   a trainer that trains.
Out:  the sentence that ends the run's output.
Must hold: reads only; the trainer is not kept alive by it.
"""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

from hf_helix.checkpoint.manifest import NAME
from hf_helix.runtime.failures.endings import advise_on_interrupt


def prepare_for_interrupts(trainer: Any) -> None:
    """Let Ctrl-C say how the run of this trainer goes on."""
    kept = weakref.ref(trainer)
    advise_on_interrupt(
        lambda: describe_stop(found.args.output_dir, found.state.global_step) if (found := kept()) else ""
    )


def describe_stop(output_dir: str | None, step: int) -> str:
    """Where a run was stopped and what it goes on from.

    Args:
        step: optimizer steps that were taken.
    """
    folders = Path(output_dir or ".").glob("checkpoint-*")
    steps = {int(found[1]): path for path in folders if (found := re.search(r"checkpoint-(\d+)$", path.name))}
    complete = [number for number in steps if (steps[number] / NAME).is_file()]
    if not complete:
        hint = "TrainingArguments(save_strategy='steps', save_steps=...) saves checkpoints on the way"
        return f"stopped after step {step}, and nothing was saved; {hint}"
    last = steps[max(complete)]
    return f"stopped after step {step}; trainer.train(resume_from_checkpoint=True) goes on from {last}"
