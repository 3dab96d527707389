"""Progress: a rank that lives and does not come to a meeting with the others.

In:   heartbeats of all ranks, each with the standing of the rank: what its main thread does, and whether it waits.
Out:  a sentence that names the rank, its host and where it stands: first as a notice, in the end as a failure.
Must hold: a run that goes on never fails. A rank fails only if neither it nor the ranks that wait for it have changed
for nearly the timeout of the process group, after which communication fails anyway. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hf_helix.runtime.failures import activity

MARGIN, LARGEST_MARGIN = 4.0, 0.2  # seconds, and part of the timeout: a failure is said before communication fails
SOON = 10  # times the longest step: the wait before a notice
LEAST_NOTICE = 15.0  # seconds
NAMED = 3  # ranks in a sentence, at most


class Standing(NamedTuple):
    """Where a rank stands.

    Attributes:
        waits: whether it waits for other ranks.
        mark: changes with every progress.
        host: its name.
        text: what it does, and the line of the user's code.
    """

    waits: bool
    mark: str
    host: str
    text: str

    @classmethod
    def mine(cls, host: str) -> Standing:
        """Returns the standing of this process, for a thread beside the main thread."""
        text = activity.describe()
        return cls(activity.is_waiting(), f"{activity.num_changes} {activity.detail()}", host, text)

    def pack(self) -> str:
        """Returns the standing as text."""
        return "\t".join([str(int(self.waits)), *(" ".join(text.split()) for text in self[1:])])

    @classmethod
    def read(cls, text: str) -> Standing:
        """Returns the standing of a text."""
        waits, mark, host, about = text.split("\t")
        return cls(waits == "1", mark, host, about)


class Progress:
    """The progress of all ranks, as one rank sees it.

    Args:
        timeout: of the process group, in seconds.
        interval: seconds between two heartbeats.
    """

    def __init__(self, timeout: float, interval: float) -> None:
        self._limit = timeout - min(MARGIN + 2 * interval, LARGEST_MARGIN * timeout)
        self._since: dict[int, tuple[Standing, float]] = {}
        self._said = ""

    def note(self, standings: Mapping[int, Standing], now: float) -> None:
        """Takes the standings of the ranks that live."""
        before, self._since = self._since, {}
        for rank, standing in standings.items():
            earlier = before.get(rank)
            is_same = earlier is not None and earlier[0][:2] == standing[:2]
            self._since[rank] = (standing, earlier[1] if earlier is not None and is_same else now)

    def failure(self, now: float) -> str:
        """Returns which rank ends the run; empty for none."""
        return self._stuck(now, self._limit)

    def notice(self, now: float, longest_step: float) -> str:
        """Returns what to say of a rank that takes long, once; empty for nothing.

        Args:
            now: the time in seconds.
            longest_step: in seconds; 0 before it is known.
        """
        soon = max(LEAST_NOTICE, SOON * longest_step)
        said, self._said = self._said, self._stuck(now, soon) if longest_step and soon < self._limit else ""
        left = self._limit - soon
        is_new = bool(self._said) and not said
        return f"{self._said}; the run ends in {left:.0f} s if nothing changes (ddp_timeout)" if is_new else ""

    def _stuck(self, now: float, limit: float) -> str:
        long = {rank: standing for rank, (standing, since) in self._since.items() if now - since >= limit}
        if not any(standing.waits for standing in long.values()):
            return ""
        late = describe_late({rank: each for rank, each in long.items() if not each.waits})
        return f"{late} for {limit:.0f} s" if late else ""


def describe_late(standings: Mapping[int, Standing]) -> str:
    """Returns a sentence on ranks that do not come to a meeting; empty for no ranks."""
    named = [f"rank {rank} ({each.host}) is in {each.text}" for rank, each in list(standings.items())[:NAMED]]
    more = f" and {len(standings) - NAMED} more" if len(standings) > NAMED else ""
    return f"{', '.join(named)}{more}, and the other ranks have waited" if named else ""
