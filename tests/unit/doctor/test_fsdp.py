"""Plain FSDP on paper: what it sends and keeps by hand, and where gathers hide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.simulated import case_of, cluster_with, counted, on_meta

from hf_helix.doctor.amounts.amounts import Amounts
from hf_helix.doctor.fsdp import simulate_fsdp
from hf_helix.doctor.step import Step, simulate_step
from hf_helix.doctor.window import Fidelity
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import Cluster, Curve

LAYERS, RANKS, MICROBATCHES = 4, 4, 3
FREE: dict[str, Any] = {"peak_tflops": {"bf16": 1e6}, "memory_gb_per_s": 1e9}
"""A device that computes in no time."""
LINK = 1e9  # bytes a second
SLOW = cluster_with(devices_per_node=RANKS, device=FREE, node={"gb_per_s": LINK / 1e9})
FAST = cluster_with(devices_per_node=RANKS, node={"gb_per_s": 1e9})


@pytest.fixture(scope="module")
def amounts() -> Amounts:
    return counted(on_meta(num_hidden_layers=LAYERS), bf16=True)


def step_of(amounts: Amounts, cluster: Cluster, microbatches: int = MICROBATCHES, sync: bool = False) -> Step:
    case = case_of(microbatches, 2, 32, dp=RANKS, plan="sequential")
    return simulate_fsdp(amounts, case, cluster, sync).step


def sizes(amounts: Amounts) -> tuple[int, int]:
    """Parameters of a layer, and of what belongs to none."""
    trained = {name: held.trained for name, held in amounts.weights.items()}
    return trained["layer"], trained["embedding"] + trained["head"]


@pytest.mark.parametrize("sync", [False, True])
def test_weights_are_gathered_twice_and_gradients_reduced_once(amounts: Amounts, sync: bool):
    layer, ends = sizes(amounts)
    gathered = MICROBATCHES * (2 * LAYERS * layer + ends)
    reduced = (MICROBATCHES if sync else 1) * (LAYERS * layer + ends)
    expected = 2 * (gathered + reduced) * (RANKS - 1) / RANKS / LINK  # in bf16
    step = step_of(amounts, SLOW, sync=sync)
    assert step.loads[Kind.INTRA_NODE] == pytest.approx(expected)
    assert step.window + step.sums == pytest.approx(expected, rel=0.03), "nothing hides it"
    assert step.exposed[Kind.INTRA_NODE] + step.sums == pytest.approx(expected, rel=0.03)


def test_what_is_gathered_beside_computation_does_not_show(amounts: Amounts):
    step = step_of(amounts, FAST)
    plain = simulate_step(amounts, step.case, FAST, Fidelity.REDUCED)
    assert step.exposed[Kind.INTRA_NODE] == pytest.approx(0, abs=1e-6 * step.window)
    assert step.window == pytest.approx(plain.window - plain.casts, rel=0.01)
    assert step.optimizer == pytest.approx(plain.optimizer / RANKS)
    assert step.model_flops == plain.model_flops


def test_contention_slows_what_runs_beside_each_other(amounts: Amounts):
    cluster = cluster_with(devices_per_node=RANKS, node={"gb_per_s": 20})
    ways = (Kind.COMPUTE, Kind.INTRA_NODE), (Kind.INTRA_NODE, Kind.COMPUTE)
    slow = replace(cluster, contention=dict.fromkeys(ways, Curve(((1.0, 1.5),))))
    alone = step_of(amounts, cluster)
    one_by_one = alone.loads[Kind.COMPUTE] + alone.loads[Kind.INTRA_NODE]
    assert alone.window < step_of(amounts, slow).window < one_by_one


def test_memory_is_a_part_of_the_model_and_what_is_gathered(amounts: Amounts):
    layer, ends = sizes(amounts)
    model = LAYERS * layer + ends
    kept, synced = (step_of(amounts, SLOW, sync=sync).memory for sync in (False, True))
    assert synced.weights == synced.gradients == 4 * model / RANKS
    assert synced.states == 8 * model / RANKS
    assert synced.copies == 2 * (2 * layer + ends)
    assert synced.buffers == 2 * 2 * layer
    assert kept.gradients - synced.gradients == 2 * model, "whole gradients, between micro-batches"
    assert step_of(amounts, SLOW, microbatches=1).memory == synced
    assert synced.activations > 0


def test_tied_weights_are_gathered_reduced_and_kept_once():
    apart, tied = (
        counted(on_meta("qwen3", num_hidden_layers=LAYERS, tie_word_embeddings=shared), bf16=True)
        for shared in (False, True)
    )
    table = 2 * 128 * 64  # in bf16
    sent = (RANKS - 1) / RANKS / LINK * table
    for more, less in ((step_of(apart, SLOW), step_of(tied, SLOW)),):
        assert more.loads[Kind.INTRA_NODE] - less.loads[Kind.INTRA_NODE] == pytest.approx((MICROBATCHES + 1) * sent)
        assert more.memory.weights - less.memory.weights == 2 * table / RANKS
        assert more.memory.copies - less.memory.copies == table


def test_the_loss_of_transformers_holds_three_times_the_logits_in_fp32():
    few, many = (counted(on_meta(num_hidden_layers=LAYERS, vocab_size=size), bf16=True) for size in (2**14, 2**15))
    more = step_of(many, SLOW).memory.activations - step_of(few, SLOW).memory.activations
    assert more == pytest.approx(12 * 2 * 32 * 2**14)


def test_the_host_of_stock_fsdp_issues_as_ours_does(amounts: Amounts):
    """Where the host is slower than the device, a step takes its time: 1.1 times that of one strand of hf_helix."""
    slow = replace(FAST, device=replace(FAST.device, issue_seconds=1e-3))
    stock = step_of(amounts, slow)
    ours = simulate_step(amounts, replace(stock.case, cuda_graphs="false"), slow, Fidelity.REDUCED)
    assert stock.window == pytest.approx(1.1 * (ours.window - ours.casts))
    assert step_of(amounts, FAST).window < 0.1 * stock.window
    on_cpu = replace(slow, device=replace(slow.device, host_runs_ahead=False))
    assert step_of(amounts, on_cpu).window == pytest.approx(stock.window / 1.1, rel=0.01), "as part of every operator"
