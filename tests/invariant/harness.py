"""Runs cases on a cluster and compares them with the unsplit model.

In:   a case of the table, and the orders in which its operators are issued.
Out:  losses, whole gradients, and in which gradients the bits of the orders differ; assertions about them.
Must hold: the cases of a class share one run of the unsplit model; cases that follow each other share what they can.
A derived model is not proven before its windows, which are compared with the unsplit model themselves.
"""

import functools
import os
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from invariant.classes import Case
from support.comparisons import assert_same_bits
from support.graphs import ORDER_BLOCK
from support.parity import compare_window, unsplit
from support.pipeline_jobs import make, runner_of, whole_gradients, window_of
from support.tuning_jobs import hasty

from benchmarks.paper.tiled_units import in_tiles
from hf_helix import HelixTrainer
from hf_helix.planning.graph.operator import Graph
from hf_helix.planning.plan.block_plan import BARRIER, BlockPlan, Order, OrderBlock, entries
from hf_helix.planning.plan.list_scheduler import Priorities, PriorityPlan
from hf_helix.planning.plan.plan import Plan, graphs_digest
from hf_helix.planning.timing.profile import Profile, rough_profile
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.runner import Runner

RANDOM = "random"
OWN = "the run's own"  # the plan that the options name
USUAL = ("sequential", RANDOM)
NAMED = ("sequential", "round_robin", "greedy", "search", "dhelix")

WINDOWS = "invariant.harness:windows"

ClusterOf = Callable[[int], Any]
Result = Mapping[str, Any]


def seed_of(name: str) -> int:
    """The seed of a case's random order. The variable ORDER_SEED draws another one."""
    return zlib.crc32(f"{name} {os.environ.get('ORDER_SEED', '')}".strip().encode())


# -- in the tests ------------------------------------------------------------------------------------------------


def run(
    cluster_of: ClusterOf,
    folder: Path,
    case: Case,
    orders: Sequence[str] = USUAL,
    training: Mapping[str, Any] | None = None,
    job: str = WINDOWS,
) -> list[list[Result]]:
    """The windows of a case, rank by rank and schedule by schedule; all orders of one give the same bits."""
    seed = seed_of(case.name)
    print(f"{case.name}: the random order has seed {seed}")  # shown where the test fails
    given = {"helix": {"plan": "sequential", **case.helix}, "model": dict(case.model), "training": dict(training or {})}
    batches = {"kind": case.kind, "count": case.count, "rows": case.rows, "lengths": case.lengths}
    shape = {"schedules": case.schedules, "orders": orders, "seed": seed}
    ranks = cluster_of(case.ranks).run(job, folder=str(folder), given=given, batches=batches, **shape)
    assert ranks[0][0]["gradients"]
    for rank, results in enumerate(ranks):
        for schedule, result in zip(case.schedules, results, strict=True):
            differing = {order: names for order, names in result["differing"].items() if names}
            assert not differing, f"rank {rank} under {schedule}: not the bits of {orders[0]}"
    return ranks


def check(cluster_of: ClusterOf, folder: Path, case: Case, orders: Sequence[str] = USUAL, job: str = WINDOWS) -> None:
    """Losses and gradients by name are those of the unsplit model, the same bits in every order.

    Also under every schedule, where no two units share a gradient: those add up in the order of the schedule.
    """
    ranks = run(cluster_of, folder, case, orders, job=job)
    sizes = case.sizes
    expected = unsplit(case.model, case.count * sizes["dp"], case.kind, case.lengths, case.rows)
    for place, schedule in enumerate(case.schedules):
        compare_window([rank[place] for rank in ranks], expected, sizes["dp"], sizes["ep"], schedule, case.floor)
        if not case.model.get("tie_word_embeddings"):
            assert_same_bits(ranks[0][place], ranks[0][0])


def check_adapted(cluster_of: ClusterOf, folder: Path, name: str, model: Mapping[str, Any], layout: str) -> None:
    """See `check`; of a model with adapters, with a layer or more for each stage."""
    layers = {"num_hidden_layers": 4 if "pp2" in layout else 2}
    check(cluster_of, folder, Case(name, {**layers, **model}, layout, "dense"), ("sequential", "dhelix"))


# -- in the processes of a cluster ---------------------------------------------------------------------------------

_latest: list[tuple[str, Any]] = []


def windows(
    folder: str,
    given: dict[str, Any],
    batches: dict[str, Any],
    schedules: Sequence[str],
    orders: Sequence[str],
    seed: int,
) -> list[dict[str, Any]]:
    """A window for each schedule and order.

    Args:
        given: what `make` takes.
        batches: what `window_of` takes.
        orders: names of plans; `OWN`; `RANDOM`. A number behind a rule of blocks cuts collectives into so many tiles.
        seed: of the random order.

    Returns:
        For each schedule what the first order gives, see `_window`; for each other order what differs from it.
    """
    trainer = _trainer_of(folder, given)
    result = []
    for schedule in schedules:
        with hasty():
            runners = [_runner_of(trainer, order, schedule, seed) for order in orders]
        first, *others = (_window(trainer, runner, batches, runner is runners[0]) for runner in runners)
        differing = {order: _differing(other, first) for order, other in zip(orders[1:], others, strict=True)}
        del first["parts"]
        result.append({**first, "differing": differing})
    _latest.append((repr(given), trainer))
    return result


