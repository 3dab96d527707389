"""Heat maps and breakdowns of a profile, as text.

In:   a `Profile`.
Out:  the overlap efficiency of pairs of operators (the paper's figure 4), and the time of a micro-batch by kind.
Must hold: cells without a measurement stay empty; cells of too short operators are marked; nothing is clipped silently.
"""

from collections import Counter
from collections.abc import Sequence

from hf_helix.planning.graph.operator import Operator, Part
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.layout import Name, named_operators

TOO_SHORT = 0.01  # of the longer operator's time, whose noise is larger than a shorter operator
KINDS = ("GEMM", "attention", "other computation", "intra-node communication", "inter-node communication")


def pair_table(profile: Profile) -> tuple[list[Name], list[Name], dict[tuple[Name, Name], float]]:
    """Returns the first operators of pairs, the second operators, and the efficiencies; either order finds a pair."""
    order = [name for name, _ in named_operators(profile.layout)]
    rows = sorted({a for a, _ in profile.pairs}, key=order.index)
    columns = sorted({b for _, b in profile.pairs}, key=lambda b: (not profile.kind(b).communicates, order.index(b)))
    cells: dict[tuple[Name, Name], float] = {}
    for a, b in profile.pairs:
        cells.setdefault((b, a), profile.overlap_efficiency(a, b))
        cells[a, b] = profile.overlap_efficiency(a, b)
    return rows, columns, {key: cells[key] for key in cells if key[0] in rows and key[1] in columns}


def tells(profile: Profile, a: Name, b: Name) -> bool:
    """Returns whether the shorter of two operators is long enough for their efficiency to mean anything."""
    short, long = sorted((profile.times[a], profile.times[b]))
    return short >= TOO_SHORT * long


def _short_names(names: Sequence[Name]) -> dict[Name, str]:
    """Names without the unit, if all have the same unit."""
    several = len({unit for unit, _ in names}) > 1
    return {name: "/".join(name) if several else name[1] for name in names}


def _number(value: float, means: bool) -> str:
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
    return text.replace("-0.00", "0.00") if means else f"({text})"


def _notes(profile: Profile, names: dict[Name, str]) -> list[str]:
    """Notes for the reader of the cells."""
    notes = ["1: the shorter is hidden; 0: as one after the other; below 0: a loss"]
    if not all(tells(profile, a, b) for a, b in profile.pairs):
        notes.append(f"(in brackets): one takes less than {TOO_SHORT:.0%} of the other's time, too little to tell")
    represented: dict[Name, list[Name]] = {}
    for name, other in profile.like.items():
        if other in names:
            represented.setdefault(other, []).append(name)
    units = {unit for unit, _ in names}
    for other, others in represented.items():
        same = [name[1] if {name[0]} == units else "/".join(name) for name in others]
        notes.append(f"{names[other]} stands for {', '.join(same)}, too")
    return notes


def text_heatmap(profile: Profile) -> str:
    """Returns the overlap efficiency of every measured pair, as a table."""
    if not profile.pairs:
        return "no pairs of operators were measured"
    rows, columns, cells = pair_table(profile)
    names = _short_names([*rows, *columns])
    indent = max(len(names[row]) for row in rows)
    widths = [max(7, len(names[column])) for column in columns]
    head = "  ".join(f"{names[column]:>{width}}" for column, width in zip(columns, widths, strict=True))
    lines = ["overlap efficiency", " " * indent + "  " + head]
    for row in rows:
        texts = [_number(cells[row, b], tells(profile, row, b)) if (row, b) in cells else "" for b in columns]
        numbers = "  ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
        lines.append(f"{names[row]:<{indent}}  {numbers}".rstrip())
    return "\n".join([*lines, *_notes(profile, names)])


def kind_of(op: Operator) -> str:
    """Returns the member of `KINDS` of an operator."""
    if op.kind.communicates:
        return f"{op.kind.value.replace('_', '-')} communication"
    if op.splits_dgrad_wgrad:
        return "GEMM"
    return "attention" if "attention" in op.forward_name.split(".") else "other computation"


def breakdown(profile: Profile) -> dict[str, tuple[float, float]]:
    """Returns, by kind, the seconds of a micro-batch's operators forward and backward, each by itself."""
    counts, by_kind = Counter(profile.layout.units), dict[str, list[float]]()
    for (unit, entry), op in named_operators(profile.layout):
        seconds = by_kind.setdefault(kind_of(op), [0.0, 0.0])
        seconds[op.part is not Part.F] += counts[unit] * profile.times[unit, entry]
    return {kind: (by_kind[kind][0], by_kind[kind][1]) for kind in KINDS if kind in by_kind}


def text_breakdown(profile: Profile) -> str:
    """Returns the time of a micro-batch by kind, as a table."""
    by_kind = breakdown(profile)
    totals = [sum(column) for column in zip(*by_kind.values(), strict=True)]
    total = sum(totals)
    lines = [f"{'':<20}{'forward':>20}{'backward':>20}{'both':>20}"]
    for kind, seconds in [*by_kind.items(), ("together", totals)]:
        cells = [f"{value * 1e3:,.1f} ms {value / total:6.1%}" for value in (*seconds, sum(seconds))]
        bar = "" if kind == "together" else "█" * round(25 * sum(seconds) / total)
        lines.append(f"{kind:<20}{cells[0]:>20}{cells[1]:>20}{cells[2]:>20}  {bar}".rstrip())
    return "\n".join([*lines, "of one micro-batch, every operator alone, one after the other"])
