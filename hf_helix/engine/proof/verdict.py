"""Comparisons of a cut model with the unsplit one, and what they come to.

In:   losses, gradients by name and logits of both; of the unsplit model also in fp64.
Out:  the worst differences of a window, and the names of what differs; a `Proof` of all windows.
Must hold: a loss may differ by 1e-5 of itself, a gradient by 1e-4 of its norm, logits by 1e-4 of the largest; a
difference from fp64 of at most twice that of the unsplit model's own fp32 is rounding, within ten times these bars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from hf_helix.engine.proof.reference import Outcome

LOSS, GRADIENT, LOGITS = 1e-5, 1e-4, 1e-4
SMALL = 1e-2
"""A gradient is compared with its norm plus this part of the largest norm: some are zero but for rounding."""

ROUNDING = 10.0
"""How many times its bar a difference may be where the unsplit model's own rounding explains it."""

SHOWN = 3
"""The number of names that a line shows."""


@dataclass(frozen=True)
class Difference:
    """A value of the cut model beside that of the unsplit one.

    Attributes:
        name: what was compared: "loss", "logits", or the name of a parameter.
        error: the distance, relative to what the bar is relative to.
        bar: the largest error that counts as equal.
    """

    name: str
    error: float
    bar: float

    @property
    def is_wrong(self) -> bool:
        """Whether it is above its bar; what is not a number is."""
        return not self.error <= self.bar

    def __str__(self) -> str:
        return f"{self.name} {self.error:.1e}"


@dataclass(frozen=True)
class ComparedWindow:
    """A window through the cut model.

    Attributes:
        kind: the kind of its batches.
        plan: the plan that it ran under.
        loss: the worst loss.
        gradient: the worst gradient.
        logits: the logits that `predict()` gives.
        wrong: everything that differs, the worst first.
    """

    kind: str
    plan: str
    loss: Difference
    gradient: Difference
    logits: Difference
    wrong: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        head = f"{self.kind}, {self.plan}: "
        if not self.wrong:
            return f"{head}loss {self.loss.error:.1e}, gradients {self.gradient.error:.1e}, {self.logits}"
        more = f" and {len(self.wrong) - SHOWN} more" if len(self.wrong) > SHOWN else ""
        return f"{head}different: {', '.join(map(str, self.wrong[:SHOWN]))}{more}"


@dataclass(frozen=True)
class Proof:
    """Whether a cut model computes what the unsplit one computes; equal on all ranks.

    Attributes:
        model: the class of the model.
        layout: the sizes of the mesh, such as "tp_size=2".
        cases: the windows that were compared; none where the model was refused.
        refusal: why the model cannot be cut so; empty if it can.
        failure: the error that a rank ended with; empty if there was none.
        trace: where it arose.
        seconds: how long it took.
    """

    model: str
    layout: str
    cases: tuple[ComparedWindow, ...] = ()
    refusal: str = ""
    failure: str = ""
    trace: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        """Whether everything was compared and is equal."""
        return bool(self.cases) and not any(case.wrong for case in self.cases)

    @property
    def verdict(self) -> str:
        """One of `equal`, `different`, `refused`, `failed`."""
        if self.refusal or self.failure:
            return "refused" if self.refusal else "failed"
        return "equal" if self.ok else "different"

    @property
    def lines(self) -> list[str]:
        """A line for each window, or the reason of a refusal, or where a failure arose."""
        return list(filter(None, [self.refusal, self.trace or self.failure])) or [str(case) for case in self.cases]

    @property
    def wrong(self) -> list[Difference]:
        """What differs, each name once, the worst first."""
        worst: dict[str, Difference] = {}
        for difference in sorted((d for case in self.cases for d in case.wrong), key=_by_error):
            worst[difference.name] = difference
        return sorted(worst.values(), key=_by_error, reverse=True)

    def __str__(self) -> str:
        head = f"{self.model} at {self.layout}: {self.verdict}"
        if self.refusal or self.failure:
            return f"{head}: {self.refusal or self.failure}"
        worst = [max((getattr(case, what) for case in self.cases), key=_by_error) for what in _COMPARED]
        figures = ", ".join(
            f"{what} {difference.error:.1e}" for what, difference in zip(_COMPARED.values(), worst, strict=True)
        )
        wrong = self.wrong
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        names = f"; {', '.join(map(str, wrong[:SHOWN]))}{more}" if wrong else ""
        return f"{head} ({figures}; {self.seconds:.0f} s){names}"


