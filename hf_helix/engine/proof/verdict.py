"""Differences of a cut model from the unsplit model, and the verdict.

In:   losses, gradients by name and logits of both models; of the unsplit model also in fp64, or with moved weights.
Out:  the worst differences of a window, and the names of wrong values; a `Proof` of all windows.
Must hold: a loss may differ by 1e-5 of itself, a gradient by 1e-4 of its norm, logits by 1e-4 of the largest; a
difference from fp64 of at most twice the unsplit model's own fp32 error is rounding, within ten times these bars. Where
fp64 is no reference, since kernels compute in fp32 inside, the unsplit model's own error is its change when every
weight moves by one step of fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from hf_helix.engine.proof.reference import Outcome

SMALL = 1e-2
"""The share of the largest norm that is added to the norm of a gradient: some gradients are zero but for rounding."""

ROUNDING = 10.0
"""The largest difference, in bars, that the unsplit model's own rounding can explain."""

SHOWN = 3
"""The number of names in a line."""


LOSS, GRADIENTS, LOGITS = "loss", "gradients", "logits"
BARS = {LOSS: 1e-5, GRADIENTS: 1e-4, LOGITS: 1e-4}


@dataclass(frozen=True)
class Difference:
    """The difference of a value of the cut model from the unsplit model.

    Attributes:
        kind: "loss", "gradients" or "logits".
        name: "loss", "logits", or the name of a parameter.
        error: the relative distance, see the module.
        bar: the largest error that counts as equal.
    """

    kind: str
    name: str
    error: float
    bar: float

    @classmethod
    def of(cls, kind: str, error: float, name: str = "") -> Difference:
        """Returns a difference with the bar of its kind."""
        return cls(kind, name or kind, error, BARS[kind])

    @property
    def is_wrong(self) -> bool:
        """Whether the error is above its bar, or not a number."""
        return not self.error <= self.bar

    @property
    def bars(self) -> float:
        """The error in bars; infinite if the error is not a number."""
        return self.error / self.bar if self.error == self.error else float("inf")

    def __str__(self) -> str:
        return f"{self.name} {self.error:.1e}"


@dataclass(frozen=True)
class ComparedWindow:
    """A window of the cut model, compared.

    Attributes:
        kind: the kind of its batches.
        plan: its plan.
        differences: of every loss, of every gradient, and of the logits of `predict()`.
    """

    kind: str
    plan: str
    differences: tuple[Difference, ...]

    @property
    def wrong(self) -> list[Difference]:
        """All wrong values, the worst first."""
        return sorted((d for d in self.differences if d.is_wrong), key=lambda d: d.bars, reverse=True)

    def __str__(self) -> str:
        found = f"different: {first_names(self.wrong)}" if self.wrong else _largest(self.differences)
        return f"{self.kind}, {self.plan}: {found}"


@dataclass(frozen=True)
class Proof:
    """The comparison of a cut model with the unsplit model; equal on all ranks.

    Attributes:
        model: the class of the model.
        layout: the sizes of the mesh, such as "tp_size=2".
        cases: the compared windows; none if the model was refused.
        refusal: the reason why the model cannot be cut; empty without a refusal.
        failure: the error of a rank; empty without an error.
        trace: the traceback of the error.
        uncovered: the parts of the model that the compared small model lacks.
        float8: the error of fp8 against bf16, which has no bar, as a sentence; empty without `HelixConfig.float8`.
        seconds: the duration.
    """

    model: str
    layout: str
    cases: tuple[ComparedWindow, ...] = ()
    refusal: str = ""
    failure: str = ""
    trace: str = ""
    uncovered: tuple[str, ...] = ()
    float8: str = ""
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
    def coverage(self) -> str:
        """A sentence about the parts that were not compared; empty if all were."""
        return f"not compared, as the small model has none: {', '.join(self.uncovered)}" if self.uncovered else ""

    @property
    def lines(self) -> list[str]:
        """A line for each window, or the reason of a refusal, or the traceback of a failure."""
        lines = [*map(str, self.cases), self.coverage, self.float8]
        return list(filter(None, [self.refusal, self.trace or self.failure] if not self.cases else lines))

    @property
    def wrong(self) -> list[Difference]:
        """The wrong values, each name once, the worst first."""
        everything = sorted((d for case in self.cases for d in case.wrong), key=lambda d: d.bars)
        worst = {difference.name: difference for difference in everything}
        return sorted(worst.values(), key=lambda d: d.bars, reverse=True)

    def __str__(self) -> str:
        head = f"{self.model} at {self.layout}: {self.verdict}"
        if self.refusal or self.failure:
            return f"{head}: {self.refusal or self.failure}"
        figures = _largest([difference for case in self.cases for difference in case.differences])
        names = f"; {first_names(self.wrong)}" if self.wrong else ""
        more = "".join(f"; {text}" for text in (self.coverage, self.float8) if text)
        return f"{head} ({figures}; {self.seconds:.0f} s){names}{more}"