def _trainer_of(folder: str, given: dict[str, Any]) -> HelixTrainer:
    """The trainer of the last case, if it is for the same and nothing went wrong."""
    key, trainer = _latest.pop() if _latest else ("", None)
    if key == repr(given):
        return trainer
    if trainer is not None:
        trainer.helix.runner.executor.streams.close()
    with mock.patch("hf_helix.engine.engine.prove_on_first_use"):
        trainer = make(folder, **given)
    trainer.model.train()
    return trainer


@plain_parameters()
def _window(trainer: Any, runner: Runner, batches: dict[str, Any], whole: bool) -> dict[str, Any]:
    """Losses, what routers counted, this rank's parts of the gradients and, if asked for, whole gradients (on rank 0).

    Of tiled graphs also the loss of the first micro-batch in evaluation.
    """
    window = window_of(trainer, **batches)
    losses = [loss.item() for loss in runner.train_window(window)]
    counted = [m.read(trainer.helix.mesh.device) for unit in runner.rank_units.all_units.values() for m in unit.meters]
    meters = [figures.nan_to_num(-1.0).tolist() for figures in counted]  # nan: of logits that nobody records
    is_tiled = runner.rank_units is not trainer.helix.runner.rank_units
    evaluated = runner.evaluate(window[:1])[0].item() if is_tiled else None
    parts = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    gradients = whole_gradients(trainer) if whole else {}
    trainer.model.zero_grad()
    return {"losses": losses, "meters": meters, "evaluated": evaluated, "parts": parts, "gradients": gradients}


def _runner_of(trainer: Any, order: str, schedule: str, seed: int) -> Runner:
    if order == OWN:
        return trainer.helix.runner
    rule, _, tiles = order.partition("/")
    if rule != RANDOM and not tiles:
        return runner_of(trainer, rule, schedule)
    runner = runner_of(trainer, "sequential", schedule)
    made_for = {"model": runner.plan.model, "mesh": runner.plan.mesh}
    if not tiles:
        return runner.with_plan(random_plan(seed, rough_profile(runner.layout), **made_for))
    order_block = random_orders(seed) if rule == RANDOM else ORDER_BLOCK[rule]
    return in_tiles(
        runner, int(tiles), lambda layout: BlockPlan.of(rule, order_block, rough_profile(layout), **made_for)
    )


def _differing(result: Result, first: Result) -> list[str]:
    """What has other bits."""
    names = [name for name, part in first["parts"].items() if not part.equal(result["parts"][name])]
    return names + [what for what in ("losses", "meters", "evaluated") if result[what] != first[what]]


# -- plans drawn at random among all that are valid: the same for the same seed, on every rank -----------------------

BARRIERS = 0.05  # of all places
MILLISECOND = 1e-3


def random_plan(seed: int, profile: Profile, *, model: str, mesh: Mapping[str, int]) -> Plan:
    """Even seeds order every block, odd ones the window as a whole."""
    if seed % 2:
        graphs, priorities = graphs_digest(profile.layout.graphs), random_priorities(seed, profile)
        return PriorityPlan("random", model, dict(mesh), graphs, priorities)
    return BlockPlan.of("random", random_orders(seed), profile, model=model, mesh=mesh)


def random_orders(seed: int) -> OrderBlock:
    """A rule that draws the order of every block."""
    return functools.partial(random_order, random.Random(seed))


def random_order(draw: random.Random, forward: Graph | None, backward: Graph | None, _: Profile) -> Order:
    """Any order in which operators come after what they read, with barriers at any place."""
    left = entries(forward, backward)
    written = {(letter, v) for letter, graph in (("F", forward), ("B", backward)) if graph for v in graph.inputs}
    written |= {("B", value) for value in (backward.saved_values if backward else ())}
    order: list[str] = []
    while left:
        ready = [
            entry
            for entry, op in left.items()
            if all((entry[0], value) in written for value in op.depends_on)
            and not any(f"{entry[0]}.{name}" in left for name in op.ordered_after)
        ]
        chosen = draw.choice(ready)
        written.update((chosen[0], value) for value in left.pop(chosen).writes)
        order += [chosen, *([BARRIER] if draw.random() < BARRIERS else [])]
    return tuple(order)


def random_priorities(seed: int, profile: Profile) -> Priorities:
    """Times and priorities that have nothing to do with the operators."""
    draw = random.Random(seed)
    times = {name: draw.uniform(0.01, 1.0) * MILLISECOND for name in profile.times}
    priority = {name: draw.uniform(-3.0, 3.0) * MILLISECOND for name in profile.times}
    return Priorities(times, priority, draw.randint(0, 3))
