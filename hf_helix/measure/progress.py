"""Progress of long work: a bar on a terminal; a line now and then if standard error is a file or a pipe.

In:   the name of the current stage, and its finished share.
Out:  a bar until all is done, or a line when a stage begins, and then every 15 seconds; with the seconds that the rest
of the stage may take.
Must hold: control characters go to terminals only, so that log files stay readable. Nothing stands at 100 % while work
goes on. Imports no torch.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SECONDS = 15.0
"""Between two lines of a stage in a file or a pipe."""

KNOWN = 0.05
"""The share of a stage after which the seconds of its rest are shown."""

MOST = 99  # percent of a stage that is not over

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


@dataclass
class _Stages:
    """When each stage began."""

    begun: dict[str, float] = field(default_factory=dict)

    def rest(self, stage: str, share: float, now: float) -> str:
        """Returns the seconds that the rest of a stage may take, as text; empty as long as nobody can tell.

        Args:
            stage: its name.
            share: its finished share.
            now: in seconds.
        """
        spent = now - self.begun.setdefault(stage, now)
        return f"about {spent * (1 / share - 1):.0f} s left" if KNOWN <= share < 1 and spent else ""


@contextmanager
def progress_bar(is_shown: bool = True) -> Iterator[StageProgress]:
    """Yields a callback that shows the progress of one or more stages; False on silent ranks, usually `rank() == 0`."""
    stages = _Stages()
    if not is_shown:
        yield lambda stage, share: None
    elif sys.stderr.isatty():
        from tqdm.auto import tqdm

        with tqdm(total=100, leave=False, bar_format="{desc}{percentage:3.0f}%|{bar}| {elapsed}{postfix}") as bar:

            def move(stage: str, share: float) -> None:
                bar.set_description(f"hf_helix: {stage}", refresh=False)
                bar.set_postfix_str(stages.rest(stage, share, time.monotonic()), refresh=False)
                bar.n = min(MOST, round(100 * share))
                bar.refresh()

            yield move
    else:
        said: dict[str, float] = {}  # when a line of the stage was last printed

        def tell(stage: str, share: float) -> None:
            now = time.monotonic()
            rest = stages.rest(stage, share, now)
            if now - said.get(stage, -math.inf) >= SECONDS:
                done = f" {min(MOST, round(100 * share))}%{rest and ', '}{rest}" if stage in said else ""
                said[stage] = now
                print(f"hf_helix: {stage} ...{done}", file=sys.stderr, flush=True)

        yield tell
