"""What every rule of placement needs: the placements found so far, and the ways to decide something and begin anew.

In:   a trace, the placement of the value that enters it, and the decisions of earlier rounds.
Out:  placements of operands, joined or moved; a decision, which ends the round by `Again`.
Must hold: a decision is never taken back within the same demotions, so that inference ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch.fx import Node

from hf_helix.models.placement.nodes import name_of
from hf_helix.models.placement.placed import FREE, SHARD, WHOLE, Again, Decisions, Placed
from hf_helix.models.trace.leaves import ATTENTION, LINEAR
from hf_helix.models.trace.trace import SEQUENCE, ModuleTrace, Underivable


class Rules:
    """The state of an inference, and what its rules share.

    Args:
        trace: the trace.
        tp_size: the number of tensor-parallel ranks.
        hidden: the placement of the value that enters.
    """

    def __init__(self, trace: ModuleTrace, tp_size: int, hidden: Placed) -> None:
        self.trace = trace
        self.tp_size = tp_size
        self.hidden = hidden
        self.decisions = Decisions()
        self.placed: dict[Node, Placed] = {}

    def _of(self, value: Any) -> Placed:
        return self.placed[value]

    def _leaf(self, node: Node) -> Any:
        return self.trace.leaf(node)

    def _dims(self, value: Any) -> int:
        return len(self.trace.shape(value))

    def _origins(self, operands: Iterable[Node]) -> frozenset[str]:
        return frozenset().union(*(self._of(value).origins for value in operands))

    def _moved(self, given: Placed, places: dict[int, int]) -> Placed:
        dim = None if given.dim is None else places[given.dim]
        is_same = given.expanded is not None and places[given.expanded[1]] == given.expanded[1]
        return replace(given, dim=dim, is_direct=False, expanded=given.expanded if is_same else None)

    def _join(self, operands: Sequence[Node]) -> str:
        """Returns where a computation of several values takes place."""
        places = {self._of(value).where for value in operands}
        if places <= {FREE}:
            return FREE
        # What is free and has a place for every token, such as a rope, is that of the whole sequence.
        of_all = any(self._of(value).where == FREE and SEQUENCE in self.trace.shape(value) for value in operands)
        return WHOLE if WHOLE in places or of_all else SHARD

    def _cut(self, value: Node) -> None:
        if value not in self.decisions.cut:
            self.decisions.cut[value] = None
            raise Again

    def _demote(self, origins: Iterable[str], node: Node) -> NoReturn:
        new = set(origins) - self.decisions.demoted
        if not new:
            where = self.trace.path(node)
            raise Underivable(f"{name_of(node)} in {where or 'the layer'} cannot be computed on cut values")
        self.decisions.demoted |= new
        self.decisions.cut.clear()  # what was decided for shares that are none now is decided anew
        self.decisions.shortened.clear()
        raise Again

    def _feeds_attention(self, node: Node) -> bool:
        """Returns whether what comes of a value reaches attention before any other linear."""
        waiting, seen = list(node.users), set()
        while waiting:
            user = waiting.pop()
            leaf = self.trace.leaf(user)
            if leaf is not None and leaf.kind == LINEAR:
                return False
            if leaf is not None and leaf.kind == ATTENTION:
                continue
            if user not in seen:
                seen.add(user)
                waiting += user.users
        return True

    def _refuse_mixing(self, node: Node) -> NoReturn:
        where = self.trace.path(node) or "the layer"
        raise Underivable(f"{name_of(node)} in {where} mixes tokens outside of attention")
