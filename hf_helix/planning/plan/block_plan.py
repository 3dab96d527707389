"""Block plans: an order of operators for every possible pair of units.

In:   a rule that orders a block (the forward graph of a unit with the backward graph of another), and a profile.
Out:  a `BlockPlan`: for every block a list of entries, for example `F.attn.gather` and `B.mlp.down.W`.
Must hold: an order holds every operator of its block once, each after its inputs. `validate_order` checks this
independently of the rules.

Two rules need no times: `sequential`, the baseline of all plans, and `round_robin`, the paper's Wavelet+.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

from hf_helix.planning.graph.backward import RECEIVE, SEND, GraphPair
from hf_helix.planning.graph.operator import Graph, Operator
from hf_helix.planning.plan.plan import Plan, check_known, graphs_digest
from hf_helix.planning.schedule.actions import Schedule, Slot, SyncPoints
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.window.instructions import UnitPass, blocks_of, transfers_of
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.passes import OrderedWindow
from hf_helix.planning.window.window import NONE, Window, barrier_of

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

BARRIER = "barrier"

Order = tuple[str, ...]
"""Entries of one block: the strand's letter, a dot, the operator's name; or `barrier`."""

OrderBlock = Callable[[Graph | None, Graph | None, Profile], Order]
"""Makes the order of a block from its forward and its backward graph (None: that strand is absent)."""


@dataclass(frozen=True, order=True)
class Block:
    """The names of the paired forward and backward units; None for an absent strand."""

    forward: str | None
    backward: str | None

    def __str__(self) -> str:
        return " | ".join(
            f"{letter}.{name}" for letter, name in (("F", self.forward), ("B", self.backward)) if name is not None
        )

    def graphs(self, pairs: Mapping[str, GraphPair]) -> tuple[Graph | None, Graph | None]:
        """The forward graph and the backward graph of the block."""
        forward = pairs[self.forward].forward if self.forward else None
        backward = pairs[self.backward].backward if self.backward else None
        return forward, backward


@dataclass(frozen=True)
class BlockPlan(Plan):
    """The order of every block of a schedule."""

    KEY: ClassVar[str] = "blocks"

    orders: Mapping[Block, Order]

    @classmethod
    def of(cls, rule: str, order_block: OrderBlock, profile: Profile, *, model: str, mesh: Mapping[str, int]) -> Self:
        """Returns the plan of a rule that orders blocks independently.

        Args:
            rule: its name.
            order_block: applied to every possible block of the units that the plan orders; each order is checked.
            profile: the graphs and the times of their operators.
            model, mesh: the model's class and the sizes of the mesh, for plan files.
        """
        pairs, orders = profile.layout.graphs, {}
        for block in all_blocks(pairs):
            forward, backward = block.graphs(pairs)
            orders[block] = order_block(forward, backward, profile)
            validate_order(orders[block], forward, backward, block=block)
        return cls(rule, model, dict(mesh), graphs_digest(pairs), orders)

    def order(self, forward: str | None, backward: str | None) -> Order:
        """Returns the order of the block of these two units."""
        return self.orders[Block(forward, backward)]

    def issue(
        self,
        schedule: Schedule,
        layout: Layout,
        slots_ahead: int = 1,
        rank: int | None = None,
        sync_points: SyncPoints = (),
    ) -> OrderedWindow:
        """Slot by slot, block by block. The receives of a slot are issued `slots_ahead` slots early, its sends at its
        end. A rank's order does not depend on the other ranks."""
        asked = [slots if rank in (None, number) else [] for number, slots in enumerate(schedule)]
        window = Window(asked, layout)
        orders = _Orders(self, window)
        return OrderedWindow(window, [orders.of_rank(slots, slots_ahead) for slots in asked])

    def data(self) -> Any:
        """The entries of every block."""
        return {str(block): list(order) for block, order in self.orders.items()}

    @classmethod
    def fields_from(cls, data: Any, pairs: Mapping[str, GraphPair]) -> dict[str, Any]:
        """The orders of a file, each checked."""
        wanted, orders = {str(block): block for block in all_blocks(pairs)}, {}
        check_known(data, wanted, "block")
        for name, block in wanted.items():
            if name not in data:
                raise ValueError(f"block {name!r} is missing")
            orders[block] = tuple(data[name])
            validate_order(orders[block], *block.graphs(pairs), block=block)
        return {"orders": orders}


