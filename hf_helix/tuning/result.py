"""What a tuning found: the plan that is kept, and the measurements that speak for it.

In:   windows that were timed under several plans, and what the cost function predicted for them.
Out:  a `TuningResult`, the same on every rank.
Must hold: it is data only; nothing here measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_helix.config import AUTO
from hf_helix.measure.overlap import Overlap
from hf_helix.planning.profile import Profile
from hf_helix.tuning.effort import FULL


@dataclass(frozen=True)
class TuningResult:
    """What `tune` measured and chose.

    Attributes:
        kept: the candidate that is in use: the rule of its plan and, where there was a choice, its schedule.
        overlaps: by candidate, the measurement of a window under it.
        predicted: by candidate, the seconds that the cost function predicted for the same window.
        bound: seconds of that window that no plan can beat, by the measured operator times.
        profile: the operator times that the plans were made with.
        measured: the date of the measurement, as text.
        gradient_bytes: bytes of the gradients of the whole model, which data parallelism would sum in every step.
        ranks: the number of ranks that share the layers, the experts or the sequences of one pipeline rank.
        schedule: the name of the schedule that is in use.
        effort: the name of the effort that was made, see `hf_helix.tuning.effort`.
        verdict: the choice and its reason, in one sentence.
        report: all figures, in one paragraph.
    """

    kept: str
    overlaps: Mapping[str, Overlap]
    predicted: Mapping[str, float] = field(default_factory=dict)
    bound: float = 0.0
    profile: Profile | None = None
    measured: str = ""
    gradient_bytes: int = 0
    ranks: int = 1
    schedule: str = AUTO
    effort: str = FULL.name
    verdict: str = ""
    report: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}\n{self.report}"

    @property
    def gradient_seconds(self) -> float:
        """An estimate of the seconds of one sum of all gradients, at the speed of the measured collectives."""
        kept = self.overlaps[self.kept]
        sent = 2 * self.gradient_bytes * (self.ranks - 1) / self.ranks
        return sent * kept.communication / kept.bytes_moved if kept.bytes_moved else 0.0
