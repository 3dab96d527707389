"""Amounts of larger micro-batches bound what is counted."""

from itertools import product
from typing import Any

import pytest
from support.simulated import cluster_with, on_meta

from hf_helix.doctor.amounts.larger import larger_amounts
from hf_helix.doctor.case import Case
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import bound_step, simulate_step
from hf_helix.doctor.window import Fidelity
from hf_helix.planning.timing.sizes import Sizes

CLUSTER = cluster_with(
    devices_per_node=4, contention={"compute_beside_intra_node": 1.3, "intra_node_beside_compute": 1.2}
)
LENGTH = 64
LAYOUTS = (Sizes(dp=4), Sizes(tp=2, dp=2), Sizes(tp=4), Sizes(pp=2, tp=2), Sizes(cp=2, dp=2))


@pytest.fixture(scope="module")
def paper() -> SimulatedModel:
    return SimulatedModel(
        on_meta("llama", num_hidden_layers=4, hidden_size=96, num_attention_heads=8, num_key_value_heads=4), CLUSTER
    )


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_no_count_of_larger_micro_batches_is_faster(sizes: Sizes, paper: SimulatedModel) -> None:
    def case(batch: int, recompute: str) -> Case:
        return Case.of(sizes, batch, LENGTH, 8, recompute=recompute)

    few = paper.amounts(case(1, "none"))
    for batch in (2, 4, 8):
        ceiling = bound_step(larger_amounts(few, batch), case(batch, "none"), CLUSTER).tokens_per_second
        for recompute in ("none", "selective", "full"):
            counted = case(batch, recompute)
            assert bound_step(paper.amounts(counted), counted, CLUSTER).tokens_per_second <= 1.0001 * ceiling


SHARDED = {"shard_parameters": True, "reduce_gradients": "microbatch"}
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"shard_optimizer": True}, {"offload": "optimizer"})
SLOW = cluster_with(
    nodes=2, devices_per_node=2, network={"gb_per_s": 0.1}, host={"gb_per_s": 10, "memory_gb_per_s": 50}
)


OVER_NETWORK = [
    *product((Sizes(dp=4), Sizes(tp=2, dp=2)), (*OPTIONS, SHARDED)),
    *product((Sizes(pp=2, dp=2),), OPTIONS),
]


@pytest.mark.parametrize(("sizes", "options"), OVER_NETWORK, ids=str)
def test_no_step_is_shorter_than_its_bound_over_a_slow_network(
    sizes: Sizes, options: dict[str, Any], paper: SimulatedModel
) -> None:
    """Gathers, reductions, updates and waits of stages belong to a bound."""
    case = Case.of(sizes, 2, LENGTH, 8, **options)
    amounts = paper.on(SLOW).amounts(case)
    bound = bound_step(amounts, case, SLOW, split=True)
    for fidelity in (Fidelity.QUICK, Fidelity.TIMED):
        step = simulate_step(amounts, case, SLOW, fidelity)
        assert 0.6 * step.seconds <= bound.seconds <= 1.0001 * step.seconds


def test_one_strand_hides_no_collective_of_a_layer(paper: SimulatedModel) -> None:
    one, two = (Case.of(Sizes(tp=4), 2, LENGTH, 8, plan=plan) for plan in ("sequential", "greedy"))
    bounds = [bound_step(paper.amounts(case), case, CLUSTER).seconds for case in (one, two)]
    assert bounds[0] > bounds[1]
    assert bounds[0] > 0.95 * simulate_step(paper.amounts(one), one, CLUSTER, Fidelity.TIMED).seconds


@pytest.mark.parametrize("plan", ["greedy", "sequential"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_no_window_is_shorter_than_its_bound(sizes: Sizes, plan: str, paper: SimulatedModel) -> None:
    """Collectives beside computation slow it down, and are no shorter than one after the other."""
    case = Case.of(sizes, 2, LENGTH, 8, plan=plan)
    amounts = paper.amounts(case)
    for fidelity in (Fidelity.QUICK, Fidelity.TIMED):
        step = simulate_step(amounts, case, CLUSTER, fidelity)
        assert bound_step(amounts, case, CLUSTER, split=True).seconds <= 1.0001 * step.seconds
