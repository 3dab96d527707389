"""Plans: the static order in which one rank issues a block's operators.

In:   the graphs of the units that meet in a block, and a rule (or a file).
Out:  a `Plan`: for every block, a list of entries such as `F.attn.gather` and `B.mlp.down.W`.
Must hold: an order holds every operator of its block once, each after what it reads; `validate_order` knows nothing
of the rules that make orders. What an order means is the same on every device: compute operators run in this
order on one stream; a communication operator starts once everything issued before it on the compute stream is done
and its own stream is free; a compute operator waits for the communication whose result it reads. At the entry
`barrier` the compute stream waits for all communication. An entry that ends in `-1` stands for the operator of the
block before, so that what one block leaves open fills the gaps of the next.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hf_helix.planning.graph import Graph, Operator, digest

FORMAT = "hf_helix.plan/1"

BARRIER = "barrier"
LATE = "-1"

Order = tuple[str, ...]
"""Entries of one block: the strand's letter, a dot, the operator's name, perhaps `-1`; or `barrier`."""

Rule = Callable[[Graph | None, Graph | None], Order]
"""Makes the order of a block from its forward and its backward graph (None: that strand is absent)."""


@dataclass(frozen=True, order=True)
class Block:
    """Which units meet: the name of the forward graph and of the backward graph; None where a strand is absent."""

    forward: str | None
    backward: str | None

    def __str__(self) -> str:
        return " | ".join(
            f"{letter}.{name}" for letter, name in (("F", self.forward), ("B", self.backward)) if name is not None
        )

    @classmethod
    def parse(cls, text: str) -> Block:
        parts = [part.strip().partition(".") for part in text.split("|")]
        sides = {letter: name for letter, _, name in parts if name}
        if len(sides) != len(parts) or not sides.keys() <= {"F", "B"}:
            raise ValueError(f"not a block: {text!r}; one looks like 'F.layer | B.layer'")
        return cls(sides.get("F"), sides.get("B"))


@dataclass(frozen=True)
class GraphPair:
    """A unit's forward graph and the backward graph derived from it."""

    forward: Graph
    backward: Graph


def entries(forward: Graph | None, backward: Graph | None) -> dict[str, Operator]:
    """Every operator of a block by its entry in a plan, each strand in canonical order."""
    found = {}
    for letter, graph in (("F", forward), ("B", backward)):
        for operator in graph.operators if graph else ():
            found[f"{letter}.{operator.name}"] = operator
    return found


def is_late(entry: str) -> bool:
    """Whether an entry runs the operator of the block before."""
    return entry.endswith(LATE)


def on_time(entry: str) -> str:
    """The entry without its lateness."""
    return entry.removesuffix(LATE)


def validate_order(order: Iterable[str], forward: Graph | None, backward: Graph | None, *, block: object = "") -> None:
    """Check that `order` is a permutation of the block's operators in which each comes after what it reads.

    A block with late entries is checked as one of many in a row, all alike.

    Raises:
        ValueError: with the whole order printed and an arrow at the first entry that is wrong.
    """
    order = list(order)
    operators = entries(forward, backward)
    late = {on_time(entry) for entry in order if is_late(entry)}
    here, before = _written_at_start(forward, backward, operators, late)
    seen: set[str] = set()
    for place, entry in enumerate(order):
        if entry == BARRIER:
            continue
        name, written = on_time(entry), before if is_late(entry) else here
        problem = None
        if name not in operators:
            problem = "is not an operator of this block"
        elif name in seen:
            problem = "comes a second time"
        else:
            missing = [v for v in operators[name].depends_on if (name[0], v) not in written]
            if missing:
                problem = f"comes before the operator that writes {', '.join(missing)}"
        if problem:
            lines = [f"{'-->' if i == place else '   '} {line}" for i, line in enumerate(order)]
            raise ValueError(f"block {block}: {entry!r} {problem}:\n" + "\n".join(lines))
        seen.add(name)
        for value in operators[name].writes:
            written.add((name[0], value))
            if is_late(entry):
                here.update(_what_enters(name[0], value, forward, backward))
    left = [entry for entry in operators if entry not in seen]
    if left:
        raise ValueError(f"block {block}: the order lacks {', '.join(left)}:\n    " + "\n    ".join(order))


Values = set[tuple[str, str]]


def _written_at_start(
    forward: Graph | None, backward: Graph | None, operators: Mapping[str, Operator], late: set[str]
) -> tuple[Values, Values]:
    """What exists of this block and of the one before when a block begins. Names are (strand, value)."""
    graphs = [(letter, graph) for letter, graph in (("F", forward), ("B", backward)) if graph]
    before = {(letter, value) for letter, graph in graphs for value in graph.inputs}
    for entry, op in operators.items():
        if entry not in late:
            before.update((entry[0], value) for value in op.writes)
    here = {(letter, value) for letter, graph in graphs for value in graph.inputs}
    for letter, graph in graphs:
        for entering, leaving in zip(graph.inputs, graph.outputs, strict=False):
            if (letter, leaving) not in before:
                here.discard((letter, entering))
    return here, before


