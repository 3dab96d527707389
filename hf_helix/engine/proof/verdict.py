"""Differences of a cut model from the unsplit model, and the verdict.

In:   losses, gradients by name and logits of both models; of the unsplit model also in fp64, or with moved weights.
Out:  the worst differences of a window, and the names of wrong values; a `Proof` of all windows.
Must hold: a loss may differ by 1e-5 of itself, a gradient by 1e-4 of its norm, logits by 1e-4 of the largest; a
difference from fp64 of at most twice the unsplit model's own fp32 error is rounding, within ten times these bars. Where
fp64 is no reference, since kernels compute in fp32 inside, the unsplit model's own error is what it changes when every
weight moves by one step of fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from hf_helix.engine.proof.reference import Outcome

LOSS, GRADIENT, LOGITS = 1e-5, 1e-4, 1e-4
SMALL = 1e-2
"""The share of the largest norm that is added to the norm of a gradient: some gradients are zero but for rounding."""

ROUNDING = 10.0
"""The largest difference, in bars, that the unsplit model's own rounding can explain."""

SHOWN = 3
"""The number of names in a line."""


@dataclass(frozen=True)
class Difference:
    """The difference of a value of the cut model from the unsplit model.

    Attributes:
        name: "loss", "logits", or the name of a parameter.
        error: the relative distance, see the module.
        bar: the largest error that counts as equal.
    """

    name: str
    error: float
    bar: float

    @property
    def is_wrong(self) -> bool:
        """Whether the error is above its bar, or not a number."""
        return not self.error <= self.bar

    def __str__(self) -> str:
        return f"{self.name} {self.error:.1e}"


@dataclass(frozen=True)
class ComparedWindow:
    """A window of the cut model, compared.

    Attributes:
        kind: the kind of its batches.
        plan: its plan.
        loss: the worst loss.
        gradient: the worst gradient.
        logits: the logits of `predict()`.
        wrong: all wrong values, the worst first.
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
        return f"{head}different: {first_names(self.wrong)}"


@dataclass(frozen=True)
class Proof:
    """The comparison of a cut model with the unsplit model; equal on all ranks.

    Attributes:
        model: the class of the model.
        layout: the sizes of the mesh, such as "tp_size=2".
        cases: the compared windows; none where the model was refused.
        refusal: the reason why the model cannot be cut; empty without a refusal.
        failure: the error of a rank; empty without an error.
        trace: the traceback of the error.
        seconds: the duration.
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
        """Whether all windows were compared and are equal."""
        return bool(self.cases) and not any(case.wrong for case in self.cases)

    @property
    def verdict(self) -> str:
        """`equal`, `different`, `refused` or `failed`."""
        if self.refusal or self.failure:
            return "refused" if self.refusal else "failed"
        return "equal" if self.ok else "different"

    @property
    def lines(self) -> list[str]:
        """A line for each window, or the reason of a refusal, or the traceback of a failure."""
        return list(filter(None, [self.refusal, self.trace or self.failure])) or [str(case) for case in self.cases]

    @property
    def wrong(self) -> list[Difference]:
        """The wrong values, each name once, the worst first."""
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
        names = f"; {first_names(self.wrong)}" if self.wrong else ""
        return f"{head} ({figures}; {self.seconds:.0f} s){names}"


def first_names(wrong: Sequence[Difference], form: Callable[[Difference], str] = str) -> str:
    """Returns the first `SHOWN` wrong values as text, and the number of the others."""
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return ", ".join(map(form, wrong[:SHOWN])) + more


_COMPARED = {"loss": "loss", "gradient": "gradients", "logits": "logits"}


def _by_error(difference: Difference) -> float:
    """The error in bars; infinite where the error is not a number."""
    return difference.error / difference.bar if difference.error == difference.error else float("inf")


def compare(
    kind: str,
    plan: str,
    outcome: Outcome,
    wanted: Outcome,
    exact: Callable[[], Sequence[Outcome]],
    moved: Callable[[], Sequence[Outcome]] = list,
) -> ComparedWindow:
    """Compares a window of the cut model with the unsplit model.

    Args:
        kind: the kind of the batches.
        plan: the rule of the plan.
        outcome: of the cut model.
        wanted: of the unsplit model.
        exact: returns the outcome of the unsplit model in fp64, or none if the model cannot run in fp64; called only
            where a value differs.
        moved: returns outcomes of the unsplit model with weights moved by one step of fp32, or none if fp64 is a
            reference; called only where a value still differs.
    """
    loss, gradients, logits = _differences(outcome, wanted)
    for others in (exact, moved):
        if not any(difference.is_wrong for difference in (*loss, *gradients, *logits)):
            break
        references = others()
        if references:
            ours = _differences(outcome, references[0] if others is exact else wanted)
            theirs = [_largest(each) for each in zip(*(_differences(wanted, r) for r in references), strict=True)]
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


def _largest(samples: Sequence[Sequence[Difference]]) -> list[Difference]:
    """The largest of several differences of each value."""
    return [max(each, key=_by_error) for each in zip(*samples, strict=True)]


def _distance(gradients: Mapping[str, Tensor], name: str, wanted: Tensor) -> float:
    """The norm of the difference; infinite without a gradient of this name and shape."""
    mine = gradients.get(name)
    return float("inf") if mine is None or mine.shape != wanted.shape else float((mine - wanted).norm())


def _excused(given: Sequence[Difference], ours: Sequence[Difference], theirs: Sequence[Difference]) -> list[Difference]:
    """The differences `given` of the cut from the unsplit model, with wider bars where fp64 shows equal rounding.

    `ours` are the differences of the cut model from fp64, `theirs` the differences of the unsplit model from fp64; or
    from the unsplit model, and from the unsplit model with moved weights.
    """
    return [
        replace(difference, bar=min(ROUNDING * difference.bar, max(difference.bar, difference.error)))
        if difference.is_wrong and mine.error <= difference.bar + 2 * own.error
        else difference
        for difference, mine, own in zip(given, ours, theirs, strict=True)
    ]
