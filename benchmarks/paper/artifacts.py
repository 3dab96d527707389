"""Every table and figure of the paper that is simulated, by number.

In:   what a user asks for: "11" of figures, "6" of tables, "6.5" of sections.
Out:  artifacts.
Must hold: one list; a number that is not in it is refused with those that are.
"""

from collections.abc import Callable, Iterator, Mapping

from benchmarks.paper import inside, throughput
from benchmarks.paper.published import FIGURE_11, FIGURE_12, FIGURE_13A, FIGURE_13B, TABLE_6
from benchmarks.paper.runs import Runs
from benchmarks.paper.table import Artifact
from benchmarks.paper.throughput import speeds

Makers = tuple[Callable[[Runs], Artifact], ...]

FIGURES: Mapping[str, Makers] = {
    "3": (inside.breakdown,),
    "4": (inside.effectiveness,),
    "5": (inside.memory,),
    "10": (inside.pairings,),
    "11": (lambda runs: speeds(runs, "Figure 11", "Llama and GPT on 64 A40, sequences of 8192 tokens", FIGURE_11),),
    "12": (lambda runs: speeds(runs, "Figure 12", "the same with cp 2, sequences of 16384 tokens", FIGURE_12),),
    "13": (
        lambda runs: speeds(runs, "Figure 13 (a)", "Llama-66B on 64 A800", FIGURE_13A),
        lambda runs: speeds(runs, "Figure 13 (b)", "Phi-42B on 64 A800", FIGURE_13B),
    ),
    "14": (throughput.scaling,),
    "15": (throughput.steps,),
    "16": (inside.visualization,),
}
TABLES: Mapping[str, Makers] = {
    "1": (inside.volumes,),
    "6": (lambda runs: speeds(runs, "Table 6", "Phi-31B on 64 A40", TABLE_6),),
    "7": (throughput.communication,),
}
SECTIONS: Mapping[str, Makers] = {"6.5": (inside.largest,)}
KINDS: Mapping[str, Mapping[str, Makers]] = {"figure": FIGURES, "table": TABLES, "section": SECTIONS}


def makers_of(kind: str, number: str) -> Makers:
    """Returns what makes a table, a figure or a section.

    Args:
        kind: a key of `KINDS`.
        number: as the paper gives it.

    Raises:
        ValueError: it is not simulated; names those that are.
    """
    known = KINDS[kind]
    if number not in known:
        others = "; ".join(f"--{other} {', '.join(numbers)}" for other, numbers in KINDS.items())
        raise ValueError(f"--{kind} {number} is not simulated; there are {others}, and --all")
    return known[number]


def all_artifacts(runs: Runs) -> Iterator[Artifact]:
    """Yields the errors, and every table and figure."""
    yield throughput.summary(runs)
    for known in KINDS.values():
        for makers in known.values():
            for make in makers:
                yield make(runs)
