"""Times of gathers of weights, of which a window has each once.

In:   a runner.
Out:  seconds and bytes of the gathers of this rank, by the names of a profile.
Must hold: what is timed is the work that windows issue, on its stream. Of gathers of one length one is timed.
"""

from __future__ import annotations

from hf_helix.measure.timing import ISSUING_SLOWEST, time_repeats
from hf_helix.operators.zero.zero1 import KeptFlat
from hf_helix.planning.profile import Name, named_gathers
from hf_helix.runtime.runner import Runner


def time_gathers(runner: Runner, repeats: int) -> tuple[dict[Name, list[float]], dict[Name, int]]:
    """Returns the seconds of every gather of this rank, repeat by repeat, and the bytes that it sends. Collective.

    Args:
        runner: a runner.
        repeats: how often a gather runs in a row; the first run warms up.
    """
    layout, names = runner.layout, [name for name, _ in named_gathers(runner.layout)]
    known: dict[tuple[object, int], list[float]] = {}
    seconds: dict[Name, list[float]] = {}
    sent: dict[Name, int] = {}
    for number in layout.gathers_of(runner.stage.rank):
        gather = layout.gathers[number]
        flat = runner.stage.model[gather.units[0]].flats[gather.name]
        assert isinstance(flat, KeptFlat)
        length = flat.axis, flat.piece.nbytes
        if length not in known:
            known[length] = _time(runner, flat, repeats)
        seconds[names[number]] = known[length]
        sent[names[number]] = flat.piece.nbytes // flat.axis.size * (flat.axis.size - 1)
    return seconds, sent


def _time(runner: Runner, flat: KeptFlat, repeats: int) -> list[float]:
    """The seconds of a gather on its stream, without the first."""
    streams = runner.executor.streams

    def repeat() -> None:
        streams.wait(streams.issue(flat.sums.kind, flat.refresh(), (), flat.name))

    return time_repeats(streams, repeat, repeats, ISSUING_SLOWEST)
