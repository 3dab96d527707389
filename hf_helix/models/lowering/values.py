"""The values of a unit while it is declared: their names, and the forms in which each is there.

In:   the outline of a unit, and the builder that its operators are declared on.
Out:  names of values and of operators; glue as functions.
Must hold: a value is gathered or scattered once, where it first meets what needs it in that form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

from hf_helix.models.graph.builder import Builder
from hf_helix.models.lowering.forms import ByRows, OfShard
from hf_helix.models.lowering.glue import Glue
from hf_helix.models.lowering.outline import Outline
from hf_helix.models.placement.placed import PARTIAL, SHARD, WHOLE
from hf_helix.models.trace.trace import BATCH, PLACES, SEQUENCE, Underivable


class Values:
    """The names of the values of one module.

    Args:
        outline: the unit.
        b: its builder.
        module: the module.
        start: the names of the values that enter.
    """

    def __init__(self, outline: Outline, b: Builder, module: Any, start: dict[Node, str]) -> None:
        self.outline = outline
        self.trace = outline.trace
        self.b = b
        self.module = module
        self.names: dict[tuple[Node, str], str] = {}
        self.used: set[str] = set()
        for node, name in start.items():
            self.names[node, outline.placed(node).where] = name

    def value(self, node: Node, where: str) -> str:
        """Returns the name of a value in some form, and declares the communication that gives it."""
        known = self.names.get((node, where))
        if known is not None:
            return known
        have = self.outline.placed(node).where
        if have == PARTIAL and where == SHARD:
            name = self.b.reduce_scatter(self._name(node, "scatter"), self.names[node, PARTIAL])
        elif where == WHOLE and have != WHOLE:
            name = self.b.all_gather(self._name(node, "gather"), self.value(node, SHARD))
        else:
            raise Underivable(f"{node.name} in {self.trace.path(node)} would have to be cut again")
        self.names[node, where] = name
        return name

    def _function(
        self, glue: Glue, outputs: Sequence[Node], inputs: Sequence[Node]
    ) -> tuple[Callable[..., Any], tuple[str, ...]]:
        """Returns the glue as a function over values as operators hand them on, and the side inputs that it takes."""
        bound = glue.bind(self.module)
        side = tuple(name for name in glue.side if name != PLACES)
        if not side:
            return (OfShard(bound, self.b.tp.rank) if glue.side else bound), glue.side
        if len(outputs) > 1 or any(self.trace.shape(value)[:2] != (BATCH, SEQUENCE) for value in (*inputs, *outputs)):
            raise Underivable("rows of tokens meet what belongs to positions")
        return ByRows(bound), (*side, "length")

    def _used_by(self, glue: Glue) -> dict[str, Any]:
        """Returns what glue calls and reads, as `Builder.segment` takes it: what ranks have whole, and what is cut."""
        cut = {self.trace.attributes[node] for node in self.outline.inference.decisions.cut}
        parameters = glue.parameters(self.module)
        return {
            "uses": [*glue.called(self.module), *(parameter for name, parameter in parameters if name not in cut)],
            "cut": [parameter for name, parameter in parameters if name in cut],
        }

    def _is_there(self, node: Node) -> bool:
        return any((node, where) in self.names for where in (SHARD, WHOLE, PARTIAL))

    def _set(self, node: Node, name: str) -> None:
        self.names[node, self.outline.placed(node).where] = name

    def _name(self, node: Node, suffix: str = "") -> str:
        """Returns a name of an operator that is not taken: the path of the module, and what is done there."""
        leaf = self.trace.leaf(node)
        if leaf is not None:
            base = leaf.path or leaf.kind
        else:
            what = str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)
            path = self.trace.path(node)
            base = f"{path}.{what}" if path else what
        return self._free(f"{base}.{suffix}" if suffix else base)

    def _free(self, name: str) -> str:
        free, number = name, 1
        while free in self.used:
            number += 1
            free = f"{name}.{number}"
        self.used.add(free)
        return free