def _largest(differences: Sequence[Difference]) -> str:
    """The largest error of each kind, as text."""
    worst = [max((d for d in differences if d.kind == kind), key=lambda d: d.bars) for kind in BARS]
    return ", ".join(f"{difference.kind} {difference.error:.1e}" for difference in worst)


def first_names(wrong: Sequence[Difference], form: Callable[[Difference], str] = str) -> str:
    """Returns the first `SHOWN` wrong values as text, and the number of the others."""
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return ", ".join(map(form, wrong[:SHOWN])) + more


def float8_error(outcome: Outcome, in_bf16: Outcome) -> tuple[float, float]:
    """Returns the largest relative difference of a loss, and the norm of the difference of all gradients relative to
    their norm."""
    losses = max(abs(mine / theirs - 1) for mine, theirs in zip(outcome.losses, in_bf16.losses, strict=True))
    pairs = [(outcome.gradients[name], gradient) for name, gradient in in_bf16.gradients.items()]
    distance, norm = (
        sum(float(each.square().sum()) for each in found)
        for found in ([mine - theirs for mine, theirs in pairs], [theirs for _, theirs in pairs])
    )
    return losses, (distance / norm) ** 0.5


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
            if a value differs.
        moved: returns outcomes of the unsplit model with weights moved by one step of fp32, or none if fp64 is a
            reference; called only if a value still differs.
    """
    differences = _differences(outcome, wanted)
    for others in (exact, moved):
        if any(difference.is_wrong for difference in differences) and (references := others()):
            ours = _differences(outcome, references[0] if others is exact else wanted)
            of_each = zip(*(_differences(wanted, reference) for reference in references), strict=True)
            theirs = [max(each, key=lambda difference: difference.bars) for each in of_each]
            differences = [_excused(*each) for each in zip(differences, ours, theirs, strict=True)]
    return ComparedWindow(kind, plan, tuple(differences))


def _differences(outcome: Outcome, wanted: Outcome) -> list[Difference]:
    """The differences of losses, of gradients and of logits."""
    losses = [
        Difference.of(LOSS, abs(mine - theirs) / max(abs(theirs), 1.0))
        for mine, theirs in zip(outcome.losses, wanted.losses, strict=True)
    ]
    floor = SMALL * max((float(gradient.norm()) for gradient in wanted.gradients.values()), default=0.0)
    gradients = [
        Difference.of(GRADIENTS, _distance(outcome.gradients, name, gradient) / (float(gradient.norm()) + floor), name)
        for name, gradient in wanted.gradients.items()
    ]
    mine, theirs = outcome.logits, wanted.logits
    if mine.shape != theirs.shape:
        return [*losses, *gradients, Difference.of(LOGITS, float("inf"), f"logits {list(mine.shape)}")]
    distance = float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))
    return [*losses, *gradients, Difference.of(LOGITS, distance)]


def _distance(gradients: Mapping[str, Tensor], name: str, wanted: Tensor) -> float:
    """The norm of the difference; infinite without a gradient of this name and shape."""
    mine = gradients.get(name)
    return float("inf") if mine is None or mine.shape != wanted.shape else float((mine - wanted).norm())


def _excused(given: Difference, ours: Difference, theirs: Difference) -> Difference:
    """The difference `given` of the cut from the unsplit model, with a wider bar if fp64 shows equal rounding:
    `ours` is the difference of the cut model from fp64, `theirs` the unsplit model's; or from the unsplit model,
    and from the unsplit model with moved weights."""
    if not given.is_wrong or not ours.error <= given.bar + 2 * theirs.error:
        return given
    return replace(given, bar=min(ROUNDING * given.bar, max(given.bar, given.error)))
