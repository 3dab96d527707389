"""What to say when a run is stopped by Ctrl-C: which checkpoint it can be resumed from.

In:   a trainer that trains.
Out:  the sentence that ends the run's output.
Must hold: nothing is written; the trainer is not kept alive by the advice.
"""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

from hf_helix.checkpoint.manifest import NAME
from hf_helix.runtime.failures.endings import advise_on_interrupt


def prepare_for_interrupts(trainer: Any) -> None:
    """Makes Ctrl-C end with the sentence of `describe_stop`."""
    reference = weakref.ref(trainer)
    advise_on_interrupt(
        lambda: describe_stop(alive.args.output_dir, alive.state.global_step) if (alive := reference()) else ""
    )


def describe_stop(output_dir: str | None, step: int) -> str:
    """Says where a run was stopped and how to resume it.

    Args:
        output_dir: the folder of its checkpoints.
        step: optimizer steps that were taken.
    """
    folders = Path(output_dir or ".").glob("checkpoint-*")
    steps = {int(name[1]): path for path in folders if (name := re.search(r"checkpoint-(\d+)$", path.name))}
    complete = [number for number in steps if (steps[number] / NAME).is_file()]
    if not complete:
        hint = "TrainingArguments(save_strategy='steps', save_steps=...) saves checkpoints on the way"
        return f"stopped after step {step}, and nothing was saved; {hint}"
    last = steps[max(complete)]
    return f"stopped after step {step}; trainer.train(resume_from_checkpoint=True) goes on from {last}"
