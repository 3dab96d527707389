"""Progress: one bar on a terminal; where standard error is a file or a pipe, one line for each stage.

In:   the name of the stage that is under way, and the share of it that is done.
Out:  a bar that goes away when all is done, or a line when a stage begins.
Must hold: control characters go to terminals only, so that log files stay readable. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[float], object]
"""Called with the share of the work that is done, from 0 to 1."""

StageProgress = Callable[[str, float], object]
"""Called with the name of the stage that is under way, and the share of it that is done, from 0 to 1."""


def stage_progress(progress: StageProgress | None, stage: str, part: int = 0, num_parts: int = 1) -> Progress | None:
    """Returns what to call with the progress of one part of a stage.

    Args:
        progress: called with the progress of the stage; None where nobody wants to know.
        stage: the name of the stage.
        part: the number of this part, counted from 0.
        num_parts: how many parts of equal length the stage has.
    """
    return None if progress is None else lambda share: progress(stage, (part + share) / num_parts)


@contextmanager
def progress_bar(is_shown: bool = True, prefix: str = "hf_helix") -> Iterator[StageProgress]:
    """Shows how far work of one or more stages has come.

    Args:
        is_shown: False on ranks that stay silent; usually `rank() == 0`.
        prefix: what every bar and line begins with.

    Yields:
        A function to call with the name of the stage and the share of it that is done, from 0 to 1.
    """
    if not is_shown:
        yield lambda stage, share: None
    elif sys.stderr.isatty():
        with _bar(prefix) as show:
            yield show
    else:
        yield _lines(prefix)


@contextmanager
def _bar(prefix: str) -> Iterator[StageProgress]:
    from tqdm.auto import tqdm

    # Stages differ in how fast they advance, so an estimate of the time that is left would mislead.
    form = "{desc}{percentage:3.0f}%|{bar}| {elapsed}"
    with tqdm(total=100, leave=False, bar_format=form) as bar:

        def show(stage: str, share: float) -> None:
            bar.set_description(f"{prefix}: {stage}", refresh=False)
            bar.n = round(100 * share)
            bar.refresh()

        yield show


def _lines(prefix: str) -> StageProgress:
    begun: set[str] = set()

    def show(stage: str, share: float) -> None:
        if stage not in begun:
            begun.add(stage)
            print(f"{prefix}: {stage} ...", file=sys.stderr, flush=True)

    return show
