"""Plans: the static order in which one rank issues operators.

In:   the graphs of the units that meet, a profile, and a rule (or a file).
Out:  a `Plan`: for every block a list of entries such as `F.attn.gather` and `B.mlp.down.W`, or a flow, which orders
      whole windows (`hf_helix.planning.plans.list_scheduler`).
Must hold: an order holds every operator of its block once, each after what it reads; `validate_order` knows nothing
of the rules that make orders. What an order means is the same on every device: compute operators run in this
order on one stream; a communication operator starts once everything issued before it on the compute stream is done
and its own stream is free; a compute operator waits for the communication whose result it reads. At the entry
`barrier` the compute stream waits for all communication.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_helix.planning.graph.operator import Graph, Operator, digest
from hf_helix.planning.graph.pair import RECEIVE, SEND, GraphPair
from hf_helix.planning.plans.baselines.intra_batch import tile_graph
from hf_helix.planning.plans.list_scheduler import Flow
from hf_helix.planning.profile import Profile
from hf_helix.planning.text import format_json, round_ms

FORMAT = "hf_helix.plan/2"

BARRIER = "barrier"

Order = tuple[str, ...]
"""Entries of one block: the strand's letter, a dot, the operator's name; or `barrier`."""

Rule = Callable[[Graph | None, Graph | None, Profile], Order]
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


def entries(forward: Graph | None, backward: Graph | None) -> dict[str, Operator]:
    """Every operator of a block by its entry in a plan, each strand in canonical order."""
    found = {}
    for letter, graph in (("F", forward), ("B", backward)):
        for operator in graph.operators if graph else ():
            found[f"{letter}.{operator.name}"] = operator
    return found


def validate_order(order: Iterable[str], forward: Graph | None, backward: Graph | None, *, block: object = "") -> None:
    """Check that `order` is a permutation of the block's operators in which each comes after what it reads.

    Raises:
        ValueError: with the whole order printed and an arrow at the first entry that is wrong.
    """
    order = list(order)
    operators = entries(forward, backward)
    written = {
        (letter, v) for letter, graph in (("F", forward), ("B", backward)) if graph for v in graph.inputs + graph.kept
    }
    seen: set[str] = set()
    for place, entry in enumerate(order):
        if entry == BARRIER:
            continue
        problem = None
        if entry not in operators:
            problem = "is not an operator of this block"
        elif entry in seen:
            problem = "comes a second time"
        else:
            missing = [v for v in operators[entry].depends_on if (entry[0], v) not in written]
            early = [name for name in operators[entry].after if f"{entry[0]}.{name}" not in seen]
            if missing:
                problem = f"comes before the operator that writes {', '.join(missing)}"
            elif early:
                problem = f"comes before {', '.join(early)}"
        if problem:
            lines = [f"{'-->' if i == place else '   '} {line}" for i, line in enumerate(order)]
            raise ValueError(f"block {block}: {entry!r} {problem}:\n" + "\n".join(lines))
        seen.add(entry)
        written.update((entry[0], value) for value in operators[entry].writes)
    left = [entry for entry in operators if entry not in seen]
    if left:
        raise ValueError(f"block {block}: the order lacks {', '.join(left)}:\n    " + "\n    ".join(order))


@dataclass(frozen=True)
class Plan:
    """The order of every block a schedule can ask for, or a flow.

    `rule` names how it was made; `model`, `mesh` and `graphs` (a digest) say what it is for. `tiles` above 1: it is for
    the graphs with their collectives cut into so many tiles (`hf_helix.planning.plans.baselines.intra_batch`).
    """

    rule: str
    model: str
    mesh: Mapping[str, int]
    graphs: str
    orders: Mapping[Block, Order]
    flow: Flow | None = None
    tiles: int = 1

    def order(self, forward: str | None, backward: str | None) -> Order:
        """The order of the block in which these two units meet."""
        return self.orders[Block(forward, backward)]

    def to_json(self) -> str:
        """The text form that is kept in files: JSON, one operator a line."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "rule": self.rule,
            "model": self.model,
            "mesh": dict(self.mesh),
            "graphs": self.graphs,
            "tiles": self.tiles,
        }
        if self.flow is None:
            data["blocks"] = {str(block): list(order) for block, order in self.orders.items()}
        else:
            data["flow"] = _flow_data(self.flow)
        return format_json(data) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan to a file that `HelixConfig(plan=path)` takes."""
        Path(path).write_text(self.to_json())


def block_plan(name: str, rule: Rule, profile: Profile, *, model: str, mesh: Mapping[str, int], tiles: int = 1) -> Plan:
    """Apply a rule to every block that the units of a profile can form, and check each order."""
    pairs, orders = profile.layout.graphs, {}
    for block in all_blocks(pairs):
        forward, backward = _graphs_of(block, pairs)
        orders[block] = rule(forward, backward, profile)
        validate_order(orders[block], forward, backward, block=block)
    return Plan(name, model, dict(mesh), graphs_digest(pairs), orders, tiles=tiles)


def _graphs_of(block: Block, pairs: Mapping[str, GraphPair]) -> tuple[Graph | None, Graph | None]:
    forward = pairs[block.forward].forward if block.forward else None
    backward = pairs[block.backward].backward if block.backward else None
    return forward, backward


def tile_pairs(pairs: Mapping[str, GraphPair], tiles: int) -> Mapping[str, GraphPair]:
    """The graphs with their collectives cut into tiles."""
    if tiles == 1:
        return pairs
    return {
        name: pair if pair.forward.transfers else GraphPair.of(tile_graph(pair.forward, tiles))
        for name, pair in pairs.items()
    }


def all_blocks(units: Iterable[str]) -> list[Block]:
    """Every block that units of these names can form: each alone, and each forward beside each backward."""
    names = [name for name in units if name not in (SEND, RECEIVE)]
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
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"plan={str(path)!r} is neither the name of a rule nor a readable file: {error}") from error
    try:
        return parse_plan(text, pairs, model=model, mesh=mesh)
    except ValueError as error:
        raise ValueError(
            f"plan file {path} {error}\nMake a new one with `hf-helix plan` or `trainer.plan.save(path)`, or use one "
            "of the rules by name, such as plan='auto'"
        ) from error


def parse_plan(text: str, pairs: Mapping[str, GraphPair], *, model: str, mesh: Mapping[str, int]) -> Plan:
    """A plan from its text form. Raises ValueError as `load_plan`."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is damaged: {error}") from error
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise ValueError(f"has format {version!r}, this version reads {FORMAT!r}")
    tiles = data.get("tiles", 1)
    if not isinstance(tiles, int) or tiles < 1:
        raise ValueError(f"is damaged: tiles must be a whole number of at least 1, got {tiles!r}")
    pairs = tile_pairs(pairs, tiles)
    graphs = graphs_digest(pairs)
    wanted = {"model": model, "mesh": dict(mesh), "graphs": graphs}
    for key, value in wanted.items():
        if data.get(key) != value:
            raise ValueError(f"is for {key} {data.get(key)!r}, this run has {value!r}")
    try:
        if "rule" not in data or ("blocks" in data) == ("flow" in data):
            raise ValueError("it needs `rule`, and either `blocks` or `flow`")
        rule = str(data["rule"])
        if "flow" in data:
            return Plan(rule, model, dict(mesh), graphs, {}, _flow_from(data["flow"], pairs), tiles)
        orders = {Block.parse(name): tuple(order) for name, order in data["blocks"].items()}
        _check_known(map(str, orders), map(str, all_blocks(pairs)), "block")
        for block in all_blocks(pairs):
            if block not in orders:
                raise ValueError(f"block {str(block)!r} is missing")
            validate_order(orders[block], *_graphs_of(block, pairs), block=block)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"is damaged: {what}") from error
    return Plan(rule, model, dict(mesh), graphs, orders, tiles=tiles)


