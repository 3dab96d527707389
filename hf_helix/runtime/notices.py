"""Notices to the person who runs the script, a sentence at a time.

In:   a sentence.
Out:  a line on standard output, after `hf_helix:`.
Must hold: only rank 0 prints; a progress bar stays whole; `log_level="error"` silences notices, as in Transformers.
"""

import logging

from tqdm.auto import tqdm

from hf_helix.runtime.distributed.mesh import rank


def say(text: str) -> None:
    """Prints a line on rank 0, unless Transformers logs errors only (`TrainingArguments(log_level="error")`)."""
    if rank() == 0 and logging.getLogger("transformers").getEffectiveLevel() <= logging.WARNING:
        tqdm.write(f"hf_helix: {text}")


def about_time(seconds: float) -> str:
    """Returns a length of time to one or two digits: `40 s`, `15 min`, `3 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"