class _Orders:
    """The orders of a plan's blocks as places in a window."""

    def __init__(self, plan: BlockPlan, window: Window) -> None:
        self._plan, self._window = plan, window
        self._known: dict[tuple[int | None, int | None, str], list[tuple[bool, int]]] = {}

    def of_rank(self, slots: Sequence[Slot], slots_ahead: int) -> list[int]:
        """The order of a rank."""
        order: list[int] = []
        issued = 0
        for number, slot in enumerate(slots):
            for coming in slots[issued : number + 1 + slots_ahead]:
                order += self._transfers(coming, receives=True)
            issued = number + 1 + slots_ahead
            for forward, backward in blocks_of(slot, self._window.layout):
                order += self._of_block(slot, forward, backward)
            order += self._transfers(slot, receives=False)
        return order

    def _transfers(self, slot: Slot, receives: bool) -> list[int]:
        """The receives or the sends of a slot."""
        return [
            self._window.at[microbatch][index]
            for (microbatch, unit, _), action in transfers_of(slot, self._window.layout, receives)
            for index in self._window.pattern.of(unit, action.computation_type)
        ]

    def _of_block(self, slot: Slot, forward: UnitPass | None, backward: UnitPass | None) -> list[int]:
        """The order of a block of a slot."""
        at, unit = self._window.at, (forward or backward or (0, -1, True))[1]
        sides = [at[each[0]] if each else [] for each in (backward, forward)]
        return [
            barrier_of(unit) if index == NONE else sides[is_forward][index]
            for is_forward, index in self._indices(slot, forward, backward)
        ]

    def _indices(self, slot: Slot, forward: UnitPass | None, backward: UnitPass | None) -> list[tuple[bool, int]]:
        """Returns the instructions of a block in order, as indices into the pattern, each with its direction (whether
        forward); `NONE` stands for a barrier."""
        halves = slot.backward.computation_type if slot.backward else ""
        key = forward[1] if forward else None, backward[1] if backward else None, halves
        if key not in self._known:
            pattern, made = self._window.pattern, {BARRIER: [(False, NONE)]}
            for letter, unit_pass, kind in (("F", forward, "F"), ("B", backward, halves)):
                for index in pattern.of(unit_pass[1], kind) if unit_pass else ():
                    made.setdefault(pattern.names[index][1], []).append((letter == "F", index))
            units = self._window.layout.units
            names = (units[each[1]] if each else None for each in (forward, backward))
            order = self._plan.order(*names)
            # A prefetched operator of the next unit may have no entry here: it comes first. In a split backward, only
            # one half may be here.
            unnamed = [entry for entry in made if entry != BARRIER and entry not in order]
            self._known[key] = [index for entry in (*unnamed, *order) for index in made.get(entry, ())]
        return self._known[key]


def all_blocks(units: Iterable[str]) -> list[Block]:
    """Every block of units with these names: each direction by itself, and each forward with each backward."""
    names = [name for name in units if not name.startswith((SEND, RECEIVE))]
    alone = [Block(name, None) for name in names] + [Block(None, name) for name in names]
    return alone + [Block(forward, backward) for forward in names for backward in names]


def entries(forward: Graph | None, backward: Graph | None) -> dict[str, Operator]:
    """Every operator of a block by its entry in a plan, each strand in canonical order."""
    return {
        f"{letter}.{operator.name}": operator
        for letter, graph in (("F", forward), ("B", backward))
        for operator in (graph.operators if graph else ())
    }


def validate_order(order: Iterable[str], forward: Graph | None, backward: Graph | None, *, block: object = "") -> None:
    """Checks that `order` is a permutation of the block's operators, each after its inputs; None for an absent strand.

    Raises:
        ValueError: with the full order printed and an arrow at the first wrong entry.
    """
    order = list(order)
    operators = entries(forward, backward)
    written = {
        (letter, v)
        for letter, graph in (("F", forward), ("B", backward))
        if graph
        for v in graph.inputs + graph.saved_values
    }
    seen: set[str] = set()
    for place, entry in enumerate(order):
        if entry == BARRIER:
            continue
        problem = _problem(entry, operators, seen, written)
        if problem:
            lines = [f"{'-->' if i == place else '   '} {line}" for i, line in enumerate(order)]
            raise ValueError(f"block {block}: {entry!r} {problem}:\n" + "\n".join(lines))
        seen.add(entry)
        written.update((entry[0], value) for value in operators[entry].writes)
    left = [entry for entry in operators if entry not in seen]
    if left:
        raise ValueError(f"block {block}: the order lacks {', '.join(left)}:\n    " + "\n    ".join(order))


def _problem(
    entry: str, operators: Mapping[str, Operator], seen: set[str], written: set[tuple[str, str]]
) -> str | None:
    """Returns the error of an entry after the seen entries; None for a right entry."""
    if entry not in operators:
        return "is not an operator of this block"
    if entry in seen:
        return "comes a second time"
    missing = [value for value in operators[entry].depends_on if (entry[0], value) not in written]
    if missing:
        return f"comes before the operator that writes {', '.join(missing)}"
    early = [name for name in operators[entry].ordered_after if f"{entry[0]}.{name}" not in seen]
    return f"comes before {', '.join(early)}" if early else None


# -- orders without times ----------------------------------------------------------------------------------------------


def sequential(forward: Graph | None, backward: Graph | None, profile: Profile) -> Order:
    """Returns an order with a strand at a time, in canonical order, each with a barrier at its end. Backward frees a
    unit's activations, so it goes before forward, which keeps as many. In a pipeline forward goes first: its input
    arrives before the gradient, and a window with backward first was predicted 2 % longer.

    As in Megatron-LM, a single overlap: the weight gradient of a column-parallel linear with the reduce-scatter after
    its input gradient.

    Args:
        forward, backward: the graphs of the block; None if a strand is absent.
        profile: has the number of pipeline ranks.
    """
    strands = entries(None, backward), entries(forward, None)
    strands = strands if profile.layout.num_ranks == 1 else strands[::-1]
    return tuple(entry for strand in strands if strand for entry in (*strand, BARRIER))


def round_robin(forward: Graph | None, backward: Graph | None, profile: Profile) -> Order:
    """Returns the operators of the strands in turn; the rest of the longer strand follows."""
    turns = zip_longest(entries(forward, None), entries(None, backward))
    return tuple(entry for entry in chain.from_iterable(turns) if entry is not None)
