"""Rivals on paper: what FSDP sends and keeps by hand, where gathers hide, and figures that others published."""

from dataclasses import replace
from typing import Any

import pytest
from support.simulated import case_of, cluster_with, counted, on_meta
from transformers import LlamaConfig

from hf_helix.doctor.amounts.records import Amounts
from hf_helix.doctor.case import Case
from hf_helix.doctor.layouts import Search
from hf_helix.doctor.rivals import FSDP, FSDP_OFFLOAD, HSDP, PIPELINE_OFFLOAD, ZERO2_OFFLOAD, simulate_rival
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import Step, simulate_step
from hf_helix.doctor.window import Fidelity
from hf_helix.operators.fused import kernels
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import Cluster, Curve, Host, load_cluster
from hf_helix.planning.timing.sizes import Sizes

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
    return simulate_rival(FSDP, amounts, case, cluster, sync).step


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
    plain = simulate_step(amounts, step.case, FAST, Fidelity.WHOLE)
    assert step.exposed[Kind.INTRA_NODE] == pytest.approx(0, abs=1e-6 * step.window)
    # Gathered weights are copied, 4 bytes each, twice of layers and once of the ends; gradients once in the window.
    layer, ends = sizes(amounts)
    copied = 4 * (MICROBATCHES * (2 * LAYERS * layer + ends) + LAYERS * layer + ends)
    assert step.window == pytest.approx(plain.window - plain.casts + copied / FAST.device.bandwidth, rel=0.01)
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
    more, less = step_of(apart, SLOW), step_of(tied, SLOW)
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
    ours = simulate_step(amounts, stock.case.changed(cuda_graphs=False), slow, Fidelity.WHOLE)
    assert stock.window == pytest.approx(1.1 * (ours.window - ours.casts))
    assert step_of(amounts, FAST).window < 0.1 * stock.window
    on_cpu = replace(slow, device=replace(slow.device, host_runs_ahead=False))
    assert step_of(amounts, on_cpu).window == pytest.approx(stock.window / 1.1, rel=0.01), "as part of every operator"


def test_a_rival_with_the_host_keeps_no_fp32_on_the_device(amounts: Amounts):
    model, case = sum(sizes(amounts)[:1]) * LAYERS + sizes(amounts)[1], case_of(MICROBATCHES, 2, 32, dp=RANKS)
    cluster = replace(SLOW, host=Host(bandwidth=1e9, memory=2e9))
    steps = {
        name: simulate_rival(name, amounts, case, cluster, True).step
        for name in (FSDP, FSDP_OFFLOAD, ZERO2_OFFLOAD, PIPELINE_OFFLOAD)
    }
    for name, step in steps.items():
        memory = step.memory
        assert (memory.weights + memory.gradients + memory.states == 0) == (name != FSDP)
        assert (step.optimizer == pytest.approx(28 * model / 2e9)) == (name != FSDP), "Adam moves 28 bytes an element"
    assert steps[ZERO2_OFFLOAD].memory.copies == 2 * model
    moved = (MICROBATCHES * 3 * 4 * model / RANKS) / 1e9 + (MICROBATCHES - 1) * 12 * model / 2e9
    longer = steps[FSDP_OFFLOAD].window + steps[FSDP_OFFLOAD].sums - steps[FSDP].window - steps[FSDP].sums
    ends = MICROBATCHES * 4 * sizes(amounts)[1] / RANKS / 1e9  # gathered once
    assert longer == pytest.approx(moved - ends, rel=0.03)


def test_hybrid_shards_are_summed_between_nodes_once(amounts: Amounts):
    cluster = cluster_with(nodes=2, devices_per_node=RANKS // 2, device=FREE, network={"gb_per_s": 1e-3})
    case = case_of(MICROBATCHES, 2, 32, dp=RANKS)
    step = simulate_rival(HSDP, amounts, case, cluster, True).step
    model = LAYERS * sizes(amounts)[0] + sizes(amounts)[1]
    assert step.window + step.sums == pytest.approx(4 * model / 2 / 1e6 * cluster.network.devices, rel=0.05)
    assert step.memory.weights == 4 * model / 2


QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 40960}
PUBLISHED = {
    "1.7B": (
        {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "num_attention_heads": 16},
        65417,
        0.16,
    ),
    "32B": (
        {"hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25600, "num_attention_heads": 64},
        5516,
        0.05,
    ),
}
"""Qwen3 on eight RTX 4090, tokens per second with fp16 sums, in the README of RoundPipe 0.1.1, and by how much the
prediction is off: too fast, since rivals are given the fused kernels of norms of queries and keys, too."""


@pytest.mark.slow
@pytest.mark.parametrize("size", PUBLISHED)
def test_the_offload_pipeline_is_near_its_published_figures(size: str):
    """With fp16 sums an RTX 4090 has twice its peak."""
    cluster = load_cluster("rtx4090x8")
    cluster = replace(cluster, device=replace(cluster.device, peaks={"bf16": 330e12}))
    options, published, error = PUBLISHED[size]
    model = on_meta("qwen3", **QWEN3, **options, tie_word_embeddings=size == "1.7B")
    search = Search(SimulatedModel(model, cluster), cluster, 512_000, case_of(length=4096))
    found = search.rival(PIPELINE_OFFLOAD)
    assert found is not None
    step = found.step
    assert published < step.tokens_per_second < (1 + error) * published


NODE = load_cluster("h100x8")


@pytest.mark.slow
def test_a_llama_of_1_billion_parameters_on_one_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.2554 s on 2026-11-22 (benchmarks/results/2026-11-22-gpu-h100.md), without kernels of Triton."""
    monkeypatch.setattr(kernels, "is_on", lambda value: False)
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = LlamaConfig(num_hidden_layers=16, vocab_size=32000, tie_word_embeddings=False, **sizes)
    one = replace(NODE, devices_per_node=1)
    case = Case.of(Sizes(), 2, 4096, 8, plan="sequential")
    step = simulate_step(SimulatedModel(config, one).amounts(case), case, one)
    assert step.seconds == pytest.approx(1.2554, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("fused", "compiled", "eager"), [(False, 1.24, 1.43), (True, 1.50, 1.74)])
def test_a_llama_of_8_billion_parameters_with_fsdp_of_torchtitan(
    fused: bool, compiled: float, eager: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,762 tokens/s a GPU, 6,667 compiled (benchmarks/llama3_h100_202412_torchtitan.md of torchtitan, table 1)."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    if not fused:
        monkeypatch.setattr(kernels, "is_on", lambda value: False)
    config = LlamaConfig(num_hidden_layers=32, vocab_size=128256, tie_word_embeddings=False, **sizes)
    case = Case.of(Sizes(dp=8), 2, 8192, 1, plan="sequential", recompute="selective")
    step = simulate_rival(FSDP, SimulatedModel(config, NODE).amounts(case), case, NODE).step
    rate = step.tokens_per_second / 8
    assert rate / 6667 == pytest.approx(compiled, abs=0.03)
    assert rate / 5762 == pytest.approx(eager, abs=0.03)