def _flow_data(flow: Flow) -> dict[str, Any]:
    operators: dict[str, dict[str, Any]] = {}
    for (unit, entry), seconds in flow.times.items():
        bias = flow.bias.get((unit, entry), 0.0)
        figures = {"ms": round_ms(seconds, 9), "bias_ms": round_ms(bias, 9)}
        operators.setdefault(unit, {})[entry] = figures
    return {"extra_layers": flow.extra_layers, "operators": operators}


def _flow_from(data: Mapping[str, Any], pairs: Mapping[str, GraphPair]) -> Flow:
    times, bias = {}, {}
    _check_known(data["operators"], pairs, "unit")
    for unit, pair in pairs.items():
        known = entries(pair.forward, pair.backward)
        found = data["operators"].get(unit, {})
        strange = sorted(found.keys() - known.keys())
        missing = [entry for entry in known if entry not in found]
        if strange or missing:
            what = f"has no operator {strange[0]!r}" if strange else f"lacks the operator {missing[0]!r}"
            raise ValueError(f"the flow of unit {unit!r} {what}" if missing else f"unit {unit!r} {what}")
        for entry in known:
            absent = [key for key in ("ms", "bias_ms") if key not in found[entry]]
            if absent:
                raise ValueError(f"{unit} {entry} lacks {absent[0]!r}")
            seconds, urgency = (float(found[entry][key]) / 1e3 for key in ("ms", "bias_ms"))
            if not (math.isfinite(seconds) and seconds > 0 and math.isfinite(urgency)):
                raise ValueError(f"impossible figures of {unit} {entry}: {found[entry]}")
            times[unit, entry], bias[unit, entry] = seconds, urgency
    extra = data["extra_layers"]
    if not isinstance(extra, int) or isinstance(extra, bool) or extra < 0:
        raise ValueError(f"extra_layers must be a whole number of at least 0, got {extra!r}")
    return Flow(times, bias, extra)


def _check_known(found: Iterable[str], known: Iterable[str], what: str) -> None:
    strange = sorted(set(found) - set(known))
    if strange:
        raise ValueError(f"this model has no {what} {strange[0]!r}")
