"""Progress of long work: a bar on a terminal; a line now and then if standard error is a file or a pipe.

In:   the name of the current stage, and its finished share.
Out:  a bar until all is done, or a line when a stage begins, and then every 15 seconds.
Must hold: control characters go to terminals only, so that log files stay readable. Imports no torch.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 15.0
"""Between two lines of a stage in a file or a pipe."""

Progress = Callable[[float], object]  # called with the finished share of some work, from 0 to 1
StageProgress = Callable[[str, float], object]
"""Called with the name of the current stage and its finished share, from 0 to 1."""


def stage_progress(progress: StageProgress | None, stage: str, part: int = 0, num_parts: int = 1) -> Progress | None:
    """Returns the progress callback of one part of a stage; None without a callback of the stage.

    Args:
        part: the number of this part, from 0.
        num_parts: the number of parts, of equal length.
    """
    return None if progress is None else lambda share: progress(stage, (part + share) / num_parts)


@contextmanager
def progress_bar(is_shown: bool = True) -> Iterator[StageProgress]:
    """Yields a callback that shows the progress of one or more stages; False on silent ranks, usually `rank() == 0`."""
    if not is_shown:
        yield lambda stage, share: None
    elif sys.stderr.isatty():
        from tqdm.auto import tqdm

        # Stages differ in speed, so an estimate of the time left would mislead.
        form = "{desc}{percentage:3.0f}%|{bar}| {elapsed}"
        with tqdm(total=100, leave=False, bar_format=form) as bar:

            def move(stage: str, share: float) -> None:
                bar.set_description(f"hf_helix: {stage}", refresh=False)
                bar.n = round(100 * share)
                bar.refresh()

            yield move
    else:
        said: dict[str, float] = {}  # when a line of the stage was last printed

        def tell(stage: str, share: float) -> None:
            now = time.monotonic()
            if now - said.get(stage, -math.inf) >= SECONDS:
                done = f" {share:.0%}" if stage in said else ""
                said[stage] = now
                print(f"hf_helix: {stage} ...{done}", file=sys.stderr, flush=True)

        yield tell