_COMPARED = {"loss": "loss", "gradient": "gradients", "logits": "logits"}


def _by_error(difference: Difference) -> float:
    """Orders by how far above the bar; what is not a number comes last."""
    return difference.error / difference.bar if difference.error == difference.error else float("inf")


def compare(
    kind: str, plan: str, outcome: Outcome, wanted: Outcome, exact: Callable[[], Outcome | None]
) -> ComparedWindow:
    """Compares a window of the cut model with the unsplit one.

    Args:
        kind: the kind of its batches.
        plan: the plan that it ran under.
        outcome: what the cut model gives.
        wanted: what the unsplit model gives.
        exact: returns what that gives in fp64, or None if it cannot run so; called only where something differs.
    """
    loss, gradients, logits = _differences(outcome, wanted)
    if any(difference.is_wrong for difference in (*loss, *gradients, *logits)):
        truth = exact()
        if truth is not None:
            ours, theirs = _differences(outcome, truth), _differences(wanted, truth)
            differences = zip((loss, gradients, logits), ours, theirs, strict=True)
            loss, gradients, logits = (_excused(*parts) for parts in differences)
    everything = (*loss, *gradients, *logits)
    wrong = sorted((d for d in everything if d.is_wrong), key=_by_error, reverse=True)
    worst = [max(part, key=_by_error) for part in (loss, gradients, logits)]
    return ComparedWindow(kind, plan, worst[0], worst[1], worst[2], tuple(wrong))


def _differences(outcome: Outcome, wanted: Outcome) -> tuple[list[Difference], list[Difference], list[Difference]]:
    """The differences of losses, of gradients and of logits."""
    losses = [
        Difference("loss", abs(mine - theirs) / max(abs(theirs), 1.0), LOSS)
        for mine, theirs in zip(outcome.losses, wanted.losses, strict=True)
    ]
    floor = SMALL * max(float(gradient.norm()) for gradient in wanted.gradients.values())
    gradients = [
        Difference(name, _distance(outcome.gradients, name, gradient) / (float(gradient.norm()) + floor), GRADIENT)
        for name, gradient in wanted.gradients.items()
    ]
    mine, theirs = outcome.logits, wanted.logits
    if mine.shape != theirs.shape:
        return losses, gradients, [Difference(f"logits {list(mine.shape)}", float("inf"), LOGITS)]
    distance = float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))
    return losses, gradients, [Difference("logits", distance, LOGITS)]


def _distance(gradients: Mapping[str, Tensor], name: str, wanted: Tensor) -> float:
    """The norm of the difference; infinite where there is no such gradient, or one of another shape."""
    mine = gradients.get(name)
    return float("inf") if mine is None or mine.shape != wanted.shape else float((mine - wanted).norm())


def _excused(given: Sequence[Difference], ours: Sequence[Difference], theirs: Sequence[Difference]) -> list[Difference]:
    """The differences, with a wider bar where fp64 shows that the unsplit model itself rounds as much.

    Args:
        given: the differences of the cut model from the unsplit one.
        ours: the differences of the cut model from fp64.
        theirs: the differences of the unsplit model from fp64.
    """
    return [
        replace(difference, bar=min(ROUNDING * difference.bar, max(difference.bar, difference.error)))
        if difference.is_wrong and mine.error <= difference.bar + 2 * own.error
        else difference
        for difference, mine, own in zip(given, ours, theirs, strict=True)
    ]
