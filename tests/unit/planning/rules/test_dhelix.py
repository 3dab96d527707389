"""The paper's search: optimal over its space by brute force, valid, never slower than one strand after the other."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from support.arrays import arrays_of
from support.graphs import LLAMA, compute, llama_layer, pair

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part
from hf_helix.planning.plan.block_plan import BARRIER, Order, all_blocks, entries, sequential, validate_order
from hf_helix.planning.rules import dhelix as dhelix_module
from hf_helix.planning.rules.dhelix import dhelix
from hf_helix.planning.timing.operator_clock import simulate
from hf_helix.planning.timing.profile import Pair, Profile, rough_profile
from hf_helix.planning.window.instructions import BARRIER_INSTRUCTION, unit_instructions
from hf_helix.planning.window.layout import Layout, named_operators

L, X = Kind.INTRA_NODE, Kind.INTER_NODE


def llama(transfer: float = 5.0) -> dict[str, GraphPair]:
    """Units with efforts such as the adapters declare; every collective takes `transfer`."""
    efforts = {"attn.qkv": 6.0, "attention": 4.0, "attn.out": 4.0, "mlp.up": 4.0, "mlp.down": 4.0}
    layer = llama_layer()
    operators = [
        replace(op, relative_cost=transfer if op.kind.communicates else efforts.get(op.name, 0.5))
        for op in layer.operators
    ]
    return {**LLAMA, "layer": GraphPair.of(replace(layer, operators=tuple(operators)))}


def profile_of(units: dict[str, GraphPair], dice: random.Random | None = None) -> Profile:
    """With dice, operators of different kinds slow each other down."""
    profile = rough_profile(Layout(list(units), {0: list(range(len(units)))}, units))
    kinds = {name: op.kind for name, op in named_operators(profile.layout)}
    pairs = {}
    for a, b in itertools.combinations(kinds, 2) if dice else ():
        if kinds[a] is not kinds[b]:
            alone, other = profile.times[a], profile.times[b]
            slower = [1 + 0.6 * dice.random() for _ in range(2)]
            first, second = alone * slower[0], other * slower[1]
            if first > second:
                first = second + alone - second / slower[0]
            else:
                second = first + other - first / slower[1]
            pairs[a, b] = Pair(max(first, second), first, second)
    return Profile(profile.about, profile.layout, profile.times, {}, pairs)


def seconds_of(forward: Graph | None, backward: Graph | None, profile: Profile) -> Callable[[Order], float]:
    """What the cost function says of every order of a block."""
    layout = profile.layout
    made = {BARRIER: BARRIER_INSTRUCTION}
    for graph, is_forward in ((forward, True), (backward, False)):
        if graph is not None:
            for instruction in unit_instructions(layout, (int(is_forward), layout.units.index(graph.name), is_forward)):
                made[f"{'BF'[is_forward]}.{instruction.operator.name}"] = instruction
    slowdown = profile.slowdown if profile.pairs else None
    return lambda order: simulate(arrays_of([made[entry] for entry in order], layout, profile.times), slowdown).seconds


def groups_of(order: Order) -> Iterator[list[str]]:
    """What lies between the barriers."""
    group: list[str] = []
    for entry in order:
        if entry == BARRIER:
            yield group
            group = []
        else:
            group.append(entry)
    assert not group, "a block ends with a barrier"


# Brute force, from the description of the space


class Space:
    """Every order of the space, one by one."""

    def __init__(self, forward: Graph, backward: Graph) -> None:
        self.operators = entries(forward, backward)
        moving = [entry for entry, op in self.operators.items() if op.part is Part.W]
        self.chains = {s: [e for e in self.operators if e[0] == s and e not in moving] for s in "FB"}
        names = list(self.operators)
        self.behind = {w: [e for e in self.chains["B"] if names.index(e) < names.index(w)] for w in moving}

    def orders(self, issued: frozenset[str] = frozenset()) -> Iterator[Order]:
        left = {s: [e for e in chain if e not in issued] for s, chain in self.chains.items()}
        if len(issued) == len(self.operators):
            yield ()
        for a, b in itertools.product(range(dhelix_module.SEGMENT + 1), repeat=2):
            if a > len(left["F"]) or b > len(left["B"]):
                continue
            segments = left["F"][:a], left["B"][:b]
            if all(any(self.operators[e].kind is L for e in segment) for segment in segments):
                continue
            chained = issued.union(*segments)
            ready = [w for w in self.behind.keys() - issued if chained.issuperset(self.behind[w])]
            late = {w for w in ready if issued.issuperset(self.behind[w])}
            for chosen in powerset(ready):
                waiting = len(ready) - len(chosen)
                if (
                    len(late.intersection(chosen)) <= dhelix_module.MOVED
                    and waiting <= dhelix_module.PENDING
                    and (a or b or chosen)
                ):
                    for group in self.merges(segments, chosen, issued):
                        for rest in self.orders(issued | set(group)):
                            yield (*group, BARRIER, *rest)

    def merges(
        self, segments: tuple[list[str], list[str]], chosen: tuple[str, ...], issued: frozenset[str]
    ) -> list[Order]:
        members = [*segments[0], *segments[1], *chosen]
        return [order for order in itertools.permutations(members) if self.allowed(order, segments, issued)]

    def allowed(self, order: Order, segments: tuple[list[str], list[str]], issued: frozenset[str]) -> bool:
        done = set(issued)
        for entry in order:
            following = [next((e for e in segment if e not in done), None) for segment in segments]
            collectives = [e for e in following if e is not None and self.operators[e].kind.communicates]
            if collectives and entry != collectives[0]:
                return False
            if entry not in following and not (entry in self.behind and done.issuperset(self.behind[entry])):
                return False
            done.add(entry)
        return True


def powerset(items: list[str]) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(sorted(items), n) for n in range(len(items) + 1))


def small_unit(name: str, dice: random.Random, size: int) -> GraphPair:
    """A chain with a residual add now and then."""
    operators: list[Operator] = []
    before = "x"
    for number in range(size):
        kind = dice.choice([Kind.COMPUTE, Kind.COMPUTE, L, X])
        split = kind is Kind.COMPUTE and dice.random() < 0.6
        effort = dice.choice([0.5, 1.0, 2.0, 3.0, 5.0])
        reads = before
        if kind is Kind.COMPUTE and not split and number == size - 1 and not operators[0].kind.communicates:
            reads = f"x {before}"
        options = {"splits_dgrad_wgrad": split, "relative_cost": effort}
        operators.append(replace(compute(f"op{number}", reads, **options), kind=kind))
        before = f"op{number}"
    return pair(name, *operators)


@pytest.mark.parametrize("slowed", [False, True])
@pytest.mark.parametrize("limits", [(2, 1, 4), (2, 2, 1), (3, 1, 0), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_order_of_the_space_is_faster(
    seed: int, limits: tuple[int, int, int], slowed: bool, monkeypatch: pytest.MonkeyPatch
):
    for name, value in zip(("SEGMENT", "MOVED", "PENDING"), limits, strict=True):
        monkeypatch.setattr(dhelix_module, name, value)
    dice = random.Random(seed)
    units = {"f": small_unit("f", dice, 3), "b": small_unit("b", dice, 3)}
    forward, backward = units["f"].forward, units["b"].backward
    profile = profile_of(units, dice if slowed else None)
    orders = [*Space(forward, backward).orders(), sequential(forward, backward, profile)]
    timed = seconds_of(forward, backward, profile)
    assert timed(dhelix(forward, backward, profile)) == pytest.approx(min(map(timed, orders)), rel=1e-7)


# The layer of a model


@pytest.mark.parametrize("transfer", [2.0, 8.0])
def test_every_block_gets_a_valid_order_that_is_never_slower_than_sequential(transfer: float):
    units = llama(transfer)
    profile = profile_of(units)
    for block in all_blocks(units):
        forward, backward = block.graphs(units)
        order, timed = dhelix(forward, backward, profile), seconds_of(forward, backward, profile)
        validate_order(order, forward, backward, block=block)
        assert timed(order) <= timed(sequential(forward, backward, profile)) * (1 + 1e-9)
        for group in groups_of(order):
            local = {entry[0] for entry in group if entries(forward, backward)[entry].kind is L}
            # `sequential` itself has one strand between two barriers.
            assert len(local) < 2, f"two local collectives beside each other: {group}"
    layer = units["layer"]  # a strand alone runs as it does under `sequential`
    assert dhelix(layer.forward, None, profile) == (*entries(layer.forward, None), BARRIER)
    assert dhelix(None, layer.backward, profile) == (*entries(None, layer.backward), BARRIER)


def test_a_long_block_keeps_fewer_weight_gradients_waiting(monkeypatch: pytest.MonkeyPatch):
    """A layer gains, is ordered the same every time, and gains less where few states may be looked at."""
    layer, profile, slowed = llama()["layer"], profile_of(llama()), profile_of(llama(), random.Random(0))
    timed, timed_slowed = (seconds_of(layer.forward, layer.backward, each) for each in (profile, slowed))
    order = dhelix(layer.forward, layer.backward, profile)
    assert order == dhelix(layer.forward, layer.backward, profile)
    assert timed(order) < 0.8 * timed(sequential(layer.forward, layer.backward, profile))
    monkeypatch.setattr(dhelix_module, "MAX_STATES", 1)
    hasty, hasty_slowed = (dhelix(layer.forward, layer.backward, each) for each in (profile, slowed))
    for each in (hasty, hasty_slowed):
        validate_order(each, layer.forward, layer.backward)
    assert timed(hasty) >= timed(order)
    plain = timed_slowed(sequential(layer.forward, layer.backward, slowed))
    assert timed_slowed(hasty_slowed) <= plain * (1 + 1e-9)