def _what_enters(letter: str, value: str, forward: Graph | None, backward: Graph | None) -> Values:
    """The inputs of a block that are this output of the one before."""
    graph = forward if letter == "F" else backward
    assert graph is not None
    pairs = zip(graph.inputs, graph.outputs, strict=False)
    return {(letter, entering) for entering, leaving in pairs if leaving == value}


@dataclass(frozen=True)
class Plan:
    """The order of every block a schedule can ask for.

    `rule` names how it was made; `model`, `mesh` and `graphs` (a digest) say what it is for.
    """

    rule: str
    model: str
    mesh: Mapping[str, int]
    graphs: str
    orders: Mapping[Block, Order]

    def order(self, forward: str | None, backward: str | None) -> Order:
        """The order of the block in which these two units meet."""
        return self.orders[Block(forward, backward)]

    def to_json(self) -> str:
        """The text form that is kept in files: JSON, one operator a line."""
        data = {
            "format": FORMAT,
            "rule": self.rule,
            "model": self.model,
            "mesh": dict(self.mesh),
            "graphs": self.graphs,
            "blocks": {str(block): list(order) for block, order in self.orders.items()},
        }
        return json.dumps(data, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan to a file that `HelixConfig(plan=path)` takes."""
        Path(path).write_text(self.to_json())


Times = Mapping[tuple[str, str], float]
"""Seconds of each operator, by the name of its unit and its entry."""


def make_plan(
    rule_name: str,
    rule: Rule,
    pairs: Mapping[str, GraphPair],
    *,
    model: str,
    mesh: Mapping[str, int],
    times: Times | None = None,
) -> Plan:
    """Apply a rule to every block that the units can form, and check each order.

    Args:
        times: what the rule reads in place of the graphs' rough efforts.
    """
    orders = {}
    for block in all_blocks(pairs):
        forward = pairs[block.forward].forward if block.forward else None
        backward = pairs[block.backward].backward if block.backward else None
        orders[block] = rule(_timed(forward, "F", times), _timed(backward, "B", times))
        validate_order(orders[block], forward, backward, block=block)
    return Plan(rule_name, model, dict(mesh), graphs_digest(pairs), orders)


def _timed(graph: Graph | None, letter: str, times: Times | None) -> Graph | None:
    if graph is None or times is None:
        return graph
    operators = [replace(op, effort=times[graph.name, f"{letter}.{op.name}"]) for op in graph.operators]
    return replace(graph, operators=tuple(operators))


def all_blocks(units: Iterable[str]) -> list[Block]:
    """Every block that units of these names can form: each alone, and each forward beside each backward."""
    names = list(units)
    alone = [Block(name, None) for name in names] + [Block(None, name) for name in names]
    return alone + [Block(forward, backward) for forward in names for backward in names]


def graphs_digest(pairs: Mapping[str, GraphPair]) -> str:
    """The fingerprint of every graph of a stage."""
    return digest(graph for pair in pairs.values() for graph in (pair.forward, pair.backward))


def load_plan(path: str | Path, pairs: Mapping[str, GraphPair], *, model: str, mesh: Mapping[str, int]) -> Plan:
    """Read a plan file and check that it is whole and made for this model and mesh.

    Raises:
        ValueError: damaged, of another version, or for another model or mesh; says which and how to get a new one.
    """
    remedy = "save a new one with `trainer.plan.save(path)`, or use one of the rules by name, such as plan='auto'"
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"plan={str(path)!r} is neither the name of a rule nor a readable file: {error}") from error
    except ValueError as error:
        raise ValueError(f"plan file {path} is damaged ({error}); {remedy}") from error
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise ValueError(f"plan file {path} has format {version!r}, this version reads {FORMAT!r}; {remedy}")
    graphs = graphs_digest(pairs)
    wanted = {"model": model, "mesh": dict(mesh), "graphs": graphs}
    for key, value in wanted.items():
        if data.get(key) != value:
            raise ValueError(f"plan file {path} is for {key} {data.get(key)!r}, this run has {value!r}; {remedy}")
    try:
        absent = [key for key in ("rule", "blocks") if key not in data]
        if absent:
            raise ValueError(f"it lacks {', '.join(absent)}")
        rule = data["rule"]
        orders = {Block.parse(name): tuple(order) for name, order in data["blocks"].items()}
        for block in all_blocks(pairs):
            forward = pairs[block.forward].forward if block.forward else None
            backward = pairs[block.backward].backward if block.backward else None
            if block not in orders:
                raise ValueError(f"block {str(block)!r} is missing")
            validate_order(orders[block], forward, backward, block=block)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"plan file {path} is damaged: {error}\n{remedy}") from error
    return Plan(str(rule), model, dict(mesh), graphs, orders)


def first_difference(mine: str, theirs: str) -> str:
    """The first line in which two texts differ, both versions; empty when they are equal."""
    left, right = mine.splitlines(), theirs.splitlines()
    for number in range(max(len(left), len(right))):
        a = left[number] if number < len(left) else "(nothing)"
        b = right[number] if number < len(right) else "(nothing)"
        if a != b:
            return f"line {number + 1}: {a.strip()!r} against {b.strip()!r}"
    return ""
